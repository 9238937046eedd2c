"""Pieces of experiments.bench.gpu that require only torch and triton; the runner imports them by name.

A piece is a function that adds figures to a Report. With `report.dry` small sizes run on a CPU, as a test of
the code. Shapes are the ones of a layer of Qwen3-30B-A3B; four layers fit one GPU.
"""

import ctypes
import importlib
import importlib.util
import os
import signal
import statistics
import subprocess
import sys
import time
import types
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import torch

from experiments.bench.common import ROOT, write_json

NEEDS_GPU = "needs a GPU"
LIMIT_S = 600  # default time limit of a piece, in seconds
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


class Written(dict):
    """A dict that calls a function after every change."""

    def __init__(self, write: Callable[[], None]):
        super().__init__()
        self.write = write

    def __setitem__(self, key, value) -> None:
        super().__setitem__(key, value)
        self.write()

    def __ior__(self, other):
        self.update(other)
        self.write()
        return self


class Report:
    """The results of a piece, in FOLDER/NAME.json after every change, so that a kill loses nothing measured.

    A criterion is True, False, or NEEDS_GPU. `finished` tells whether the piece has run to its end.
    """

    def __init__(self, out: Path, name: str, dry: bool = False, versions: dict | None = None):
        self.out = out
        self.name = name
        self.dry = dry
        self.device = torch.device("cpu" if dry else "cuda")
        self.finished = False
        self.versions = versions or {}
        self.start = time.perf_counter()
        self.figures = Written(self.write)
        self.criteria = Written(self.write)

    def write(self) -> None:
        """Replace the file by one with all results so far."""
        results = {"figures": self.figures, "criteria": self.criteria}
        record = {"report": results, "seconds": time.perf_counter() - self.start, "dry": self.dry}
        record |= {"finished": self.finished, "versions": self.versions}
        write_json(self.out / f"{self.name}.json", record)

    def on_gpu(self, criterion: str, verdict: bool) -> None:
        """Add a criterion that small sizes on a CPU cannot decide."""
        self.criteria[criterion] = NEEDS_GPU if self.dry else verdict

    def fail(self, reason: str) -> None:
        """Note in a line why the piece has ended."""
        self.figures["error"] = " ".join(reason.split())[:500]
        self.criteria["it ran to its end"] = False


@dataclass(frozen=True)
class Piece:
    """A piece, and its figures as expected of one H200, written before the first run."""

    run: Callable[[Report], None]
    claim: str
    expected: dict[str, str] = field(default_factory=dict)  # {start of a figure's name: value}
    limit_s: int = LIMIT_S
    num_engines: int = 0  # starts of vLLM, each of which may take 70 s
    needs: tuple[str, ...] = ()  # packages besides torch and triton
    min_gib: int = 70  # free GPU memory


def die_with_parent() -> None:
    """Have Linux kill this new process when its parent dies: a killed visit leaves nothing on the GPU."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def shell(command: list, log: Path) -> None:
    """Run a program of the project; raise RuntimeError with the end of its log if it fails."""
    environment = {"OMP_NUM_THREADS": "1"} | dict(os.environ)
    options = {"cwd": ROOT, "env": environment, "timeout": LIMIT_S, "preexec_fn": die_with_parent}
    try:
        with log.open("w") as file:
            done = subprocess.run(list(map(str, command)), stdout=file, stderr=file, **options)
        failure = f"exit code {done.returncode}" if done.returncode else ""
    except subprocess.TimeoutExpired:
        failure = f"not done after {LIMIT_S} s"
    if failure:
        raise RuntimeError(f"{failure}, {log}:\n{log.read_text()[-1500:]}")


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


def peak_bytes(function: Callable[[], object]) -> int:
    """Return the peak of GPU memory during the call above the memory before; 0 without a GPU."""
    if not torch.cuda.is_available():
        function()
        return 0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    baseline = torch.cuda.memory_allocated()
    function()
    return torch.cuda.max_memory_allocated() - baseline


def peak_flops(device: torch.device) -> float:
    """Return the FLOP/s of a large square product, as a median of three."""
    side, dtype = (2048, torch.float32) if device.type == "cpu" else (8192, torch.bfloat16)
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    times = [seconds(lambda: a @ b, device) for _ in range(4)]
    return 2 * side**3 / statistics.median(times[1:])


# ------------------------------------------------------------------------------------------------------------
# Kernels
# ------------------------------------------------------------------------------------------------------------
def tests(report: Report) -> None:
    """Run the kernels' tests."""
    if not report.dry:
        log = report.out / "tests_pytest.log"
        shell([sys.executable, "-m", "pytest", "-q", "tests/test_kernels.py"], log)
        report.figures["pytest"] = next(line for line in log.read_text().splitlines() if " passed" in line)
    report.on_gpu("all pass, none is skipped", " skipped" not in report.figures.get("pytest", ""))


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


