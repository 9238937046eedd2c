"""The reward pool: functions of your own, workers that misbehave, order, backlog, decoding."""

import random
import time

import pytest

import reward
from data.tiny import build_tokenizer
from reward import RewardPool, Verdict, decoder_json

OWN = """
import os, signal, sys, time

def given(completion, answer): return float(answer)
def equal(completion, answer): return completion == answer
def raises(completion, answer): raise KeyError("no such test")
def text(completion, answer): return "half"
def hangs(completion, answer):
    while True: pass
def deaf(completion, answer):
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
    while True: time.sleep(1)
def aborts(completion, answer): os.abort()
def leaves(completion, answer): sys.exit(0)
def eats(completion, answer):
    kept = []
    while True: kept.append(bytearray(1 << 24))
def floods(completion, answer):
    for _ in range(100):
        os.write(1, b"x" * (1 << 20)); sys.stdout.write("y" * 1000); os.write(2, b"z" * (1 << 20))
    return 1.0
def sleeps(completion, answer):
    time.sleep(float(completion)); return 1.0
"""
OK = Verdict(1.0, "ok", pass_frac=1.0)


@pytest.fixture
def own(tmp_path, monkeypatch):
    """The module `own_rewards` where the workers find it."""
    (tmp_path / "own_rewards.py").write_text(OWN)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))


def scored(*items: tuple, **options) -> list[Verdict]:
    with RewardPool(**{"num_workers": 2, "timeout_s": 5.0} | options) as pool:
        for key, item in enumerate(items):
            pool.submit(key, *item)
        return list(pool.collect().values())


def test_a_function_of_your_own_gives_a_share_and_one_is_right(own):
    shares = [0, 0.25, 1 - 2**-53, 1]
    verdicts = scored(*(("own_rewards:given", "x", repr(share)) for share in shares))
    assert verdicts == [Verdict(0.0, "wrong", pass_frac=share) for share in shares[:3]] + [OK]


@pytest.mark.parametrize(
    "kind, answer, reason",
    [
        ("own_rewards:given", "1.001", "gave 1.001, not a score"),
        ("own_rewards:given", "-0.1", "gave -0.1, not a score"),
        ("own_rewards:given", "nan", "gave nan, not a score"),
        ("own_rewards:given", "inf", "gave inf, not a score"),
        ("own_rewards:text", "", "could not convert string to float"),
        ("own_rewards:raises", "", "no such test"),
        ("own_rewards:absent", "", "AttributeError"),
        ("no_such_module:f", "", "No module named 'no_such_module'"),
    ],
)
def test_what_is_no_score_is_an_error_with_its_reason(kind, answer, reason, own):
    (verdict,) = scored((kind, "x", answer), num_workers=1)
    assert (verdict.reward, verdict.status, verdict.pass_frac) == (0.0, "error", 0.0)
    assert reason in verdict.detail and len(verdict.detail) <= 200


