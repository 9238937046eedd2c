"""Random settings, rows and files with fixed seeds: each input is used, or refused by name."""

import copy
import json
import random
from collections.abc import Iterator
from dataclasses import asdict

import pytest
from helpers import FakeRanks, make_config

import train_rl
from data.prompts import load_prompts, load_scores
from data.tiny import build_tokenizer
from runtime import checkpoint
from runtime.checkpoint import TrainState
from runtime.config import setting_fields
from runtime.launch import one_line

SCALARS = [
    None, True, False, 0, 1, -1, 7, 2**31, 2**63, -(10**30), 0.5, -0.0, 1e-300, 1e308, float("inf"),
    float("nan"), "", " ", "text", "off", "1", "1.0", "\0", "\x1b[31m", "\ud800", "ｆ", "²", "a" * 5000,
    "../..", "{", "null",
]  # fmt: skip


def random_value(rng: random.Random, depth: int = 3) -> object:
    """Return a scalar, or a list or mapping of random values."""
    kind = rng.random() if depth else 0.0
    if kind < 0.7:
        return rng.choice(SCALARS)
    values = [random_value(rng, depth - 1) for _ in range(rng.randrange(4))]
    return values if kind < 0.85 else {str(rng.choice(SCALARS)): value for value in values}


def items_in(value: object) -> Iterator[tuple[object, object]]:
    """Yield (list or mapping, index or key) of every nested item."""
    for key in range(len(value)) if isinstance(value, list) else value if isinstance(value, dict) else ():
        yield value, key
        yield from items_in(value[key])


def changed_values(value: object, rng: random.Random) -> object:
    """Return a copy in which one or two nested values are replaced or deleted."""
    value = copy.deepcopy(value)
    for _ in range(rng.choice((1, 1, 2))):
        holder, key = rng.choice([*items_in(value)] or [([None], 0)])
        if rng.random() < 0.3:
            del holder[key]
        else:
            holder[key] = random_value(rng)
    return value


def changed_bytes(content: bytes, rng: random.Random) -> bytes:
    """Flip, truncate, repeat or insert some bytes."""
    for _ in range(rng.choice((1, 1, 1, 3))):
        start, end = sorted(rng.randrange(len(content) + 1) for _ in range(2))
        odd = rng.choice((b"\xff", b"\0", b"\n", b"[" * 5000, b"9" * 5000, b'{"step": 1}\n', b"\xe2\x80\xa8"))
        content = rng.choice((
            content[:start] + bytes(b ^ 1 << rng.randrange(8) for b in content[start : start + 1])
            + content[start + 1 :],
            content[:start], content[:end] + content[start:], content[:start] + odd + content[start:],
        )) or b" "  # fmt: skip
    return content


# ---- settings ----------------------------------------------------------------------------------------------
NAMES = sorted(setting_fields(train_rl.Config))


@pytest.mark.parametrize("seed", range(3))
def test_any_value_of_any_setting_is_accepted_or_refused_by_name(seed):
    rng = random.Random(f"settings {seed}")
    num_refused = 0
    for _ in range(100):
        name = rng.choice(NAMES)
        section, _, key = name.partition("[].")
        value = json.dumps(random_value(rng))
        value = value.replace("NaN", ".nan").replace("Infinity", ".inf").replace("e+308", ".0e+308")
        override = f"{section}=[{{path: unused, {key}: {value}}}]" if key else f"{name}={value}"
        try:
            train_rl.load_config(["data.train=[{path: unused}]", override])
        except ValueError as error:
            num_refused += 1
            assert section.rpartition(".")[2] in str(error) and len(str(error)) < 3000, override
            assert one_line(str(error)).isprintable()
    assert 30 < num_refused < 100


# ---- data --------------------------------------------------------------------------------------------------
ROWS = [
    {"prompt": "1+1=", "answer": "2", "kind": "exact", "difficulty": 1},
    {"prompt": "2+2=", "answer": 4, "kind": "numeric", "difficulty": 2, "extra": [{"a": None}]},
    {"prompt": [{"role": "user", "content": "3+3="}], "answer": 6.0, "kind": "math", "difficulty": 1.5},
]
SCORES = [
    {"model": "m", "samples": 2},
    {"prompt_sha": "0" * 64, "pass_rate": 0.5, "wrong_rate": 0.25, "mean_tokens": 3.0},
    {"prompt_sha": "1" * 64, "pass_rate": None, "mean_tokens": 3},
]


