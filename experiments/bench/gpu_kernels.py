"""Pieces of experiments.bench.gpu that require only torch and triton; the runner imports them by name.

A piece is a function (folder, dry) -> Report. `dry` runs small sizes on a CPU, as a test of the code. Shapes
are the ones of a layer of Qwen3-30B-A3B; four layers fit one GPU.
"""

import contextlib
import importlib
import importlib.util
import itertools
import os
import statistics
import subprocess
import sys
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from experiments.bench.common import ROOT, markdown, read_results

NEEDS_GPU = "needs a GPU"
LIMIT_S = 600  # time limit of a piece, in seconds
LAYER_30B = {
    "hidden_size": 2048, "num_hidden_layers": 4, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    "vocab_size": 151936,
}  # fmt: skip
SIZES = {  # layers of 30B; 2.0 billion parameters, 0.8 billion active per token; small, for dry runs
    "30B": LAYER_30B,
    "2B": LAYER_30B | {"num_hidden_layers": 8, "num_experts": 32},
    "dry": {
        "hidden_size": 128, "num_hidden_layers": 2, "num_experts": 8, "num_experts_per_tok": 2,
        "moe_intermediate_size": 128, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
        "vocab_size": 512,
    },
}  # fmt: skip
TILES = [  # rows, columns, depth, warps, stages: all compile for sm_90 without spills
    (128, 256, 64, 8, 3), (128, 256, 64, 8, 4), (128, 128, 64, 8, 4), (128, 256, 128, 8, 2),
]  # fmt: skip


@dataclass
class Report:
    """The results of a piece; a criterion is True, False, or NEEDS_GPU."""

    figures: dict = field(default_factory=dict)
    criteria: dict[str, bool | str] = field(default_factory=dict)


def on_gpu(verdict: bool, dry: bool) -> bool | str:
    """Return a criterion that small sizes on a CPU cannot decide."""
    return NEEDS_GPU if dry else verdict


def shell(command: list, log: Path) -> None:
    """Run a program of the project; raise RuntimeError with the end of its log if it fails."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    options = {"cwd": ROOT, "env": environment, "timeout": LIMIT_S}
    try:
        with log.open("w") as file:
            done = subprocess.run(list(map(str, command)), stdout=file, stderr=file, **options)
        failure = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"not done after {LIMIT_S} s"
    if failure:
        raise RuntimeError(f"{failure}, {log}:\n{log.read_text()[-1500:]}")


# ------------------------------------------------------------------------------------------------------------
# Kernels
# ------------------------------------------------------------------------------------------------------------
def tests(out: Path, dry: bool) -> Report:
    """Run the kernels' tests."""
    if dry:
        return Report(criteria={"all pass, none is skipped": NEEDS_GPU})
    shell([sys.executable, "-m", "pytest", "-q", "tests/test_kernels.py"], out / "tests.log")
    lines = (out / "tests.log").read_text().splitlines()
    summary = next(line for line in lines if " passed" in line)
    return Report({"pytest": summary}, {"all pass, none is skipped": " skipped" not in summary})


