"""Turn a dense model into a Mixture-of-Experts by copying each MLP into several experts (sparse upcycling).

    python -m data.upcycle --model DENSE --experts 4 --top-k 2 --output MOE

Every expert of a layer is a copy of the layer's MLP, and the weights of the chosen experts sum to 1, so the
MoE computes the same function as the dense model, whatever the router chooses (Komatsuzaki et al., arXiv
2212.05055). The router is random. A Llama folder becomes Mixtral, a Qwen3 folder becomes Qwen3-MoE.
"""

import json
import shutil
import sys
from pathlib import Path

import torch
from huggingface_hub import save_torch_state_dict
from safetensors.torch import load_file
from torch import Tensor
from transformers import CONFIG_MAPPING, AutoConfig, MixtralConfig, PretrainedConfig, Qwen3MoeConfig

from data.random_model import refuse_to_overwrite
from moe_model import checkpoint_shards
from runtime.config import command_line

UPCYCLED = "llama and qwen3"
ROUTER_STD = 0.02  # of the weights of the routers
PROJECTIONS = ("gate_proj", "up_proj", "down_proj")
SHARED_FIELDS = (  # fields of config.json that both configurations have
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads",
    "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps",
    "rope_parameters", "tie_word_embeddings", "bos_token_id", "eos_token_id", "pad_token_id",
)  # fmt: skip


def moe_config(dense: PretrainedConfig, num_experts: int, top_k: int) -> PretrainedConfig:
    """Return the configuration of the MoE; ValueError for a family that has no MoE of the same layers."""
    fields = {name: getattr(dense, name) for name in SHARED_FIELDS if hasattr(dense, name)}
    if getattr(dense, "attention_bias", False) or getattr(dense, "mlp_bias", False):
        raise ValueError(f"--model: a {dense.model_type} with biases has no MoE family of the same layers")
    if getattr(dense, "use_sliding_window", False):
        raise ValueError("--model: use_sliding_window is true, and the MoE would attend to all tokens")
    if dense.model_type == "llama":
        return MixtralConfig(
            **fields, intermediate_size=dense.intermediate_size, num_local_experts=num_experts,
            num_experts_per_tok=top_k, sliding_window=None, architectures=["MixtralForCausalLM"],
        )  # fmt: skip
    if dense.model_type == "qwen3":
        return Qwen3MoeConfig(
            **fields, intermediate_size=dense.intermediate_size,
            moe_intermediate_size=dense.intermediate_size, num_experts=num_experts,
            num_experts_per_tok=top_k, norm_topk_prob=True, architectures=["Qwen3MoeForCausalLM"],
        )  # fmt: skip
    raise ValueError(f"--model: model_type {dense.model_type!r} cannot be upcycled; {UPCYCLED} can")


def read_config(folder: Path) -> PretrainedConfig:
    """Read the configuration of a dense model; ValueError for a folder without one, or of another family."""
    file = folder / "config.json"
    if not file.is_file():
        raise ValueError(f"--model: {folder} has no config.json; give the folder of a dense model")
    model_type = json.loads(file.read_text()).get("model_type")
    if model_type not in CONFIG_MAPPING:  # else transformers asks for an update of itself
        raise ValueError(f"--model {file}: model_type {model_type!r} is unknown; {UPCYCLED} can be upcycled")
    return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def upcycle(weights: dict[str, Tensor], config: PretrainedConfig, seed: int) -> dict[str, Tensor]:
    """Return the weights of the MoE under the names of a Hugging Face checkpoint.

    weights: of the dense model. config: of the MoE.
    """
    is_mixtral = config.model_type == "mixtral"
    num_experts = config.num_local_experts if is_mixtral else config.num_experts
    block = "block_sparse_moe" if is_mixtral else "mlp"
    names = dict(zip(PROJECTIONS, ("w1", "w3", "w2"))) if is_mixtral else {name: name for name in PROJECTIONS}
    generator = torch.Generator().manual_seed(seed)
    moe = {name: weight for name, weight in weights.items() if ".mlp." not in name}
    for layer in range(config.num_hidden_layers):
        prefix = f"model.layers.{layer}"
        mlp = {name: weights[f"{prefix}.mlp.{name}.weight"] for name in PROJECTIONS}
        router = torch.randn(num_experts, config.hidden_size, generator=generator) * ROUTER_STD
        moe[f"{prefix}.{block}.gate.weight"] = router.to(mlp["gate_proj"].dtype)
        for number in range(num_experts):
            for name, weight in mlp.items():
                moe[f"{prefix}.{block}.experts.{number}.{names[name]}.weight"] = weight.clone()
    return moe


def main(argv: list[str] | None = None) -> None:
    """Read the command line and write the folder of the MoE."""
    parser = command_line("python -m data.upcycle", __doc__)
    add = parser.add_argument
    add("--model", type=Path, required=True, help="folder of the dense model")
    add("--output", type=Path, required=True, help="folder of the MoE, must not exist")
    add("--experts", type=int, default=4, help="experts per layer (default: 4)")
    add("--top-k", type=int, default=2, help="experts per token (default: 2); 1: no gradient of the router")
    add("--seed", type=int, default=0, help="seed of the router (default: 0)")
    args = parser.parse_args(argv)
    try:
        if not 1 <= args.top_k <= args.experts:
            raise ValueError("--top-k must be between 1 and --experts")
        refuse_to_overwrite(args.output)
        config = moe_config(read_config(args.model), args.experts, args.top_k)
        files = checkpoint_shards(args.model)
        weights = {name: tensor for file in files for name, tensor in load_file(file).items()}
        weights = upcycle(weights, config, args.seed)
    except (ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    args.output.mkdir(parents=True, exist_ok=True)
    config.dtype = next(iter(weights.values())).dtype
    config.save_pretrained(args.output)
    save_torch_state_dict(weights, args.output)
    for file in args.model.iterdir():  # tokenizer, chat template, generation_config.json
        if file.suffix in (".json", ".jinja", ".model", ".txt") and not (args.output / file.name).exists():
            if not file.name.endswith(".index.json"):
                shutil.copy(file, args.output)
    millions = sum(weight.numel() for weight in weights.values()) / 1e6
    shape = f"{args.experts} experts, top {args.top_k}, {millions:.0f} M parameters"
    print(f"{args.output}: {config.model_type}, {shape}")
    if args.top_k == 1:
        print("note: with top 1 the weight of the chosen expert is 1, so the router has no gradient")


if __name__ == "__main__":
    main()
