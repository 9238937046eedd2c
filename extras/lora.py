"""LoRA (arXiv 2106.09685): train two thin matrices beside each weight matrix, experts included.

    y = W x + s B A x    W [O, D] frozen;  A [r, D] Kaiming-uniform, B [O, r] zero;  s = alpha / r, as PEFT

    adapt()      freezes the policy and adds A and B to the modules of lora.targets
    forward      a linear layer adds s B A x to its output; experts do so inside their grouped product
    sync         moe_model.hf_tensors() asks Merged for W + s B A, one tensor at a time
    reference    the same model with its adapters switched off
    checkpoint   save() and load(): A and B in a folder of PEFT; DeepSpeed's shards hold their float32 masters
    end          run.dir/model has the merged weights, run.dir/adapter the folder of PEFT

Experts have a pair of matrices each: A [e, r, D] and B [e, 2I, r] for gate and up together, A [e, r, I] and
B [e, D, r] for down. These are PEFT's shapes for fused experts (target_parameters). The pairs lie on the
ranks of their experts.
"""

import hashlib
import json
import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import PretrainedConfig

import moe_model
from extras.base import Extra
from extras.settings import LoraSettings
from moe_model import (
    FAMILIES,
    DenseMLP,
    Experts,
    ParameterCounts,
    Policy,
    grouped_linear,
    num_experts_of,
    token_chunks,
)
from runtime.agreement import digests_of_input
from runtime.metrics import warn_once
from runtime.schedule import from_all_ranks

RANK_MULTIPLE = 8  # grouped products of CUDA need rows of 16 bytes: a smaller rank is padded with zeros
MODULES = {"attention": moe_model.Attention, "mlp": DenseMLP, "experts": Experts}  # {target: class}
FUSED = ("gate_up_proj", "down_proj")  # parameters of Experts


@dataclass
class Adapters:
    """The state that all adapters of a policy share, policy.lora."""

    scale: float
    engine_dtype: torch.dtype  # to which a sync rounds merged weights
    enabled: bool = True  # off: the policy computes as its base
    survival: Tensor | None = None  # [2] float64, summed by Merged.to()

    def low_rank(self, x: Tensor, a: Tensor, b: Tensor, linear: Callable) -> Tensor:
        """Return s B A x."""
        return linear(linear(x, a), b) * self.scale


class AdaptedExperts(Experts):
    """Experts with adapters; adapt() gives this class to the Experts of a policy."""

    lora: Adapters

    def linear(self, x_PD: Tensor, name: str, rows_per_expert: Tensor) -> Tensor:
        """Add the adapters' product to the rows of Experts.linear()."""
        out_PO = super().linear(x_PD, name, rows_per_expert)
        if not self.lora.enabled:
            return out_PO
        a_erD, b_eOr = pair_of(self, name)
        padding = -a_erD.shape[1] % RANK_MULTIPLE
        if padding:
            a_erD = F.pad(a_erD, (0, 0, 0, padding))
            b_eOr = F.pad(b_eOr, (0, padding))
        product = partial(grouped_linear, tokens_per_expert=rows_per_expert)
        return out_PO + self.lora.low_rank(x_PD, a_erD, b_eOr, product)


def names_of(name: str) -> tuple[str, str]:
    """Return the names of A and B in the module that has a weight of this name."""
    suffix = "" if name == "weight" else f"_{name}"
    return f"lora_A{suffix}", f"lora_B{suffix}"


def pair_of(module: nn.Module, name: str) -> tuple[Tensor, Tensor]:
    """Return A and B beside the weight of this name."""
    a, b = names_of(name)
    return getattr(module, a), getattr(module, b)


def add_to_output(adapters: Adapters, linear: nn.Linear, inputs: tuple, output: Tensor) -> Tensor:
    """Add the adapter's product to the output of a linear layer: a forward hook."""
    if not adapters.enabled:
        return output
    return output + adapters.low_rank(inputs[0], *pair_of(linear, "weight"), F.linear)


