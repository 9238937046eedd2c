"""Measure the pass rate of every prompt in a dataset offline: stage 1 of zero-variance elimination.

    torchrun --nproc-per-node=8 -m data.score --model MODEL --prompts FILE --output scores.jsonl
    python -m data.score --model data/built/tiny/model --prompts data/built/tiny/test.jsonl \\
        --max-new-tokens 16 --dtype float32 --kv-cache-gib 0.25 --output runs/scores.jsonl
    python -m data.score --model MODEL --prompts verl/train.parquet --output scores.jsonl --limit 1000 \\
        --system-prompt "Be brief." --chat-template-args "{enable_thinking: false}" --on-bad-row drop

MODEL is the folder of a Hugging Face checkpoint, or the name of a model on the hub, as in model.path.
Prompts are loaded and rendered as in training, with the options of the settings' section `data`.
zero_variance.offline_scores matches prompts by their final text, so pass the template and the chat settings
of the training run. Settings of section reward and rollout.stop may follow the options, for example
reward.num_workers=8 reward.functions=[mine.py:score].

Why: a prompt that is solved with probability p gives a group of G equal rewards, and therefore no gradient,
with probability p^G + (1 - p)^G. Prompts that smaller models always solve can be dropped before any rollout
[secondary: the stage, reported of arXiv 2512.07710; ours: how the pass rates are measured].

The output is JSONL, read by load_scores of data/prompts.py. The first row is a header {model, samples,
temperature, max_new_tokens, seed, dtype, kinds, stop, reward}, digests of the files of your own functions
(functions), and the date, if the chat template writes it. Then follows one row per distinct prompt, in the
order of the dataset:
    prompt_sha   SHA-256 of the text (with template), a zero byte and the answer
    pass_rate    share of fully right completions (reward 1) among the num_samples; null if num_samples is 0
    wrong_rate   share of fully wrong completions (reward 0); 1 - pass_rate if all rewards are 0 or 1
    num_samples  number of completions with a verdict, excluding timeouts and errors
    mean_tokens  mean length of all completions of the prompt

Rerun the same command to resume an interrupted run; on a complete file, the command only prints the summary.
The seed of a completion is derived from (seed, prompt, sample), so that scores are independent of the order
of prompts and of the number of ranks, up to rounding that depends on how vLLM batches the requests.
"""

import argparse
import contextlib
import fcntl
import json
import math
import os
import sys
from datetime import datetime
from pathlib import Path

os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")  # read when torch is imported

import torch
import torch.distributed as dist
from pydantic import ValidationError
from safetensors import safe_open
from tqdm import tqdm

from data.chat import load_tokenizer, reads_clock
from data.prompts import DataSettings, Prompt, PromptSource, check_data, load_set, prompt_sha
from data.stream import chat_warnings, digest_of_rows, drop_overlong, dropped_line, seed_of, set_lines
from memory_plan import engine_settings
from moe_model import checkpoint_shards, engine_dtype, load_config, model_folder
from reward import Verdict, check_functions, start_pool
from rollout import Completion, Request, RolloutEngine, RolloutSettings
from runtime.agreement import check_inputs_agree, digests_of_input
from runtime.checkpoint import digest_of_files
from runtime.config import command_line, explain, merge, read_mapping, read_override
from runtime.launch import join_ranks, leave, one_line, run
from runtime.schedule import from_rank_0
from runtime.user_files import digest_of_file, file_of
from settings import RewardSettings
from verifiers.kinds import functions_of

GROUP_SIZE = 8  # G of the summary
VERDICT_SETTINGS = ("timeout_s", "memory_gib", "sandbox", "code_timeout_s", "code_memory_gib")


# ------------------------------------------------------------------------------------------------------------
# The output file, and resuming
# ------------------------------------------------------------------------------------------------------------
def model_digest(folder: Path) -> str:
    """Hash the files of config, tokenizer and weights with digest_of_files()."""
    names = ("config.json", "tokenizer.json", "generation_config.json", "*.safetensors")
    return digest_of_files(sorted(path for name in names for path in folder.glob(name)))


