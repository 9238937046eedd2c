"""Make rows of reasoning-gym: 98 tasks with verifiers and levels of difficulty, made by rules from a seed.

    python -m data.reasoning_gym --tasks gcd lcm chain_sum --rows 2000 --seed 0 --output data/built/gym
    python -m data.reasoning_gym --tasks gcd lcm --difficulty 0 2 --rows 400 --output data/built/gym
    python -m data.reasoning_gym --list                      # all tasks with their levels of difficulty

Writes train.jsonl and test.jsonl with the columns prompt, answer (JSON for verifiers/reasoning_gym.py), kind,
difficulty (the level; empty: the default of the package) and task. Tasks and levels have equal shares.

Item i of the package is drawn with seed + i, so that two sets with neighbouring seeds are the same but for
one item. Here all rows of a task come from one stream, whose start is a hash of seed, task and level. A
prompt occurs once in both files together, also with its words in another order if the answer is the same.
A calculation occurs once, too ("3 * 2 =" and "Calculate 2 * 3."). Repeated prompts are dropped and counted.

Many tasks have a frequent answer, which reinforcement learning finds first. The command tries the most
frequent answers as constants and warns above 15 % of the rows; --balance leaves out frequent answers.
"""

import contextlib
import io
import json
import random
import re
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

from data.chat import time_limit
from data.stream import seed_of
from runtime.config import command_line
from verifiers import reasoning_gym

MAX_CONSTANT_FRAC = 0.15  # of a task's rows that one constant answer solves, without a warning [ours]
MAX_ITEM_S = 60.0  # a generator that takes longer costs a row; one item of number_sequence:1 takes 17 s
MAX_LATE = 2  # such rows, after which the task is refused
DRAWS_PER_ROW = 5  # draws, for each wanted row, after which a task has no more prompts
NUM_TRIED = 200  # rows on which constants are tried
ONLY_CALCULATION = r"^\D*?([-(]*\d+(?:\.\d+)?(?:\)* [-+*/] [-(]*\d+(?:\.\d+)?)+\)*)\D*$"  # of a prompt
CONSTANTS = ("0", "1")  # tried besides the most frequent answers


@dataclass
class Part:
    """The rows of a task at a level, and the items that gave no row."""

    task: str
    level: int | None
    rows: list[dict] = field(default_factory=list)
    num_repeated: int = 0
    num_frequent: int = 0  # rows left out by --balance
    failures: Counter = field(default_factory=Counter)  # {reason: items}

    @property
    def name(self) -> str:
        """Return the task, with the level if there is one."""
        return self.task if self.level is None else f"{self.task} at {self.level}"


def levels_of(task: str) -> int:
    """Return the number of levels of a task; 0: the task has none."""
    curriculum = reasoning_gym.load().factory.CURRICULA.get(task)
    attributes = curriculum().attributes.values() if curriculum else ()
    return max((len(attribute.levels) for attribute in attributes), default=0)


def config_of(task: str, level: int | None) -> dict:
    """Return the settings of a task at a level; ValueError if the task has no such level, or refuses it."""
    if reason := reasoning_gym.refusal(task):
        raise ValueError(reason)
    factory = reasoning_gym.load().factory
    _, settings = factory.DATASETS[task]
    if level is None:
        return {}
    num_levels = levels_of(task)
    if not 0 <= level < num_levels:
        known = f"0 to {num_levels - 1}" if num_levels else "none, leave --difficulty out"
        raise ValueError(f"the task {task} has no difficulty {level}: its levels are {known}")
    curriculum = factory.CURRICULA[task]()
    curriculum.set_global_level(level)
    try:
        config = curriculum.generate_configuration()
        getattr(config, "validate", lambda: None)()  # two tasks lack it
    except Exception as error:  # assertions of the package
        raise ValueError(f"the task {task} refuses the difficulty {level}: {error}") from error
    default = asdict(settings())
    return {name: value for name, value in asdict(config).items() if value != default[name]}