@dataclass(frozen=True)
class Merged:
    """W + s B A in place of W: a tensor whose values to() computes when moe_model.py reads them.

    Has the methods that moe_model.py calls on weights. Cutting weights into matrices of experts, or gate from
    up, cuts the adapters alike.
    """

    weight: Tensor  # [O, D], or [e, O, D] of experts
    a: Tensor  # [r, D] or [e, r, D]
    b: Tensor  # [O, r] or [e, O, r]
    adapters: Adapters
    copies: int = 1  # ranks of an expert-parallel group that hold this weight

    @property
    def shape(self) -> torch.Size:
        """Return the shape of the merged tensor."""
        return self.weight.shape

    @property
    def dtype(self) -> torch.dtype:
        """Return the dtype to send: the weight's, or the engine's if that is finer."""
        return torch.promote_types(self.weight.dtype, self.adapters.engine_dtype)

    def __iter__(self) -> Iterator["Merged"]:
        """Yield the experts."""
        for parts in zip(self.weight.detach(), self.a.detach(), self.b.detach()):
            yield Merged(*parts, self.adapters, self.copies)

    def chunk(self, chunks: int, dim: int) -> list["Merged"]:
        """Cut the outputs."""
        parts = zip(self.weight.chunk(chunks, dim), self.b.chunk(chunks, dim))
        return [Merged(weight, self.a, b, self.adapters, self.copies) for weight, b in parts]

    @torch.no_grad()
    def to(self, dtype: torch.dtype) -> Tensor:
        """Compute the merged tensor in float32, some experts or rows at a time, and round it once.

        Records in adapters.survival how much of the update D = s B A the engine gets, which rounds what it is
        sent: (<round(W + D) - round(W), D>, <D, D>). Their ratio is 0 if all weights round back to W.
        """
        merged = torch.empty(self.shape, dtype=dtype, device=self.weight.device)
        exact = torch.promote_types(self.weight.dtype, torch.float32)
        engine_dtype = self.adapters.engine_dtype
        sums = torch.zeros(2, dtype=torch.float64, device=merged.device)
        for part in token_chunks(len(merged), merged[0].numel(), merged.device):
            weight = self.weight[part].to(exact)
            a = self.a[part] if self.a.dim() == 3 else self.a
            delta = self.b[part].to(exact) @ a.to(exact) * self.adapters.scale
            total = weight + delta
            merged[part] = total
            change = merged[part].to(engine_dtype).to(exact) - weight.to(engine_dtype).to(exact)
            sums += torch.stack([(change * delta).sum(), (delta * delta).sum()]) / self.copies
        earlier = self.adapters.survival
        self.adapters.survival = sums if earlier is None else earlier + sums
        return merged


def matrices_of(policy: Policy, targets: list[str]) -> Iterator[tuple[nn.Module, str, str]]:
    """Yield (module, its name, parameter) of each weight that gets an adapter: a matrix, or fused experts."""
    for name, module in policy.named_modules():
        kind = next((target for target in targets if isinstance(module, MODULES[target])), None)
        if kind == "experts":
            yield from ((module, name, parameter) for parameter in FUSED)
        elif kind:
            for leaf, linear in module.named_children():
                if isinstance(linear, nn.Linear):
                    yield linear, f"{name}.{leaf}", "weight"


SHAPES_CACHE: dict[str, dict[str, list[torch.Size]]] = {}  # as moe_model.COUNTS_CACHE


def shapes_of(hf_config) -> dict[str, list[torch.Size]]:
    """Return {target: shapes of its weights} of a model, without allocating the model."""
    key = f"{type(hf_config).__name__} {vars(hf_config)}"
    if key not in SHAPES_CACHE:
        with torch.device("meta"):
            policy = Policy(hf_config)
        SHAPES_CACHE[key] = {
            target: [getattr(module, name).shape for module, _, name in matrices_of(policy, [target])]
            for target in MODULES
        }
    return SHAPES_CACHE[key]