def head(out: Path, dry: bool) -> Report:
    """Run the benchmark of the kernels at one vocabulary and check the criteria."""
    sizes = ["--rows", 4096, 32768, "--vocab", 151936, "--hidden", 2048, 4096, "--repeats", 5]
    if dry:
        sizes = ["--rows", 64, "--vocab", 1000, "--hidden", 64, "--repeats", 1, "--fp8-shape", 256, 256]
    path = out / "kernels.json"
    from experiments.bench import kernels

    kernels.main([*map(str, sizes), "--json", str(path)])
    results = read_results(path)
    report = Report({f"ceiling, {name}": value for name, value in results["ceilings"].items()})
    for kind in ("naive", "chunked", "triton"):
        errors = [max(r["errors"].values()) for r in results["head"] if r["errors"] and r["version"] == kind]
        report.figures |= {f"largest error against float64, {kind}": max(errors)} if errors else {}
        if errors and kind != "naive":  # naive rounds logits to bfloat16
            report.criteria[f"errors below 1 %, {kind}"] = max(errors) < 1e-2
    names = ("1.5 times chunked", "twice the floor", "1/10 of naive's memory", "FP8 at 80 % of a copy")
    report.criteria |= dict.fromkeys(names, NEEDS_GPU)
    if dry:
        return report
    row = {(r["version"], r["rows"], r["hidden"]): r for r in results["head"]}
    fused, chunked = (row[name, 32768, 4096] for name in ("triton", "chunked"))
    few = row["naive", 4096, 4096]  # extrapolated, because the logits of 32,768 rows may not fit
    naive_bytes = 8 * (few["peak_bytes"] - few["gradient_bytes"]) + fused["gradient_bytes"]
    fused_s = statistics.median(fused["update_s"])
    chunked_s = statistics.median(chunked["update_s"])
    figures = {"chunked / triton": chunked_s / fused_s, "triton / floor": fused_s / fused["floor_s"]}
    figures["memory / naive's"] = fused["peak_bytes"] / naive_bytes
    copies = {
        f"FP8 {r['operation']} of a copy": r["of_copy"] for r in results["fp8"] if r["version"] == "triton"
    }
    verdicts = (figures["chunked / triton"] >= 1.5, figures["triton / floor"] <= 2)
    verdicts += (figures["memory / naive's"] <= 0.1, min(copies.values()) >= 0.8)
    report.criteria |= dict(zip(names, verdicts))
    report.figures |= figures | copies
    return report


def tiles(out: Path, dry: bool) -> Report:
    """Time forward and backward with other tiles, to choose TILES for this GPU."""
    if dry:
        return Report(criteria={"the tile in use is within 5 % of the fastest": NEEDS_GPU})
    from experiments.bench.kernels import gradients, make_inputs, seconds
    from kernels import linear_logprob_entropy as kernel

    device = torch.device("cuda")
    report = Report()
    current_tile = kernel.TILES[2]
    inputs = make_inputs(32768, 151936, 4096, device, torch.bfloat16)
    ones = torch.ones(32768, device=device)

    def fused(*inputs):
        return kernel.linear_logprob_entropy(*inputs, backend="triton")

    seconds_of = {}
    for tile in TILES:
        kernel.TILES[2] = dict(zip(("BN", "BC", "BD", "num_warps", "num_stages"), tile))
        try:
            times = [seconds(lambda: gradients(fused, inputs, (ones, None)), device) for _ in range(4)]
            seconds_of[str(tile)] = statistics.median(times[1:])
        except Exception as error:
            report.figures[str(tile)] = f"does not run: {str(error).splitlines()[0]}"
    in_use = seconds_of.get(str(tuple(current_tile.values())), float("inf"))
    report.criteria["the tile in use is within 5 % of the fastest"] = in_use <= 1.05 * min(
        seconds_of.values()
    )
    report.figures |= seconds_of
    return report


# ------------------------------------------------------------------------------------------------------------
# Some layers of a model
# ------------------------------------------------------------------------------------------------------------
def policy_module():
    """Import moe_model, with empty modules in place of missing libraries."""
    stand_ins = {
        "deepspeed": {"DeepSpeedEngine": object}, "deepspeed.moe": {},
        "deepspeed.moe.layer": {"MoE": torch.nn.Module},
        "deepspeed.utils": {"groups": None}, "safetensors": {"SafetensorError": OSError, "safe_open": None},
        "safetensors.torch": {"save_file": None},
        "transformers": {"AutoConfig": None, "PretrainedConfig": SimpleNamespace},
    }  # fmt: skip
    names = ("deepspeed", "safetensors", "transformers")
    missing = {name for name in names if name not in sys.modules and not importlib.util.find_spec(name)}
    for name, attributes in stand_ins.items():
        if name.partition(".")[0] in missing:
            module = types.ModuleType(name)
            vars(module).update(attributes)
            sys.modules[name] = module
    return importlib.import_module("moe_model")


