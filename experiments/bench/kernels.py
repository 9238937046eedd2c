"""Measure the kernels: time, rate relative to this machine's peak, peak memory and error of every version.

    python -m experiments.bench.kernels --json kernels.json
                                              # 16 sizes on a GPU, 6 on a CPU: about ten minutes
    python -m experiments.bench.kernels --rows 32768 --vocab 151936 --hidden 4096

Head (kernels/linear_logprob_entropy.py), all versions available on this machine:
    naive        full logits and torch's autograd; the entropy has no gradient, as in the trainer
    chunked      torch, a block of the vocabulary at a time
    triton       the kernels (NVIDIA GPUs)
FP8 (kernels/fp8_block.py): weights and activations, torch and Triton.

Seconds are medians of --repeats rounds in which all versions take turns, after a warm-up round, with the
range in brackets. The floor is the time of the three matrix products that any version must compute (forward,
dx, dW), at the rate of a large square product in the same run. Memory is the peak during forward and
backward above the memory before, and in brackets less the gradients. (For full logits the bracket is too low,
because the peak comes before the gradients are allocated.) Errors are norm(difference) / norm(result) against
full logits in float64, on the first rows and the same operands.
"""

import argparse
import ctypes
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from itertools import product
from pathlib import Path

import torch
from torch import Tensor
from tqdm import tqdm

from experiments.bench.common import make_parser, markdown, spread, with_range, write_results
from kernels import fp8_block
from kernels.linear_logprob_entropy import linear_logprob_entropy, naive

SIZES = {  # rows, vocabulary (Llama 2: 32,000; Qwen3: 151,936), hidden size
    "cuda": ([4096, 16384, 32768, 65536], [32000, 151936], [2048, 4096]),
    "cpu": ([512], [8192, 32000, 151936], [256, 1024]),
}
CEILING = {"cuda": (8192, 2**30), "cpu": (2048, 2**26)}  # side of the square product, elements of the copy
FP8_SHAPE = {"cuda": (65536, 16384), "cpu": (2048, 2048)}
ERROR_ROWS = 128


# ------------------------------------------------------------------------------------------------------------
# Measuring
# ------------------------------------------------------------------------------------------------------------
def seconds(function: Callable[[], object], device: torch.device) -> float:
    """Return the seconds of a call."""
    if device.type == "cpu":
        start = time.perf_counter()
        function()
        return time.perf_counter() - start
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda._sleep(2_000_000)  # about a millisecond, in which Python queues the launches
    start.record()
    function()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3


def in_turns(
    functions: dict[str, Callable], repeats: int, device: torch.device, bar: tqdm
) -> dict[str, list[float]]:
    """Return the seconds of every function by round.

    A function that runs out of memory is left out: for example, naive with large vocabularies.
    """
    times: dict[str, list[float]] = {name: [] for name in functions}
    for _ in range(repeats + 1):
        for name in list(times):
            failure = None
            try:
                times[name].append(seconds(functions[name], device))
            except torch.OutOfMemoryError as error:
                failure = f"{name} is left out: {str(error).splitlines()[0]}"
            if failure:  # outside of except, whose traceback holds the tensors
                del times[name]
                torch.cuda.empty_cache()
                tqdm.write(failure)
            bar.update()
    return {name: values[1:] for name, values in times.items()}