def targets_of(config, hf_config) -> list[str]:
    """Return lora.targets; null: all kinds of matrices that the model has."""
    return config.lora.targets or [target for target, shapes in shapes_of(hf_config).items() if shapes]


def scale_of(rank: int, alpha: float, rslora: bool) -> float:
    """Return s, the factor of B A x."""
    return alpha / (math.sqrt(rank) if rslora else rank)


def adapt(
    policy: Policy, settings: LoraSettings, targets: list[str], engine_dtype: torch.dtype, seed: int
) -> None:
    """Freeze a policy and give adapters to its matrices; A depends on the seed and the weight's name."""
    policy.requires_grad_(False)
    assert settings.rank is not None
    policy.lora = Adapters(scale_of(settings.rank, settings.alpha, settings.rslora), engine_dtype)
    matrices = list(matrices_of(policy, targets))
    for module, path, name in matrices:
        add_adapter(policy, module, path, name, settings.rank, seed)
    for module in dict.fromkeys(module for module, *_ in matrices):
        if isinstance(module, Experts):
            module.__class__ = AdaptedExperts
            module.lora = policy.lora
        else:
            module.register_forward_hook(partial(add_to_output, policy.lora))
    fill_groups(policy)


def add_adapter(policy: Policy, module: nn.Module, path: str, name: str, rank: int, seed: int) -> None:
    """Give A and B to a weight: A Kaiming-uniform as in PEFT, that is within 1 / sqrt(D) of 0, and B zero.

    The A of an expert does not depend on the rank that holds the expert.
    """
    weight = getattr(module, name)
    first, count = moe_model.local_experts(policy, weight)
    num_experts = (num_experts_of(policy.config),) if count else ()
    bound = weight.shape[-1] ** -0.5
    generator = moe_model.generator_of(seed, f"{path}.{name}")
    a = torch.empty(*num_experts, rank, weight.shape[-1]).uniform_(-bound, bound, generator=generator)
    a = a[first : first + count] if count else a
    pair = [nn.Parameter(values.to(weight)) for values in (a, torch.zeros(*weight.shape[:-1], rank))]
    for parameter_name, parameter in zip(names_of(name), pair):
        if count:
            mark_as_expert(parameter, weight.group_name)
        module.register_parameter(parameter_name, parameter)
    copies = dist.get_world_size(policy.group) if policy.group and not count else 1
    policy.merged[f"{path}.{name}"] = Merged(weight, pair[0], pair[1], policy.lora, copies)


def mark_as_expert(parameter: nn.Parameter, group_name: str) -> None:
    """Mark a parameter for DeepSpeed, as moe_model.Experts does."""
    setattr(parameter, "allreduce", False)  # noqa: B010
    setattr(parameter, "group_name", group_name)  # noqa: B010


def fill_groups(policy: Policy) -> None:
    """Add a parameter without effect to each of DeepSpeed's two groups that has no adapter.

    DeepSpeed takes no empty group: of experts in a MoE (targets without experts), and of all other
    parameters (experts alone), whose norm in bfloat16 needs a gradient: the hook gives it one of 0.
    """
    trained = [parameter for parameter in policy.parameters() if parameter.requires_grad]
    example = policy.lm_head.weight
    names = {getattr(p, "group_name", None) for p in policy.parameters()} | {None}
    for group_name in names - {getattr(p, "group_name", None) for p in trained}:
        parameter = nn.Parameter(example.new_zeros(1))
        if group_name:
            mark_as_expert(parameter, group_name)
        policy.register_parameter("lora_unused", parameter)
        policy.register_forward_hook(
            lambda policy, _, outputs: (outputs[0] + 0 * policy.lora_unused.sum(), *outputs[1:])
        )


def adapter_counts(config, hf_config) -> ParameterCounts:
    """Count the parameters of the adapters, by the way in which ranks share them."""
    shapes = shapes_of(hf_config)
    counts = {
        target: sum(math.prod(shape[:-2]) * config.lora.rank * sum(shape[-2:]) for shape in shapes[target])
        for target in targets_of(config, hf_config)
    }
    experts = counts.pop("experts", 0)
    return ParameterCounts(experts, 0, sum(counts.values()))


