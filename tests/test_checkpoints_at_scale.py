"""Loading and export of checkpoints with the names and the shard layout of Qwen3-30B-A3B and Qwen3-235B-A22B.

The tensors are tiny, their number and names and the file of each are those of the real models. Ranks are
played one after another in this process: load_hf() and save_hf() use no collective.
"""

import json
from types import SimpleNamespace

import pytest
import torch
from model_suites import tiny_model
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import Qwen3MoeConfig

import moe_model
from moe_model import INDEX, Policy, checkpoint_tensors, load_hf, save_hf

SHARED = {"num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True, "tie_word_embeddings": False}
REAL = {
    "30B": SHARED | {
        "vocab_size": 151936, "hidden_size": 2048, "moe_intermediate_size": 768, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
    },
    "235B": SHARED | {
        "vocab_size": 151936, "hidden_size": 4096, "moe_intermediate_size": 1536, "num_hidden_layers": 94,
        "num_attention_heads": 64, "num_key_value_heads": 4, "head_dim": 128,
    },
}  # fmt: skip
TINY = {
    "vocab_size": 17, "hidden_size": 4, "moe_intermediate_size": 3, "num_attention_heads": 2,
    "num_key_value_heads": 1, "head_dim": 2,
}  # fmt: skip
NUM_SHARDS = {"30B": 16, "235B": 118}  # as published, in files of at most 4 GB


def shard_layout(size: str) -> list[list[str]]:
    """Deal the names of the real model to files of at most 4 GB of bfloat16, in the order of the layers."""
    with torch.device("meta"):
        policy = Policy(Qwen3MoeConfig(**REAL[size]))
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
    """Make checkpoint(size): the folder, and all tensors by name."""
    made = {}

    def make(size: str):
        if size not in made:
            folder = tmp_path_factory.mktemp(size)
            policy = Policy(config := Qwen3MoeConfig(**REAL[size] | TINY))
            torch.manual_seed(0)
            for parameter in policy.parameters():
                parameter.data.normal_()
            tensors = {name: tensor.contiguous() for name, tensor, _ in checkpoint_tensors(policy)}
            shards, weight_map = shard_layout(size), {}
            assert len(shards) == NUM_SHARDS[size]
            for number, names in enumerate(shards, 1):
                file = f"model-{number:05d}-of-{len(shards):05d}.safetensors"
                save_file({name: tensors[name] for name in names}, folder / file)
                weight_map |= dict.fromkeys(names, file)
            (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))
            config.save_pretrained(folder)
            made[size] = folder, tensors
        return made[size]

    return make


@pytest.fixture
def play_rank(monkeypatch):
    """Let the policy's code believe that it is a rank of an expert-parallel group."""

    def play(rank: int, ep_size: int) -> None:
        ranks = SimpleNamespace(
            get_rank=lambda group=None: rank,
            get_world_size=lambda group=None: ep_size,
            is_initialized=lambda: True,
        )
        monkeypatch.setattr(moe_model, "dist", ranks)

    return play


@pytest.fixture
def read(monkeypatch) -> list[tuple[str, int]]:
    """Record (name, bytes) of every tensor whose contents are taken from a file."""
    taken = []

    def spy(path, framework):
        file = safe_open(path, framework=framework)

        def get_tensor(name):
            tensor = file.get_tensor(name)
            taken.append((name, tensor.nbytes))
            return tensor

        return SimpleNamespace(keys=file.keys, get_slice=file.get_slice, get_tensor=get_tensor)

    monkeypatch.setattr(moe_model, "safe_open", spy)
    return taken


def expert_of(name: str) -> int | None:
    """Return the number of the expert that a tensor belongs to, from its name."""
    return int(name.split(".experts.")[1].split(".")[0]) if ".experts." in name else None


def assert_holds(policy: Policy, tensors: dict[str, torch.Tensor], experts: range) -> None:
    """Compare a rank's parameters with the tensors of the checkpoint, named here by hand."""
    for name, parameter in policy.named_parameters():
        if name.endswith("experts.down_proj"):
            prefix = name.removesuffix("down_proj")
            expected = torch.stack([tensors[f"{prefix}{e}.down_proj.weight"] for e in experts])
        elif name.endswith("experts.gate_up_proj"):
            prefix = name.removesuffix("gate_up_proj")
            pairs = [[tensors[f"{prefix}{e}.{part}_proj.weight"] for part in ("gate", "up")] for e in experts]
            expected = torch.stack([torch.cat(pair) for pair in pairs])
        else:
            expected = tensors[name]
        assert torch.equal(parameter, expected), name