def finished_rows(path: Path, header: dict, shas: list[str]) -> tuple[list[dict], int]:
    """Return the rows of an earlier run (excluding the header), and the size of its complete lines in bytes.

    An incomplete last line is ignored. ValueError if the file has another header or other prompts.
    """
    content = path.read_bytes() if path.is_file() else b""
    if (json.dumps(header) + "\n").encode().startswith(content):  # an empty file, or an incomplete header
        return [], 0
    remedy = "choose another --output, or remove the file"
    *lines, _ = content.split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(json.loads(line))
        except ValueError:
            raise ValueError(f"{path}: line {number} is not JSON; {remedy}") from None
    if not rows or not isinstance(rows[0], dict) or rows[0].keys() != header.keys():
        raise ValueError(f"{path}: not an output file of data/score.py; {remedy}")
    earlier = rows.pop(0)
    if not rows:
        return [], 0  # a file with only a header may be overwritten
    changes = [f"{key} {old!r}, now {header[key]!r}" for key, old in earlier.items() if old != header[key]]
    if changes:
        raise ValueError(f"{path}: made with {'; '.join(changes)}; {remedy}")
    for number, (row, sha) in enumerate(zip(rows, [*shas, None])):
        if not isinstance(row, dict) or row.get("prompt_sha") != sha:
            raise ValueError(
                f"{path}: row {number + 2} is not of prompt {number + 1} of the set: --prompts or an option "
                f"for prompts differs from the earlier run; {remedy}"
            )
    return rows, sum(len(line) + 1 for line in lines)


