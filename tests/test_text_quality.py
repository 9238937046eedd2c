"""experiments/text_quality.py: figures of hand-made texts, and of models by brute force."""

import math

import pytest
import torch
from conftest import save_small_moe

from experiments import text_quality as quality

PROMPT = [3, 4, 5]


def row(text: str, token_ids: list[int], prompt_index: int = 0, temperature: float = 1.0) -> dict:
    return {"completion": text, "token_ids": token_ids, "prompt_ids": PROMPT, "prompt_index": prompt_index,
            "temperature": temperature}  # fmt: skip


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folders of a small random model and of a copy with other weights."""
    from transformers import AutoModelForCausalLM

    start = tmp_path_factory.mktemp("start")
    trained = tmp_path_factory.mktemp("trained")
    save_small_moe(start)
    model = AutoModelForCausalLM.from_pretrained(start, dtype=torch.float32)
    with torch.no_grad():
        model.lm_head.weight.add_(torch.randn_like(model.lm_head.weight) * 0.3)
    model.save_pretrained(trained)
    return trained, start


def all_logprobs(folder, token_ids: list[int]) -> torch.Tensor:
    """Return the log-probabilities [tokens, V] from whole logits in double precision."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float64, experts_implementation="eager"
    )  # grouped products lack float64
    with torch.no_grad():
        return model(torch.tensor([PROMPT + token_ids])).logits[0, len(PROMPT) - 1 : -1].log_softmax(-1)


def test_perplexity_and_kl_equal_a_computation_by_brute_force(folders, monkeypatch):
    monkeypatch.setattr(quality, "POSITIONS_PER_CHUNK", 3)  # several chunks, the last one not full
    trained, start = folders
    completions = [[7, 8, 9, 10, 11, 1], [12, 1], [], [6]]
    nll = []
    kl = []
    for token_ids in filter(None, completions):
        p = all_logprobs(trained, token_ids)
        q = all_logprobs(start, token_ids)
        for position, token in enumerate(token_ids):
            nll.append(-q[position, token].item())
            terms = zip(p[position].tolist(), q[position].tolist())
            kl.append(sum(math.exp(a) * (a - b) for a, b in terms))
    figures = quality.text_quality([row("a word", ids) for ids in completions], trained, start)
    # float32 against float64
    assert figures["perplexity_start"] == pytest.approx(math.exp(sum(nll) / len(nll)), rel=1e-5)
    assert figures["kl_to_start"] == pytest.approx(sum(kl) / len(kl), rel=1e-4) and sum(kl) > 0.1
    assert figures["mean_tokens"] == 9 / 4
    assert quality.text_quality([row("a", [7, 8])], start, start)["kl_to_start"] == 0


def test_scaled_logits_of_granite_are_those_of_transformers(tmp_path):
    from transformers import GraniteConfig, GraniteForCausalLM

    config = GraniteConfig(
        vocab_size=24, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, logits_scaling=6.0, initializer_range=0.5,
    )  # fmt: skip
    for seed, name in enumerate(("start", "trained")):
        torch.manual_seed(seed)
        GraniteForCausalLM(config).save_pretrained(tmp_path / name)
    ids = [7, 8, 9, 10, 1]
    p, q = (all_logprobs(tmp_path / name, ids) for name in ("trained", "start"))
    figures = quality.text_quality([row("a word", ids)], tmp_path / "trained", tmp_path / "start")
    nll = -q[range(len(ids)), ids].mean().item()
    assert figures["perplexity_start"] == pytest.approx(math.exp(nll), rel=1e-5)
    assert figures["kl_to_start"] == pytest.approx((p.exp() * (p - q)).sum(1).mean().item(), rel=1e-4)


def test_words_and_repetition_of_hand_made_texts():
    assert quality.words_of("It's well-known, 3 times: ÉTÉ!") == ["it's", "well-known", "3", "times", "été"]
    texts = [text.split() for text in ("a b a b", "a b c", "", "d")]
    # 8 words, 2-grams ab ba bc
    assert quality.distinct_bigrams(texts) == {"distinct_2": 3 / 8, "distinct_words": 8}
    cut = quality.distinct_bigrams(texts, num_words=4, words_per_text=3)  # a b a, then a
    assert cut == {"distinct_2": 2 / 4, "distinct_words": 4}
    # a b a b a b a: abab baba abab baba
    assert quality.repeated_4grams("a b a b a b a".split()) == 2 / 4
    assert quality.repeated_4grams("a b c".split()) is None


def test_a_set_that_cannot_be_measured_is_explained(folders, tmp_path):
    trained, start = folders
    rows = [row("text", [7])]
    with pytest.raises(ValueError, match="no rows"):
        quality.text_quality([], trained, start)
    with pytest.raises(ValueError, match="prompt_ids"):
        quality.text_quality([{k: v for k, v in rows[0].items() if k != "prompt_ids"}], trained, start)
    with pytest.raises(ValueError, match="config.json"):
        quality.text_quality(rows, trained, tmp_path)
    turns = [{"role": "assistant", "num_tokens": 1, "sampled": True}]
    with pytest.raises(ValueError, match="tools"):
        inserted = {"role": "tool", "num_tokens": 1, "sampled": False}
        quality.text_quality([rows[0] | {"turns": [*turns, inserted]}], trained, start)
    assert quality.text_quality([rows[0] | {"turns": turns}], trained, start)["num_completions"] == 1