def make_policy(size: str, device: torch.device, **changes):
    """Make a random policy of one of SIZES, bfloat16 on a GPU."""
    moe_model = policy_module()
    config = SimpleNamespace(
        **SIZES[size] | changes, model_type="qwen3_moe", mlp_only_layers=[], decoder_sparse_step=1,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, rms_norm_eps=1e-6, attention_bias=False,
        norm_topk_prob=True, tie_word_embeddings=False, initializer_range=0.02, intermediate_size=6144,
    )  # fmt: skip
    torch.set_default_dtype(torch.float32 if device.type == "cpu" else torch.bfloat16)
    torch.manual_seed(0)
    with device:
        policy = moe_model.Policy(config)
        for parameter in policy.parameters():
            if parameter.dim() > 1:  # norms stay ones
                torch.nn.init.normal_(parameter, 0.0, 0.02)
    torch.set_default_dtype(torch.float32)
    return policy


def flops_per_token(size: dict, length: int) -> float:
    """Return the model FLOPs of forward and backward per token, at sequences of length S.

    The sum is 6 per active weight, plus 6 H R S for causal attention in each layer. Recomputed activations
    do not count.
    """
    hidden = size["hidden_size"]
    heads = size["num_attention_heads"] * size["head_dim"]
    keys = size["num_key_value_heads"] * size["head_dim"]
    attention = hidden * (2 * heads + 2 * keys)
    experts = size["num_experts_per_tok"] * 3 * hidden * size["moe_intermediate_size"]
    layer = attention + experts + hidden * size["num_experts"]
    weights = size["num_hidden_layers"] * layer + hidden * size["vocab_size"]
    return 6 * weights + 6 * size["num_hidden_layers"] * heads * length


