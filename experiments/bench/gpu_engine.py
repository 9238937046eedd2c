"""Pieces of experiments.bench.gpu that require vLLM; each process holds one engine.

Engines have four layers of Qwen3-30B-A3B with all 128 experts. The pieces share a temporary folder for models
(EXPERIMENTS_GPU_MODELS, set by the runner), separate from the reports.
"""

import json
import os
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch

from experiments.bench.gpu_kernels import NEEDS_GPU, SIZES, Piece, Report, make_policy

GIB = 2**30
SEQUENCES = (8, 32, 64, 256)  # concurrent sequences; with FlashInfer, vLLM takes another kernel below 32
LONGEST = 640
SCALE_LAYOUT = {"column_major_scales": True, "tma_aligned_scales": True, "use_ue8m0": False}


def models() -> Path:
    """Return the temporary folder for models."""
    return Path(os.environ["EXPERIMENTS_GPU_MODELS"])


def model_of_size(size: str, device: torch.device | None = None) -> Path:
    """Make the folder of a Qwen3-MoE with the tiny task's tokenizer, unless it exists; return its path.

    device: also write random weights, drawn on this device.
    """
    from transformers import Qwen3MoeConfig

    from data.tiny import build_tokenizer

    folder = models() / f"{size}{'_weights' * (device is not None)}"
    if (folder / "tokenizer.json").is_file():
        return folder
    config = Qwen3MoeConfig(
        **SIZES[size], intermediate_size=4 * SIZES[size]["hidden_size"], norm_topk_prob=True, eos_token_id=1,
        pad_token_id=0, max_position_embeddings=32768, tie_word_embeddings=False, initializer_range=0.02,
        architectures=["Qwen3MoeForCausalLM"],
    )  # fmt: skip
    config.save_pretrained(folder)
    if device is not None:
        import moe_model

        torch.set_default_dtype(torch.bfloat16)
        with device:
            policy = moe_model.Policy(config)
        moe_model.random_weights(policy, seed=0)
        torch.set_default_dtype(torch.float32)
        moe_model.save_hf(policy, folder)
    build_tokenizer().save_pretrained(folder)
    return folder


def used_gib() -> float:
    """Return the GiB of this GPU in use by all processes; 0 on a CPU."""
    if not torch.cuda.is_available():
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    return (total_bytes - free_bytes) / GIB


def timed(call: Callable) -> float:
    """Return the seconds of a call, until the GPU has finished."""
    start = time.perf_counter()
    call()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - start


# ------------------------------------------------------------------------------------------------------------
# Launches
# ------------------------------------------------------------------------------------------------------------
def launch_head(device: torch.device) -> float:
    """Return the largest error of the head's kernel beside plain logits."""
    from kernels.linear_logprob_entropy import linear_logprob_entropy

    hidden = torch.randn(64, 256, device=device)
    weight = torch.randn(1000, 256, device=device) / 16
    targets = torch.arange(64, device=device)
    kernel = "triton" if device.type == "cuda" else "naive"
    logprobs, _ = linear_logprob_entropy(hidden, weight, targets, 1.0, kernel)
    exact = (hidden.double() @ weight.double().T).log_softmax(-1)[targets, targets]
    return (logprobs - exact).abs().max().item()


def launch_norm(device: torch.device) -> float:
    """Return the largest error of vLLM's RMS norm: the library `_C` loads and launches."""
    from vllm import _custom_ops

    values = torch.randn(64, 256, device=device)
    normalised = torch.empty_like(values)
    _custom_ops.rms_norm(normalised, values, torch.ones(256, device=device), 1e-6)
    return (normalised - torch.nn.functional.rms_norm(values, (256,), eps=1e-6)).abs().max().item()


def launch_attention(device: torch.device) -> float:
    """Return the largest error of vLLM's flash attention 3 on one sequence of 128 tokens."""
    from vllm.vllm_flash_attn import flash_attn_varlen_func

    q, k, v = torch.randn(3, 128, 4, 128, device=device, dtype=torch.bfloat16)
    ends = torch.tensor([0, 128], device=device, dtype=torch.int32)
    output = flash_attn_varlen_func(q, k, v, 128, ends, 128, ends, causal=True, fa_version=3)
    heads_first = (x.float().transpose(0, 1) for x in (q, k, v))
    exact = torch.nn.functional.scaled_dot_product_attention(*heads_first, is_causal=True)
    return (output.float() - exact.transpose(0, 1)).abs().max().item()


