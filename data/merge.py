r"""Merge checkpoints of one architecture: their weighted mean, or TIES (arXiv 2306.01708).

    python -m data.merge --models math/model code/model --weights 0.6 0.4 --output merged
    python -m data.merge --method ties --base Qwen3-4B-Base --models math/model code/model --density 0.2 \
        --output merged

With weights x_i of models i, base weights b, model weights w_i, element by element:

    linear   sum_i w_i x_i / sum_i w_i
    ties     d_i = x_i - b for the fraction `density` of each tensor with the largest magnitudes, else 0
             s   = sign of sum_i w_i d_i, with sign 0 = +
             b + scale * sum_{i: sign d_i = s} w_i d_i / sum_{i: sign d_i = s} w_i, or b if no sign d_i is s

Both are computed in float64 and rounded once, to the dtype of the first model. With all weights 1 and scale
lambda, ties is Algorithm 1 of the paper, except for two choices that follow mergekit [secondary]: magnitudes
are ranked within each tensor instead of over the whole model, and the sign of a sum of 0 is +.

Tensors are read one at a time and written in the shards of the first model. The host needs memory for one
shard, plus about 8 (models + 3) bytes per element of the largest tensor. config.json is copied from the first
model; generation config, tokenizer and chat template from --tokenizer-from, or else from the first model.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

from data.random_model import refuse_to_overwrite

SIDE_FILES = (  # copied if they exist
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


class Checkpoint:
    """The tensors of a checkpoint folder by name. A tensor is loaded only when read() is called."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json: pass the folder of a Hugging Face checkpoint")
        self.files = {}  # {file name: open file}
        self.file_of = {}  # {tensor name: file name}
        for name in self.list_files():
            try:
                self.files[name] = safe_open(folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{folder / name} is not a complete safetensors file: {error}") from error
            self.file_of |= dict.fromkeys(self.files[name].keys(), name)

    def list_files(self) -> list[str]:
        """List the safetensors files, from the index if it exists; ValueError names missing files."""
        from moe_model import weight_map_of

        listed = set(weight_map_of(self.folder).values())
        names = sorted(listed or {path.name for path in self.folder.glob("*.safetensors")})
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing or not names:
            raise ValueError(f"{self.folder} lacks {', '.join(missing[:3]) or '*.safetensors files'}")
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.files[self.file_of[name]].get_slice(name).get_shape())

    def read(self, name: str):
        """Return a tensor in the dtype of the file."""
        return self.files[self.file_of[name]].get_tensor(name)


def check_alike(first: Checkpoint, checkpoints: list[Checkpoint]) -> None:
    """Raise ValueError unless all checkpoints have the tensors and shapes of the first checkpoint."""
    for other in checkpoints:
        for larger, smaller in ((first, other), (other, first)):
            missing = sorted(larger.file_of.keys() - smaller.file_of.keys())
            if missing:
                raise ValueError(
                    f"{smaller.folder} lacks {len(missing)} tensors that {larger.folder} has: "
                    f"{', '.join(missing[:3])}{' ...' * (len(missing) > 3)}; only checkpoints of one "
                    "architecture can be merged"
                )
        for name in first.file_of:
            if first.shape(name) != other.shape(name):
                raise ValueError(
                    f"{name} has shape {first.shape(name)} in {first.folder} and {other.shape(name)} in "
                    f"{other.folder}; only checkpoints of one architecture can be merged"
                )


def linear(tensors: list, weights: list[float]):
    """Return sum_i w_i x_i / sum_i w_i in float64."""
    total = tensors[0].double() * (weights[0] / sum(weights))
    for tensor, weight in zip(tensors[1:], weights[1:], strict=True):
        total.add_(tensor.double(), alpha=weight / sum(weights))
    return total


def trim(delta, density: float):
    """Set all but the int(density * n) largest magnitudes to 0; between equal magnitudes, the first stays."""
    import torch

    num_kept = int(density * delta.numel())
    if num_kept == delta.numel():
        return delta
    largest = delta.abs().flatten().argsort(descending=True, stable=True)[:num_kept]
    trimmed = torch.zeros_like(delta)
    trimmed.view(-1)[largest] = delta.view(-1)[largest]
    return trimmed