@dataclass
class Work:
    """A policy and a micro-batch."""

    policy: torch.nn.Module
    packed: object
    tokens: int
    flops: float  # forward and backward together
    device: torch.device

    @classmethod
    def make(cls, dry: bool, length: int = 1024, tokens: int = 32768, **changes) -> "Work":
        """Make some layers of 30B, with changes, or the small model in a dry run, and random tokens."""
        size = "dry" if dry else "30B"
        device = torch.device("cpu" if dry else "cuda")
        if dry:
            length = 32
            tokens = 128
        policy = make_policy(size, device, **changes)
        generator = torch.Generator().manual_seed(0)
        shape = (tokens // length, length)
        completions = torch.randint(2, policy.config.vocab_size, shape, generator=generator).tolist()
        packed = policy_module().pack([[2]] * len(completions), completions, device)
        return cls(policy, packed, tokens, tokens * flops_per_token(SIZES[size], length), device)

    def forward(self, replay=None):
        """Return the outputs without gradient, as the old-logprob pass does."""
        with torch.no_grad():
            return self.policy(self.packed, replay_ids_TLK=replay)

    def update(self, replay=None) -> None:
        """Compute the gradients of all weights."""
        self.policy.zero_grad(set_to_none=True)
        logprobs, *_ = self.policy(self.packed, replay_ids_TLK=replay)
        logprobs.sum().backward()


def update(out: Path, dry: bool) -> Report:
    """Time an update and the old-logprob pass at 30B's shapes; replay, checkpointing, memory, determinism."""
    from experiments.bench.kernels import ceilings, peak_bytes, seconds

    work = Work.make(dry)
    report = Report()
    moe_model = policy_module()
    dtype = torch.float32 if dry else torch.bfloat16
    best = ceilings(work.device, dtype, 3)["flops"]
    routes = moe_model.route_table(work.forward()[2], work.policy.config.num_experts)
    rounds = 2 if dry else 5
    calls = {
        "update": work.update,
        "update, R3": partial(work.update, routes),
        "old-logprob pass": work.forward,
    }
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(rounds):
        for name, call in calls.items():
            times[name].append(seconds(call, work.device))
    medians = {name: statistics.median(values[1:]) for name, values in times.items()}
    report.figures |= {f"{name}, s": value for name, value in medians.items()}
    report.figures["R3 / live routes"] = medians["update, R3"] / medians["update"]
    report.figures["MFU, update"] = work.flops / medians["update"] / best
    report.figures["MFU, old-logprob pass"] = work.flops / 3 / medians["old-logprob pass"] / best
    gradients = []
    for _ in range(3):
        work.update()
        gradients.append({n: p.grad.float().cpu() for n, p in work.policy.named_parameters()})
    spread = {
        name: max((repeat[name] - value).abs().max().item() for repeat in gradients[1:])
        / value.abs().max().item()
        for name, value in gradients[0].items()
    }
    last = f"layers.{work.policy.config.num_hidden_layers - 1}.mlp.experts"  # no attention follows
    of_experts = max(value for name, value in spread.items() if last in name)
    report.figures |= {"gradients over repeats, largest": max(spread.values())}
    report.figures |= {"gradients over repeats, last experts": of_experts}
    work.policy.zero_grad(set_to_none=True)  # the memory before the call is that of the weights
    for parameter in work.policy.parameters():  # the plan counts gradients apart from activations
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for checkpointing in (False, True):
        work.policy.activation_checkpointing = checkpointing
        gib = (peak_bytes(work.update, work.device) or 0) / 2**30
        planned = planned_activations(moe_model, work, checkpointing)
        name = "with checkpointing" if checkpointing else "without"
        report.figures[f"peak of an update, GiB, {name} / planned"] = [gib, planned / 2**30]
        report.criteria[f"the plan of memory holds within 30 %, {name}"] = on_gpu(
            0.7 < gib * 2**30 / planned < 1.3, dry
        )
    report.criteria["gradients of the last layer's experts are the same in every repeat"] = of_experts == 0
    return report


def planned_activations(moe_model, work: Work, checkpointing: bool) -> int:
    """Return the bytes that an update adds to the weights on one GPU, by memory_plan.memory_by_part()."""
    from memory_plan import memory_by_part  # after policy_module(), which replaces libraries that are missing
    from runtime.memory import extra_bytes

    dtype = "float32" if work.device.type == "cpu" else "bfloat16"
    settings = moe_model.ModelSettings(dtype=dtype, activation_checkpointing=checkpointing)
    parts = memory_by_part(work.policy.config, settings, 1, 1, work.tokens)
    return extra_bytes(parts)["update"]


def long(out: Path, dry: bool) -> Report:
    """Time an update on sequences of 16,384 tokens."""
    from experiments.bench.kernels import seconds

    work = Work.make(dry, length=16384)
    work.policy.activation_checkpointing = True
    times = [seconds(work.update, work.device) for _ in range(2 if dry else 4)]
    figures = {"update, s": statistics.median(times[1:]), "TFLOP/s": work.flops / min(times[1:]) / 1e12}
    return Report(figures, {"sequences of 16,384 tokens fit": on_gpu(True, dry)})


def attention(out: Path, dry: bool) -> Report:
    """Name the kernel of an attention layer at 4,096 and 16,384 tokens, and time it beside cuDNN's.

    moe_model.py switches cuDNN off, because cuDNN builds a plan at the first call with a shape. The plan pays
    if later calls with the same shape save more than the first call costs.
    """
    from torch.nn.attention import SDPBackend, sdpa_kernel

    from experiments.bench.kernels import seconds

    report = Report()
    kernels: dict[str, Callable] = {"in use": contextlib.nullcontext}
    if not dry:
        kernels["cuDNN"] = partial(sdpa_kernel, SDPBackend.CUDNN_ATTENTION)
    for length, (name, kernel) in itertools.product((1024, 4096, 16384), kernels.items()):
        call, device = attention_layer(length, dry)
        times: list[float] = []
        try:
            with kernel():
                times += [seconds(call, device) for _ in range(2 if dry else 6)]
                operators = attention_operators(call)
        except RuntimeError as error:
            operators = f"does not run: {str(error).splitlines()[0]}"
        if length == 1024:  # a warm-up, in which libraries are loaded
            continue
        at_length = f"{name} at {length:,} tokens"
        report.figures[f"kernel {at_length}"] = operators
        if len(times) > 1:
            report.figures[f"{at_length}, first call, s"] = times[0]
            report.figures[f"{at_length}, later calls, s"] = statistics.median(times[1:])
        if name == "in use":
            is_flash = operators.startswith("flash_attention")
            report.criteria[f"flash attention runs at {length:,} tokens"] = on_gpu(is_flash, dry)
    return report


def attention_layer(length: int, dry: bool) -> tuple[Callable[[], None], torch.device]:
    """Return a call that computes an attention layer of 30B, forward and backward, and its device."""
    work = Work.make(dry, length=length, num_hidden_layers=1, num_experts=8)
    layer = work.policy.model.layers[0].self_attn
    options = {"dtype": layer.o_proj.weight.dtype, "device": work.device}
    num_tokens = len(work.packed.input_ids)
    x_TD = torch.randn(num_tokens, work.policy.config.hidden_size, requires_grad=True, **options)
    cos_TR, sin_TR = torch.randn(2, num_tokens, layer.head_dim, **options)

    def call() -> None:
        layer(x_TD, (cos_TR, sin_TR), work.packed).sum().backward()

    return call, work.device


def attention_operators(call: Callable[[], object]) -> str:
    """Return the names of torch's attention operators in a call's forward pass, such as flash_attention."""
    prefix = "aten::_scaled_dot_product_"
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call()
    names = {event.name for event in profiler.events() if event.name.startswith(prefix)}
    return ", ".join(sorted(name.removeprefix(prefix) for name in names if not name.endswith("backward")))


def optimizer(out: Path, dry: bool) -> Report:
    """Measure a step of AdamW, fused as on GPUs and with torch's default: seconds and peak memory."""
    from experiments.bench.kernels import peak_bytes, seconds

    device = torch.device("cpu" if dry else "cuda")
    report = Report()
    num = 2**18 if dry else 2**30
    results = {}
    for name, options in (("fused", {"fused": True}), ("default", {"foreach": None})):
        torch.manual_seed(0)
        weight = torch.nn.Parameter(torch.randn(num, device=device))
        weight.grad = torch.randn(num, device=device)
        adamw = torch.optim.AdamW([weight], lr=1e-3, **options)
        adamw.step()
        report.figures[f"{name}, s per 2^30 weights"] = seconds(adamw.step, device) * 2**30 / num
        held = (peak_bytes(adamw.step, device) or 0) / (4 * num)
        report.figures[f"{name}, copies of the weights held in a step"] = held
        results[name] = weight.detach()
        del adamw, weight
    difference = (results["fused"] - results["default"]).abs().max().item()
    report.figures["largest difference of weights"] = difference
    tolerance = 4 * torch.finfo(torch.float32).eps * results["default"].abs().max().item()
    report.criteria["fused gives the same weights, to four last places of the largest"] = (
        difference <= tolerance
    )
    held = report.figures["fused, copies of the weights held in a step"]
    report.criteria["fused holds no copy"] = on_gpu(held < 0.1, dry)
    return report


# ------------------------------------------------------------------------------------------------------------
# Profile
# ------------------------------------------------------------------------------------------------------------
KINDS = {  # kind: parts of the names of calls; the innermost matching call decides
    "head": ("LinearLogprobEntropy",),
    "experts": ("grouped_mm",),
    "attention": ("scaled_dot_product", "flash", "efficient_attention", "cudnn_attention"),
    "other products": ("aten::mm", "aten::addmm", "aten::bmm", "aten::linear"),
    "moving rows": ("TakeRows", "CopyToExperts", "SumOfExperts", "CopyRows", "SumRows", "index", "gather",
                    "scatter", "sort", "topk", "cumsum", "repeat_interleave"),
}  # fmt: skip
OUTERMOST = ("head", "experts", "attention")  # kinds that include all calls within their own calls


def profile(out: Path, dry: bool) -> Report:
    """Measure the share of each kind of operation in an update: would a routing kernel pay?"""
    work = Work.make(dry)
    work.update()
    shares = profiled_shares(work, dry, out / "profile.txt")
    text = "moving rows takes less than the experts' products: no kernel of our own for it"
    return Report(shares, {text: on_gpu(shares["moving rows"] < shares["experts"], dry)})


def profiled_shares(work: Work, dry: bool, table: Path | None = None) -> dict[str, float]:
    """Return the share of each kind of operation in an update. table: file for the times of operators."""
    with torch.profiler.profile() as profiler:
        work.update()
        if not dry:
            torch.cuda.synchronize()
    if table is not None:
        table.write_text(profiler.key_averages().table(row_limit=60))
    return shares_by_kind(profiler.events(), "self_cpu_time_total" if dry else "self_device_time_total")


def kind_of(event) -> str | None:
    """Return the kind of an operation, by its own name or by the name of an enclosing call."""
    kind = None
    while event is not None:
        match = next((k for k, names in KINDS.items() if any(n in event.name for n in names)), None)
        kind = match if match in OUTERMOST else kind or match
        event = event.cpu_parent
    return kind


def shares_by_kind(events, attribute: str) -> dict[str, float]:
    """Return the share of time per kind of operation; on a GPU, the time of the launched kernels."""
    sums = dict.fromkeys([*KINDS, "norms, softmax, elementwise, copies"], 0.0)
    for event in (e for e in events if e.device_type == torch.autograd.DeviceType.CPU):
        sums[kind_of(event) or list(sums)[-1]] += getattr(event, attribute)
    total = sum(sums.values()) or 1.0
    return {kind: seconds / total for kind, seconds in sums.items()}


# ------------------------------------------------------------------------------------------------------------
# Rows of experts
# ------------------------------------------------------------------------------------------------------------
PASSES = {  # {computation: passes over rows [P, D], over rows [P, I]}, explained in docs/gpu.md
    "torch": (31, 18), "triton": (6.25, 8), "liger": (2.25, 6),
}  # fmt: skip
WAYS = {  # {row of the table: (computation, TFLOP/s of the experts' products; None: as measured)}
    "torch": ("torch", None), "triton": ("triton", None),
    "liger-kernel, as published": ("liger", 275), "liger-kernel, with its open change": ("liger", 413),
}  # fmt: skip


def expected_lines(record: dict, num_layers: int = 48, h100_bandwidth: float = 3.35 / 4.8) -> list[str]:
    """Return what an update of a deep model should take by computation of its experts, from an H200's record.

    The record has an update of four layers and the share of each kind. Moving rows is bound by bytes, so its
    time follows PASSES. Elementwise operations lose the passes of SwiGLU, at the same bytes per second. On an
    H100 both take 1.4 times as long, and products as long.
    """
    update_s = record["update"]["report"]["figures"]["update, s"]
    shares = record["profile"]["report"]["figures"]
    pairs = 32768 * LAYER_30B["num_experts_per_tok"]
    widths = (LAYER_30B["hidden_size"], LAYER_30B["moe_intermediate_size"])
    row_bytes = [2 * pairs * width for width in widths]  # bfloat16
    flops = 18 * pairs * widths[0] * widths[1]  # three matrices, forward and backward, of a layer
    layer_s = {kind: update_s * share / 4 for kind, share in shares.items()}
    head_s = 4 * layer_s.pop("head") / num_layers
    elementwise = list(shares)[-1]
    bytes_per_s = PASSES["torch"][0] * row_bytes[0] / layer_s["moving rows"]
    rows, wholes = [], {}
    for name, (way, rate) in WAYS.items():
        of_way = dict(layer_s)
        of_way["moving rows"] = PASSES[way][0] * row_bytes[0] / bytes_per_s
        of_way[elementwise] -= (PASSES["torch"][1] - PASSES[way][1]) * row_bytes[1] / bytes_per_s
        of_way["experts"] = flops / (rate * 1e12) if rate else layer_s["experts"]
        slower = {"moving rows": 1 / h100_bandwidth, elementwise: 1 / h100_bandwidth}
        wholes[name] = (
            head_s + sum(of_way.values()),
            head_s + sum(seconds * slower.get(kind, 1) for kind, seconds in of_way.items()),
        )
        shown = [of_way[kind] / wholes["torch"][0] for kind in ("moving rows", elementwise, "experts")]
        faster = [base / whole for base, whole in zip(wholes["torch"], wholes[name])]
        rows.append([name, *(f"{value:.2f}" for value in (*shown, *faster))])
    header = ["experts", "moving rows", "elementwise", "products", "times as fast, H200", "H100"]
    return markdown(header, rows)


def experts(out: Path, dry: bool) -> Report:
    """Time an update with both values of model.expert_kernel, and compare gradients at the same routes."""
    import triton

    from experiments.bench.kernels import seconds

    work = Work.make(dry)
    moe_model = policy_module()
    blocks = [layer.mlp for layer in work.policy.model.layers]
    report = Report({"triton": triton.__version__})
    if reason := moe_model.unsupported(work.device):
        return Report(report.figures | {"kernels": reason}, {"the kernels run": on_gpu(False, dry)})
    report.figures["largest difference of a block"] = moe_model.kernel_difference(blocks[0])
    routes = moe_model.route_table(work.forward()[2], work.policy.config.num_experts)
    gradients = []
    medians = {}
    whole_s = {}
    for kernel in ("torch", "triton"):
        for block in blocks:
            block.kernel = kernel
        times = [seconds(partial(work.update, routes), work.device) for _ in range(2 if dry else 5)]
        gradients.append([parameter.grad for parameter in work.policy.parameters()])
        medians[kernel] = statistics.median(times[1:])
        shares = profiled_shares(work, dry)
        whole_s[kernel] = medians[kernel] * (shares["head"] + (1 - shares["head"]) * 48 / len(blocks))
        report.figures |= {f"update, {kernel}, s": medians[kernel]}
        report.figures |= {f"{kernel}, {kind}": share for kind, share in shares.items()}
    distance = max(((b - a).norm() / a.norm()).item() for a, b in zip(*gradients))
    report.figures |= {
        "times as fast": medians["torch"] / medians["triton"],
        "times as fast at 48 layers": whole_s["torch"] / whole_s["triton"],
        "distance of gradients, relative to their norm, largest": distance,
    } | block_times(work, blocks[0])  # fmt: skip
    report.criteria["a block is the same within 3 %"] = report.figures["largest difference of a block"] < 0.03
    report.criteria["gradients are the same within 5 %"] = distance < 0.05
    report.criteria["an update is faster"] = on_gpu(medians["triton"] < medians["torch"], dry)
    return report


def block_times(work: Work, block: torch.nn.Module) -> dict[str, float | str]:
    """Time forward and backward of a block with both kernels, and of its experts with liger-kernel."""
    from experiments.bench.kernels import seconds

    x_TD = torch.randn(work.tokens, work.policy.config.hidden_size).to(block.gate.weight).requires_grad_()
    figures: dict[str, float | str] = {}
    for block.kernel in ("torch", "triton"):
        times = [seconds(lambda: block(x_TD)[0].sum().backward(), work.device) for _ in range(4)]
        figures[f"block, {block.kernel}, s"] = min(times)
    try:
        from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

        with torch.no_grad():
            weights_TK, ids_TK = block.gate(x_TD).float().softmax(-1).topk(block.top_k)
        operands = (block.experts.gate_up_proj, block.experts.down_proj, ids_TK.int(), weights_TK)
        call = lambda: LigerFusedMoEFunction.apply(x_TD, *operands).sum().backward()
        figures["block, liger-kernel, s"] = min(seconds(call, work.device) for _ in range(4))
    except Exception as error:  # a rival only: no package, or an untested version of Triton
        figures["block, liger-kernel, s"] = f"does not run: {str(error).splitlines()[0]}"
    return figures


PIECES: dict[str, Callable[[Path, bool], Report]] = {
    piece.__name__: piece
    for piece in (tests, head, tiles, update, experts, long, attention, optimizer, profile)
}  # fmt: skip
EXPECTED = {  # {piece: {start of a figure's name: value expected of one H200, written before the first run}}
    "tests": {"pytest": "all pass, none skipped"},
    "head": {
        "ceiling, flops": "7e14", "ceiling, copy": "4.3e12", "largest error against float64, triton": "1e-4",
        "chunked / triton": "1.2 at D = 4,096", "triton / floor": "1.6", "memory / naive's": "0.02",
        "FP8": "0.8 or more",
    },
    "tiles": {"(128, 256, 64, 8, 3)": "0.264 s; the others within 10 %"},
    "update": {
        "update, s": "0.36: 32,768 tokens x 3.3 GFLOP at 40 % of 750 TFLOP/s",
        "update, R3, s": "as without, within 2 %", "R3 / live": "0.98 to 1.02",
        "old-logprob pass, s": "0.11", "MFU, update": "0.35 to 0.45", "MFU, old": "0.4 to 0.5",
        "gradients over repeats, largest": "up to 1e-2: flash attention adds parts of dq atomically",
        "gradients over repeats, last": "0",
        "peak of an update, GiB, without": "as planned, within 30 %",
        "peak of an update, GiB, with": "as planned, within 30 %",
    },
    "experts": {
        "largest difference": "0.01", "update, torch, s": "0.33", "update, triton, s": "0.27",
        "times as fast at 48": "1.39 (H200), 1.47 (H100)", "times as fast": "1.2", "distance": "0.02",
        "triton, moving": "0.05", "triton, norms": "0.17", "block, torch": "0.032", "block, triton": "0.018",
        "block, liger": "0.018 to 0.027",
    },
    "attention": {
        "kernel in use": "flash_attention", "kernel cuDNN": "cudnn_attention",
        "in use at 4,096 tokens, first": "as later calls", "in use at 4,096 tokens, later": "0.02",
        "in use at 16,384 tokens, first": "as later calls", "in use at 16,384 tokens, later": "0.06",
        "cuDNN at 4,096 tokens, first": "0.05 to 0.08 more than later calls",
        "cuDNN at 4,096 tokens, later": "0.016",
        "cuDNN at 16,384 tokens, first": "0.05 to 0.08 more than later calls",
        "cuDNN at 16,384 tokens, later": "0.04",
    },
    "long": {"update, s": "0.6", "TFLOP/s": "260, recomputed layers not counted"},
    "optimizer": {
        "fused, s": "0.008: 28 bytes a weight at 4 TB/s", "default, s": "0.03", "fused, copies": "0",
        "default, copies": "1", "largest": "below 1e-6",
    },
    "profile": {
        "head": "0.25", "experts": "0.25", "attention": "0.05", "other products": "0.1", "moving rows": "0.2",
        "norms": "0.15",
    },
}  # fmt: skip
