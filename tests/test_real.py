"""`make real`: conversion, phases that resume, and the report with texts before and after training."""

import json

import pytest

from data import smollm2
from experiments import real
from experiments.text_quality import LABELS

ROW = {
    "prompt_index": 0, "prompt": "<user>Write about tea.", "temperature": 0.0, "sample": 0,
    "kind": "instructions",
    "messages": [{"role": "user", "content": "Write about tea."}], "source": "test",
    "answer": '[{"id": "startend:quotation"}, {"id": "punctuation:no_comma"}]',
    "difficulty": 1.0, "status": "ok", "token_ids": [5, 6, 7], "num_tokens": 3, "finish_reason": "stop",
}  # fmt: skip
BEFORE = ROW | {"completion": '"Tea, tea."', "reward": 0.5, "detail": "not met: punctuation:no_comma"}
AFTER = ROW | {"completion": '"A cup of tea ```"', "reward": 1.0, "detail": ""}


def test_finished_phases_are_skipped_and_their_seconds_are_kept(tmp_path):
    calls = []
    for _ in range(2):
        phases = real.Phases(tmp_path)
        phases.run("check", "check" in phases.seconds, lambda: calls.append("check"))
    assert calls == ["check"]
    with pytest.raises(RuntimeError, match="exit code 3"):
        phases.run("train", False, lambda: real.call("sh", "-c", "exit 3"))
    assert list(real.Phases(tmp_path).seconds) == ["check"]  # a failed phase runs again


def test_an_evaluation_takes_the_rollout_settings_of_its_run(tmp_path, monkeypatch):
    rollout = {"max_new_tokens": 77, "dtype": "float32", "kv_cache_gib": 0.5}
    (tmp_path / "config.yaml").write_text(json.dumps({"rollout": rollout | {"dtype": "auto"}}))
    (tmp_path / "versions.json").write_text(json.dumps({"rollout_dtype": "float32"}))
    commands = []
    monkeypatch.setattr(real, "call", lambda *command: commands.append(list(command)))
    real.evaluate(tmp_path / "model", tmp_path / "after_completions.jsonl")
    for option, value in (("--max-new-tokens", 77), ("--dtype", "float32"), ("--kv-cache-gib", 0.5)):
        assert commands[0][commands[0].index(option) + 1] == value


def test_a_small_disk_is_refused_before_anything_starts(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "DISK_BYTES", 1e18)
    monkeypatch.setattr(real, "MEMORY_BYTES", 0)
    with pytest.raises(ValueError, match="run.dir"):
        real.announce(tmp_path)


def test_little_memory_is_refused_before_a_download(tmp_path, monkeypatch):
    monkeypatch.setattr(real, "MEMORY_BYTES", 1e18)
    with pytest.raises(ValueError, match="GB of memory"):
        real.announce(tmp_path)


def test_the_report_shows_texts_and_figures_of_both_models(tmp_path):
    for name, row in (("before", BEFORE), ("after", AFTER)):
        (tmp_path / f"{name}_completions.jsonl").write_text(json.dumps(row) + "\n")
    quality = dict.fromkeys(LABELS, 0.25)
    (tmp_path / "quality.json").write_text(json.dumps({"before": quality, "after": quality}))
    summary = {
        "accuracy_before": 0.6, "num_steps": 3, "generated_tokens": 99, "peak_rss_bytes": 2**34,
        "seconds_by_phase": {"rollout": 60.0, "log": 0.1},
    }  # fmt: skip
    (tmp_path / "summary.json").write_text(json.dumps(summary))
    (tmp_path / "versions.json").write_text('{"commit": "c0ffee"}')
    data = real.record_of(tmp_path)
    assert data["versions"] == {"commit": "c0ffee"} and "4-bit" in data["summary"]["start"]
    assert (data["summary"]["accuracy_before"], data["summary"]["accuracy_after"]) == (0, 1)
    report = real.report_text(data)
    for words in (
        "| steps |  | 3 |",
        "16.0 GiB",
        "(rollout 1.0)",
        "Tea, tea.",
        "A cup of tea",
        "Write about tea.",
        "| `punctuation:no_comma` | 1 | 0 | 1 |",
        "| `startend:quotation` | 1 | 1 | 1 |",
    ):
        assert words in report
    assert report.count("```") == 4  # the fence in a text opens no block


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="gpt2"):
        smollm2.convert(tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_text_without_words_keeps_no_instruction():
    """Its verdict names no instruction, because there is nothing to judge."""
    empty = ROW | {"completion": "", "reward": 0.0, "status": "no_answer", "detail": ""}
    expected = {"startend:quotation": [2, 3], "punctuation:no_comma": [1, 3]}
    assert real.kept_by_check([BEFORE, AFTER, empty]) == expected