class Base(nn.Module):
    """A policy with its adapters off, the reference of a KL penalty; takes no memory of its own."""

    def __init__(self, policy: Policy):
        super().__init__()
        self.module = policy

    def forward(self, *args, **options) -> Any:
        """Return the outputs of the policy without adapters."""
        self.module.lora.enabled = False
        try:
            return self.module(*args, **options)
        finally:
            self.module.lora.enabled = True


# ------------------------------------------------------------------------------------------------------------
# Files: the folder of PEFT
# ------------------------------------------------------------------------------------------------------------
CONFIG = "adapter_config.json"
TENSORS = "adapter_model.safetensors"


def file_names(config: PretrainedConfig, name: str) -> tuple[str, str]:
    """Return the names of A and B in a file of PEFT; name: of the weight, in the policy.

    PEFT wraps a module once for each parameter; the adapter of gate and up is then that of the `base_layer`
    of down's wrapper.
    """
    name = transformers_name(config, name)
    path = name.removesuffix(".weight").replace(".experts.gate_up_proj", ".experts.base_layer")
    path = path.removesuffix(".down_proj") if path.endswith(".experts.down_proj") else path
    return f"base_model.model.{path}.lora_A.weight", f"base_model.model.{path}.lora_B.weight"


def transformers_name(config: PretrainedConfig, name: str) -> str:
    """Return the name of a parameter in transformers, which differs from the policy's for Granite alone."""
    return moe_model.checkpoint_name(config, name) if FAMILIES[config.model_type].fused_names else name


def peft_config(policy: Policy, config) -> dict[str, Any]:
    """Return the contents of adapter_config.json, for peft 0.21.

    Adapters of a MoE besides those of attention are named as parameters, because peft takes the names of
    modules such as gate_proj for those of experts.
    """
    names = [transformers_name(policy.config, name) for name in policy.merged]
    is_moe = num_experts_of(policy.config) > 0
    modules = {name.split(".")[-2] for name in names if ".self_attn." in name or not is_moe}
    parameters = {".".join(name.split(".")[3:]) for name in names if ".self_attn." not in name and is_moe}
    return {
        "peft_type": "LORA", "task_type": "CAUSAL_LM", "base_model_name_or_path": config.model.path,
        "r": config.lora.rank, "lora_alpha": config.lora.alpha, "use_rslora": config.lora.rslora,
        "lora_dropout": 0.0, "bias": "none", "fan_in_fan_out": False, "init_lora_weights": True,
        "inference_mode": True, "target_modules": sorted(modules), "target_parameters": sorted(parameters),
    }  # fmt: skip


def save_adapter(policy: Policy, config, folder: Path, save: Callable = save_file) -> None:
    """Write the folder of PEFT on rank 0. Collective: experts are gathered before anything is written.

    save: as in moe_model.save_hf().
    """
    is_writer = not dist.is_initialized() or dist.get_rank() == 0
    tensors = {}
    for name, merged in policy.merged.items():
        a, b = merged.a.detach(), merged.b.detach()
        if a.dim() == 3:  # [E, r, D] and [E, O, r] to PEFT's [E r, D] and [O, r E]
            a = moe_model.gather_experts(policy, a).flatten(0, 1)
            b = moe_model.gather_experts(policy, b).permute(1, 2, 0).flatten(1)
        for file_name, tensor in zip(file_names(policy.config, name), (a, b)):
            if is_writer:
                tensors[file_name] = tensor.cpu().contiguous()
    if is_writer:
        folder.mkdir(parents=True, exist_ok=True)
        save(tensors, folder / TENSORS, metadata={"format": "pt"})
        (folder / CONFIG).write_text(json.dumps(peft_config(policy, config), indent=1))