def ties(base, tensors: list, weights: list[float], density: float, scale: float):
    """Return the TIES merge of the tensors in float64 (formula in the module docstring)."""
    import torch

    base = base.double().contiguous()
    deltas = [trim(tensor.double() - base, density) for tensor in tensors]
    sign = torch.where(sum(w * d for w, d in zip(weights, deltas, strict=True)) >= 0, 1.0, -1.0).double()
    total = torch.zeros_like(base)
    total_weight = torch.zeros_like(base)
    for delta, weight in zip(deltas, weights):
        agrees = delta.sign() == sign
        total += torch.where(agrees, weight * delta, 0)
        total_weight += weight * agrees
    return base + scale * total / torch.where(total_weight == 0, 1, total_weight)


def merge(
    models: list[Path],
    output: Path,
    weights: list[float],
    base: Path | None = None,
    density: float = 1.0,
    scale: float = 1.0,
    tokenizer_from: Path | None = None,
) -> int:
    """Write the merged checkpoint and return the number of tensors. TIES if `base` is passed, else linear.

    The folder is written as OUTPUT.partial and renamed when complete. ValueError for checkpoints of different
    architectures and for results with NaN or infinity.
    """
    from safetensors.torch import save_file

    from moe_model import INDEX

    checkpoints = [Checkpoint(Path(model)) for model in models]
    base_checkpoint = Checkpoint(Path(base)) if base else None
    first = checkpoints[0]
    check_alike(first, checkpoints[1:] + ([base_checkpoint] if base_checkpoint else []))
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    num_bytes = 0
    for file in first.files:
        shard = {}
        for name in (name for name, location in first.file_of.items() if location == file):
            tensors = [checkpoint.read(name) for checkpoint in checkpoints]
            if base_checkpoint:
                merged = ties(base_checkpoint.read(name), tensors, weights, density, scale)
            else:
                merged = linear(tensors, weights)
            if not merged.isfinite().all():
                raise ValueError(
                    f"{name}: the merged weights are not finite; look for NaN in the checkpoints"
                )
            shard[name] = merged.to(tensors[0].dtype)
            num_bytes += shard[name].numel() * shard[name].element_size()
        save_file(shard, partial / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(first.file_of.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=1))
    shutil.copy(first.folder / "config.json", partial)
    for name in SIDE_FILES:
        source = (tokenizer_from or first.folder) / name
        if source.is_file():
            shutil.copy(source, partial)
    os.replace(partial, output)
    return len(first.file_of)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Parse the command line; ValueError names an invalid option."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m data.merge", description=__doc__, formatter_class=keep_lines
    )
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="folders of two or more checkpoints")
    add("--output", type=Path, required=True, help="folder to create")
    add("--method", choices=["linear", "ties"], default="linear", help="default: %(default)s")
    add("--weights", type=float, nargs="+", help="one weight per model (default: all 1)")
    add("--base", type=Path, help="ties: checkpoint that the models were trained from")
    add("--density", type=float, help="ties: fraction of changes to keep (default: 0.2)")
    add("--scale", type=float, help="ties: the factor lambda (default: 1)")
    add(
        "--tokenizer-from", type=Path, help="folder of tokenizer and generation config (default: first model)"
    )
    args = parser.parse_args(argv)
    args.weights = args.weights or [1.0] * len(args.models)
    if len(args.models) < 2 and args.method == "linear":
        raise ValueError("--models: a mean needs at least two checkpoints")
    if len(args.weights) != len(args.models) or min(args.weights) <= 0:
        raise ValueError(f"--weights: pass {len(args.models)} numbers above 0, one for each of --models")
    if (args.method == "ties") != (args.base is not None):
        raise ValueError("--base and --method ties: pass both or neither")
    if args.method == "linear" and (args.density, args.scale) != (None, None):
        raise ValueError("--density and --scale need --method ties")
    args.density = 0.2 if args.density is None else args.density
    args.scale = 1.0 if args.scale is None else args.scale
    if not 0 < args.density <= 1:
        raise ValueError(f"--density {args.density:g} must be above 0 and at most 1")
    names = [name for name in SIDE_FILES if name.startswith(("tokenizer.", "vocab"))]
    if args.tokenizer_from and not any((args.tokenizer_from / name).is_file() for name in names):
        raise ValueError(f"--tokenizer-from {args.tokenizer_from}: none of {', '.join(names)} is there")
    refuse_to_overwrite(args.output)
    return args


def main(argv: list[str] | None = None) -> None:
    """Read the command line, merge, and print the number of merged tensors."""
    args = parse_args(argv)
    options = {"base": args.base, "density": args.density, "scale": args.scale}
    count = merge(args.models, args.output, args.weights, tokenizer_from=args.tokenizer_from, **options)
    print(f"{args.output}: {count} tensors merged from {len(args.models)} checkpoints by {args.method}")


if __name__ == "__main__":
    main()