def make_part(
    task: str, level: int | None, num: int, seed: int, contents: set[str], most: float = 1.0
) -> Part:
    """Return `num` rows of a task, fewer if its prompts repeat. contents: of earlier rows, receives the new.

    most: share of the rows that may have the same reference answer.
    """
    part = Part(task, level)
    config = config_of(task, level)
    make, settings = reasoning_gym.load().factory.DATASETS[task]
    num_draws = DRAWS_PER_ROW * num
    num_of_answer: Counter = Counter()
    num_late = 0
    first = seed_of(seed, "reasoning_gym", task, str(level)) % (2**31)
    try:
        items = make(settings(**config | {"seed": first, "size": max(num_draws, 500)}))
    except Exception as error:
        raise ValueError(f"the task {task} cannot be made: {error}") from error
    for number in range(num_draws):
        if len(part.rows) == num or sum(part.failures.values()) > num:
            break
        try:
            with time_limit(MAX_ITEM_S, "the generator"), contextlib.redirect_stdout(io.StringIO()):
                row = row_of(task, level, config, items[number])
                reference = reasoning_gym.reference_of(row["answer"])
                content = content_of(row["prompt"], reference)
                if content in contents:
                    part.num_repeated += 1
                    continue
                if reference == "{}":
                    raise ValueError("no reference answer, after an error inside of the generator")
                reward, *_ = reasoning_gym.verify(f"<answer>{reference}</answer>", row["answer"])
                if reward != 1:
                    raise ValueError(f"the verifier gives {reward:g} to the reference answer")
                if num_of_answer[reference] + 1 > max(1, most * num):
                    part.num_frequent += 1
                    continue
        except Exception as error:  # of any type, from the code of 100 tasks
            part.failures[f"{type(error).__name__}: {error}"[:120]] += 1
            num_late += isinstance(error, TimeoutError)
            if num_late == MAX_LATE:
                raise ValueError(f"the task {task}: {error}; take another difficulty") from error
            continue
        contents.add(content)
        part.rows.append(row)
        num_of_answer[reference] += 1
    # If fewer rows were found than wanted, the share allows fewer rows of each answer.
    part.num_frequent += drop_frequent(part.rows, most)
    if part.num_frequent:  # frequent answers came first, and the first rows are held out
        random.Random(first).shuffle(part.rows)
    return part


def drop_frequent(rows: list[dict], most: float) -> int:
    """Drop rows until no reference answer has more than a share `most` of them; return the number dropped."""
    num_before = len(rows)
    while True:
        seen: Counter[str] = Counter()
        kept = []
        for row in rows:
            reference = reasoning_gym.reference_of(row["answer"])
            seen[reference] += 1
            if seen[reference] <= max(1, most * len(rows)):
                kept.append(row)
        if len(kept) == len(rows):
            return num_before - len(rows)
        rows[:] = kept


def content_of(prompt: str, reference: str) -> str:
    """Return the sorted words of a prompt, or those of its only calculation, and its answer."""
    words = re.findall(r"\w+|[^\w\s]", re.sub(ONLY_CALCULATION, r"\1", prompt))
    return " ".join([*sorted(words), reference])


def row_of(task: str, level: int | None, config: dict, item: dict) -> dict:
    """Return the row of an item of the package."""
    answer = {"task": task, "config": reasoning_gym.numbers_of(config), "answer": item["answer"]}
    return {
        "prompt": item["question"],
        "answer": json.dumps(answer | {"metadata": item["metadata"]}, default=str),  # fractions, dates
        "kind": "reasoning_gym",
        "difficulty": level,
        "task": task,
    }


def best_constant(rows: list[dict]) -> tuple[str, float, float]:
    """Return the constant answer that is right most often, its share of rows, and the highest mean score."""
    answers = [row["answer"] for row in rows[:NUM_TRIED]]
    frequent = Counter(map(reasoning_gym.reference_of, answers)).most_common(3)
    shares = []
    for constant in dict.fromkeys([*(value for value, _ in frequent), *CONSTANTS]):
        rewards = [reasoning_gym.verify(f"<answer>{constant}</answer>", answer)[0] for answer in answers]
        shares.append((rewards.count(1) / len(rewards), sum(rewards) / len(rewards), constant))
    share, _, constant = max(shares)
    return constant, share, max(mean for _, mean, _ in shares)


def split_parts(parts: list[Part], num_train: int, num_test: int) -> tuple[list[dict], list[dict]]:
    """Return training and held-out rows, in the same proportion for every part that has too few."""
    train: list[dict] = []
    test: list[dict] = []
    for part in parts:
        num = round(len(part.rows) * num_test / (num_train + num_test)) if num_test else 0
        test += part.rows[:num]
        train += part.rows[num:]
    return train, test


def describe(part: Part, num: int) -> list[str]:
    """Return the lines about a part: rows, repeated prompts, failures, and the best constant answer."""
    if not part.rows:
        return [f"warning: {part.name}: no row ({dict(part.failures)})"]
    constant, share, mean = best_constant(part.rows)
    line = f"{part.name}: {len(part.rows)} rows, {part.num_repeated} repeated prompts dropped"
    line += f", {part.num_frequent} by --balance; " if part.num_frequent else "; "
    lines = [f"{line}constant answer {constant[:40]!r}: right in {share:.2f}, highest mean score {mean:.2f}"]
    if max(share, mean) > MAX_CONSTANT_FRAC:
        lines.append(
            f"warning: {part.name}: one constant answer is right in {share:.0%} of the rows, one scores "
            f"{mean:.2f}, more than {MAX_CONSTANT_FRAC}: a gain below shows nothing; choose another task"
        )
    if len(part.rows) < num:
        lines.append(f"warning: {part.name}: {len(part.rows)} different prompts found, {num} wanted")
    for reason, count in part.failures.most_common(3):
        lines.append(f"warning: {part.name}: {count} items left out: {reason}")
    return lines