def launch_product(device: torch.device) -> float:
    """Return the relative error of DeepGEMM's FP8 product, which nvcc compiles at its first call."""
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import fp8_gemm_nt, per_block_cast_to_fp8

    x, weight = torch.randn(2, 256, 256, device=device, dtype=torch.bfloat16)
    product = torch.empty_like(x)
    fp8_weight = per_block_cast_to_fp8(weight, [128, 128], use_ue8m0=False)
    fp8_gemm_nt(per_token_group_quant_fp8(x, 128, **SCALE_LAYOUT), fp8_weight, product)
    exact = x.float() @ weight.float().T
    return ((product - exact).norm() / exact.norm()).item()


def launch_sleep(device: torch.device) -> float:
    """Return the GiB that vLLM's allocator fails to free in sleep, of a tensor of 1 GiB that comes back."""
    from vllm.device_allocator.cumem import CuMemAllocator

    allocator = CuMemAllocator.get_instance()
    with allocator.use_memory_pool(tag="weights"):
        values = torch.ones(2**28, device=device)
    before = used_gib()
    allocator.sleep(offload_tags=("weights",))
    left = 1 - (before - used_gib())
    allocator.wake_up()
    if not (values == 1).all():
        raise RuntimeError("the tensor came back with other values")
    return left


LAUNCHES = {  # name: (launch, largest error, does a CPU run it)
    "head": (launch_head, 1e-2, True),  # products in TF32
    "rms_norm": (launch_norm, 1e-2, True),
    "flash attention 3": (launch_attention, 5e-2, False),
    "sleep and wake": (launch_sleep, 0.1, False),
    "DeepGEMM": (launch_product, 5e-2, False),
}


def ready(report: Report) -> None:
    """Launch a kernel of each library that later pieces need; a failure leaves the other launches."""
    from rollout import set_vllm_environment

    set_vllm_environment(not report.dry, fp8=not report.dry)  # before vLLM is imported
    for name, (launch, tolerance, on_cpu) in LAUNCHES.items():
        criterion = f"{name} launches"
        if report.dry and not on_cpu:
            report.criteria[criterion] = NEEDS_GPU
            continue
        try:
            start = time.perf_counter()
            error = launch(report.device)
            report.figures[f"{name}: error, s"] = [error, time.perf_counter() - start]
            report.criteria[criterion] = error <= tolerance
        except Exception as failure:
            report.figures[name] = f"{type(failure).__name__}: {str(failure)[:300]}"
            report.criteria[criterion] = False


# ------------------------------------------------------------------------------------------------------------
# One engine: formats, syncs, trainer against engine, tokens per second
# ------------------------------------------------------------------------------------------------------------
class Pair:
    """An engine of four layers of 30B, and a policy with the weights to sync."""

    def __init__(self, report: Report, **settings):
        from rollout import RolloutEngine
        from settings import RolloutSettings

        self.size = "dry" if report.dry else "30B"
        settings |= {"kv_cache_gib": 0.05 if report.dry else 24.0, "max_num_seqs": 256}
        start = time.perf_counter()
        # Fewer graphs than vLLM's 51: each new size may compile kernels by nvcc for seconds.
        sizes = None if report.dry else {"cudagraph_capture_sizes": [1, *SEQUENCES, 128]}
        folder = model_of_size(self.size)
        self.engine = RolloutEngine(folder, LONGEST, RolloutSettings(**settings), more_options=sizes)
        self.layers_s = 0.0  # of the last sync
        report.figures["start of the engine, s"] = time.perf_counter() - start
        report.figures["engine"] = self.engine.describe()
        report.figures["GiB in use, engine built"] = used_gib()
        self.policy = make_policy(self.size, report.device)
        report.figures["GiB in use, with the policy's weights"] = used_gib()

    def sync(self, version: int) -> int:
        """Send the policy's weights and return their bytes."""
        return self.engine.sync(self.tensors(), version).num_bytes

    def tensors(self):
        """Yield the policy's weights under the engine's names, and add up the seconds of the layers."""
        import moe_model

        self.layers_s = 0.0
        start = None
        for name, tensor in moe_model.hf_tensors(self.policy):
            yield name, tensor  # the engine has taken the tensor when it asks for the next one
            if torch.cuda.is_available():
                torch.cuda.synchronize()
            now = time.perf_counter()
            if ".layers." in name and start is not None:
                self.layers_s += now - start
            start = now


