"""Make pairs of completions with labels Better, Tie and Worse, on which train_rl.py trains a judge.

    python -m data.judge_pairs --model data/built/tiny/model --prompts data/built/tiny/train.jsonl \\
        --output data/built/judge_pairs --max-new-tokens 16 --dtype float32 --kv-cache-gib 0.25 \\
        --question "{prompt}|{first}|{second}|" --rationale "{answer};{first_score};{second_score};"
    python -m data.judge_pairs --help

A judge of pairs is a policy whose reward says whether its verdict is the label ("Each Prompt Matters", arXiv
2512.07710 [secondary]: a generative reward model that reasons and answers Better, Tie or Worse; ours: how its
pairs are made). The policy samples completions of each prompt, the verifier scores them, and two completions
of one prompt make a pair. The label says how the first completion compares with the second:

    Better   score of the first > score of the second        Tie   the scores are equal        Worse   lower

With the settings reward.binary=true (which may follow the options) fractions count as 0. Prompts are loaded
and rendered as in training, with the options of data/score.py.

The output folder is not rebuilt if it is up to date. It contains
    train.jsonl   {prompt: the question to the judge, answer: the label, kind: "verdict", rationale:
                  --rationale of the pair, followed by the label, and task, first, second, first_score,
                  second_score}
    test.jsonl    the same for held-out prompts
    groups.jsonl  {task, completions, scores} of the held-out prompts, for experiments/judge_quality.py
    recipe.json   options and numbers of pairs
Both sets of pairs have as many pairs of each label. Half of the ties have two different texts if there are
enough, because two equal texts are easy to recognise.

The rationale imitates reasoning: the steps of the task worked again, and each completion compared with them.
data/judge_start.py starts a small model on it, because a model of a million parameters does not reason by
itself.
"""

import argparse
import hashlib
import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from random import Random

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch.distributed as dist

from batch import ZERO_VARIANCE
from data.prompts import Prompt, prompt_sha
from data.score import (
    VERDICT_SETTINGS,
    add_prompt_options,
    build_engine,
    data_settings,
    model_digest,
    read_prompts,
    trailing_settings,
)
from data.stream import seed_of
from data.tiny import build_once
from judges import TEMPLATE, has_places
from reward import check_functions, score_of, start_pool
from rollout import Request
from runtime.launch import join_ranks, leave, one_line, run
from verifiers.kinds import parts_of
from verifiers.verdict import SIGNS

LABELS = tuple(SIGNS)
PAIRS_PER_LABEL = 2  # of one prompt, so that no prompt dominates
Answer = tuple[str, float]  # text and score of a completion


# ------------------------------------------------------------------------------------------------------------
# Pairs
# ------------------------------------------------------------------------------------------------------------
def label_of(first_score: float, second_score: float) -> str:
    """Return the verdict that is right: Better, Tie or Worse."""
    if abs(first_score - second_score) <= ZERO_VARIANCE:
        return "Tie"
    return "Better" if first_score > second_score else "Worse"


def pair_row(prompt: Prompt, first: Answer, second: Answer, question: str, rationale: str) -> dict:
    """Return the row of a pair; question and rationale are the templates of the options."""
    label = label_of(first[1], second[1])
    worked = rationale.format(
        answer=prompt.answer, first_score=f"{first[1]:g}", second_score=f"{second[1]:g}"
    )
    return {
        "prompt": question.format(prompt=prompt.conversation, first=first[0], second=second[0]),
        "answer": label,
        "kind": "verdict",
        "rationale": worked + label,
        "task": prompt.text,
        "conversation": prompt.conversation,
        "first": first[0],
        "second": second[0],
        "first_score": first[1],
        "second_score": second[1],
    }


def pairs_of_prompt(answers: list[Answer], rng: Random) -> dict[str, list[tuple[Answer, Answer]]]:
    """Draw up to PAIRS_PER_LABEL distinct ordered pairs of each label; a tie of equal texts is "equal".

    A text is paired with itself only if it was sampled twice.
    """
    candidates = defaultdict(dict)
    for i, first in enumerate(answers):
        for j, second in enumerate(answers):
            if i != j:
                label = "equal" if first[0] == second[0] else label_of(first[1], second[1])
                candidates[label][first[0], second[0]] = (first, second)
    return {
        label: rng.sample(list(pairs.values()), min(PAIRS_PER_LABEL, len(pairs)))
        for label, pairs in candidates.items()
    }