def open_output(path: Path, header: dict, shas: list[str]):
    """Lock the output file; return the finished rows, and the file opened for appending."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "ab")
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # held until the process ends
    except BlockingIOError:
        raise ValueError(
            f"{path}: another process is writing it; wait for the process or choose another --output"
        ) from None
    rows, num_bytes = finished_rows(path, header, shas)
    file.truncate(num_bytes)
    if num_bytes == 0:
        append_rows(file, [header])
    return rows, file


def append_rows(file, rows: list[dict]) -> None:
    """Append rows to the file and flush, so that finished rows survive a killed process."""
    file.write("".join(json.dumps(row) + "\n" for row in rows).encode())
    file.flush()


# ------------------------------------------------------------------------------------------------------------
# Prompts and model
# ------------------------------------------------------------------------------------------------------------
def folder_of_model(model: Path) -> Path:
    """Return the folder of --model: the path itself, or a download of this name from the hub.

    ValueError names the option if there is neither, or if the folder has no weights.
    """
    try:
        folder = model_folder(model)
    except ValueError as error:
        raise ValueError(f"--model {str(error).removeprefix('model.path: ')}") from error
    if not any(folder.glob("*.safetensors")):
        raise ValueError(f"--model {model} holds no *.safetensors; convert the weights to this format")
    return folder


def read_prompts(args) -> tuple[list[Prompt], list[list[int]], object, list[str]]:
    """Return (distinct prompts in file order, their token ids, tokenizer, lines to print).

    ValueError names a row with an unknown verifier.
    """
    data = args.data
    (source,) = data.eval
    tokenizer = load_tokenizer(args.model)
    context = load_config(args.model).max_position_embeddings
    prompt_set = load_set(source, data, tokenizer, args.reward.functions)
    limit = f"the model's context of {context} less --max-new-tokens"
    rows = drop_overlong(prompt_set, data, tokenizer, context - args.max_new_tokens, limit)
    if not rows:
        dropped = dropped_line(source.label, prompt_set.dropped)
        raise ValueError(f"{source.path}: every row was dropped; {dropped}")
    distinct = {}
    num_other = 0
    for row, ids in rows:
        first, _ = distinct.setdefault(prompt_sha(row.prompt), (row.prompt, ids))
        same = (first.kind, first.columns) == (row.prompt.kind, row.prompt.columns)
        num_other += not same
    prompts, prompt_ids = map(list, zip(*distinct.values()))
    notes = set_lines(prompt_set, len(rows)) + chat_warnings(data, tokenizer, [prompts])
    if num_other:
        notes.append(
            f"warning: {num_other} rows repeat prompt and answer of an earlier row, with another kind or "
            "other columns; they are not scored, and training gives them the earlier row's score"
        )
    return prompts, prompt_ids, tokenizer, notes


def weights_of(folder: Path):
    """Yield (name, tensor) for every weight of a Hugging Face checkpoint, loading one tensor at a time."""
    for shard in checkpoint_shards(folder):
        with safe_open(shard, framework="pt") as file:
            for name in file.keys():
                yield name, file.get_tensor(name)


def build_engine(args, longest_prompt: int) -> RolloutEngine:
    """Start vLLM and load the weights of --model."""
    settings = RolloutSettings(
        max_num_seqs=args.max_num_seqs, dtype=args.dtype, kv_cache_gib=args.kv_cache_gib, stop=args.stop,
        capture_routes="off",
    )  # fmt: skip
    max_len = longest_prompt + args.max_new_tokens
    settings = engine_settings(settings, load_config(args.model), max_len)
    engine = RolloutEngine(args.model, max_len, settings)
    engine.sync(weights_of(args.model), policy_version=0)
    return engine


# ------------------------------------------------------------------------------------------------------------
# Scores
# ------------------------------------------------------------------------------------------------------------
def score(engine, pool, tokenizer, prompts: list[Prompt], prompt_ids, args, progress) -> list[dict]:
    """Return one row per prompt; each completion is submitted to the reward workers as soon as it ends."""
    shas = [prompt_sha(prompt) for prompt in prompts]
    requests = [
        Request(ids, seed_of(args.seed, sha, sample), args.temperature, args.max_new_tokens)
        for ids, sha in zip(prompt_ids, shas)
        for sample in range(args.samples)
    ]

    def submit(index: int, completion: Completion) -> None:
        prompt = prompts[index // args.samples]
        text = tokenizer.decode(completion.token_ids, skip_special_tokens=True)
        pool.submit(index, prompt.kind, text, prompt.answer, prompt.fields, prefix=prompt.prefix)
        pool.poll()
        progress.update(dist.get_world_size())  # estimate: the other ranks progress at the same speed

    completions = engine.generate(requests, 0, submit)
    verdicts = pool.collect()
    groups = [range(first, first + args.samples) for first in range(0, len(requests), args.samples)]
    return [
        row_of(sha, [len(completions[i].token_ids) for i in group], [verdicts[i] for i in group])
        for sha, group in zip(shas, groups)
    ]


def row_of(sha: str, num_tokens: list[int], verdicts: list[Verdict]) -> dict:
    """Make the row of a prompt from the lengths and verdicts of the completions."""
    valid = [verdict for verdict in verdicts if not verdict.failed]
    solved = sum(verdict.reward == 1 for verdict in valid)
    return {
        "prompt_sha": sha,
        "pass_rate": solved / len(valid) if valid else None,
        "wrong_rate": sum(verdict.reward == 0 for verdict in valid) / len(valid) if valid else None,
        "num_samples": len(valid),
        "mean_tokens": sum(num_tokens) / len(num_tokens),
    }


def score_all(engine, tokenizer, prompts, prompt_ids, args, num_done: int, file) -> list[dict]:
    """Score prompts[num_done:] in chunks; rank 0 writes and returns the new rows. Collective."""
    rank = dist.get_rank()
    world_size = dist.get_world_size()
    progress = tqdm(
        total=len(prompts) * args.samples, initial=num_done * args.samples, desc="score", unit="completion",
        disable=None if rank == 0 else True, mininterval=0.5,
    )  # fmt: skip
    new_rows = []
    with start_pool(args.reward, None) as pool, progress:
        for start in range(num_done, len(prompts), args.chunk):
            stop = min(start + args.chunk, len(prompts))
            share = slice(start + rank, stop, world_size)  # the prompts of this rank
            rows = score(engine, pool, tokenizer, prompts[share], prompt_ids[share], args, progress)
            gathered = [None] * world_size if rank == 0 else None
            dist.gather_object(rows, gathered)
            if rank == 0:
                chunk = [gathered[i % world_size][i // world_size] for i in range(stop - start)]
                append_rows(file, chunk)
                new_rows += chunk
                progress.update(stop * args.samples - progress.n)
    return new_rows


def summary(rows: list[dict]) -> str:
    """Return a histogram of the pass rates, and the expected share of zero-variance groups, as text."""
    measured = [row for row in rows if row["pass_rate"] is not None]
    rates = [row["pass_rate"] for row in measured]
    edges = (0, 0.2, 0.4, 0.6, 0.8, 1)
    bins = {"0": sum(p == 0 for p in rates)}
    for low, high in zip(edges, edges[1:]):
        bins[f"{'[' if low else '('}{low:g}, {high:g})"] = sum(low <= p < high and p > 0 for p in rates)
    bins["1"] = sum(p == 1 for p in rates)
    lines = [f"pass rates of {len(rates)} prompts; {len(rows) - len(rates)} more without any verdict"]
    for label, count in bins.items():
        share = count / max(1, len(rates))
        lines.append(f"  {label:>10} {count:7d} {share:6.1%} {'#' * round(50 * share)}".rstrip())
    if rates:
        num_tokens = sum(row["mean_tokens"] for row in rows) / len(rows)
        lines.append(f"mean {sum(rates) / len(rates):.3f}; {num_tokens:.1f} tokens a completion")
        wrong_rates = [row["wrong_rate"] for row in measured]
        share = sum(rate**GROUP_SIZE for rate in rates + wrong_rates) / len(rates)
        lines.append(f"zero-variance groups expected at G = {GROUP_SIZE}: {share:.3f}, mean of p^G + q^G")
    large = [row for row in rows if row["num_samples"] >= GROUP_SIZE]
    if large:  # p^G is convex in p, so that the mean above, over noisy measured p, is too high
        drawn = [zero_variance_of_draws(row) for row in large]
        lines.append(f"  {sum(drawn) / len(drawn):.3f} without bias: drawing G of each prompt's completions")
    return "\n".join(lines)


def zero_variance_of_draws(row: dict) -> float:
    """Return the share of subsets of G completions of a prompt that are all right or all wrong.

        (C(right, G) + C(wrong, G)) / C(num_samples, G)

    An unbiased estimate of p^G + q^G.
    """
    num_samples = row["num_samples"]
    counts = [round(row[name] * num_samples) for name in ("pass_rate", "wrong_rate")]
    return sum(math.comb(count, GROUP_SIZE) for count in counts) / math.comb(num_samples, GROUP_SIZE)


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ValueError names an invalid option.

    args.model is the folder, which is downloaded if the option is a name on the hub.
    """
    parser = command_line("data/score.py", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="checkpoint in safetensors: folder, or name on the hub")
    add("--output", type=Path, required=True, help="score file to create or to resume")
    add_prompt_options(parser)
    add("--samples", type=int, default=16, help="completions per prompt (default: %(default)s)")
    add("--max-new-tokens", type=int, default=512, help="maximum completion length (default: %(default)s)")
    add("--temperature", type=float, default=1.0, help="sampling temperature (default: %(default)s)")
    add("--seed", type=int, default=0, help="of sampling (default: %(default)s)")
    add("--chunk", type=int, default=256, help="prompts per write to --output (default: %(default)s)")
    add("--dtype", choices=["auto", "bfloat16", "float32"], default="auto", help="of vLLM, see rollout.dtype")
    add("--kv-cache-gib", type=float, help="GiB of keys and values per rank (default: at most 1 on CPUs)")
    add("--max-num-seqs", type=int, default=256, help="parallel completions per rank (default: %(default)s)")
    add("settings", nargs="*", metavar="reward.key=value", help="of section reward, and rollout.stop")
    args = parser.parse_intermixed_args(argv)
    args.data = data_settings(args)
    args.reward, args.stop = trailing_settings(args)
    for name in ("samples", "max_new_tokens", "chunk", "max_num_seqs"):
        if getattr(args, name) < 1:
            raise ValueError(f"--{name.replace('_', '-')} {getattr(args, name)} must be at least 1")
    if args.temperature < 0 or (args.temperature == 0 and args.samples > 1):
        raise ValueError(f"--temperature {args.temperature:g}: must be positive, or 0 with --samples 1")
    args.model_name = args.model.resolve().name
    args.model = folder_of_model(args.model)
    return args


