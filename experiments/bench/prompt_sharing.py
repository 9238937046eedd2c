"""Measure the time saved in an update by computing the prompt of a group once instead of once per completion.

    python -m experiments.bench.prompt_sharing                  # one process on one core: about five minutes
    python -m experiments.bench.prompt_sharing --json prompt_sharing.json
    python -m experiments.bench.prompt_sharing --prompts 64 --completions 256 --repeats 1

A group of 8 completions of equal length goes through forward and backward of a random MoE, in one
micro-batch. Three ways take turns: every row with its own prompt (train.share_prompts: false), one prompt
shared by all rows (true), and rows with only the last token of the prompt. The last way is an upper bound on
the saving, not valid training. Seconds are CPU time of this process, so that other processes on the core do
not count.
"""

import statistics
import time

from experiments.bench.common import make_parser, make_policy, markdown, spread, with_range, write_results

GROUP_SIZE = 8
MODEL = (256, 2, 8, 256, 1024)  # hidden size, layers, experts, expert width, vocabulary
WAYS = ("as they are", "shared", "without prompts")


def pack_group(way: str, prompt: list[int], completions: list[list[int]]):
    """Pack a group in one of WAYS."""
    import moe_model

    prompt = prompt[-1:] if way == "without prompts" else prompt
    return moe_model.pack([prompt] * len(completions), completions, "cpu", share_prompts=way == "shared")


def seconds_of(policy, packed) -> float:
    """Return the CPU seconds of a forward and backward pass over the sum of all log-probabilities."""
    policy.zero_grad()
    start = time.process_time()
    logprobs, *_ = policy(packed)
    logprobs.sum().backward()
    return time.process_time() - start


def measure(policy, num_prompt: int, num_completion: int, repeats: int) -> dict:
    """Time the three ways in turns; the first round is not counted."""
    import torch

    generator = torch.Generator().manual_seed(0)

    def draw(num_tokens: int) -> list[int]:
        return torch.randint(3, MODEL[4], (num_tokens,), generator=generator).tolist()

    prompt = draw(num_prompt)
    completions = [draw(num_completion) for _ in range(GROUP_SIZE)]
    packed = {way: pack_group(way, prompt, completions) for way in WAYS}
    rounds = [{way: seconds_of(policy, packed[way]) for way in WAYS} for _ in range(repeats + 1)][1:]
    tokens = {way: len(packed[way].input_ids) for way in WAYS}
    ratios = {way: statistics.median(seconds[way] / seconds[WAYS[0]] for seconds in rounds) for way in WAYS}
    return {
        "prompt_tokens": num_prompt, "completion_tokens": num_completion, "group_size": GROUP_SIZE,
        "tokens_saved": 1 - tokens["shared"] / tokens["as they are"],
        "seconds": {way: spread([seconds[way] for seconds in rounds]) for way in WAYS},
        "saved": 1 - ratios["shared"], "saved_at_most": 1 - ratios["without prompts"],
    }  # fmt: skip


def table_lines(data: list[dict]) -> list[str]:
    """Return the table by lengths of prompt and completions."""
    rows = [
        [
            row["prompt_tokens"], row["completion_tokens"], f"{row['tokens_saved']:.3f}",
            *(with_range(row["seconds"][way], ".2f") for way in WAYS),
            f"{row['saved']:.2f}", f"{row['saved_at_most']:.2f}",
        ]
        for row in data
    ]  # fmt: skip
    names = ["prompt", "completions", "tokens saved", *(f"{way}, s" for way in WAYS)]
    return markdown([*names, "time saved", "at most"], rows)


def main() -> None:
    """Measure all lengths and print the table."""
    import torch

    parser = make_parser(__doc__)
    add = parser.add_argument
    add(
        "--prompts", type=int, nargs="+", default=[64, 512, 2048], help="prompt tokens (default: %(default)s)"
    )
    add("--completions", type=int, nargs="+", default=[256, 2048], help="tokens each (default: %(default)s)")
    add("--repeats", type=int, default=5, help="rounds of the three ways (default: %(default)s)")
    args = parser.parse_args()
    torch.set_num_threads(1)
    policy = make_policy(*MODEL)
    rows = []
    for num_completion in args.completions:
        for num_prompt in args.prompts:
            rows.append(measure(policy, num_prompt, num_completion, args.repeats))
            print("\n".join(table_lines(rows[-1:])[0 if len(rows) == 1 else 2 :]), flush=True)
    write_results(args.json, rows)


if __name__ == "__main__":
    main()