def lines_of(rows: list) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()


def changed_file(rows: list[dict], rng: random.Random) -> bytes:
    """Return the bytes of the rows with random changes, in the values of one row or in the bytes."""
    if rng.random() < 0.5:
        return changed_bytes(lines_of(rows), rng)
    number = rng.randrange(len(rows))
    return lines_of([changed_values(row, rng) if i == number else row for i, row in enumerate(rows)])


def read_rows(path):
    tokenizer = build_tokenizer()
    tokenizer.chat_template = "{{ messages[-1]['content'] }}"
    for prompt in load_prompts(path, tokenizer=tokenizer):
        (prompt.text + prompt.answer).encode()
        json.dumps(prompt.fields)


@pytest.mark.parametrize("read, rows", [(read_rows, ROWS), (load_scores, SCORES)])
@pytest.mark.parametrize("seed", range(3))
def test_any_file_of_rows_is_read_or_refused_by_its_name(read, rows, seed, tmp_path):
    path = tmp_path / "rows.jsonl"
    rng = random.Random(f"data {seed}")
    num_refused = 0
    path.write_bytes(lines_of(rows))
    read(path)
    for _ in range(150):
        path.write_bytes(content := changed_file(rows, rng))
        try:
            read(path)
        except ValueError as error:
            num_refused += 1
            assert str(path) in str(error) and len(str(error)) < 2000, content[:300]
    assert 30 < num_refused < 150


# ---- files that a resumed run reads ------------------------------------------------------------------------
def test_only_bad_lines_of_metrics_are_dropped(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(checkpoint, "save_source", lambda folder, plugins: {})
    monkeypatch.setattr(checkpoint, "versions_of", dict)
    config = make_config(f"run.dir={tmp_path}")
    file = tmp_path / "metrics.jsonl"
    rng = random.Random("rows")
    good = [{"step": step, "score": 0.5, "name": "x" * step} for step in range(1, 6)]
    for _ in range(40):
        bad = changed_bytes(lines_of(good[:1]), rng) if rng.random() < 0.5 else lines_of([random_value(rng)])
        position = rng.randrange(6)
        tail = b"\n" + lines_of(good[position:])
        file.write_bytes(lines_of(good[:position]) + bad.rstrip(b"\n") + tail)
        checkpoint.prepare_run_dir(tmp_path, config, {"state": {"step": 4, "evaluated_step": -1}})
        rows = [json.loads(line) for line in file.read_text().splitlines()]
        remaining = iter(rows)
        assert all(row in remaining for row in good[:4]), "the good rows must stay, in order"
        assert all(type(row["step"]) is int and row["step"] <= 4 for row in rows), bad
    assert "is no row of metrics" in capsys.readouterr().out


@pytest.mark.parametrize("seed", range(3))
def test_any_state_is_used_or_named(seed, tmp_path, monkeypatch):
    """Checkpoints of earlier versions have no digest; the values must still make a state."""
    FakeRanks(1).install(monkeypatch)
    monkeypatch.setattr(checkpoint.os, "sync", lambda: None)
    config = make_config(f"run.dir={tmp_path}")
    rng = random.Random(f"state {seed}")
    num_refused = 0
    checkpoint.save_checkpoint(config, asdict(TrainState(step=3)), lambda folder: None)
    file = tmp_path / "checkpoints" / "step_000003" / "state.json"
    state = json.loads(file.read_text())
    content = file.read_bytes()
    for number in range(100):
        if number % 2:
            file.write_bytes(changed_bytes(content, rng))
        else:
            file.write_text(json.dumps(changed_values(state | {"sha256": None}, rng)))
        try:
            _, record = checkpoint.find_checkpoint(config)
            assert type(TrainState(**record["state"]).step) is int
        except ValueError as error:
            num_refused += 1
            assert "step_000003" in str(error) and len(str(error)) < 20_000
    assert num_refused > 30
