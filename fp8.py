"""FP8 rollouts: who may have them, which weights are quantised, and the rounding that simulate repeats.

vLLM quantises the weights of a sync (rollout.fp8=on) in the format of kernels/fp8_block.py. `simulate`
rounds the same tensors in the trainer, so that an engine in 16 or 32 bits on any machine samples with the
same weights.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from kernels.fp8_block import BLOCK, fp8_round, mxfp4_round
from moe_model import expert_width, head_dim, is_moe_layer
from runtime.machine import Device
from settings import RolloutSettings
from vllm_worker import engine_name

INSTEAD = "or set rollout.fp8 to simulate (weights rounded in the same way) or off"


# ------------------------------------------------------------------------------------------------------------
# The gate
# ------------------------------------------------------------------------------------------------------------
def fp8_refusal(settings: RolloutSettings, hf_config=None, device: Device | None = None) -> str | None:
    """Explain why a run cannot have these FP8 rollouts; None if it can.

    Every refusal of rollout.fp8 is made here, from the source of vLLM 0.30.0. hf_config, device: None leaves
    out the checks of the model or of the device, for example before the model is known.
    """
    if settings.simulate_format != "fp8" and settings.fp8 != "simulate":
        return (
            f"rollout.simulate_format {settings.simulate_format!r} is the format of rollout.fp8 simulate, "
            f"not of rollout.fp8 {settings.fp8!r}"
        )
    if settings.fp8 == "simulate" and settings.expert_parallel:
        return (
            "rollout.expert_parallel True and rollout.fp8 'simulate': vLLM quantises on GPUs itself, set fp8 "
            "to on, or expert_parallel to false"
        )
    if settings.fp8 != "on":
        return None
    if settings.dtype == "float32":
        return f"rollout.fp8 'on' needs bfloat16, not rollout.dtype {settings.dtype!r}"
    of_model = model_refusal(settings, hf_config) if hf_config is not None else None
    return of_model or (device_refusal(device) if device is not None else None)


def check_fp8(settings: RolloutSettings, hf_config=None, device: Device | None = None) -> None:
    """Raise ValueError with the reason of fp8_refusal(), if there is one."""
    if refusal := fp8_refusal(settings, hf_config, device):
        raise ValueError(refusal)


def device_refusal(device: Device) -> str | None:
    """Explain why vLLM cannot quantise on a device, or would round differently from the simulation.

    Of the kernels for blocks of 128 (model_executor/kernels/linear: _POSSIBLE_FP8_BLOCK_KERNELS), DeepGEMM
    and CUTLASS run on Hopper and Blackwell. An older GPU gets Marlin, which leaves activations in 16 bits.
    """
    place = f"{device.name} (compute capability {'.'.join(map(str, device.capability))})"
    if device.capability >= (10, 0):
        return (
            f"rollout.fp8 on is for Hopper GPUs only (H100, H200), this is {place}, whose kernels expect "
            f"powers of two as scales, unlike the trainer: take a Hopper GPU, {INSTEAD}"
        )
    if device.capability == (0, 0):
        return f"rollout.fp8 on needs a Hopper GPU (H100, H200), this is {device.name}: take one, {INSTEAD}"
    if device.capability < (9, 0):
        return (
            f"rollout.fp8 on is for Hopper GPUs only (H100, H200), this is {place}, on which vLLM rounds "
            f"only weights and leaves activations in 16 bits: take a Hopper GPU, {INSTEAD}"
        )
    if not device.has_nvcc:
        return (
            "rollout.fp8 on: vLLM compiles its FP8 kernels with nvcc, which is not in CUDA_HOME/bin or, if "
            "CUDA_HOME is unset, neither on PATH nor in site-packages/nvidia or /usr/local/cuda: install the "
            f"CUDA toolkit of torch's CUDA version and set CUDA_HOME, {INSTEAD}"
        )
    if not device.has_cxx:
        return f"rollout.fp8 on: nvcc calls g++, which is missing: install build-essential, {INSTEAD}"
    return None


def model_refusal(settings: RolloutSettings, hf_config) -> str | None:
    """Explain which width of a model is no multiple of 128 on the ranks of an engine.

    vLLM quantises the input of each linear layer in blocks of 128 values and asserts that blocks are whole
    (quantization/utils/fp8_utils.py: per_token_group_quant_fp8). Only experts are padded to whole blocks.
    """
    size = settings.tensor_parallel
    split = split_widths(hf_config, settings.expert_parallel)
    for name, width in {"the model": hf_config.hidden_size, **split}.items():
        if width % BLOCK and name != "an expert":
            return (
                f"rollout.fp8 on: vLLM quantises activations in blocks of {BLOCK} values, and the width "
                f"{width} of {name} is no multiple of {BLOCK}: set it to simulate (weights rounded in the "
                "same way) or off"
            )
    for name, width in split.items() if size > 1 else ():
        if width % (size * BLOCK) == 0:
            continue
        is_expert = name == "an expert"
        effect = (
            "vLLM pads such parts, and a sync would hold the model twice"
            if is_expert
            else "vLLM multiplies such parts with another kernel, or not at all"
        )
        return (
            f"rollout.tensor_parallel {size} with rollout.fp8 on splits {name} of width {width} into parts "
            f"of {width / size:g}, which are no whole blocks of {BLOCK}: {effect}. Set "
            f"{'rollout.expert_parallel=true or ' if is_expert else ''}a tensor_parallel that divides the "
            f"{width / BLOCK:g} blocks of {name}"
        )
    return None


def split_widths(hf_config, expert_parallel: bool) -> dict[str, int]:
    """Return {part: width} of the parts of a layer whose width tensor parallelism splits."""
    is_moe = [is_moe_layer(hf_config, layer) for layer in range(hf_config.num_hidden_layers)]
    num_shared = getattr(hf_config, "n_shared_experts", 0) or 0
    widths = {}
    if any(is_moe) and not expert_parallel:
        widths["an expert"] = expert_width(hf_config)
    if any(is_moe) and num_shared:
        widths["the shared experts"] = num_shared * expert_width(hf_config)
    if not all(is_moe):
        widths["the MLP"] = hf_config.intermediate_size
    widths["the input of the attention's output"] = hf_config.num_attention_heads * head_dim(hf_config)
    return widths


# ------------------------------------------------------------------------------------------------------------
# The tensors of a sync
# ------------------------------------------------------------------------------------------------------------
FP8_QUANTIZATION = {"ignore": ["re:.*mlp\\.gate$"]}  # the router; vLLM skips head, embeddings, norms itself


def simulate_rounding(
    named_tensors: Iterable[tuple[str, Tensor]], round_weight: Callable[[Tensor], Tensor] = fp8_round
) -> Iterator[tuple[str, Tensor]]:
    """Round the weights that vLLM would quantise: linear layers and experts, but neither router nor head.

    vLLM fuses some projections (queries, keys and values; gate and up of a dense layer) and quantises each
    fused matrix as a whole, so that blocks can span two projections. Therefore fused projections are
    collected, rounded as one matrix in vLLM's order and yielded together. Granite's experts are fused in
    files, too (input_linear, output_linear).
    """
    pending: dict[str, dict[str, tuple[str, Tensor]]] = {}  # {fused parameter: {part: (name, weight)}}
    for name, tensor in named_tensors:
        if not name.removesuffix(".weight").endswith(("_proj", ".w1", ".w2", ".w3", *GRANITE_EXPERTS)):
            yield name, tensor
            continue
        # [E, 2I, D]; vLLM pads both halves to whole blocks
        if name.endswith(("experts.gate_up_proj", f"{GRANITE_EXPERTS[0]}.weight")):
            yield name, round_experts(tensor.unflatten(1, (2, -1)), round_weight).flatten(1, 2)
            continue
        if name.endswith(("experts.down_proj", f"{GRANITE_EXPERTS[1]}.weight")):  # [E, D, I]
            yield name, round_experts(tensor, round_weight)
            continue
        target = engine_name(name)
        parts = next((parts for fused, parts in FUSED.items() if fused in target), ("",))
        projections = pending.setdefault(target, {})
        projections[next(part for part in parts if part in name)] = (name, tensor)
        if len(projections) == len(parts):
            del pending[target]
            names, weights = zip(*(projections[part] for part in parts))
            rounded = round_weight(torch.cat(weights, dim=-2))
            yield from zip(names, rounded.split([len(weight) for weight in weights]))
    if pending:
        names = [name for projections in pending.values() for name, _ in projections.values()]
        raise ValueError(f"no partner of {', '.join(names)}: vLLM fuses these projections with others")


GRANITE_EXPERTS = (".input_linear", ".output_linear")
FUSED = {  # the order in which vLLM joins projections; a file may hold another order
    ".qkv_proj.": ("q_proj", "k_proj", "v_proj"),
    ".gate_up_proj.": ("gate_proj", "up_proj"),
}
EXPERTS_PER_ROUNDING = 8  # per call, because rounding makes several float32 copies of its input


def round_experts(experts: Tensor, round_weight: Callable[[Tensor], Tensor]) -> Tensor:
    """Round fused experts [E, ...] to float32, some experts at a time to bound the temporary memory.

    For example, gate and up of 128 experts of width 768 and hidden size 2,048 are 1.5 GiB in float32, and a
    rounding of all experts at once holds several such tensors.
    """
    rounded = torch.empty_like(experts, dtype=torch.float32)
    for chunk, target in zip(experts.split(EXPERTS_PER_ROUNDING), rounded.split(EXPERTS_PER_ROUNDING)):
        target.copy_(round_weight(chunk))
    return rounded


ROUNDINGS = {"fp8": fp8_round, "mxfp4": mxfp4_round}  # rollout.simulate_format


def quantise_for_engine(
    named_tensors: Iterable[tuple[str, Tensor]], fp8: str, simulate_format: str = "fp8"
) -> Iterable[tuple[str, Tensor]]:
    """Convert the policy's tensors to the values that a sync sends (rollout.fp8)."""
    match fp8:
        case "simulate":
            return simulate_rounding(named_tensors, ROUNDINGS[simulate_format])
        case "on":
            # vLLM quantises the bfloat16 weights that the trainer computes with. The bias of GLM's router
            # stays float32, because its values differ by little compared with their mean.
            return (
                (name, tensor if name.endswith("e_score_correction_bias") else tensor.bfloat16())
                for name, tensor in named_tensors
            )
        case "off":
            return named_tensors
