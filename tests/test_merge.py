"""Merging checkpoints: float64 loops over the equations as oracle; incompatible checkpoints are refused."""

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
    deltas = []
    for model in models:
        delta = [x - b for x, b in zip(model, base)]
        largest = sorted(range(number), key=lambda i: (-abs(delta[i]), i))[: int(density * number)]
        deltas.append([delta[i] if i in largest else 0.0 for i in range(number)])
    merged = []
    for i in range(number):
        sign = 1 if sum(w * delta[i] for w, delta in zip(weights, deltas)) >= 0 else -1
        agreeing = [(w, delta[i]) for w, delta in zip(weights, deltas) if delta[i] * sign > 0]
        mean = sum(w * d for w, d in agreeing) / sum(w for w, _ in agreeing) if agreeing else 0.0
        merged.append(base[i] + scale * mean)
    return merged


@pytest.fixture
def folders(tmp_path):
    """Make a base and two checkpoints with noise, each in two shards and with the files of a tokenizer."""
    paths = []
    for number, name in enumerate(("base", "one", "two")):
        folder = tmp_path / name
        save_small_moe(folder)
        tensors = load_file(folder / "model.safetensors")
        generator = torch.Generator().manual_seed(number)
        for key in sorted(tensors) if number else ():
            noise = torch.randn(tensors[key].shape, generator=generator)
            tensors[key] = tensors[key] + noise.round(decimals=1)  # rounded: with ties and zeros
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
    """Replace a tensor of a checkpoint, or remove the tensor if the function returns None."""
    for file in folder.glob("*.safetensors"):
        tensors = load_file(file)
        if name in tensors:
            changed = function(tensors.pop(name))
            save_file(tensors | ({} if changed is None else {name: changed}), file)


@pytest.mark.parametrize(
    "density, scale, weights", [(0.2, 1.0, [1, 1]), (0.5, 0.7, [2.0, 1.0]), (1.0, 1.0, [1, 3, 2])]
)
def test_ties_agrees_with_the_equations(density, scale, weights):
    rng = random.Random(7)
    tensor = functools.partial(torch.tensor, dtype=torch.float64)
    for shape in ((3, 7), (2, 3, 4), (5,)):
        number = torch.Size(shape).numel()  # equal magnitudes are common
        base, *models = [[round(rng.gauss(0, 1), 1) for _ in range(number)] for _ in range(1 + len(weights))]
        tensors = [tensor(model).reshape(shape) for model in models]
        merged = merge.ties(tensor(base).reshape(shape), tensors, weights, density, scale)
        expected = tensor(reference_ties(base, models, weights, density, scale))
        torch.testing.assert_close(merged.flatten(), expected, rtol=1e-12, atol=1e-12)


def test_agreeing_changes_are_averaged_and_a_minority_is_dropped():
    tensor = lambda *values: torch.tensor(values, dtype=torch.float64)
    models = [tensor(4.0, 2.0, -1.0, 5.0), tensor(2.0, -3.0, 1.0, 0.0)]
    merged = merge.ties(tensor(0, 0, 0, 0), models, [1, 1], 1.0, 1.0)
    assert merged.tolist() == [3.0, -3.0, 1.0, 5.0], "the sign of a sum of 0 is +"
    trimmed = merge.ties(tensor(0, 0, 0, 0), models, [1, 1], 0.5, 1.0)
    assert trimmed.tolist() == [3.0, -3.0, 0.0, 5.0], "each model keeps two of four: 4 and 5, 2 and -3"


@pytest.mark.parametrize("method", ["linear", "ties"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_merged_folder_holds_every_tensor_rounded_once_and_loads(method, dtype, folders, tmp_path):
    base, first, second = folders
    for folder in folders:
        for file in folder.glob("*.safetensors"):
            save_file({name: t.to(dtype) for name, t in load_file(file).items()}, file)
    options = ["--method", "ties", "--base", str(base), "--density", "0.3"] if method == "ties" else []
    weights = [0.25, 0.75]
    output = ["--output", str(tmp_path / "out")]
    merge.main(["--models", str(first), str(second), "--weights", "0.25", "0.75", *output, *options])
    checkpoints = [tensors_of(folder) for folder in folders]
    merged = tensors_of(tmp_path / "out")
    assert merged.keys() == checkpoints[0].keys()
    for name, tensor in merged.items():
        flat = [checkpoint[name].double().flatten().tolist() for checkpoint in checkpoints]
        if method == "ties":
            expected = reference_ties(flat[0], flat[1:], weights, 0.3, 1.0)
        else:
            expected = [reference_linear(values, weights) for values in zip(*flat[1:])]
        assert tensor.dtype == dtype
        expected = torch.tensor(expected, dtype=torch.float64).to(dtype)
        assert torch.equal(tensor.flatten(), expected), name
    index = json.loads((tmp_path / "out" / INDEX).read_text())
    assert index["weight_map"] == json.loads((first / INDEX).read_text())["weight_map"]
    assert index["metadata"]["total_size"] == sum(t.numel() * t.element_size() for t in merged.values())
    for name in ("config.json", "generation_config.json", "chat_template.jinja"):
        assert (tmp_path / "out" / name).read_text() == (first / name).read_text()
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype=dtype)
    assert torch.equal(model.state_dict()[NAME], merged[NAME])


def test_the_tokenizer_may_come_from_another_model(folders, tmp_path):
    base, first, second = folders
    merge.merge([first, second], tmp_path / "out", [1, 1], tokenizer_from=base)
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
def test_incompatible_checkpoints_are_refused_and_write_no_folder(case, folders, tmp_path):
    spoil, words = BROKEN[case]
    spoil(folders[2])
    with pytest.raises(ValueError) as caught:
        merge.merge(folders[1:], tmp_path / "out", [1, 1])
    assert all(word in str(caught.value) for word in words), caught.value
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    "options, word",
    [
        (["--models", "a"], "two checkpoints"),
        (["--models", "a", "b", "--weights", "1"], "--weights"),
        (["--models", "a", "b", "--weights", "1", "-1"], "--weights"),
        (["--models", "a", "b", "--method", "ties"], "--base"),
        (["--models", "a", "b", "--density", "0.3"], "--method ties"),
        (["--models", "a", "b", "--scale", "2"], "--method ties"),
        (["--models", "a", "b", "--base", "c"], "--base"),
        (["--models", "a", "b", "--tokenizer-from", "c"], "--tokenizer-from"),
        (["--models", "a", "b", "--method", "ties", "--base", "c", "--density", "0"], "--density"),
    ],
)
def test_wrong_options_are_refused(options, word, tmp_path):
    with pytest.raises(ValueError, match=word):
        merge.parse_args([*options, "--output", str(tmp_path / "out")])