def peak_bytes(function: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory during the call above the memory before; None if the device cannot tell."""
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        baseline = torch.cuda.memory_allocated()
        function()
        return torch.cuda.max_memory_allocated() - baseline
    try:
        Path("/proc/self/clear_refs").write_text("5")  # resets the peak to the resident memory
        baseline = status_kib("VmRSS")
        function()
        return (status_kib("VmHWM") - baseline) * 1024
    except OSError:
        return None


def status_kib(field: str) -> int:
    """Return a field of this process's /proc status in KiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(field))


def return_freed_memory() -> None:
    """Make glibc return freed blocks of 64 KiB and more at once, so that the peak counts live memory only."""
    m_mmap_threshold = -3
    if hasattr(ctypes.CDLL(None), "mallopt"):
        ctypes.CDLL(None).mallopt(m_mmap_threshold, 2**16)


def ceilings(device: torch.device, dtype: torch.dtype, repeats: int) -> dict[str, float]:
    """Return FLOP/s of a large square product and bytes/s of a large copy (read plus written)."""
    side, elements = CEILING[device.type]
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    source = torch.randn(elements, device=device).to(dtype)
    target = torch.empty_like(source)
    rounds = [seconds(lambda: a @ b, device) for _ in range(repeats + 1)][1:]
    copies = [seconds(lambda: target.copy_(source), device) for _ in range(repeats + 1)][1:]
    moved = 2 * source.numel() * source.element_size()
    return {"flops": 2 * side**3 / statistics.median(rounds), "bytes": moved / statistics.median(copies)}


# ------------------------------------------------------------------------------------------------------------
# Head
# ------------------------------------------------------------------------------------------------------------
def naive_value_only(x: Tensor, weight: Tensor, targets: Tensor, temperature: float):
    """Compute naive() without a gradient of the entropy, which is cheaper."""
    logits = torch.nn.functional.linear(x, weight).float() / temperature
    logp = logits.log_softmax(dim=-1)
    with torch.no_grad():
        entropy = torch.special.entr(logp.exp()).sum(dim=-1)
    return logp.gather(1, targets.unsqueeze(1)).squeeze(1), entropy


def head_versions(device: torch.device, wanted: list[str]) -> dict[str, Callable]:
    """Return {name: function from (x, weight, targets, temperature) to (logprobs, entropy)}."""
    versions = {"naive": naive_value_only, "chunked": partial(linear_logprob_entropy, backend="chunked")}
    if device.type == "cuda":
        versions["triton"] = partial(linear_logprob_entropy, backend="triton")
    return {name: function for name, function in versions.items() if not wanted or name in wanted}


def gradients(function: Callable, inputs: tuple, weights: tuple[Tensor, Tensor | None]) -> tuple:
    """Return (logprobs, entropy, dx, dW) of sum(weights[0] logprobs) + sum(weights[1] entropy)."""
    x = inputs[0].requires_grad_()
    weight = inputs[1].requires_grad_()
    x.grad = weight.grad = None
    logprobs, entropy = function(*inputs)
    loss = (logprobs * weights[0]).sum()
    if weights[1] is not None:
        loss = loss + (entropy * weights[1]).sum()
    loss.backward()
    result = (logprobs.detach(), entropy.detach(), x.grad, weight.grad)
    x.grad = weight.grad = None
    return result


def make_inputs(rows: int, vocab: int, hidden: int, device: torch.device, dtype: torch.dtype) -> tuple:
    """Draw (x, weight, targets, temperature).

    Logits have a standard deviation of 3, so that entropies are some nats below log V.
    """
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(rows, hidden, device=device, generator=generator)
    weight = torch.randn(vocab, hidden, device=device, generator=generator) * 3 / hidden**0.5
    targets = torch.randint(vocab, (rows,), device=device, generator=generator)
    return x.to(dtype), weight.to(dtype), targets, 0.8


def head_errors(functions: dict[str, Callable], inputs: tuple) -> dict:
    """Return {version: {quantity: relative error}} on ERROR_ROWS rows, with gradients of both outputs."""
    x, weight, targets, temperature = inputs
    rows = slice(0, min(ERROR_ROWS, len(x)))
    generator = torch.Generator(x.device).manual_seed(1)
    weights = tuple(torch.randn(2, len(x[rows]), device=x.device, generator=generator))
    small = (x[rows].detach(), weight.detach(), targets[rows], temperature)
    exact = gradients(
        naive, (small[0].double(), small[1].double(), *small[2:]), [w.double() for w in weights]
    )
    errors = {}
    for name, function in functions.items():
        results = gradients(function, small, weights)
        errors[name] = {
            quantity: float((a.double() - b).norm() / b.norm())
            for quantity, a, b in zip(("logprob", "entropy", "dx", "dW"), results, exact)
        }
    return errors


def bench_head(size: tuple[int, int, int], args, peak: dict[str, float], bar: tqdm) -> list[dict]:
    """Return one row per version for a size (rows, vocabulary, hidden)."""
    rows, vocab, hidden = size
    device = torch.device(args.device)
    dtype = getattr(torch, args.dtype)
    inputs = make_inputs(*size, device, dtype)
    versions = head_versions(device, args.versions)
    ones = torch.ones(rows, device=device)
    with_entropy = versions | ({"naive": naive} if "naive" in versions else {})  # with its gradient

    def forward(function):
        with torch.no_grad():
            return function(*inputs)

    forwards = {name: partial(forward, f) for name, f in versions.items()}
    updates = {name: partial(gradients, f, inputs, (ones, None)) for name, f in versions.items()}
    both_gradients = {name: partial(gradients, f, inputs, (ones, ones)) for name, f in with_entropy.items()}
    forward_s = in_turns(forwards, args.repeats, device, bar)
    update_s = in_turns(updates, args.repeats, device, bar)
    both_gradients_s = in_turns(both_gradients, args.repeats, device, bar)
    floor = 6 * rows * vocab * hidden / peak["flops"]
    gradient_bytes = inputs[0].nbytes + inputs[1].nbytes
    errors = head_errors(with_entropy, inputs)
    table = []
    for name in versions:
        row = {"rows": rows, "vocab": vocab, "hidden": hidden, "version": name, "floor_s": floor}
        row |= {
            "gradient_bytes": gradient_bytes,
            "errors": errors.get(name),
            "left_out": name not in update_s,
        }
        row |= {"forward_s": forward_s.get(name), "both_gradients_s": both_gradients_s.get(name)}
        if name in update_s:
            torch.cuda.empty_cache()
            row |= {"update_s": update_s[name], "peak_bytes": peak_bytes(updates[name], device)}
            row["flops"] = 6 * rows * vocab * hidden / statistics.median(update_s[name])
        table.append(row)
    return table


# ------------------------------------------------------------------------------------------------------------
# FP8
# ------------------------------------------------------------------------------------------------------------
def bench_fp8(args, peak: dict[str, float], bar: tqdm) -> list[dict]:
    """Return one row per operation and version; the rate counts the bytes that must be read and written."""
    device = torch.device(args.device)
    values = torch.randn(args.fp8_shape or FP8_SHAPE[device.type], device=device).bfloat16()
    operations = {
        "weights": (fp8_block.quantise_weight, fp8_block.BLOCK),
        "activations": (fp8_block.quantise_activation, 1),
    }
    rows = []
    for operation, (quantise, block_rows) in operations.items():
        functions = {"torch": partial(quantise, values, use_triton=False)}
        if device.type == "cuda":
            functions["triton"] = partial(quantise, values, use_triton=True)
        codes, scales = functions["torch"]()
        moved = values.nbytes + codes.nbytes + scales.nbytes
        back = fp8_block.dequantise(codes, scales, block_rows).double()
        error = float((back - values.double()).norm() / values.double().norm())
        for version, times in in_turns(functions, args.repeats, device, bar).items():
            rate = moved / statistics.median(times)
            row = {"operation": operation, "version": version, "seconds": times, "bytes_per_s": rate}
            rows.append(row | {"of_copy": rate / peak["bytes"], "error": error})
    return rows


# ------------------------------------------------------------------------------------------------------------
# Tables
# ------------------------------------------------------------------------------------------------------------
def summary_lines(data: dict) -> list[str]:
    """Return a line per size of the head: seconds of forward and backward (over naive), and MiB."""
    versions = list(dict.fromkeys(row["version"] for row in data["head"]))
    sizes: dict[tuple, dict[str, str]] = {}
    for row in data["head"]:
        cells = sizes.setdefault((row["rows"], row["vocab"], row["hidden"]), {})
        if not row["left_out"]:
            ratio = ratio_of(row, data["head"])
            is_read = row["peak_bytes"] is not None
            mib = f"{(row['peak_bytes'] - row['gradient_bytes']) / 2**20:,.0f}" if is_read else "-"
            cells[row["version"]] = f"{statistics.median(row['update_s']):.3g} ({ratio}), {mib}"
    rows = [[*size, *(cells.get(version, "-") for version in versions)] for size, cells in sizes.items()]
    return markdown(["rows", "vocabulary", "hidden", *versions], rows)


def ratio_of(row: dict, rows: list[dict]) -> str:
    """Return the seconds of a version over those of naive, the median of ratios within a round; else "-"."""
    same = ("rows", "vocab", "hidden")
    rivals = [r for r in rows if r["version"] == "naive" and all(r[name] == row[name] for name in same)]
    if not rivals or rivals[0]["left_out"]:
        return "-"
    pairs = zip(row["update_s"], rivals[0]["update_s"])
    return f"{statistics.median(seconds / naive_s for seconds, naive_s in pairs):.2f}"


def fp8_lines(data: dict) -> list[str]:
    """Return the table of FP8."""
    rows = [
        [
            r["operation"], r["version"], with_range(spread(r["seconds"]), ".3g"),
            f"{r['bytes_per_s'] / 1e9:.3g}", f"{r['of_copy']:.2f}", f"{r['error']:.2e}",
        ]
        for r in data["fp8"]
    ]  # fmt: skip
    return markdown(["FP8", "version", "seconds", "GB/s", "of a copy", "error"], rows)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = make_parser(__doc__)
    add = parser.add_argument
    default_device = "cuda" if torch.cuda.is_available() else "cpu"
    add("--device", choices=SIZES, default=default_device, help="device to measure (default: %(default)s)")
    add("--dtype", help="dtype of the operands (default: bfloat16 on GPUs, float32 on CPUs)")
    for name, meaning in (("rows", "tokens"), ("vocab", "vocabulary sizes"), ("hidden", "hidden sizes")):
        add(f"--{name}", type=int, nargs="+", help=f"{meaning} (default: see SIZES)")
    add("--fp8-shape", type=int, nargs=2, metavar=("M", "N"), help="size of the matrix to quantise")
    add(
        "--versions",
        nargs="+",
        default=[],
        help="versions of the head, for example chunked triton (default: all)",
    )
    add("--repeats", type=int, default=5, help="counted rounds (default: %(default)s)")
    args = parser.parse_args(argv)
    args.dtype = args.dtype or ("bfloat16" if args.device == "cuda" else "float32")
    for name, default in zip(("rows", "vocab", "hidden"), SIZES[args.device]):
        setattr(args, name, getattr(args, name) or default)
    return args


def main(argv: list[str] | None = None) -> None:
    """Measure all sizes and print the tables."""
    args = parse_args(argv)
    device = torch.device(args.device)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    if device.type == "cpu":
        return_freed_memory()
    on_gpu = device.type == "cuda"
    machine = torch.cuda.get_device_name() if on_gpu else f"CPU, {torch.get_num_threads()} threads"
    peak = ceilings(device, getattr(torch, args.dtype), args.repeats)
    print(
        f"{machine}, torch {torch.__version__}, {args.dtype}: product {peak['flops'] / 1e12:.3g} TFLOP/s, "
        f"copy {peak['bytes'] / 1e9:.4g} GB/s; medians (ranges) of {args.repeats}\n"
    )
    head = []
    with tqdm(desc="kernels", unit="run", disable=None) as bar:
        for size in product(args.rows, args.vocab, args.hidden):
            bar.set_postfix_str("rows {} vocabulary {} hidden {}".format(*size))
            head += bench_head(size, args, peak, bar)
        fp8 = bench_fp8(args, peak, bar)
    results = {"machine": machine, "torch": torch.__version__, "dtype": args.dtype, "ceilings": peak}
    results |= {"head": head, "fp8": fp8}
    print("\n".join([*summary_lines(results), "", *fp8_lines(results)]))
    write_results(args.json, results)


if __name__ == "__main__":
    main()
