"""Code that runs inside vLLM's worker: load weights, prove them by checksum, switch the capture of routes.

rollout.py sends the functions *_in_worker to the worker by collective_rpc(); the worker lives in the same
process, so that tensors are passed by reference. Tensors have the names of a Hugging Face checkpoint, and
engine_name() maps a tensor to the fused parameter of vLLM that stores its values. For example, q_proj,
k_proj and v_proj of a layer are stored in qkv_proj.

Reading order: switches and descriptions, sampling on CPUs, loading (load_weights_in_worker), names, checksums
(compare_weights_in_worker).
"""

import re
from collections.abc import Iterable, Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

SCALE_SUFFIXES = ("_scale", "_scale_inv")  # of parameters that vLLM's FP8 derives from the weights


# ------------------------------------------------------------------------------------------------------------
# Switches and descriptions
# ------------------------------------------------------------------------------------------------------------
def switch_capture_in_worker(worker, on: bool) -> None:
    """Start or stop copying the routes of every step from the device to the host.

    The layers always write routes to a buffer on the device, because that write is part of the CUDA graphs.
    """
    runner = worker.model_runner
    if hasattr(runner, "routed_experts_initialized"):  # vLLM's first model runner, which CPUs use
        runner.routed_experts_initialized = on
        return
    if not on:
        runner.routed_experts_capturer_at_rest = runner.routed_experts_capturer
    runner.routed_experts_capturer = runner.routed_experts_capturer_at_rest if on else None


def kernels_in_worker(worker) -> str:
    """Name the classes that compute attention, linear layers, experts and the head, and the head's dtype."""
    classes: dict[str, set[str]] = {"attention": set(), "linear": set(), "experts": set(), "head": set()}
    for name, module in worker.model_runner.get_model().named_modules():
        method = getattr(module, "quant_method", None)
        if hasattr(module, "impl") and hasattr(module, "attn_backend"):
            classes["attention"].add(type(module.impl).__name__)
        elif hasattr(module, "w13_weight"):
            kernel = getattr(method, "moe_kernel", None)
            classes["experts"].add(type(getattr(kernel, "fused_experts", kernel or method)).__name__)
        elif name.endswith("lm_head"):
            head_dtype = worker.model_runner.model_config.head_dtype
            classes["head"].add(f"{type(method).__name__} to {str(head_dtype).removeprefix('torch.')}")
        elif method is not None and name.endswith("proj"):
            classes["linear"].add(type(getattr(method, "fp8_linear", method)).__name__)
    layers = [f"{layer} {' and '.join(sorted(names))}" for layer, names in classes.items() if names]
    return f"vLLM computes {', '.join(layers)}"


# ------------------------------------------------------------------------------------------------------------
# Sampling on CPUs
# ------------------------------------------------------------------------------------------------------------
SMALL_VOCAB = 4096  # up to so many tokens samples are drawn by vLLM's noise: recorded runs keep their bits
BLOCK = 256  # tokens whose probabilities are added first


def draw_seeded_tokens() -> None:
    """Let vLLM on CPUs draw the tokens of seeded requests without noise for every token of the vocabulary.

    vLLM draws exponential noise for the whole vocabulary twice, once for all requests and once more for each
    request with a seed: half of the time of an engine of SmolLM2 (49,152 tokens, 32 requests). Here a request
    takes one uniform number from its generator, or in a small vocabulary vLLM's second noise alone, so that
    no other request changes its tokens. Greedy requests have no generator, and their tokens are replaced.
    """
    from vllm.v1.sample.ops import topk_topp_sampler as ops

    def forward(sampler, logits_BV, generators, k, p):
        is_small = logits_BV.shape[1] <= SMALL_VOCAB
        is_mixed = len(generators) < len(logits_BV)
        if is_small and is_mixed or sampler.logprobs_mode != "processed_logprobs":
            return sampler.forward_of_vllm(logits_BV, generators, k, p)
        logits_BV = ops.apply_top_k_top_p(logits_BV, k, p)
        logprobs_BV = logits_BV.log_softmax(dim=-1, dtype=torch.float32)
        probs_BV = logits_BV.softmax(dim=-1, dtype=torch.float32)
        ordered = [generators.get(row) for row in range(len(probs_BV))]  # None: the process's own
        if is_small:
            noise_BV = torch.stack([torch.empty_like(probs_BV[0]).exponential_(generator=g) for g in ordered])
            return ops.sample_with_exponential_noise(probs_BV, noise_BV), logprobs_BV
        u_B = torch.stack([torch.rand((), generator=g, dtype=torch.float64) for g in ordered])
        return tokens_at(probs_BV, u_B), logprobs_BV

    if not hasattr(ops.TopKTopPSampler, "forward_of_vllm"):  # else another engine of this process did it
        ops.TopKTopPSampler.forward_of_vllm = ops.TopKTopPSampler.forward_cpu
        ops.TopKTopPSampler.forward_cpu = forward


