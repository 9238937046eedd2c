"""Make prompts with instructions that a rule can verify, for training and for a held-out set.

    python -m data.instructions                                   # data/built/instructions/{train,test}.jsonl
    python -m data.instructions --train 900 --test 64 --seed 1    # other sizes

A prompt asks for a text on a topic and adds one or two instructions with the checks of IFEval
(verifiers/instructions.py), for example: "Write a short letter about bread. Answer with at least 30 words. Do
not use any commas. Include the word river." Topics, wordings and arguments are ours. The held-out set has
other topics and other arguments (other keywords, other numbers) than the training set.

Every prompt demands a least number of words, because reinforcement learning finds shortcuts: without this
instruction completions shrank to a few words, for example "Time.", which break few other instructions. The
number of words is one of the checks, so an answer that is too short loses a part of the reward.
"""

import argparse
import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

FORMS = (
    "Write a short letter about {topic}.",
    "Explain {topic} to a child.",
    "Write a few sentences about {topic}.",
    "Give advice to somebody who wants to learn about {topic}.",
    "Describe {topic} for a travel magazine.",
    "Tell a small story about {topic}.",
)
TOPICS = {
    "train": (
        "bread, rivers, bicycles, winter, a lighthouse, music, gardens, old maps, the moon, horses, coffee, "
        "bridges, rain, a market, chess, mountains, trains, honey, wool, a library, paper, the sea, "
        "windmills, apples, clocks, snow, glass, a harbour, birds, stones"
    ).split(", "),
    "test": (
        "salt, forests, kites, a museum, bees, candles, deserts, violins, tea, a village, ships, silver"
    ).split(", "),
}
KEYWORDS = {
    "train": "river stone light garden winter bridge silver morning paper window".split(),
    "test": "harbour candle forest copper evening mirror".split(),
}
FORBIDDEN = {
    "train": "very good make people always great".split(),
    "test": "never thing really often".split(),
}
ENDINGS = {
    "train": (
        "That is all I know.",
        "Thank you for reading.",
        "Let me know what you think.",
        "I look forward to your answer.",
        "This was my story.",
        "Have a nice day.",
        "Who would have thought so?",
        "Can I do more for you?",
    ),
    "test": ("I hope this helps.", "Is there anything else?"),
}
LEAST_WORDS = {"train": (30, 40, 50), "test": (35, 45)}
LETTERS = {"train": "aeiost", "test": "nrl"}


@dataclass(frozen=True)
class Instruction:
    """One instruction: its text in the prompt, and the constraint for the verifier."""

    text: str
    constraint: dict


def keyword(split: str, rng: random.Random) -> Instruction:
    """Ask for a word."""
    word = rng.choice(KEYWORDS[split])
    return Instruction(f"Include the word {word}.", {"id": "keywords:existence", "keywords": [word]})


def forbidden_word(split: str, rng: random.Random) -> Instruction:
    """Forbid a word."""
    word = rng.choice(FORBIDDEN[split])
    constraint = {"id": "keywords:forbidden_words", "forbidden_words": [word]}
    return Instruction(f"Do not use the word {word}.", constraint)


def letter(split: str, rng: random.Random) -> Instruction:
    """Ask for a letter at least so many times."""
    which = rng.choice(LETTERS[split])
    count = rng.choice((8, 12, 16))
    constraint = {
        "id": "keywords:letter_frequency",
        "letter": which,
        "let_frequency": count,
        "let_relation": "at least",
    }
    return Instruction(f"The letter {which} should appear at least {count} times.", constraint)


def no_comma(split: str, rng: random.Random) -> Instruction:
    """Forbid commas."""
    return Instruction("Do not use any commas.", {"id": "punctuation:no_comma"})


def lowercase(split: str, rng: random.Random) -> Instruction:
    """Ask for small letters."""
    text = "write in english and only in lowercase letters, like this sentence: no capital letters anywhere."
    return Instruction(text, {"id": "change_case:english_lowercase"})


def title(split: str, rng: random.Random) -> Instruction:
    """Ask for a title."""
    text = "Give the text a title in double angular brackets, such as <<a title>>."
    return Instruction(text, {"id": "detectable_format:title"})


