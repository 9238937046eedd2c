"""experiments/studies/teacher/accuracy.py: probabilities against transformers, and the table of policies."""

import json
import math
import sys

import pytest
import torch
from conftest import save_small_moe
from transformers import AutoConfig, AutoModelForCausalLM

from data.tiny import build_tokenizer
from experiments.studies.teacher import accuracy

PROMPTS = [{"prompt": "1+2=", "answer": "3"}, {"prompt": "2*8=", "answer": "16"}]


@pytest.fixture
def starts(tmp_path, monkeypatch):
    """Prompts of both tasks, and the folder of an exported policy by row and seed."""
    monkeypatch.setattr(accuracy, "STARTS", tmp_path / "starts")
    for start in accuracy.TASKS.values():
        (tmp_path / "starts" / start).mkdir(parents=True)
        for name in ("train", "test"):
            lines = [json.dumps(row) + "\n" for row in PROMPTS]
            (tmp_path / "starts" / start / f"{name}.jsonl").write_text("".join(lines))
    return tmp_path


def save_policy(folder) -> None:
    """Save a random model of the size of save_small_moe(), with the vocabulary of the tiny models."""
    save_small_moe(folder)
    config = AutoConfig.from_pretrained(folder, vocab_size=len(build_tokenizer()))
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    build_tokenizer().save_pretrained(folder)


def test_a_probability_is_that_of_the_whole_answer_with_its_end(starts):
    """Against transformers, prompt by prompt. float32, two implementations."""
    folder = starts / "runs" / "short_grpo" / "seed_3" / "model"
    save_policy(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, trust_remote_code=False)
    tokenizer = build_tokenizer()
    expected = []
    for row in PROMPTS:
        prompt = tokenizer(row["prompt"])["input_ids"]
        answer = [*tokenizer(row["answer"])["input_ids"], tokenizer.eos_token_id]
        assert len(answer) == len(row["answer"]) + 1
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *answer]])).logits[0, len(prompt) - 1 : -1]
        logprobs = logits.log_softmax(1)
        expected.append(math.exp(sum(logprobs[i, token].item() for i, token in enumerate(answer))))
    assert accuracy.probabilities(folder, PROMPTS).tolist() == pytest.approx(expected, rel=1e-3)
    figures = accuracy.figures_of(folder)
    assert (figures["row"], figures["seed"]) == ("short_grpo", 3)
    assert figures["probabilities"] == pytest.approx({
        "short, held out: sums": sum(expected) / 2, "short, training: sums": expected[0],
        "short, training: products": expected[1],
    }, rel=1e-3)  # fmt: skip


def policy(row: str, seed: int, **probabilities: float) -> dict:
    return {"row": row, "seed": seed, "probabilities": probabilities}


def test_the_table_pairs_policies_with_those_of_grpo_by_seed():
    """Differences of the common seeds 0 and 1: 0.25 and 0.375."""
    data = [
        policy("short_every", 0, short=0.5), policy("short_every", 1, short=0.875),
        policy("short_every", 7, short=0.125), policy("short_grpo", 0, short=0.25),
        policy("short_grpo", 1, short=0.5), policy("chains_skip", 0, chains=0.5),
    ]  # fmt: skip
    half = 12.7062 * 0.0625  # t(0.975, 1) x standard deviation / root of 2
    interval = f"{0.3125 - half:+.4f} to {0.3125 + half:+.4f}"
    assert accuracy.table_lines(data)[2:] == [
        "| short_grpo | short | 2 | 0.3750 | n/a | n/a | n/a |",
        f"| short_every | short | 3 | 0.5000 | +0.3125 | {interval} | 0.126 |",
        "| chains_skip | chains | 1 | 0.5000 | n/a | n/a | n/a |",
    ]


def test_portions_share_a_file(starts, monkeypatch, capsys):
    file = starts / "accuracy.json"
    for row in ("chains_grpo", "chains_every"):
        folder = starts / "runs" / row / "seed_0" / "model"
        save_policy(folder)
        monkeypatch.setattr(sys, "argv", ["accuracy", "--models", str(folder), "--json", str(file)])
        accuracy.main()
    data = json.loads(file.read_text())
    assert [run["row"] for run in data] == ["chains_every", "chains_grpo"]
    assert set(data[0]["probabilities"]) == {"chains, held out", "chains, training"}
    assert "| chains_every | chains, training | 1 |" in capsys.readouterr().out