@torch.no_grad()
def load_adapter(policy: Policy, folder: Path) -> None:
    """Fill the adapters from a folder of save_adapter(); ValueError if names, shapes or scale differ."""
    num_experts = num_experts_of(policy.config)
    parameters: dict[str, Tensor] = {}  # by name in the file
    for name, merged in policy.merged.items():
        parameters |= zip(file_names(policy.config, name), (merged.a, merged.b))
    with safe_open(folder / TENSORS, framework="pt") as file:
        differing = sorted(set(file.keys()) ^ set(parameters))
        for name, parameter in () if differing else parameters.items():
            tensor = file.get_tensor(name)
            first, count = moe_model.local_experts(policy, parameter)
            if count and name.endswith("lora_A.weight"):
                tensor = tensor.unflatten(0, (num_experts, -1))[first : first + count]
            elif count:
                tensor = tensor.unflatten(1, (-1, num_experts)).permute(2, 0, 1)[first : first + count]
            if tensor.shape == parameter.shape:
                parameter.copy_(tensor)
            else:
                differing.append(name)
    if differing:
        raise ValueError(
            f"lora.rank, lora.targets: {folder} has adapters of other matrices or another rank, first "
            f"{differing[0]}: restore the settings, or choose another run.dir"
        )
    saved = json.loads((folder / CONFIG).read_text())
    if scale_of(saved["r"], saved["lora_alpha"], saved["use_rslora"]) != policy.lora.scale:
        raise ValueError(
            f"lora.alpha, lora.rslora: the adapters in {folder} have lora_alpha {saved['lora_alpha']} and "
            f"use_rslora {saved['use_rslora']}: restore the settings, which are a factor of the adapters"
        )


def digest_of_base(folder: Path) -> str:
    """Hash names, forms and values of all tensors, however they are split over files.

    Collective: the ranks share the tensors, of which sha256 reads 1 to 2 GB per second.
    """
    digests: dict[str, str] = {}
    for shard in moe_model.checkpoint_shards(folder):
        with shard.open("rb") as file:
            header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
            start = file.tell()
            header.pop("__metadata__", None)
            for name, entry in sorted(header.items())[dist.get_rank() :: dist.get_world_size()]:
                begin, end = entry["data_offsets"]
                digest = hashlib.sha256(f"{name} {entry['dtype']} {entry['shape']}".encode())
                file.seek(start + begin)
                digest.update(file.read(end - begin))
                digests[name] = digest.hexdigest()
    everything = sorted(item for of_rank in from_all_ranks(digests) for item in of_rank.items())
    return hashlib.sha256(json.dumps(everything).encode()).hexdigest()[:16]


# ------------------------------------------------------------------------------------------------------------
# The calls of a run
# ------------------------------------------------------------------------------------------------------------
SMALLEST_SURVIVAL = 0.5  # share of the update that merging leaves; below it a warning [ours]
# Files beside the weights that decide what a policy samples.
DECIDING_FILES = re.compile(
    r"(generation_)?config\.json|(tokenizer|special_tokens|added_tokens|vocab|merges|chat_template|additional)"
)
NUM_COPIES = 6  # float32 tensors of a chunk that Merged.to() holds