def balanced_rows(
    prompts: list[Prompt], answers: list[list[Answer]], question: str, rationale: str, limit: int, rng: Random
) -> list[dict]:
    """Return shuffled rows, equally many of each label, at most `limit`; half of the ties differ in text."""
    pools = defaultdict(list)
    for prompt, answers_of_prompt in zip(prompts, answers):
        for label, pairs in pairs_of_prompt(answers_of_prompt, rng).items():
            pools[label] += [pair_row(prompt, *pair, question, rationale) for pair in pairs]
    for pool in pools.values():
        rng.shuffle(pool)
    num_ties = len(pools["Tie"]) + len(pools["equal"])
    num = min(len(pools["Better"]), len(pools["Worse"]), num_ties, limit // len(LABELS))
    num_different = min(len(pools["Tie"]), max(num // 2, num - len(pools["equal"])))
    rows = pools["Better"][:num] + pools["Worse"][:num]
    rows += pools["Tie"][:num_different] + pools["equal"][: num - num_different]
    rng.shuffle(rows)
    return rows


def sample_answers(engine, pool, tokenizer, prompts: list[Prompt], prompt_ids, args) -> list[list[Answer]]:
    """Sample and score completions of each prompt; completions without a verdict are left out."""
    requests = [
        Request(ids, seed_of(args.seed, prompt_sha(prompt), sample), args.temperature, args.max_new_tokens)
        for prompt, ids in zip(prompts, prompt_ids)
        for sample in range(args.samples)
    ]
    texts: dict[int, str] = {}

    def submit(index: int, completion) -> None:
        prompt = prompts[index // args.samples]
        texts[index] = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        pool.submit(index, prompt.kind, texts[index], prompt.answer, prompt.fields)
        pool.poll()

    engine.generate(requests, 0, submit)
    verdicts = pool.collect()
    answers: list[list[Answer]] = [[] for _ in prompts]
    for index in range(len(requests)):
        if not verdicts[index].failed:
            score = score_of(verdicts[index], args.reward.binary)
            answers[index // args.samples].append((texts[index], score))
    return answers


# ------------------------------------------------------------------------------------------------------------
# The folder
# ------------------------------------------------------------------------------------------------------------
def write_rows(file: Path, rows: list[dict]) -> None:
    """Write rows as JSONL."""
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_folder(prompts: list[Prompt], prompt_ids, tokenizer, record: dict, args, folder: Path) -> dict:
    """Sample the completions, write all files into a folder, and return the record."""
    rows_of_kinds = [(prompt.kind, prompt.answer, prompt.fields) for prompt in prompts]
    check_functions(args.reward.functions, rows_of_kinds, args.reward)
    engine = build_engine(args, max(map(len, prompt_ids)))
    with start_pool(args.reward, None) as pool:
        answers = sample_answers(engine, pool, tokenizer, prompts, prompt_ids, args)
    num_test = round(args.held_out * len(prompts))
    num_train = len(prompts) - num_test
    rng = Random(args.seed)
    sets = {"train": slice(0, num_train), "test": slice(num_train, None)}
    for name, share in sets.items():
        rows = balanced_rows(prompts[share], answers[share], args.question, args.rationale, args.pairs, rng)
        if not rows:
            raise ValueError(
                f"{args.output}: {len(prompts[share])} prompts with {args.samples} completions each give no "
                f"{name} pairs of every label: the prompts need right and wrong completions"
            )
        write_rows(folder / f"{name}.jsonl", rows)
        record[f"num_{name}"] = len(rows)
    groups = [
        {
            "task": prompt.text,
            "conversation": prompt.conversation,
            "completions": [text for text, _ in row],
            "scores": [score for _, score in row],
        }
        for prompt, row in zip(prompts[num_train:], answers[num_train:])
    ]
    write_rows(folder / "groups.jsonl", groups)
    return record


def key_of(record: dict, prompts: list[Prompt], args: argparse.Namespace) -> str:
    """Return the digest of everything that decides the pairs: options, prompts and verifiers."""
    kinds = sorted({prompt.kind for prompt in prompts})
    files = {term.rpartition(":")[0] for kind in kinds for _, term in parts_of(kind) if ".py:" in term}
    content = {
        "record": record, "stop": args.stop, "dtype": args.dtype, "kinds": kinds,
        "prompts": [prompt_sha(prompt) for prompt in prompts],
        "functions": [Path(file).read_text() for file in sorted(files)],
        "reward": {name: getattr(args.reward, name) for name in VERDICT_SETTINGS},
    }  # fmt: skip
    text = json.dumps(content, sort_keys=True)
    return hashlib.sha256(Path(__file__).read_bytes() + text.encode()).hexdigest()


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ValueError names an invalid option."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="data/judge_pairs.py", description=__doc__, formatter_class=keep_lines
    )
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the policy, a checkpoint in safetensors")
    add("--output", type=Path, required=True, help="folder to create")
    add("--question", default=TEMPLATE, help="question to the judge, with {prompt}, {first} and {second}; "
        "reward.judge_template must be the same text (default: an instruction in English)")  # fmt: skip
    add("--rationale", default="", help="reasoning before the verdict, with {answer}, {first_score} and "
        "{second_score} (default: none)")  # fmt: skip
    add("--pairs", type=int, default=12000, help="maximum number of pairs of a file (default: %(default)s)")
    add(
        "--held-out",
        type=float,
        default=0.15,
        help="share of the prompts in test.jsonl (default: %(default)s)",
    )
    add("--skip", type=int, default=0, help="leave out the first N prompts, for example the policy's own")
    add_prompt_options(parser)
    add("--samples", type=int, default=8, help="completions per prompt (default: %(default)s)")
    add("--max-new-tokens", type=int, default=512, help="maximum completion length (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="of sampling and of the choice of pairs (default: %(default)s)")
    add("--dtype", choices=["bfloat16", "float32"], default="bfloat16", help="of vLLM (default: %(default)s)")
    add("--kv-cache-gib", type=float, help="memory for keys and values (default: vLLM decides)")
    add("--max-num-seqs", type=int, default=256, help="parallel completions (default: %(default)s)")
    add(
        "settings", nargs="*", metavar="reward.key=value", help="settings of section reward, and rollout.stop"
    )
    args = parser.parse_intermixed_args(argv)
    args.data = data_settings(args)
    args.reward, args.stop = trailing_settings(args)
    if not has_places(args.question):
        raise ValueError(f"--question {args.question!r} must contain {{prompt}}, {{first}} and {{second}}")
    try:
        args.rationale.format(answer="", first_score="", second_score="")
    except (KeyError, IndexError, ValueError) as error:
        raise ValueError(
            f"--rationale {args.rationale!r} may contain {{answer}}, {{first_score}} and {{second_score}}"
        ) from error
    if args.samples < 2 or not 0 < args.held_out < 1 or args.skip < 0:
        raise ValueError("--samples must be at least 2, --held-out between 0 and 1, and --skip at least 0")
    if not (args.model / "config.json").is_file() or not any(args.model.glob("*.safetensors")):
        raise ValueError(f"--model {args.model} must be a folder with config.json and *.safetensors; "
                         "`python -m data.tiny` makes a tiny one")  # fmt: skip
    return args


def main(args: argparse.Namespace) -> None:
    """Build the folder unless it is up to date, and print the numbers of pairs."""
    join_ranks()
    if dist.get_world_size() > 1:
        raise ValueError("data/judge_pairs.py runs in one process: start it by python -m data.judge_pairs")
    prompts, prompt_ids, tokenizer, notes = read_prompts(args)
    prompts = prompts[args.skip :]
    prompt_ids = prompt_ids[args.skip :]
    if len(prompts) < 2:
        raise ValueError(f"--skip {args.skip} leaves {len(prompts)} prompts; at least 2 are needed")
    names = ("question", "rationale", "pairs", "held_out", "samples", "max_new_tokens", "temperature", "seed")
    record = {"model": str(args.model), "digest": model_digest(args.model)}
    record |= {name: getattr(args, name) for name in names} | {"binary": args.reward.binary}
    key = key_of(record, prompts, args)
    print(*map(one_line, notes), sep="\n", file=sys.stderr)
    build_once(
        args.output, key, "data.judge_pairs",
        lambda folder: write_folder(prompts, prompt_ids, tokenizer, record, args, folder),
    )  # fmt: skip
    record = json.loads((args.output / "recipe.json").read_text())
    print(f"{args.output}: {record['num_train']} pairs, and {record['num_test']} of held-out prompts")
    dist.destroy_process_group()


if __name__ == "__main__":
    leave(run(main, parse_args, sys.argv[1:]))
