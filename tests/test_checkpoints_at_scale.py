"""Load and export checkpoints with the names and the shards of Qwen3-30B-A3B and Qwen3-235B-A22B.

The tensors are tiny, but have the names and the files of the real models, for example 118 files of the 235B
model. One process plays all ranks in turn, because load_hf() and save_hf() use no collective.
"""

import copy
import json
from functools import cache
from types import SimpleNamespace

import pytest
import torch
from model_suites import tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file

import moe_model
from experiments.plan import model_config
from moe_model import INDEX, Policy, checkpoint_tensors, load_hf, save_hf

TINY = {
    "vocab_size": 17, "hidden_size": 4, "moe_intermediate_size": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 2,
}  # fmt: skip
NUM_SHARDS = {"30B-A3B": 16, "235B-A22B": 118}  # as published, in files of at most 4 GB


def shard_layout(size: str) -> list[list[str]]:
    """Distribute the names of the real model over files of at most 4 GB of bfloat16, layer by layer."""
    with torch.device("meta"):
        policy = Policy(model_config(f"Qwen/Qwen3-{size}"))
    shards, room = [], 0
    for name, tensor, _ in checkpoint_tensors(policy):
        if 2 * tensor.numel() > room:
            shards.append([])
            room = 4e9
        shards[-1].append(name)
        room -= 2 * tensor.numel()
    return shards


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """Return checkpoint(size), which returns the folder and the tensors by name."""

    @cache
    def checkpoint(size: str):
        folder = tmp_path_factory.mktemp(size)
        config = copy.deepcopy(model_config(f"Qwen/Qwen3-{size}"))
        config.update(TINY)
        policy = Policy(config)
        torch.manual_seed(0)
        for parameter in policy.parameters():
            parameter.data.normal_()
        tensors = {name: tensor.contiguous() for name, tensor, _ in checkpoint_tensors(policy)}
        shards = shard_layout(size)
        assert len(shards) == NUM_SHARDS[size]
        weight_map = {}
        for number, names in enumerate(shards, 1):
            file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
            save_file({name: tensors[name] for name in names}, folder / file)
            weight_map |= dict.fromkeys(names, file)
        (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
        config.save_pretrained(folder)
        return folder, tensors

    return checkpoint


@pytest.fixture
def reads(monkeypatch) -> list[str]:
    """Record the name of every tensor whose contents are read from a file."""
    names = []

    def recording(path, framework):
        file = safe_open(path, framework=framework)
        get_tensor = lambda name: names.append(name) or file.get_tensor(name)
        return SimpleNamespace(keys=file.keys, get_slice=file.get_slice, get_tensor=get_tensor)

    monkeypatch.setattr(moe_model, "safe_open", recording)
    return names


def expert_of(name: str) -> int | None:
    """Return the number of the expert in a tensor's name."""
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "ep_size", "ranks"),
    [("30B-A3B", 1, [0]), ("30B-A3B", 8, [0, 7]), ("235B-A22B", 8, [0, 5])],
)
def test_a_rank_reads_its_share_and_exports_it(
    size, ep_size, ranks, checkpoint, reads, tmp_path, monkeypatch
):
    """A rank reads the shared tensors and the experts of this rank, each tensor once, and writes its experts.

    Together the ranks write every tensor once, bitwise equal, in files of a limited size that the index
    names. test_model.py compares the loaded parameters with transformers'.
    """
    monkeypatch.setattr(moe_model, "SHARD_BYTES", 2**16)
    folder, tensors = checkpoint(size)
    config = moe_model.load_config(folder)
    expected_names = []
    for rank in ranks:
        process = SimpleNamespace(
            get_rank=lambda group=None, rank=rank: rank,
            get_world_size=lambda group=None: ep_size,
            is_initialized=lambda: True,
        )
        monkeypatch.setattr(moe_model, "dist", process)
        policy = Policy(config, "the group")
        for parameter in policy.parameters():
            parameter.data.fill_(float("nan"))
        reads.clear()
        load_hf(policy, folder)
        experts = range(rank * 128 // ep_size, (rank + 1) * 128 // ep_size)
        assert sorted(reads) == sorted(name for name in tensors if expert_of(name) in (None, *experts))
        save_hf(policy, tmp_path)
        written = (None, *experts) if rank == 0 else experts
        expected_names += [name for name in tensors if expert_of(name) in written]
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in tensors.values())
    names = []
    for file in tmp_path.glob("*.safetensors"):
        part = load_file(file)
        assert sum(tensor.nbytes for tensor in part.values()) <= 2**16
        names += part
        for name, tensor in part.items():
            assert index["weight_map"][name] == file.name and torch.equal(tensor, tensors[name]), name
    assert sorted(names) == sorted(expected_names)


def test_damage_to_the_shards_of_a_checkpoint_is_named(tmp_path):
    """An index may list more tensors than the model has, for example layers for speculative decoding."""
    tiny_model("moe").save_pretrained(tmp_path, max_shard_size="40KB")
    policy = Policy(moe_model.load_config(tmp_path))
    index = json.loads((tmp_path / INDEX).read_text())
    weight_map = index["weight_map"]
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    file = tmp_path / weight_map[name]
    weight_map["model.layers.46.eh_proj.weight"] = file.name
    (tmp_path / INDEX).write_text(json.dumps(index))
    load_hf(policy, tmp_path)
    tensors = load_file(file)
    save_file({n: tensor for n, tensor in tensors.items() if n != name}, file)
    with pytest.raises(ValueError, match=f"{name}.*{file.name}"):
        load_hf(policy, tmp_path)
    file.unlink()
    with pytest.raises(ValueError, match=file.name):
        load_hf(policy, tmp_path)
