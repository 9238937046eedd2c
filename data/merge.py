r"""Merge checkpoints of one architecture: their weighted mean, or TIES (arXiv 2306.01708).

    python -m data.merge --models math/model code/model --weights 0.6 0.4 --output merged
    python -m data.merge --method ties --base Qwen3-4B-Base --models math/model code/model --density 0.2 \
        --output merged

With weights x_i of models i, base weights b, model weights w_i, element by element:

    linear   sum_i w_i x_i / sum_i w_i
    ties     d_i = x_i - b where it is among the `density` largest in magnitude of its tensor, else 0
             s   = sign of sum_i w_i d_i, + where that is 0
             b + scale * sum_{i: sign d_i = s} w_i d_i / sum_{i: sign d_i = s} w_i, or b where there is none

Both are computed in float64 and rounded once, to the dtype of the first model. With weights of one and scale
lambda, ties is Algorithm 1 of the paper, but for two choices that follow mergekit [secondary]: magnitudes are
ranked within each tensor, not over the whole model, and the sign of a sum of 0 is +.

Tensors are read one by one and written shard by shard, as the first model has them: the host needs room for
one shard and for about 8 (models + 3) bytes an element of the largest tensor. config.json, generation config,
tokenizer and chat template are those of the first model, or of --tokenizer-from.
"""

import argparse
import json
import os
import shutil
from pathlib import Path

from data.random_model import refuse_to_overwrite