def make_policy(size: str, device: torch.device):
    """Make a random policy of one of SIZES, bfloat16 on a GPU."""
    moe_model = policy_module()
    config = SimpleNamespace(
        **SIZES[size], model_type="qwen3_moe", mlp_only_layers=[], decoder_sparse_step=1,
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


class Work:
    """Some layers of 30B, or the small model in a dry run, and a micro-batch of random tokens."""

    def __init__(self, report: Report):
        self.device = report.device
        self.policy = make_policy("dry" if report.dry else "30B", self.device)
        length, self.tokens = (32, 128) if report.dry else (1024, 32768)
        generator = torch.Generator().manual_seed(0)
        shape = (self.tokens // length, length)
        completions = torch.randint(2, self.policy.config.vocab_size, shape, generator=generator).tolist()
        self.packed = policy_module().pack([[2]] * len(completions), completions, self.device)

    def update(self, replay=None) -> None:
        """Compute the gradients of all weights."""
        self.policy.zero_grad(set_to_none=True)
        logprobs, *_ = self.policy(self.packed, replay_ids_TLK=replay)
        logprobs.sum().backward()


def update(report: Report) -> None:
    """Compare the memory that an update adds to the weights with the plan, without and with checkpointing."""
    work = Work(report)
    for parameter in work.policy.parameters():  # the plan counts gradients apart from activations
        parameter.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", None))
    for checkpointing in (False, True):
        work.policy.activation_checkpointing = checkpointing
        name = "with checkpointing" if checkpointing else "without"
        planned_gib = planned_activations(policy_module(), work, checkpointing) / 2**30
        gib = peak_bytes(work.update) / 2**30
        report.figures[f"peak of an update, GiB, {name} / planned"] = [gib, planned_gib]
        share = gib / planned_gib
        report.on_gpu(f"the plan of memory holds within 30 %, {name}", 0.7 < share < 1.3)


def experts(report: Report) -> None:
    """Time an update with both values of model.expert_kernel, and compare gradients at the same routes.

    At the end a block is timed with both, and its experts with liger-kernel, if it is installed.
    """
    import triton

    work = Work(report)
    moe_model = policy_module()
    blocks = [layer.mlp for layer in work.policy.model.layers]
    report.figures["triton"] = triton.__version__
    if reason := moe_model.unsupported(work.device):
        report.figures["not run"] = reason
        return
    difference = report.figures["largest difference of a block"] = moe_model.kernel_difference(blocks[0])
    report.criteria["a block is the same within 3 %"] = difference < 0.03
    with torch.no_grad():
        x_TD, _ = work.policy.hidden(work.packed)
        routes = moe_model.route_table(work.policy(work.packed)[2], work.policy.config.num_experts)
    head = partial(head_update, work, x_TD[work.packed.predictor_index])
    head_s = min(seconds(head, work.device) for _ in range(3))
    gradients = []
    medians = {}
    for kernel in ("torch", "triton"):
        for block in blocks:
            block.kernel = kernel
        times = [seconds(partial(work.update, routes), work.device) for _ in range(2 if report.dry else 5)]
        medians[kernel] = report.figures[f"update, {kernel}, s"] = statistics.median(times[1:])
        gradients.append([parameter.grad for parameter in work.policy.parameters()])
    whole = {name: head_s + (value - head_s) * 48 / len(blocks) for name, value in medians.items()}
    report.figures["torch / triton"] = medians["torch"] / medians["triton"]
    report.figures["torch / triton, 48 layers"] = whole["torch"] / whole["triton"]
    distance = max(((b - a).norm() / a.norm()).item() for a, b in zip(*gradients))
    report.figures["gradients, largest distance over norm"] = distance
    report.criteria["gradients are the same within 5 %"] = distance < 0.05
    report.on_gpu("an update is faster", medians["triton"] < medians["torch"])
    time_block(report, work, blocks[0])


def head_update(work: Work, x_ND: torch.Tensor) -> None:
    """Compute the log-probabilities of the targets and their gradients from hidden states."""
    x_ND = x_ND.detach().requires_grad_()
    weight = work.policy.lm_head.weight
    policy_module().linear_logprob_entropy(x_ND, weight, work.packed.target_ids)[0].sum().backward()


def time_block(report: Report, work: Work, block: torch.nn.Module) -> None:
    """Time forward and backward of a block with both kernels, and of its experts with liger-kernel."""
    x_TD = torch.randn(work.tokens, work.policy.config.hidden_size).to(block.gate.weight).requires_grad_()
    for block.kernel in ("torch", "triton"):
        times = [seconds(lambda: block(x_TD)[0].sum().backward(), work.device) for _ in range(4)]
        report.figures[f"block, {block.kernel}, s"] = min(times)
    if not importlib.util.find_spec("liger_kernel"):
        return
    os.environ["LIGER_FUSED_MOE_AUTOTUNE"] = "0"  # otherwise it tries 32 tiles for most of its kernels
    from liger_kernel.ops.fused_moe import LigerFusedMoEFunction

    with torch.no_grad():
        weights_TK, ids_TK = block.gate(x_TD).softmax(-1, dtype=torch.float32).topk(block.top_k)
    operands = (block.experts.gate_up_proj, block.experts.down_proj, ids_TK.int(), weights_TK)
    call = lambda: LigerFusedMoEFunction.apply(x_TD, *operands).sum().backward()
    report.figures["block, liger-kernel, s"] = min(seconds(call, work.device) for _ in range(4))


def planned_activations(moe_model, work: Work, checkpointing: bool) -> int:
    """Return the bytes that an update adds to the weights on one GPU, by memory_plan.memory_by_part()."""
    from memory_plan import memory_by_part  # after policy_module(), which replaces libraries that are missing
    from runtime.memory import extra_bytes

    dtype = "float32" if work.device.type == "cpu" else "bfloat16"
    settings = moe_model.ModelSettings(dtype=dtype, activation_checkpointing=checkpointing)
    parts = memory_by_part(work.policy.config, settings, 1, 1, work.tokens)
    return extra_bytes(parts)["update"]


PIECES = {
    "tests": Piece(tests, "the kernels' tests pass", {"pytest": "all pass, none skipped"}),
    "update": Piece(update, "activations of an update stay within the plan", {
        "peak of an update, GiB, without": "0.65 to 0.87 of planned",
        "peak of an update, GiB, with": "0.46 to 0.95 of planned",
    }, 45),
    "experts": Piece(experts, "`model.expert_kernel=triton` is faster and gives the same gradients", {
        "largest difference": "0.01", "torch / triton, 48": "1.39 (H200), 1.47 (H100)", "gradients": "0.02",
        "block, torch": "0.032", "block, triton": "0.017", "block, liger": "0.030",
    }, 60),
}  # fmt: skip
