"""Merging checkpoints: against loops in float64 written from the equations, and what does not go together."""

import functools
import json
import random

import pytest
import torch
from conftest import save_small_moe
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from data import merge
from moe_model import INDEX


def reference_linear(values: list[float], weights: list[float]) -> float:
    return sum(w * x for w, x in zip(weights, values)) / sum(weights)


def reference_ties(base, models, weights, density, scale) -> list[float]:
    """Trim, elect a sign and take the disjoint mean of flat lists, one element after another (2306.01708)."""
    number = len(base)
    kept = []
    for model in models:
        delta = [x - b for x, b in zip(model, base)]
        order = sorted(range(number), key=lambda i: (-abs(delta[i]), i))[: int(density * number)]
        kept.append([delta[i] if i in order else 0.0 for i in range(number)])
    merged = []
    for i in range(number):
        elected = 1 if sum(w * delta[i] for w, delta in zip(weights, kept)) >= 0 else -1
        agreeing = [(w, delta[i]) for w, delta in zip(weights, kept) if delta[i] * elected > 0]
        mean = sum(w * d for w, d in agreeing) / sum(w for w, _ in agreeing) if agreeing else 0.0
        merged.append(base[i] + scale * mean)
    return merged


@pytest.fixture
def folders(tmp_path):
    """Make a base and two checkpoints that were changed, in two shards, with files of a tokenizer."""
    paths = []
    for number, name in enumerate(("base", "one", "two")):
        folder = tmp_path / name
        save_small_moe(folder)
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(number)
        for key in sorted(tensors) if number else ():
            noise = torch.randn(tensors[key].shape, generator=generator).round(
                decimals=1
            )  # with ties and zeros
            tensors[key] = tensors[key] + noise
        (folder / "model.safetensors").unlink()
        weight_map = {
            key: f"model-{1 + i % 2:05d}-of-00002.safetensors" for i, key in enumerate(sorted(tensors))
        }
        for file in set(weight_map.values()):
            save_file({key: tensors[key] for key in tensors if weight_map[key] == file}, folder / file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [1, number]}))
        (folder / "chat_template.jinja").write_text(f"template of {name}")
        paths.append(folder)
    return paths


def tensors_of(folder) -> dict[str, torch.Tensor]:
    return {name: t for file in sorted(folder.glob("*.safetensors")) for name, t in load_file(file).items()}