def add_prompt_options(parser: argparse.ArgumentParser) -> None:
    """Add the options for loading prompts, with the names of the settings in section data."""
    add = parser.add_argument_group("prompts, as in section data of the settings").add_argument
    add("--prompts", required=True, help="file, pattern, folder or hub name; see data.train[].path")
    add("--subset", help="configuration of a hub dataset (default: the dataset's default)")
    add("--split", help="split of a hub dataset (default: train)")
    add("--kind", help="verifier of rows without a kind (default: gsm8k if answers hold ####, else math)")
    add("--columns", nargs="+", metavar="ROLE=COLUMN", help="column of prompt, answer, kind or difficulty; "
        "null: none")  # fmt: skip
    add("--template", help="text around each prompt (default: {prompt})")
    add("--difficulty", nargs=2, type=float, metavar=("LOW", "HIGH"), help="load only this closed range")
    add("--limit", type=int, help="load only the first rows")
    add("--distinct", action="store_true", default=None, help="leave out copies of earlier rows")
    add("--chat", choices=["auto", "always", "never"], help="render with the chat template (default: auto)")
    add("--system-prompt", help="system message for rendered prompts that lack one")
    add("--chat-template-args", metavar="YAML", help='for example "{enable_thinking: false}"')
    add("--answer-prefix", help="text that opens every completion, see data.answer_prefix")
    add("--date", help="date that the chat template writes (default: the output's, or today)")
    add("--on-bad-row", choices=["stop", "drop"], help="stop at a bad row, or drop it (default: stop)")
    add("--special-tokens", action="store_true", default=None, help="allow special tokens in messages")