SIDE_FILES = (  # copied where they are there
    "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "tokenizer.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip


class Checkpoint:
    """The tensors of a folder by name; nothing is read before it is asked for."""

    def __init__(self, folder: Path):
        from safetensors import SafetensorError, safe_open

        self.folder = folder
        if not (folder / "config.json").is_file():
            raise ValueError(f"{folder} holds no config.json: give the folder of a Hugging Face checkpoint")
        self.files, self.where = {}, {}  # {file name: open file}, {tensor: file name}
        for name in self.list_files():
            try:
                self.files[name] = safe_open(folder / name, framework="pt")
            except (SafetensorError, OSError) as error:
                raise ValueError(f"{folder / name} is not a whole safetensors file: {error}") from error
            self.where |= dict.fromkeys(self.files[name].keys(), name)

    def list_files(self) -> list[str]:
        """Name the safetensors files, those of the index where there is one; ValueError if one is missing."""
        from moe_model import weight_map_of

        listed = set(weight_map_of(self.folder).values())
        names = sorted(listed or {path.name for path in self.folder.glob("*.safetensors")})
        missing = [name for name in names if not (self.folder / name).is_file()]
        if missing or not names:
            raise ValueError(f"{self.folder} lacks {', '.join(missing[:3]) or '*.safetensors files'}")
        return names

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return tuple(self.files[self.where[name]].get_slice(name).get_shape())

    def read(self, name: str):
        """Return a tensor in the dtype of the file."""
        return self.files[self.where[name]].get_tensor(name)


def check_alike(first: Checkpoint, others: list[Checkpoint]) -> None:
    """Raise ValueError naming tensors that not all checkpoints have, or have in other shapes."""
    for other in others:
        for one, two in ((first, other), (other, first)):
            lacking = sorted(one.where.keys() - two.where.keys())
            if lacking:
                raise ValueError(
                    f"{two.folder} lacks {len(lacking)} tensors that {one.folder} has: "
                    f"{', '.join(lacking[:3])}{' ...' * (len(lacking) > 3)}; only checkpoints of one "
                    "architecture can be merged"
                )
        for name in first.where:
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
    """Return the tensor with its int(density * n) largest magnitudes, of equal ones the first, and 0 else."""
    import torch

    kept = int(density * delta.numel())
    if kept == delta.numel():
        return delta
    largest = delta.abs().flatten().argsort(descending=True, stable=True)[:kept]
    trimmed = torch.zeros_like(delta)
    trimmed.view(-1)[largest] = delta.view(-1)[largest]
    return trimmed


def ties(base, tensors: list, weights: list[float], density: float, scale: float):
    """Return the TIES merge of the tensors in float64, see the top of the file."""
    import torch

    base = base.double().contiguous()
    deltas = [trim(tensor.double() - base, density) for tensor in tensors]
    sign = torch.where(sum(w * d for w, d in zip(weights, deltas, strict=True)) >= 0, 1.0, -1.0).double()
    total, weight_of = torch.zeros_like(base), torch.zeros_like(base)
    for delta, weight in zip(deltas, weights):
        agrees = delta.sign() == sign
        total += torch.where(agrees, weight * delta, 0)
        weight_of += weight * agrees
    return base + scale * total / torch.where(weight_of == 0, 1, weight_of)


def merge(
    models: list[Path],
    output: Path,
    weights: list[float],
    base: Path | None = None,
    density: float = 1.0,
    scale: float = 1.0,
    tokenizer_from: Path | None = None,
) -> int:
    """Write the merged checkpoint; return how many tensors it has. With a base by TIES, else linear.

    The folder gets its name when it is whole. ValueError for checkpoints that do not go together and for
    results that are not finite.
    """
    from safetensors.torch import save_file

    from moe_model import INDEX

    opened = [Checkpoint(Path(model)) for model in models]
    on = [Checkpoint(Path(base))] if base else []
    first = opened[0]
    check_alike(first, [*opened[1:], *on])
    partial = output.with_name(output.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    num_bytes = 0
    for file in first.files:
        shard = {}
        for name in (name for name, where in first.where.items() if where == file):
            tensors = [model.read(name) for model in opened]
            if on:
                merged = ties(on[0].read(name), tensors, weights, density, scale)
            else:
                merged = linear(tensors, weights)
            if not merged.isfinite().all():
                raise ValueError(
                    f"{name}: the merged weights are not finite; look for NaN in the checkpoints"
                )
            shard[name] = merged.to(tensors[0].dtype)
            num_bytes += shard[name].numel() * shard[name].element_size()
        save_file(shard, partial / file, metadata={"format": "pt"})
    index = {"metadata": {"total_size": num_bytes}, "weight_map": dict(sorted(first.where.items()))}
    (partial / INDEX).write_text(json.dumps(index, indent=1))
    shutil.copy(first.folder / "config.json", partial)
    for name in SIDE_FILES:
        source = (tokenizer_from or first.folder) / name
        if source.is_file():
            shutil.copy(source, partial)
    os.replace(partial, output)
    return len(first.where)


def parse_args(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line; ValueError names an option that is wrong."""
    keep_lines = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(
        prog="python -m data.merge", description=__doc__, formatter_class=keep_lines
    )
    add = parser.add_argument
    add("--models", type=Path, nargs="+", required=True, help="folders of two or more checkpoints")
    add("--output", type=Path, required=True, help="folder to make")
    add("--method", choices=["linear", "ties"], default="linear", help="default: %(default)s")
    add("--weights", type=float, nargs="+", help="one a model (default: all 1)")
    add("--base", type=Path, help="what the models were trained from, for ties")
    add("--density", type=float, default=0.2, help="share of a change that ties keeps (default: %(default)s)")
    add("--scale", type=float, default=1.0, help="lambda of ties (default: %(default)s)")
    add("--tokenizer-from", type=Path, help="folder of tokenizer and generation config (default: the first)")
    args = parser.parse_args(argv)
    args.weights = args.weights or [1.0] * len(args.models)
    if len(args.models) < 2 and args.method == "linear":
        raise ValueError("--models: a mean needs at least two checkpoints")
    if len(args.weights) != len(args.models) or min(args.weights) <= 0:
        raise ValueError(f"--weights: {len(args.models)} numbers above 0, one for each of --models")
    if (args.method == "ties") != (args.base is not None):
        raise ValueError("--base and --method ties: give both or neither")
    if not 0 < args.density <= 1:
        raise ValueError(f"--density {args.density:g} must be above 0 and at most 1")
    refuse_to_overwrite(args.output)
    return args


def main(argv: list[str] | None = None) -> None:
    """Read the command line, merge, and say what was made."""
    args = parse_args(argv)
    options = {"base": args.base, "density": args.density, "scale": args.scale}
    count = merge(args.models, args.output, args.weights, tokenizer_from=args.tokenizer_from, **options)
    print(f"{args.output}: {count} tensors merged from {len(args.models)} checkpoints by {args.method}")


if __name__ == "__main__":
    main()