def pairs_of(tasks: list[str], levels: list[int | None]) -> list[tuple[str, int | None]]:
    """Return (task, level) of each part, for example ("lcm", 2) for lcm:2; ValueError for lcm:x."""
    pairs: list[tuple[str, int | None]] = []
    for name in tasks:
        task, colon, level = name.partition(":")
        if colon and not level.isdecimal():
            raise ValueError(f"--tasks {name}: the level after the colon is a number, for example lcm:2")
        pairs += [(task, number) for number in ([int(level)] if colon else levels)]
    return list(dict.fromkeys(pairs))


def make_sets(
    tasks: list[str], levels: list[int | None], num_train: int, num_test: int, seed: int, most: float = 1.0
) -> tuple:
    """Return training rows, held-out rows and the lines to print; ValueError names a task or level."""
    pairs = pairs_of(tasks, levels)
    for task, level in pairs:
        config_of(task, level)  # all errors of names and levels before the first row
    if num_train < len(pairs) or num_test < len(pairs):
        raise ValueError(
            f"--rows {num_train}, --test {num_test}: each of {len(pairs)} tasks and levels needs rows"
        )
    contents: set[str] = set()
    parts = []
    lines = []
    for number, (task, level) in enumerate(pairs):
        num = sum(total // len(pairs) + (number < total % len(pairs)) for total in (num_train, num_test))
        parts.append(make_part(task, level, num, seed, contents, most))
        lines += describe(parts[-1], num)
    train, test = split_parts(parts, num_train, num_test)
    if not train or not test:
        raise ValueError(f"too few different prompts: {len(train)} to train on, {len(test)} held out")
    for rows in (train, test):
        random.Random(seed).shuffle(rows)
    return train, test, lines


def list_tasks() -> list[str]:
    """Return a line for each task of the package: its levels, or why it cannot be used."""
    lines = []
    for task in sorted(reasoning_gym.load().factory.DATASETS):
        reason = reasoning_gym.refusal(task)
        levels = []
        for level in range(0 if reason else levels_of(task)):
            with contextlib.suppress(ValueError):
                config_of(task, level)
                levels.append(str(level))
        lines.append(reason or f"{task}: {'levels ' * bool(levels)}{', '.join(levels) or 'no levels'}")
    return lines


def main(argv: list[str] | None = None) -> None:
    """Read the command line and write both sets."""
    parser = command_line("python -m data.reasoning_gym", __doc__)
    add = parser.add_argument
    add("--tasks", nargs="+", default=[], metavar="NAME", help="tasks, with a level of its own as NAME:LEVEL")
    add("--difficulty", nargs="+", type=int, default=[None], metavar="LEVEL",
        help="levels of the tasks without their own; left out: the default of the package")  # fmt: skip
    add("--rows", type=int, default=1000, help="training rows, over all tasks (default: %(default)s)")
    add("--test", type=int, help="held-out rows, over all tasks (default: a fifth of --rows)")
    add("--seed", type=int, default=0, help="seed of all draws (default: %(default)s)")
    add("--balance", type=float, default=1.0, metavar="SHARE",
        help="most rows of a task and level with the same answer, as a share, for example 0.1")  # fmt: skip
    add("--output", type=Path, default=Path("data/built/reasoning_gym"), help="folder (default: %(default)s)")
    add("--list", action="store_true", help="list the tasks and their levels, and end")
    args = parser.parse_args(argv)
    try:
        if args.list or not args.tasks:
            print("\n".join(list_tasks()))
            return
        num_parts = len(pairs_of(args.tasks, args.difficulty))
        num_test = max(num_parts, args.rows // 5) if args.test is None else args.test
        if not 0 < args.balance <= 1:
            raise ValueError(f"--balance {args.balance:g}: a share above 0 and at most 1 is needed")
        if args.output.is_file():
            raise ValueError(f"--output {args.output} is a file: name a folder")
        sizes = args.rows, num_test
        train, test, lines = make_sets(args.tasks, args.difficulty, *sizes, args.seed, args.balance)
    except (ImportError, ValueError) as error:
        parser.error(str(error))
    print("\n".join(lines))
    args.output.mkdir(parents=True, exist_ok=True)
    for name, rows in (("train", train), ("test", test)):
        file = args.output / f"{name}.jsonl"
        file.write_text("".join(json.dumps(row) + "\n" for row in rows))
        print(f"{file}: {len(rows)} rows")


if __name__ == "__main__":
    main()