@pytest.mark.parametrize(
    "name, status, restarts",
    [("hangs", "timeout", 1), ("aborts", "error", 1), ("leaves", "error", 1), ("eats", "error", 0),
     ("floods", "ok", 0)],
)  # fmt: skip
def test_a_function_that_misbehaves_costs_its_own_item_only(name, status, restarts, own):
    """Within the limit of 2 s and what a fresh worker takes to start, on a machine with other work."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=2.0, memory_bytes=1 << 29) as pool:
        pool.submit("before", "exact", "a", "a")
        pool.submit("bad", f"own_rewards:{name}", "x", "")
        for key in range(20):
            pool.submit(key, "exact", "a", "a")
        pool.submit("after", "own_rewards:given", "x", "1")
        verdicts = pool.collect()
        assert pool.num_restarts == restarts and len(pool.latencies) == 23
    assert verdicts.pop("bad").status == status
    assert set(verdicts.values()) == {OK} and len(verdicts) == 22
    assert time.monotonic() - start < 2 + 20


def test_a_function_that_ignores_the_alarm_is_killed_after_the_grace(own, monkeypatch):
    monkeypatch.setattr(reward, "GRACE_S", 1.0)
    with RewardPool(1, timeout_s=0.5) as pool:
        pool.submit("warm", "own_rewards:given", "x", "1")
        pool.collect()
        pool.submit("deaf", "own_rewards:deaf", "x", "")
        pool.submit("after", "exact", "a", "a")
        verdicts = pool.collect()
        assert pool.num_restarts == 1
    assert verdicts["deaf"].status == "timeout" and verdicts["after"] == OK


def test_rules_do_not_wait_for_slow_items_that_came_before(own):
    """One worker is busy with the first slow item; then the rules are due, and the other slow items last."""
    with RewardPool(1, timeout_s=10.0) as pool:
        for key in range(3):
            pool.submit(("slow", key), "own_rewards:sleeps", "0.2", "")
        for key in range(40):  # more than one window
            pool.submit(("rule", key), "exact", "a", "a")
        order = []
        while pool.poll():
            order += [k for k, v in pool._verdicts.items() if v is not None and k not in order]
        order += [k for k in pool._verdicts if k not in order]
        assert set(pool.collect().values()) == {OK}
    first_slow, second_slow = order.index(("slow", 0)), order.index(("slow", 1))
    rules = [order.index(("rule", key)) for key in range(40)]
    assert first_slow < min(rules) < max(rules) < second_slow < order.index(("slow", 2))


def test_a_full_backlog_makes_submit_wait_and_is_never_exceeded(own):
    with RewardPool(1, timeout_s=10.0, max_backlog=3) as pool:
        pool.submit("warm", "own_rewards:sleeps", "0", "")
        pool.collect()
        start, outstanding = time.monotonic(), []
        for key in range(9):
            pool.submit(key, "own_rewards:sleeps", "0.05", "")
            outstanding.append(sum(verdict is None for verdict in pool._verdicts.values()))
        waited = time.monotonic() - start
        assert len(pool.collect()) == 9
    assert max(outstanding) == 3, "it is used, and never exceeded"
    assert waited >= 6 * 0.05, "six had to be finished before the ninth was taken"


def test_latencies_are_of_every_item_from_submit_to_verdict(own):
    """In order of the verdicts; an item behind another waits for it too."""
    start = time.monotonic()
    with RewardPool(1, timeout_s=10.0) as pool:
        for key in range(3):
            pool.submit(key, "own_rewards:sleeps", "0.1", "")
        pool.submit("rule", "exact", "a", "a")
        pool.collect()
        wall, latencies = time.monotonic() - start, pool.latencies
    assert len(latencies) == 4
    first, rule, second, third = latencies
    assert 0.1 <= first and second >= 0.2 and third >= 0.3
    assert first <= second <= third <= wall and 0 < rule <= wall


def byte_level_tokenizer():
    """A BPE over bytes, so that a token may be part of a character."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    rng = random.Random(0)
    texts = [
        "".join(chr(rng.choice([97, 98, 32, 0xE9, 0x4E2D, 0x1F600])) for _ in range(40)) for _ in range(50)
    ]
    inner = Tokenizer(models.BPE())
    inner.pre_tokenizer, inner.decoder = pre_tokenizers.ByteLevel(False), decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=400, initial_alphabet=alphabet, special_tokens=["<eos>"], show_progress=False
    )
    inner.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=inner, eos_token="<eos>")


@pytest.mark.parametrize("make", [build_tokenizer, byte_level_tokenizer])
def test_workers_decode_tokens_as_the_tokenizer_does(make, own):
    """Random ids, special ones and parts of characters among them, are scored by equality with the text."""
    tokenizer, rng = make(), random.Random(1)
    ids = [[rng.randrange(len(tokenizer)) for _ in range(rng.randint(0, 12))] for _ in range(150)]
    ids += [[tokenizer.eos_token_id], [*ids[0], tokenizer.eos_token_id]]
    texts = [tokenizer.decode(row, skip_special_tokens=True) for row in ids]
    if make is byte_level_tokenizer:
        assert sum("\ufffd" in text for text in texts) > 20, "parts of characters"
    items = [("own_rewards:equal", row, text) for row, text in zip(ids, texts)]
    of_ids = [("exact", row, "abc") for row in ids]
    of_texts = [("exact", text, "abc") for text in texts]
    verdicts = scored(*items, *of_ids, *of_texts, tokenizer=decoder_json(tokenizer))
    assert verdicts[: len(ids)] == [OK] * len(ids)
    assert verdicts[len(ids) : 2 * len(ids)] == verdicts[2 * len(ids) :]


def test_token_ids_need_a_tokenizer():
    with RewardPool(1) as pool, pytest.raises(ValueError, match="token ids need a pool with a tokenizer"):
        pool.submit(0, "exact", [1, 2], "a")