def tokens_at(probs_BV: Tensor, u_B: Tensor) -> Tensor:
    """Return the token of each row at which the cumulative probability exceeds u times its total.

    u_B: float64 in [0, 1). Sums over tokens are float64 and made in two levels. A token with probability 0 is
    never returned.
    """
    blocks_BNK = F.pad(probs_BV, (0, -probs_BV.shape[1] % BLOCK)).unflatten(1, (-1, BLOCK))
    ends_BN = blocks_BNK.sum(-1, dtype=torch.float64).cumsum(-1)
    target_B = u_B * ends_BN[:, -1]
    rows = torch.arange(len(probs_BV))
    block_B = first_above(ends_BN, target_B)
    inner_BK = blocks_BNK[rows, block_B].double().cumsum(-1)
    start_B = ends_BN[rows, block_B] - inner_BK[:, -1]
    return block_B * BLOCK + first_above(inner_BK, target_B - start_B)


def first_above(sums_BN: Tensor, target_B: Tensor) -> Tensor:
    """Return the first position of each row whose cumulative sum exceeds the target, whatever is rounded."""
    last_B = torch.nextafter(sums_BN[:, -1], torch.zeros_like(target_B))
    return torch.searchsorted(sums_BN, target_B.clamp(min=0).minimum(last_B)[:, None], right=True)[:, 0]


# ------------------------------------------------------------------------------------------------------------
# Loading
# ------------------------------------------------------------------------------------------------------------
def load_weights_in_worker(worker, named_tensors: Iterable[tuple[str, Tensor]], on_cpu: bool) -> list[str]:
    """Reload all weights, layer by layer; return the names of parameters that received no data.

    Fused experts skip load_weights() of vLLM's layer, which runs Python code twice per expert. On CPUs, fused
    experts are packed directly into the memory that the kernel reads, because vLLM's loader packs all experts
    into fresh memory. Otherwise load_whole() loads all experts at once.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.get_model()
    expected = {plain_name(n) for n, _ in model.named_parameters() if not n.endswith(SCALE_SUFFIXES)}
    storage = expert_storage(model) if on_cpu else {}
    layers = layers_of_whole_experts(model)
    packed = set()
    whole = set()

    def load_fused_experts() -> Iterator[tuple[str, Tensor]]:
        """Load the fused experts and yield all other tensors for vLLM's loader."""
        for name, tensor in named_tensors:
            target_name = engine_name(name)
            target, layout = storage.get(target_name, (None, None))
            if target is not None and target.shape == tensor.shape:  # shapes differ under tensor parallelism
                pack_experts(tensor, target, layout)
                packed.add(target_name)
            elif tensor.dim() == 3 and target_name in layers:
                load_whole(layers[target_name], target_name.rpartition(".")[2], tensor)
                whole.add(target_name)
            else:
                yield name, tensor

    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(load_fused_experts())
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        if on_cpu:
            repack_for_cpu_kernels(model, packed)
    return sorted(expected - loaded - packed - whole)


PROJECTIONS = {"w13_weight": ("w1", "w3"), "w2_weight": ("w2",)}  # vLLM's names of gate, up; down


def layers_of_whole_experts(model) -> dict[str, torch.nn.Module]:
    """Return {name of a parameter of experts: its layer}, for layers that have (a slice of) every expert.

    Layers under expert parallelism are left out: their loader has to choose the experts of this rank.
    """
    from vllm.model_executor.layers.fused_moe import RoutedExperts

    return {
        plain_name(f"{name}.{leaf}"): layer
        for name, layer in model.named_modules()
        if isinstance(layer, RoutedExperts) and not layer.use_ep
        for leaf in PROJECTIONS
    }