def data_settings(args: argparse.Namespace) -> DataSettings:
    """Build section data from the options, with --prompts as data.eval; ValueError names a wrong option."""
    options = {name: value for name, value in vars(args).items() if value is not None}
    source = {name: options[name] for name in PromptSource.model_fields if name in options}
    data = {name: options[name] for name in DataSettings.model_fields if name in options}
    if "columns" in source:
        pairs = [column.partition("=") for column in source["columns"]]
        source["columns"] = {role: None if column == "null" else column for role, _, column in pairs}
    try:
        if "chat_template_args" in data:
            data["chat_template_args"] = read_mapping("--chat-template-args", data["chat_template_args"])
        settings = DataSettings(eval=[PromptSource(path=args.prompts, **source)], **data)
    except ValidationError as error:
        name, _, why = explain(error, PromptSource).partition(":")
        raise ValueError(f"--{name.replace('_', '-')}:{why}") from error
    check_data(settings)
    return settings


def trailing_settings(args: argparse.Namespace) -> tuple[RewardSettings, list[str]]:
    """Return section reward and rollout.stop from the settings that follow the options.

    ValueError names an invalid setting, or a setting of another section.
    """
    values: dict = {}
    for text in args.settings:
        values = merge(values, read_override(text))
    rollout_keys = {f"rollout.{key}" for key in values.get("rollout", {})}
    if unknown := (values.keys() - {"reward", "rollout"} | rollout_keys) - {"rollout.stop"}:
        raise ValueError(
            f"{min(unknown)}: only settings of section reward and rollout.stop may follow the options, for "
            "example reward.timeout_s=30"
        )
    sections = {}
    for section, settings in (("reward", RewardSettings), ("rollout", RolloutSettings)):
        try:
            sections[section] = settings.model_validate(values.get(section, {}))
        except ValidationError as error:
            raise ValueError(f"{section}.{explain(error, settings)}") from error
    return sections["reward"], sections["rollout"].stop