@pytest.mark.slow
@pytest.mark.parametrize(
    ("size", "ep_size", "ranks"),
    [("30B", 1, [0]), ("30B", 2, [0, 1]), ("30B", 4, [0, 2]), ("30B", 8, range(8)), ("235B", 8, [0, 5])],
)
def test_a_rank_reads_its_share_and_exports_it(
    size, ep_size, ranks, checkpoint, play_rank, read, tmp_path, monkeypatch
):
    """A rank takes the contents of what all share and of its own experts, each once, and writes them again.

    Together the ranks write every tensor once, in files of a bounded size that the index names.
    """
    monkeypatch.setattr(moe_model, "SHARD_BYTES", 2**16)
    folder, tensors = checkpoint(size)
    config, written = moe_model.load_config(folder), set()
    shared = sum(t.nbytes for name, t in tensors.items() if expert_of(name) is None)
    experts = sum(t.nbytes for name, t in tensors.items() if expert_of(name) is not None)
    for rank in ranks:
        play_rank(rank, ep_size)
        policy = Policy(config, "the group")
        for parameter in policy.parameters():
            parameter.data.fill_(float("nan"))
        read.clear()
        load_hf(policy, folder)
        own = range(rank * 128 // ep_size, (rank + 1) * 128 // ep_size)
        assert sorted(name for name, _ in read) == sorted(n for n in tensors if expert_of(n) in (None, *own))
        assert sum(num_bytes for _, num_bytes in read) == shared + experts // ep_size
        assert_holds(policy, tensors, own)
        save_hf(policy, tmp_path)
        written |= {n for n in tensors if expert_of(n) in own or (rank == 0 and expert_of(n) is None)}
    index, found = json.loads((tmp_path / INDEX).read_text()), []
    assert index["weight_map"].keys() == tensors.keys()
    assert index["metadata"]["total_size"] == shared + experts
    for file in tmp_path.glob("*.safetensors"):
        part = load_file(file)
        assert sum(tensor.nbytes for tensor in part.values()) <= 2**16
        found += part
        for name, tensor in part.items():
            assert index["weight_map"][name] == file.name and torch.equal(tensor, tensors[name]), name
    assert sorted(found) == sorted(written)


def save_two_shards(folder):
    """Save a small model in files of 40 KB; return its policy and its index."""
    tiny_model("moe").save_pretrained(folder, max_shard_size="40KB")
    return Policy(moe_model.load_config(folder)), json.loads((folder / INDEX).read_text())


def test_a_missing_shard_is_named(tmp_path):
    policy, index = save_two_shards(tmp_path)
    files = sorted(set(index["weight_map"].values()))
    (tmp_path / files[1]).unlink()
    message = rf"lacks 1 of the {len(files)} files that {INDEX} names, first {files[1]}: copy or download"
    with pytest.raises(ValueError, match=message):
        load_hf(policy, tmp_path)


def test_a_tensor_that_only_the_index_knows_is_named(tmp_path):
    policy, index = save_two_shards(tmp_path)
    name = "model.layers.0.mlp.experts.3.up_proj.weight"
    file = tmp_path / index["weight_map"][name]
    save_file({n: t for n, t in load_file(file).items() if n != name}, file)
    with pytest.raises(
        ValueError, match=rf"lacks 1 of .* tensors: {name} .*says that {name} is in {file.name}"
    ):
        load_hf(policy, tmp_path)


def test_tensors_of_an_index_that_the_model_has_no_use_for_are_left_alone(tmp_path):
    """GLM-4.5 and others publish layers for speculative decoding that no policy here has."""
    policy, index = save_two_shards(tmp_path)
    index["weight_map"]["model.layers.46.eh_proj.weight"] = sorted(index["weight_map"].values())[0]
    (tmp_path / INDEX).write_text(json.dumps(index))
    load_hf(policy, tmp_path)
    saved = {
        name: tensor for file in tmp_path.glob("*.safetensors") for name, tensor in load_file(file).items()
    }
    loaded = {name: tensor for name, tensor, _ in checkpoint_tensors(policy)}
    assert loaded.keys() == saved.keys() and all(torch.equal(loaded[name], saved[name]) for name in saved)