def compare_formats(report: Report) -> None:
    """Compare codes and scales with vLLM's own functions on this machine, in the environment of an engine."""
    from rollout import set_vllm_environment

    set_vllm_environment(not report.dry, fp8=not report.dry)  # before vLLM is imported
    from vllm.model_executor.layers.quantization.utils.fp8_utils import per_token_group_quant_fp8
    from vllm.utils.deep_gemm import is_deep_gemm_e8m0_used, per_block_cast_to_fp8

    from kernels.fp8_block import quantise_activation, quantise_weight

    report.criteria["vLLM takes float32 scales, no powers of two"] = not is_deep_gemm_e8m0_used()
    columns = torch.logspace(-3, 3, 4096, device=report.device)
    values = torch.randn(1000, 4096, device=report.device).mul(columns).bfloat16()
    for version in (False,) if report.dry else (False, True):
        name = "Triton" if version else "torch"
        codes, scales = quantise_weight(values, version)
        vllm_codes, vllm_scales = per_block_cast_to_fp8(values, [128, 128], use_ue8m0=False)
        max_difference = (scales.view(torch.int32) - vllm_scales.view(torch.int32)).abs().max().item()
        report.figures[f"weights, {name}: scales apart, last bits"] = max_difference
        steps = (codes.view(torch.uint8).int() - vllm_codes.view(torch.uint8).int()).abs()
        differing = (steps > 0).double().mean().item()
        report.figures[f"weights, {name}: share of codes that differ"] = differing
        # vLLM compiles its function, so that 1 / s may differ in the last bit and decide a tie of codes
        close = max_difference == 0 and steps.max().item() <= 1 and differing < 1e-3
        report.on_gpu(f"weights, {name}: vLLM's scales, codes but for ties", close)
        if report.dry:
            report.criteria["activations: bit-equal to vLLM's"] = NEEDS_GPU
            continue
        codes, scales = quantise_activation(values, version, column_major=True)
        vllm_codes, vllm_scales = per_token_group_quant_fp8(values, 128, **SCALE_LAYOUT)
        same = torch.equal(codes.view(torch.uint8), vllm_codes.view(torch.uint8))
        same &= torch.equal(scales, vllm_scales) and scales.stride() == vllm_scales.stride()
        report.criteria[f"activations, {name}: bit-equal to vLLM's, layout too"] = same


def measure_syncs(report: Report, pair: Pair) -> None:
    """Measure weight syncs, the check, sleeping and waking at 30B's shapes, and memory by phase."""
    report.figures["GiB sent"] = pair.sync(0) / GIB
    awake_gib = report.figures["GiB in use, awake after a sync"] = used_gib()
    syncs: list[float] = []
    layers: list[float] = []
    checks: list[float] = []
    sleeps: list[float] = []
    for version in range(1, 3 if report.dry else 5):
        sleeps.append(timed(pair.engine.sleep))
        asleep_gib = report.figures["GiB in use, asleep after a sync"] = used_gib()
        syncs.append(timed(partial(pair.sync, version)))
        layers.append(pair.layers_s)
        checks.append(timed(partial(pair.engine.check_weights, pair.tensors())))
        report.figures |= {"sync with waking, s": syncs, "check, s": checks, "sleep, s": sleeps}
    further = 48 / SIZES[pair.size]["num_hidden_layers"] - 1
    of_48_layers = statistics.median(syncs) + further * statistics.median(layers)
    report.figures["sync of 48 such layers, s"] = of_48_layers
    report.on_gpu("sleep frees weights, keys and values: 24 GiB and more", awake_gib - asleep_gib > 24)
    requests = fixed_requests(4, 8 if report.dry else 64)
    first = [c.token_ids for c in pair.engine.generate(requests, version)]
    pair.sync(version + 1)
    second = [c.token_ids for c in pair.engine.generate(requests, version + 1)]
    report.criteria["the same weights after another sync give the same tokens"] = first == second


def fixed_requests(count: int, num_tokens: int, temperature: float = 1.0) -> list:
    """Make requests of exactly num_tokens tokens."""
    from batch import Request

    return [Request([2, 3, 4, 5 + i % 50], i, temperature, num_tokens, num_tokens) for i in range(count)]


def measure_mismatch(report: Report, pair: Pair) -> None:
    """Compare the trainer's log-probabilities with the engine's, with live routes and with R3."""
    import moe_model

    requests = fixed_requests(4 if report.dry else 32, 8 if report.dry else 256)
    completions = pair.engine.generate(requests, pair.engine.policy_version)
    token_ids = [c.token_ids for c in completions]
    packed = moe_model.pack([r.prompt_ids for r in requests], token_ids, report.device)
    routes = torch.cat([c.routed_experts for c in completions]).to(report.device)
    report.criteria["captured routes are valid"] = bool((routes < 255).all())
    sampled = torch.tensor([value for c in completions for value in c.logprobs], device=report.device)
    for name, replay in (("live routes", None), ("R3", routes)):
        with torch.no_grad():
            logprobs, _, layer_ids, _ = pair.policy(packed, replay_ids_TLK=replay)
        used = moe_model.route_table(layer_ids, pair.policy.config.num_experts)
        differs = (used.sort().values != routes.sort().values).flatten(1).any(dim=1)
        others = report.figures[f"other experts, {name}"] = differs.double().mean().item()
        log_ratio = logprobs.float() - sampled
        report.figures[f"mean |dlogp|, {name}"] = log_ratio.abs().mean().item()
        report.figures[f"k3 KL, {name}"] = (log_ratio.exp() - 1 - log_ratio).mean().item()
    report.criteria["R3 takes the route mismatch to 0"] = others == 0