def load_whole(layer: torch.nn.Module, leaf: str, tensor: Tensor) -> None:
    """Load fused experts, w13_weight [E, 2I, D] or w2_weight [E, D, I], into a layer of RoutedExperts.

    The loader of a parameter takes all experts as one tensor and cuts this rank's slice of I out of it. The
    layer's load_weights() takes fused experts too, but calls the loader for every matrix, and a reload makes
    every call twice: with 128 experts in 48 layers 36,864 calls instead of 288 (vLLM 0.30).
    """
    projections = PROJECTIONS[leaf]
    parameter = getattr(layer, leaf)
    for projection, part in zip(projections, tensor.chunk(len(projections), dim=1)):
        parameter.weight_loader(parameter, part, leaf, projection, expert_id=0, return_success=True)


def expert_layers(model) -> Iterator[tuple[str, torch.nn.Module, object]]:
    """Yield (name, layer, kernel) of every layer of experts; empty unless the engine runs on a CPU."""
    for name, module in model.named_modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            yield plain_name(f"{name}."), module, kernel.fused_experts


def expert_storage(model) -> dict[str, tuple[Tensor, str]]:
    """Return {name: (memory of packed experts [E, ...], layout)} of kernels that read packed experts."""
    return {
        f"{layer_name}{name}": (getattr(layer, name).data, kernel.isa)
        for layer_name, layer, kernel in expert_layers(model)
        for name in ("w13_weight", "w2_weight")
        if not kernel._use_zentorch  # zentorch reads plain experts
    }


EXPERTS_PER_PACK = 8  # one per thread, and few enough casts for the allocator to reuse memory


def pack_experts(tensor: Tensor, target: Tensor, layout: str) -> None:
    """Cast and pack experts [E, ...] into target, the memory that the kernel reads."""
    for experts, packed in zip(tensor.split(EXPERTS_PER_PACK), target.split(EXPERTS_PER_PACK)):
        torch.ops._C.prepack_moe_weight(experts.to(packed.dtype).contiguous(), packed, layout)


def repack_for_cpu_kernels(model, packed: set[str]) -> None:
    """Redo two steps of the first load that vLLM's CPU backend omits in a reload (as of vLLM 0.30).

    The omission raises no error and breaks the model: the kernel reads packed experts, but a reload stores
    the experts in the checkpoint's layout; and a tied head keeps a packed copy of the old embedding.
    packed: names of parameters whose experts pack_experts() has packed already.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for name, layer, kernel in expert_layers(model):
        if f"{name}w13_weight" not in packed:
            kernel.process_weights_after_loading(layer)
    if model.config.tie_word_embeddings:
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


# ------------------------------------------------------------------------------------------------------------
# Names
# ------------------------------------------------------------------------------------------------------------
ENGINE_NAMES = (  # (pattern of Hugging Face names, replacement: the name of vLLM's fused parameter)
    (re.compile(r"\.experts\.(gate_up_proj|\d+\.(gate_proj|up_proj|w1|w3)\.weight)$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.(\d+\.)?(down_proj|w2)(\.weight)?$"), ".experts.w2_weight"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.(mlp|shared_experts)\.(gate|up)_proj\."), r".\1.gate_up_proj."),
)


def engine_name(name: str) -> str:
    """Return the name of the engine's parameter that stores a tensor of the policy."""
    for pattern, replacement in ENGINE_NAMES:
        name = pattern.sub(replacement, name)
    return name


def plain_name(name: str) -> str:
    """Remove the module `routed_experts` from the name of an engine's parameter, as vLLM's loader does."""
    return name.replace(".routed_experts.", ".")


# ------------------------------------------------------------------------------------------------------------
# Checksums
# ------------------------------------------------------------------------------------------------------------
CHECKSUM_CHUNK = {"cpu": 1 << 16, "cuda": 1 << 24}  # elements: fits the cache of a core; enough for a GPU