def bullets(split: str, rng: random.Random) -> Instruction:
    """Ask for a list with so many points."""
    count = rng.choice({"train": (2, 3), "test": (4,)}[split])
    constraint = {"id": "detectable_format:number_bullet_lists", "num_bullets": count}
    return Instruction(f"Use exactly {count} bullet points, each on a line that begins with *.", constraint)


def placeholders(split: str, rng: random.Random) -> Instruction:
    """Ask for placeholders in brackets."""
    count = rng.choice({"train": (1, 2), "test": (3,)}[split])
    constraint = {"id": "detectable_content:number_placeholders", "num_placeholders": count}
    return Instruction(f"Use at least {count} placeholders in square brackets, such as [name].", constraint)


def ending(split: str, rng: random.Random) -> Instruction:
    """Ask for a last sentence."""
    phrase = rng.choice(ENDINGS[split])
    text = f"Finish the answer with exactly these words: {phrase}"
    return Instruction(text, {"id": "startend:end_checker", "end_phrase": phrase})


def quotation(split: str, rng: random.Random) -> Instruction:
    """Ask for quotation marks around the text."""
    text = 'Begin and end the answer with a double quotation mark: "text".'
    return Instruction(text, {"id": "startend:quotation"})


MAKERS: tuple[Callable[[str, random.Random], Instruction], ...] = (
    keyword, forbidden_word, letter, no_comma, lowercase, title, bullets, placeholders, ending, quotation,
)  # fmt: skip
EXCLUSIVE = ({ending, quotation},)  # both decide about the last character


def make_row(split: str, rng: random.Random) -> dict:
    """Return one row: prompt, answer (the constraints as JSON), kind and difficulty (number of
    instructions)."""
    number = rng.choice((1, 2))
    makers = rng.sample(MAKERS, number)
    while any(pair <= set(makers) for pair in EXCLUSIVE):
        makers = rng.sample(MAKERS, number)
    least = rng.choice(LEAST_WORDS[split])
    words = Instruction(
        f"Answer with at least {least} words.",
        {"id": "length_constraints:number_words", "relation": "at least", "num_words": least},
    )
    instructions = [words, *(make(split, rng) for make in makers)]
    request = rng.choice(FORMS).format(topic=rng.choice(TOPICS[split]))
    return {
        "prompt": " ".join([request, *(instruction.text for instruction in instructions)]),
        "answer": json.dumps([instruction.constraint for instruction in instructions]),
        "kind": "instructions",
        "difficulty": len(instructions),
    }


def make_rows(split: str, num: int, seed: int) -> list[dict]:
    """Return so many different rows of a split; ValueError if there are not as many, or for a num below 1."""
    if num < 1:
        raise ValueError(f"--{split} {num}: at least one prompt is needed")
    rng = random.Random(f"{seed}/{split}")
    rows: dict[str, dict] = {}
    for _ in range(100 * num):
        row = make_row(split, rng)
        rows.setdefault(row["prompt"], row)
        if len(rows) == num:
            return list(rows.values())
    raise ValueError(f"--{split} {num}: there are fewer different prompts, about {len(rows)}")


def main(argv: list[str] | None = None) -> None:
    """Read the command line and write both sets."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m data.instructions", description=__doc__, formatter_class=keep_lines
    )
    parser.add_argument(
        "--output", type=Path, default=Path("data/built/instructions"), help="folder (default: %(default)s)"
    )
    parser.add_argument("--train", type=int, default=600, help="training prompts (default: 600)")
    parser.add_argument("--test", type=int, default=128, help="held-out prompts (default: 128)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the draws (default: 0)")
    args = parser.parse_args(argv)
    try:
        sets = {split: make_rows(split, getattr(args, split), args.seed) for split in ("train", "test")}
    except ValueError as error:
        parser.error(str(error))
    args.output.mkdir(parents=True, exist_ok=True)
    for split, rows in sets.items():
        file = args.output / f"{split}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{file}: {len(rows)} prompts, for example: {rows[0]['prompt']}")


if __name__ == "__main__":
    main()