def measure_rates(report: Report, pair: Pair) -> None:
    """Measure tokens per second by number of sequences, with and without capture; write greedy samples."""
    new_tokens = 6 if report.dry else 512
    counts = (2, 4) if report.dry else SEQUENCES

    def rate(requests: list, **options) -> float:
        tokens = sum(request.max_new_tokens for request in requests)
        return tokens / timed(partial(pair.engine.generate, requests, version, **options))

    version = pair.engine.policy_version
    rate(fixed_requests(counts[-1], new_tokens // 4))  # warm-up
    for count in counts:
        requests = fixed_requests(count, new_tokens)
        report.figures[f"tokens/s, {count} sequences"] = rate(requests, capture_routes=False)
    captured = rate(requests)
    report.figures["captured routes / without"] = captured / report.figures[f"tokens/s, {count} sequences"]
    greedy = pair.engine.generate(fixed_requests(8, new_tokens // 2, temperature=0.0), version)
    samples = [{"token_ids": c.token_ids, "logprobs": c.logprobs} for c in greedy]
    (report.out / f"greedy_{report.name}.json").write_text(json.dumps(samples))


def fp8(report: Report) -> None:
    """Measure an engine in FP8, which quantises at every sync."""
    os.environ.setdefault("VLLM_DEEP_GEMM_WARMUP", "skip")  # else nvcc compiles for minutes
    compare_formats(report)
    pair = Pair(report, fp8="simulate" if report.dry else "on", sleep_level=0 if report.dry else 2)
    measure_syncs(report, pair)
    measure_mismatch(report, pair)
    measure_rates(report, pair)


def bf16(report: Report) -> None:
    """Measure an engine in bfloat16, and compare it with `fp8`, if that piece has run."""
    pair = Pair(report, sleep_level=0 if report.dry else 2)
    measure_syncs(report, pair)
    measure_rates(report, pair)
    compare(report, "fp8")


def compare(report: Report, name: str) -> None:
    """Add ratios of rates to another piece's, and differences of log-probabilities, if that piece has run."""
    files = [report.out / f"greedy_{each}.json" for each in (report.name, name)]
    if not files[1].is_file():
        return
    other = json.loads((report.out / f"{name}.json").read_text())["report"]["figures"]
    for key, value in [*report.figures.items()]:
        if key.startswith("tokens/s"):
            report.figures[f"{key}: / that of `{name}`"] = value / other[key]
    differences = [
        abs(p - q)
        for first, second in zip(*(json.loads(file.read_text()) for file in files))
        for s, t, p, q in zip(first["token_ids"], second["token_ids"], first["logprobs"], second["logprobs"])
        if s == t
    ]
    report.figures[f"largest |dlogp| against `{name}`"] = max(differences, default=0.0)
    report.figures[f"mean |dlogp| against `{name}`"] = statistics.fmean(differences or [0.0])


VLLM = ("vllm",)
SYNC = "sync with waking, s"
SYNC_48 = "sync of 48 such layers, s"
AWAKE = "GiB in use, awake"
CAPTURE = {"captured routes / without": "0.95"}
RATES = ("tokens/s, 8 sequences", "tokens/s, 32 sequences", "tokens/s, 256 sequences")
PIECES = {
    "ready": Piece(ready, "the libraries load, and a kernel of each launches", {
        "DeepGEMM": "launches, error below 0.05; so do the others",
    }, 70, needs=VLLM, min_gib=8),
    "fp8": Piece(fp8, "FP8 rollouts: vLLM's formats, syncs, tokens/s, R3", {
        "weights, torch: share of codes that differ": "0", SYNC: "1.0", SYNC_48: "8", AWAKE: "37",
        "GiB in use, asleep": "10", "mean |dlogp|, live routes": "0.03", "other experts, R3": "0",
        **dict(zip(RATES, ("1,500", "6,000", "36,000"))), **CAPTURE,
    }, 230, 1, VLLM),
    "bf16": Piece(bf16, "the same in bfloat16", {
        SYNC: "0.4", SYNC_48: "3", AWAKE: "40: 24 of keys and values, 5.9 of weights",
        **dict(zip(RATES, ("1,500", "5,500", "32,000"))), **CAPTURE,
    }, 110, 1, VLLM),
}  # fmt: skip
