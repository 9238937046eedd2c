"""What runs inside vLLM's worker: weights into the engine, and out again as checksums.

rollout.RolloutEngine hands these functions to the worker in sync() and check_weights(). Names on the way are
those of a Hugging Face checkpoint; engine_name() says which of vLLM's fused parameters a tensor goes into.
"""

import re
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

MADE_FROM_WEIGHTS = ("_scale", "_scale_inv")  # ends of names of parameters that vLLM's FP8 makes itself


def load_weights_in_worker(worker, named_tensors: Iterable[tuple[str, Tensor]], on_cpu: bool) -> list[str]:
    """Runs inside vLLM's worker: reload layer by layer; returns the parameters that got nothing.

    On CPUs fused experts are copied whole to where the kernel reads them, and packed there, where vLLM's
    loader would go through Python twice for every expert.
    """
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    model = worker.model_runner.get_model()
    expected = {plain_name(n) for n, _ in model.named_parameters() if not n.endswith(MADE_FROM_WEIGHTS)}
    experts, copied = fused_expert_storage(model) if on_cpu else {}, set()

    def without_fused_experts():
        for name, tensor in named_tensors:
            target = experts.get(engine_name(name))
            if target is None or target.shape != tensor.shape:  # another shape: a tensor-parallel part of it
                yield name, tensor
            else:
                target.copy_(tensor)
                copied.add(engine_name(name))

    with set_current_vllm_config(worker.vllm_config), torch.no_grad():
        initialize_layerwise_reload(model)
        loaded = model.load_weights(without_fused_experts())
        finalize_layerwise_reload(model, worker.model_runner.model_config)
        if on_cpu:
            repack_for_cpu_kernels(model)
    return sorted(expected - loaded - copied)


def fused_expert_storage(model) -> dict[str, Tensor]:
    """{name: [E, ...]} of the memory that holds the experts."""
    return {plain_name(name): p.data for name, p in model.named_parameters() if p.dim() == 3}


def repack_for_cpu_kernels(model) -> None:
    """Redo two steps of the first load that vLLM's CPU backend leaves out of a reload (seen in 0.30).

    Without them it returns no error and a broken model: expert weights stay in the checkpoint's layout
    although the kernel reads a packed one, and a tied head keeps the packed copy of the old embedding.
    """
    from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

    for module in model.modules():
        kernel = getattr(getattr(module, "quant_method", None), "moe_kernel", None)
        if kernel is not None and hasattr(module, "w13_weight"):
            kernel.fused_experts.process_weights_after_loading(module)
    if model.config.tie_word_embeddings:
        dispatch_cpu_unquantized_gemm(model.lm_head, remove_weight=False)


ENGINE_NAMES = (  # Hugging Face's names -> those of vLLM's fused parameters
    (re.compile(r"\.experts\.(gate_up_proj|\d+\.(gate|up)_proj\.weight)$"), ".experts.w13_weight"),
    (re.compile(r"\.experts\.(\d+\.)?down_proj(\.weight)?$"), ".experts.w2_weight"),
    (re.compile(r"\.[qkv]_proj\."), ".qkv_proj."),
    (re.compile(r"\.mlp\.(gate|up)_proj\."), ".mlp.gate_up_proj."),
)


def engine_name(name: str) -> str:
    """The parameter of the engine that a tensor of the policy goes into."""
    for pattern, replacement in ENGINE_NAMES:
        name = pattern.sub(replacement, name)
    return name


def plain_name(name: str) -> str:
    """An engine's name of a parameter without the module that holds the experts: its loader leaves it out."""
    return name.replace(".routed_experts.", ".")


CHECKSUM_CHUNK = 1 << 16  # elements; their integers stay in a core's cache


def checksum(tensor: Tensor) -> Tensor:
    """[2] int64: sum and sum of squares of the elements' bits as integers, modulo 2^64.

    It does not depend on the order of the elements, nor on zeros among them: kernels permute and pad.
    """
    tiny, sums = torch.finfo(tensor.dtype).tiny, torch.zeros(2, dtype=torch.int64, device=tensor.device)
    integers = torch.int32 if tensor.dtype.itemsize == 4 else torch.int16
    for part in tensor.flatten().split(CHECKSUM_CHUNK):
        part = torch.where(part.abs() < tiny, 0, part)  # -0 and what a kernel may flush to 0
        bits = part.view(integers).long()
        sums += torch.stack([bits.sum(), (bits * bits).sum()])
    return sums


def held_tensors(model, dtype: torch.dtype, tensor_parallel: int) -> Iterator[tuple[str, Tensor]]:
    """(name, values) of all that the engine computes with, in whatever order its kernels store the elements.

    Without what it has quantised itself, and without what tensor parallelism splits: of a shared engine,
    norms, routers and whole experts. A linear layer that vLLM's CPU backend has packed away is asked for its
    product with the identity.
    """
    for module_name, module in model.named_modules():
        is_split = tensor_parallel > 1 and not module_name.endswith(("norm", ".gate"))
        if is_split and not getattr(getattr(module, "moe_config", None), "ep_size", 1) > 1:
            continue
        for name, parameter in module.named_parameters(recurse=False):
            values = parameter.data
            if values.dtype.itemsize == 1 or name.endswith(MADE_FROM_WEIGHTS):  # FP8
                continue
            if name == "weight" and hasattr(module, "cpu_linear") and not module_name.endswith("tokens"):
                sizes = ("input_size_per_partition", "input_size", "embedding_dim")  # by kind of layer
                size = next(getattr(module, size) for size in sizes if hasattr(module, size))
                values = module.cpu_linear(torch.eye(size, dtype=dtype), values, None)
            yield plain_name(f"{module_name}.{name}"), values


def compare_weights_in_worker(worker, named_tensors: Iterable[tuple[str, Tensor]]) -> list[str]:
    """Runs inside vLLM's worker: the parameters whose checksum is not that of the tensors sent into them."""
    model, dtype = worker.model_runner.get_model(), worker.model_runner.model_config.dtype
    known = {plain_name(name) for name, _ in model.named_parameters(remove_duplicate=False)}
    with torch.no_grad():
        tensors = held_tensors(model, dtype, worker.parallel_config.tensor_parallel_size)
        held = {name: (values.dtype, checksum(values)) for name, values in tensors}
        sent: dict[str, Tensor] = {}
        names: dict[str, list[str]] = {}
        lost = []  # tensors that the engine has no place for
        for name, tensor in named_tensors:
            target = engine_name(name)
            names.setdefault(target, []).append(name)
            if target not in known and tensor.any():
                lost.append(f"nothing (from {name})")
            if target in held:
                part = checksum(tensor.to(held[target][0]))
                sent[target] = sent[target] + part if target in sent else part
    if "lm_head.weight" in held and model.config.tie_word_embeddings:  # on CPUs the head has a packed copy
        sent["lm_head.weight"] = sent["model.embed_tokens.weight"]
        names["lm_head.weight"] = ["model.embed_tokens.weight"]
    return lost + [
        f"{name} (from {', '.join(names.get(name, ['nothing']))})"
        for name, (_, bits) in held.items()
        if name not in sent or not torch.equal(bits.cpu(), sent[name].cpu())
    ]