class LoraExtra(Extra):
    """The calls of a run with adapters."""

    name = "lora.rank"
    keeps_base = True

    def contradictions(self, config):
        """The router is frozen anyway; kernels for experts are not tested with adapters."""
        if config.model.expert_kernel == "triton":
            yield "{model.expert_kernel} is not tested with {lora.rank}: set it to auto or torch"
        if config.model.freeze_router:
            yield "{model.freeze_router} has no effect with {lora.rank}: all weights of the model are frozen"

    def check_model(self, config, hf_config):
        """Refuse targets that the model lacks, and a rank above the smaller dimension of a weight."""
        shapes = shapes_of(hf_config)
        lacking = [target for target in targets_of(config, hf_config) if not shapes[target]]
        if lacking:
            present = ", ".join(target for target in shapes if shapes[target])
            kind = "MoE" if num_experts_of(hf_config) else "dense model"
            raise ValueError(f"lora.targets: this {kind} has no {lacking[0]} to adapt; it has {present}")
        smallest = min(min(shape[-2:]) for t in targets_of(config, hf_config) for shape in shapes[t])
        if config.lora.rank > smallest:
            raise ValueError(
                f"lora.rank {config.lora.rank} exceeds the smaller dimension of a weight: at most {smallest}"
            )

    def trained(self, config, hf_config):
        """Count the adapters."""
        return adapter_counts(config, hf_config)

    def memory(self, config, hf_config, tokens):
        """Return the bytes of the adapters, and of the float32 copies while a tensor is merged."""
        counts = adapter_counts(config, hf_config)
        num_held = counts.experts // config.model.ep_size + counts.others
        shapes = [shape for target in targets_of(config, hf_config) for shape in shapes_of(hf_config)[target]]
        largest = max(math.prod(s) // (config.model.ep_size if len(s) == 3 else 1) for s in shapes)
        whole = max(math.prod(s[1:]) for s in shapes)  # an expert, or a row: token_chunks() cuts none
        copies = NUM_COPIES * 4 * max(whole, min(largest, moe_model.CHUNK_ELEMENTS["cuda"]))
        held, engine = (getattr(torch, section.dtype) for section in (config.model, config.rollout))
        sent = torch.promote_types(held, engine).itemsize
        return {"weights": num_held * held.itemsize, "sync buffers": largest * sent + copies}

    def check(self, launch):
        """Refuse a resume with other weights under the adapters, or another config or tokenizer."""
        recorded = launch.state.extras.setdefault("lora", {})
        folder = moe_model.model_folder(launch.config.model.path)
        digests = {"weights": digest_of_base(folder)}
        of_files = {name.strip(): digest for name, digest in digests_of_input("", folder).items()}
        digests |= {name: digest for name, digest in of_files.items() if DECIDING_FILES.match(name)}
        known = recorded or digests
        if "config.json" not in known:  # of an earlier version, which recorded the weights alone
            known = digests | known
        changed = sorted({name for name, _ in digests.items() ^ known.items()})
        if changed:
            raise ValueError(
                f"model.path: the adapters of the checkpoint belong to other {', '.join(changed)} than in "
                f"{launch.config.model.path}: restore what has changed, or choose another run.dir"
            )
        recorded |= digests

    def adapt(self, policy, config):
        """Freeze the policy and add the adapters."""
        targets = targets_of(config, policy.config)
        adapt(policy, config.lora, targets, getattr(torch, config.rollout.dtype), config.train.seed)

    def load(self, policy, folder):
        """Read the adapters of a checkpoint."""
        load_adapter(policy, folder / "adapter")

    def save(self, policy, config, folder, save):
        """Write the adapters into a folder of PEFT."""
        save_adapter(policy, config, folder / "adapter", save)

    def reference(self, policy):
        """Return the policy without adapters."""
        return Base(policy)

    def after_rollout(self, run, batch, groups):
        """Let metrics() find the sums of this step's sync, which comes after the update.

        The sums of the launch's first sync are dropped, or a resume would add them to its first step.
        """
        run.policy.lora.survival = None
        batch.extras["lora"] = run.policy.lora

    def metrics(self, batch):
        """Measure the last sync, as (sum, count).

        lora/merged_frac    share of the update s B A that the rounding of merged weights leaves: 1 in float32
        """
        adapters = batch.extras["lora"]
        kept, whole = (0.0, 0.0) if adapters.survival is None else adapters.survival.tolist()
        if kept < SMALLEST_SURVIVAL * whole:
            warn_once(
                f"lora/merged_frac is below {SMALLEST_SURVIVAL}: rounding to {adapters.engine_dtype} hides "
                "most of the update. If it stays there after the first steps, raise train.learning_rate or "
                "set rollout.dtype=float32"
            )
        return {"lora/merged_frac": (kept, whole)}


EXTRA = LoraExtra()