def earlier_choice(output: Path, name: str) -> str | None:
    """Return a value of the first row that an earlier command has written; None without such a row."""
    with contextlib.suppress(OSError, ValueError, AttributeError), output.open() as file:
        return json.loads(file.readline()).get(name)
    return None


def dtype_of(args: argparse.Namespace) -> str:
    """Return --dtype; for auto, the dtype of an earlier command, or the choice of rollout.dtype auto."""
    earlier = earlier_choice(args.output, "dtype") if args.dtype == "auto" else None
    return earlier or engine_dtype(RolloutSettings(dtype=args.dtype), torch.cuda.is_available())


def header_of(args: argparse.Namespace, kinds: list[str]) -> dict:
    """Return the first row of the output: all that decides the scores, apart from the prompts."""
    header = {"model": f"{args.model_name} {model_digest(args.model)}"}
    settings = ("samples", "temperature", "max_new_tokens", "seed", "dtype")
    header |= {name: getattr(args, name) for name in settings}
    header["kinds"] = kinds
    functions = sorted({name for kind in kinds for name in functions_of(kind)})
    if functions:
        header["functions"] = {name: digest_of_file(file_of(name)) for name in functions}
    reward = {name: getattr(args.reward, name) for name in VERDICT_SETTINGS}
    if args.reward.scale:
        header["scale"] = {name: list(scale) for name, scale in args.reward.scale.items()}
    return header | {"stop": args.stop, "reward": reward}


def main(args: argparse.Namespace) -> None:
    """Score all prompts that are missing in the output, and print a summary of the file."""
    join_ranks()
    date = from_rank_0(args.data.date or earlier_choice(args.output, "date") or str(datetime.now().date()))
    args.data = args.data.model_copy(update={"date": date})
    args.dtype = from_rank_0(dtype_of(args))
    prompts, prompt_ids, tokenizer, notes = read_prompts(args)
    rows_of_rank = {"--prompts": digest_of_rows(zip(prompts, prompt_ids))}
    check_inputs_agree(digests_of_input("--model", args.model) | rows_of_rank)
    shas = [prompt_sha(prompt) for prompt in prompts]
    header = header_of(args, sorted({prompt.kind for prompt in prompts}))
    header |= {"date": args.data.date} if reads_clock(tokenizer) else {}
    rows, file = open_output(args.output, header, shas) if dist.get_rank() == 0 else ([], None)
    num_done = from_rank_0(len(rows))
    if num_done < len(prompts):
        if dist.get_rank() == 0:
            print(*map(one_line, notes), sep="\n", file=sys.stderr)
            done = f"{num_done} of {len(prompts)} prompts done"
            print(f"{args.output}: {done}; starting vLLM", file=sys.stderr)
        rows_of_kinds = [(prompt.kind, prompt.answer, prompt.fields) for prompt in prompts]
        check_functions(args.reward.functions, rows_of_kinds, args.reward)
        engine = build_engine(args, max(map(len, prompt_ids)))
        rows += score_all(engine, tokenizer, prompts, prompt_ids, args, num_done, file)
    if dist.get_rank() == 0:
        print(f"{args.output}: {header['model']}, {args.samples} samples a prompt\n{summary(rows)}")
    dist.destroy_process_group()


if __name__ == "__main__":
    leave(run(main, parse_args, sys.argv[1:]))