def change(folder, name, function) -> None:
    """Replace a tensor of a checkpoint, or take it out where the function returns None."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            changed = function(tensors.pop(name))
            save_file(tensors | ({} if changed is None else {name: changed}), file)


@pytest.mark.parametrize(
    "density, scale, weights", [(0.2, 1.0, [1, 1]), (0.5, 0.7, [2.0, 1.0]), (1.0, 1.0, [1, 3, 2])]
)
def test_ties_is_what_the_equations_say(density, scale, weights):
    rng, tensor = random.Random(7), functools.partial(torch.tensor, dtype=torch.float64)
    for shape in ((3, 7), (2, 3, 4), (5,)):
        number = torch.Size(shape).numel()  # equal magnitudes are common
        base, *models = [[round(rng.gauss(0, 1), 1) for _ in range(number)] for _ in range(1 + len(weights))]
        tensors = [tensor(model).reshape(shape) for model in models]
        found = merge.ties(tensor(base).reshape(shape), tensors, weights, density, scale)
        expected = tensor(reference_ties(base, models, weights, density, scale))
        torch.testing.assert_close(found.flatten(), expected, rtol=1e-12, atol=1e-12)


def test_agreeing_changes_are_averaged_and_a_minority_is_left_out():
    tensor = lambda *values: torch.tensor(values, dtype=torch.float64)
    models = [tensor(4.0, 2.0, -1.0, 5.0), tensor(2.0, -3.0, 1.0, 0.0)]
    merged = merge.ties(tensor(0, 0, 0, 0), models, [1, 1], 1.0, 1.0)
    assert merged.tolist() == [3.0, -3.0, 1.0, 5.0], "the sign of a sum of 0 is +"
    trimmed = merge.ties(tensor(0, 0, 0, 0), models, [1, 1], 0.5, 1.0)
    assert trimmed.tolist() == [3.0, -3.0, 0.0, 5.0], "two of four stay: 4 and 5, 2 and -3"


@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_folder_holds_every_tensor_rounded_once_and_loads(method, dtype, folders, tmp_path):
    base, one, two = folders
    for folder in folders:
        for file in folder.glob("*.safetensors"):
            save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file)
    options = ["--method", "ties", "--base", str(base), "--density", "0.3"] if method == "ties" else []
    weights = [0.25, 0.75]
    merge.main(
        [
            "--models",
            str(one),
            str(two),
            "--weights",
            "0.25",
            "0.75",
            "--output",
            str(tmp_path / "out"),
            *options,
        ]
    )
    parts, found = [tensors_of(folder) for folder in folders], tensors_of(tmp_path / "out")
    assert found.keys() == parts[0].keys()
    for name, tensor in found.items():
        flat = [part[name].double().flatten().tolist() for part in parts]
        if method == "ties":
            expected = reference_ties(flat[0], flat[1:], weights, 0.3, 1.0)
        else:
            expected = [reference_linear(values, weights) for values in zip(*flat[1:])]
        assert tensor.dtype == dtype
        expected = torch.tensor(expected, dtype=torch.float64).to(dtype)
        assert torch.equal(tensor.flatten(), expected), name
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == json.loads((one / INDEX).read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in found.values())
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == (one / name).read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    key = "model.layers.1.self_attn.q_proj.weight"
    assert torch.equal(model.state_dict()[key], found[key])


def test_the_tokenizer_may_be_another_models(folders, tmp_path):
    base, one, two = folders
    merge.merge([one, two], tmp_path / "out", [1, 1], tokenizer_from=base)
    assert (tmp_path / "out" / "chat_template.jinja").read_text() == "template of base"


NAME = "model.layers.1.self_attn.q_proj.weight"
BROKEN = {
    "shape": (lambda folder: change(folder, NAME, lambda t: t[1:].clone()), [NAME, "(16, 16)", "(15, 16)"]),
    "name": (lambda folder: change(folder, NAME, lambda t: None), [NAME, "two lacks 1 "]),
    "shard": (lambda folder: next(folder.glob("*1-of*")).unlink(), ["two", "model-00001-of-00002"]),
    "cut": (lambda folder: next(folder.glob("*1-of*")).write_bytes(b"x" * 20), ["two", "safetensors"]),
    "nan": (lambda folder: change(folder, NAME, lambda t: t * torch.nan), [NAME, "not finite"]),
    "config": (lambda folder: (folder / "config.json").unlink(), ["two", "no config.json"]),
}  # fmt: skip


@pytest.mark.parametrize("case", BROKEN)
def test_what_does_not_go_together_is_named_and_nothing_is_left_under_the_name(case, folders, tmp_path):
    spoil, parts = BROKEN[case]
    spoil(folders[2])
    with pytest.raises(ValueError) as caught:
        merge.merge(folders[1:], tmp_path / "out", [1, 1])
    assert all(part in str(caught.value) for part in parts), caught.value
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, part",
    [
        (["--models", "a"], "two checkpoints"),
        (["--models", "a", "b", "--weights", "1"], "--weights"),
        (["--models", "a", "b", "--weights", "1", "-1"], "--weights"),
        (["--models", "a", "b", "--method", "ties"], "--base"),
        (["--models", "a", "b", "--base", "c"], "--base"),
        (["--models", "a", "b", "--method", "ties", "--base", "c", "--density", "0"], "--density"),
    ],
)
def test_wrong_options_are_refused(options, part, tmp_path):
    with pytest.raises(ValueError, match=part):
        merge.parse_args([*options, "--output", str(tmp_path / "out")])