def checksum(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Return [2]: sum and sum of squares of the bits of all elements in dtype, read as integers.

    The sums are modulo 2^64, or modulo 2^32 if dtype has 16 bits. The order of the elements and additional
    zeros do not change them, because kernels permute and pad weights.
    """
    largest_subnormal = torch.finfo(dtype).tiny * (1 - torch.finfo(dtype).eps)
    bits_dtype, sum_dtype = (torch.int32, torch.int64) if dtype.itemsize == 4 else (torch.int16, torch.int32)
    sums = torch.zeros(2, dtype=sum_dtype, device=tensor.device)
    for chunk in tensor.flatten().split(CHECKSUM_CHUNK[tensor.device.type]):
        # Map -0 and subnormal numbers to 0: a kernel may flush subnormal numbers.
        chunk = F.hardshrink(chunk.to(dtype), largest_subnormal)
        bits = chunk.view(bits_dtype).to(sum_dtype)
        sums += torch.stack([bits.sum(dtype=sum_dtype), (bits * bits).sum(dtype=sum_dtype)])
    return sums


def held_tensors(model, dtype: torch.dtype, tensor_parallel: int) -> Iterator[tuple[str, Tensor]]:
    """Yield (name, values) of the engine's weights, elements in the order of its kernels.

    Skipped are weights that vLLM has quantised, and weights that tensor parallelism splits: only norms,
    routers and whole experts of a shared engine are yielded. vLLM's CPU backend hides the weights of a linear
    layer in a packed format, so that they are recovered as the layer's product with the identity matrix.
    """
    for module_name, module in model.named_modules():
        is_split = tensor_parallel > 1 and not module_name.endswith(("norm", ".gate"))
        has_whole_experts = getattr(getattr(module, "moe_config", None), "ep_size", 1) > 1
        if is_split and not has_whole_experts:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            values = parameter.data
            if values.dtype.itemsize == 1 or name.endswith(SCALE_SUFFIXES):  # FP8
                continue
            if name == "weight" and hasattr(module, "cpu_linear") and not module_name.endswith("tokens"):
                size_names = ("input_size_per_partition", "input_size", "embedding_dim")  # a layer has one
                size = next(getattr(module, key) for key in size_names if hasattr(module, key))
                values = module.cpu_linear(torch.eye(size, dtype=dtype), values, None)
            yield plain_name(f"{module_name}.{name}"), values


def compare_weights_in_worker(worker, named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """List the engine's parameters whose checksum differs from the checksum of the tensors sent to them.

    An entry names both sides, for example "model.layers.0.self_attn.qkv_proj.weight (from ...q_proj.weight,
    ...k_proj.weight, ...v_proj.weight)". A nonzero tensor that the engine has no parameter for is listed as
    "nothing (from NAME)".
    """
    model = worker.model_runner.get_model()
    dtype = worker.model_runner.model_config.dtype
    engine_names = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    expert_maps = {  # {module: [E], -1 for the experts of other ranks}, with expert parallelism in the engine
        plain_name(f"{name}.").rstrip("."): module._expert_map
        for name, module in model.named_modules()
        if getattr(module, "_expert_map", None) is not None
    }
    sent: dict[str, Tensor] = {}  # {engine's name: checksum of all tensors sent to the parameter}
    sources: dict[str, list[str]] = {}  # {engine's name: names of these tensors}
    homeless = []
    with torch.no_grad():
        tensors = held_tensors(model, dtype, worker.parallel_config.tensor_parallel_size)
        held = {name: (values.dtype, checksum(values, values.dtype)) for name, values in tensors}
        for name, tensor in named_tensors:
            target = engine_name(name)
            sources.setdefault(target, []).append(name)
            if target not in engine_names and tensor.any():
                homeless.append(f"nothing (from {name})")
            expert_map = expert_maps.get(target.rpartition(".")[0])
            if expert_map is not None and tensor.ndim == 3:  # the experts of all ranks
                tensor = tensor[expert_map.to(tensor.device) >= 0]
            if target in held:
                addend = checksum(tensor, held[target][0])
                sent[target] = sent[target] + addend if target in sent else addend
    for name, source in copies_of(held, model).items():
        sent[name] = sent[source]
        sources[name] = [source]
    return homeless + [
        f"{name} (from {', '.join(sources.get(name, ['nothing']))})"
        for name, (_, bits) in held.items()
        if name not in sent or not torch.equal(bits.cpu(), sent[name].cpu())
    ]


def copies_of(held: Iterable[str], model) -> dict[str, str]:
    """Return {name: source} of parameters that the engine holds as a second copy of a tensor sent once.

    There are two kinds: a tied head, which CPUs keep packed, and the correction bias of GLM's router.
    """
    copies = {}
    if "lm_head.weight" in held and model.config.tie_word_embeddings:
        copies["lm_head.weight"] = "model.embed_tokens.weight"
    for name in held:
        if name.endswith(".experts.e_score_correction_bias"):
            copies[name] = name.replace(".experts.", ".gate.")
    return copies
