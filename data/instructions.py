"""Make prompts with instructions that a rule can verify, for training and for a held-out set.

    python -m data.instructions                                   # data/built/instructions/{train,test}.jsonl
    python -m data.instructions --train 900 --test 64 --seed 1    # other sizes

A prompt asks for a text on a topic and adds one or two instructions with the checks of IFEval
(verifiers/instructions.py), for example: "Write a short letter about bread. Answer with at least 30 words. Do
not use any commas. Include the word river." Topics, wordings and arguments are ours. The held-out set has
other topics and other arguments (keywords, letters, most numbers) than the training set.

Every prompt demands a least number of words, because reinforcement learning finds shortcuts: without this
instruction completions shrank to a few words, for example "Time.", which break few other instructions. The
number of words is one of the checks, so an answer that is too short loses a part of the reward.
"""

import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from runtime.config import command_line

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
LETTER_COUNTS = {"train": (8, 12, 16), "test": (8, 12, 16)}
BULLETS = {"train": (2, 3), "test": (4,)}
PLACEHOLDERS = {"train": (1, 2), "test": (3,)}


Choices = dict[str, Sequence]  # {split: values to draw from}


class Instruction(NamedTuple):
    """One instruction: its text in the prompt, and the constraint for the verifier."""

    id: str  # of the check
    text: str  # {} is the place of each drawn value
    choices: tuple[Choices, ...] = ()  # of the drawn values
    arguments: Callable[..., dict] = dict  # drawn values -> arguments of the check

    def draw(self, split: str, rng: random.Random) -> tuple[str, dict]:
        """Return the text and the constraint with values for a split."""
        values = [rng.choice(choice[split]) for choice in self.choices]
        return self.text.format(*values), {"id": self.id, **self.arguments(*values)}


LEAST = Instruction(
    "length_constraints:number_words", "Answer with at least {} words.", (LEAST_WORDS,),
    lambda count: {"relation": "at least", "num_words": count},
)  # fmt: skip
INSTRUCTIONS = (
    Instruction("keywords:existence", "Include the word {}.", (KEYWORDS,), lambda word: {"keywords": [word]}),
    Instruction("keywords:forbidden_words", "Do not use the word {}.", (FORBIDDEN,),
                lambda word: {"forbidden_words": [word]}),
    Instruction("keywords:letter_frequency", "The letter {} should appear at least {} times.",
                (LETTERS, LETTER_COUNTS),
                lambda letter, n: {"letter": letter, "let_frequency": n, "let_relation": "at least"}),
    Instruction("punctuation:no_comma", "Do not use any commas."),
    Instruction("change_case:english_lowercase", "write in english and only in lowercase letters, like this "
                "sentence: no capital letters anywhere."),
    Instruction("detectable_format:title", "Give the text a title in double angular brackets, such as "
                "<<a title>>."),
    Instruction("detectable_format:number_bullet_lists", "Use exactly {} bullet points, each on a line that "
                "begins with *.", (BULLETS,), lambda count: {"num_bullets": count}),
    Instruction("detectable_content:number_placeholders", "Use at least {} placeholders in square brackets, "
                "such as [name].", (PLACEHOLDERS,), lambda count: {"num_placeholders": count}),
    Instruction("startend:end_checker", "Finish the answer with exactly these words: {}", (ENDINGS,),
                lambda phrase: {"end_phrase": phrase}),
    Instruction("startend:quotation", 'Begin and end the answer with a double quotation mark: "text".'),
)  # fmt: skip
EXCLUSIVE = {"startend:end_checker", "startend:quotation"}  # both decide about the last character


def make_row(split: str, rng: random.Random) -> dict:
    """Return one row: prompt, answer (constraints as JSON), kind and difficulty (number of instructions)."""
    number = rng.choice((1, 2))
    chosen = rng.sample(INSTRUCTIONS, number)
    while {instruction.id for instruction in chosen} == EXCLUSIVE:
        chosen = rng.sample(INSTRUCTIONS, number)
    drawn = [instruction.draw(split, rng) for instruction in (LEAST, *chosen)]
    request = rng.choice(FORMS).format(topic=rng.choice(TOPICS[split]))
    return {
        "prompt": " ".join([request, *(text for text, _ in drawn)]),
        "answer": json.dumps([constraint for _, constraint in drawn]),
        "kind": "instructions",
        "difficulty": len(drawn),
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
    parser = command_line("python -m data.instructions", __doc__)
    add = parser.add_argument
    add("--output", type=Path, default=Path("data/built/instructions"), help="folder (default: %(default)s)")
    add("--train", type=int, default=600, help="training prompts (default: 600)")
    add("--test", type=int, default=128, help="held-out prompts (default: 128)")
    add("--seed", type=int, default=0, help="seed of the draws (default: 0)")
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
