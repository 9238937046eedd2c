"""FP8 weights of the engine: which parts are quantised, and the rounding that rollout.fp8=simulate repeats.

vLLM quantises the weights of a sync (rollout.fp8=on) in the format of kernels/fp8_block.py. `simulate`
rounds the same tensors in the trainer, so that an engine in 16 or 32 bits on any machine samples with the
same weights.
"""

from collections.abc import Callable, Iterable, Iterator

import torch
from torch import Tensor

from kernels.fp8_block import BLOCK, fp8_round, mxfp4_round
from moe_model import expert_width, head_dim, is_moe_layer
from vllm_worker import engine_name


# ------------------------------------------------------------------------------------------------------------
# Whole blocks
# ------------------------------------------------------------------------------------------------------------
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


def splits_into_blocks(hf_config, tensor_parallel: int, expert_parallel: bool = False) -> bool:
    """Tell whether tensor parallelism splits a layer into whole FP8 blocks, or splits nothing."""
    widths = split_widths(hf_config, expert_parallel).values()
    return tensor_parallel == 1 or all(width % (tensor_parallel * BLOCK) == 0 for width in widths)


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
    pending: dict[str, dict[str, Tensor]] = {}  # {fused parameter: {name: projection}}
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
        projections = pending.setdefault(target, {})
        projections[name] = tensor
        if len(projections) == num_projections(target):
            del pending[target]
            projections = dict(sorted(projections.items(), key=place_in_fused))
            rounded = round_weight(torch.cat(list(projections.values()), dim=-2))
            yield from zip(projections, rounded.split([len(weight) for weight in projections.values()]))
    if pending:
        names = [name for projections in pending.values() for name in projections]
        raise ValueError(f"no partner of {', '.join(names)}: vLLM fuses these projections with others")


GRANITE_EXPERTS = (".input_linear", ".output_linear")
FUSED_ORDER = ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")  # a file may hold another order


def place_in_fused(item: tuple[str, Tensor]) -> int:
    """Return the place of a named projection in the matrix that vLLM fuses; 0 for one that is not fused."""
    names = [name in item[0] for name in FUSED_ORDER]
    return names.index(True) if any(names) else 0


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


def num_projections(target: str) -> int:
    """Return the number of projections that vLLM fuses into a parameter."""
    if ".qkv_proj." in target:
        return 3
    return 2 if ".gate_up_proj." in target else 1


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
