"""`make real`: conversion, phases that resume, and the report with texts before and after training."""

import json
import os
import subprocess
import sys

import psutil
import pytest
from helpers import ROOT, make_config

from data import smollm2
from experiments import evaluate, real

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


def test_a_phase_ends_with_the_script():
    """SIGTERM to the script alone; the phase first waits until the script handles it."""
    caught = "int(open(f'/proc/{os.getppid()}/status').read().split('SigCgt:')[1].split()[0], 16)"
    phase = f"import os, time\nwhile not {caught} >> 14 & 1: pass\n"
    phase += "print(os.getpid(), flush=True)\ntime.sleep(900)"
    script = f"import sys\nfrom experiments import real\nreal.call(sys.executable, '-c', {phase!r})"
    command = [sys.executable, "-c", script]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(command, cwd=ROOT, text=True, **pipes) as process:
        pid = int(process.stdout.readline())
        process.terminate()
        assert "exit code -15" in process.communicate()[1] and not psutil.pid_exists(pid)


def test_another_start_is_refused(capsys):
    with pytest.raises(SystemExit):
        real.parse_args(["model.path=mine"])
    assert "model.path" in capsys.readouterr().err


@pytest.mark.parametrize("chat", ["never", "always"])
def test_an_evaluation_takes_the_settings_of_its_run(chat, tmp_path, monkeypatch):
    """After tasks the model also answers instructions, so that its texts can be measured."""
    rollout = {
        "max_new_tokens": 77,
        "dtype": "auto",
        "kv_cache_gib": None,
        "temperature": 0.7,
        "stop": ["\n"],
    }
    sets = [{"path": "held_out.jsonl"}, {"path": "more.jsonl"}]
    data = {"chat": chat, "answer_prefix": "\nAnswer:", "eval": sets}
    config = make_config().model_dump(mode="json")
    for section, values in {"rollout": rollout, "data": data, "reward": {"binary": True}}.items():
        config[section] |= values
    config["eval"] |= {"num_samples": 4}
    config["train"]["seed"] = 3
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").touch()
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    (tmp_path / "versions.json").write_text(json.dumps({"rollout_dtype": "float32"}))
    commands = []
    monkeypatch.setattr(real, "call", lambda *command: commands.append(list(map(str, command))))
    assert not real.is_evaluated(model, tmp_path, "after")
    real.evaluate(model, tmp_path, "after")
    assert len(commands) == (2 if chat == "never" else 1)
    start = next(i for i, word in enumerate(commands[-1]) if word.endswith("evaluate.py"))
    args = evaluate.parse_args(commands[-1][start + 1 :])
    read = evaluate.read_settings(args, 2048)
    assert (args.samples, args.seed, args.completions) == (4, 3, tmp_path / "after_completions.jsonl")
    assert [source.path for source in read.data.eval] == ["held_out.jsonl", "more.jsonl"]
    assert read.data.chat == chat and read.data.answer_prefix == "\nAnswer:" and read.reward.binary
    expected = rollout | {"dtype": "float32", "max_prompt_tokens": config["rollout"]["max_prompt_tokens"]}
    assert {name: getattr(read.rollout, name) for name in expected} == expected
    assert real.is_evaluated(model, tmp_path, "after") and not real.is_evaluated(model, tmp_path, "before")
    config["eval"]["num_samples"] = 8  # a run may be extended with another evaluation
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    assert not real.is_evaluated(model, tmp_path, "after")
    config["data"]["eval"] = []
    (tmp_path / "config.yaml").write_text(json.dumps(config))
    with pytest.raises(ValueError, match="data.eval"):
        real.evaluate(model, tmp_path, "after")


def test_prompts_of_other_options_are_made_again(tmp_path, monkeypatch):
    commands = []
    for name in ("PROMPTS", "TASKS"):
        monkeypatch.setattr(real, name, tmp_path / name)
        (tmp_path / name).mkdir()
    monkeypatch.setattr(real, "call", lambda *command: commands.append(command))
    assert not real.has_prompts("tasks") and not real.has_prompts("instructions")
    real.make_prompts("tasks")
    assert [command[2] for command in commands] == ["data.instructions", "data.reasoning_gym"]
    for folder in (real.TASKS, real.PROMPTS):
        assert not real.has_prompts("tasks"), "rows are missing"
        for name in ("train", "test"):
            (folder / f"{name}.jsonl").touch()
    assert real.has_prompts("tasks") and real.has_prompts("instructions")
    monkeypatch.setattr(real, "TASK_OPTIONS", ["--tasks", "gcd"])
    assert not real.has_prompts("tasks") and real.has_prompts("instructions")
    os.utime(real.PROMPTS / "test.jsonl", (0, 0))
    assert not real.has_prompts("instructions"), "older than the command that makes them"
    assert real.has_prompts("instructions", is_started=True)


@pytest.mark.parametrize("disk, memory, named", [(1e18, 0, "run.dir"), (0, 1e18, "GB of memory")])
def test_a_small_disk_or_memory_is_refused_before_a_download(disk, memory, named, tmp_path, monkeypatch):
    monkeypatch.setattr(real, "DISK_BYTES", disk)
    monkeypatch.setattr(real, "MEMORY_BYTES", memory)
    with pytest.raises(ValueError, match=named):
        real.announce(tmp_path, 25)


def write_run(folder, rows):
    """Write what the phases of a run leave; rows: {"before": rows, "after": rows}."""
    for name, of_name in rows.items():
        (folder / f"{name}_completions.jsonl").write_text("".join(json.dumps(row) + "\n" for row in of_name))
    quality = dict.fromkeys(real.ROWS, 0.25)
    (folder / "quality.json").write_text(json.dumps({"before": quality, "after": quality}))
    summary = {
        "accuracy_before": 0.6, "num_steps": 3, "generated_tokens": 99, "peak_rss_bytes": 2**34,
        "seconds_by_phase": {"rollout": 60.0, "log": 0.1},
    }  # fmt: skip
    (folder / "summary.json").write_text(json.dumps(summary))
    (folder / "versions.json").write_text('{"commit": "c0ffee"}')


def test_the_report_shows_texts_and_figures_of_both_models(tmp_path):
    write_run(tmp_path, {"before": [BEFORE], "after": [AFTER]})
    data = real.record_of(tmp_path)
    assert data["versions"] == {"commit": "c0ffee"} and "4-bit" in data["summary"]["start"]
    assert (data["summary"]["accuracy_before"], data["summary"]["accuracy_after"]) == (0, 1)
    report = real.report_text(data)
    words = ("| steps |  | 3 |", "16.0 GiB", "(rollout 1.0)", "Tea, tea.", "A cup of tea", "Write about tea.")
    assert [text for text in words if text not in report] == []
    assert report.count("```") == 4  # the fence in a text opens no block


def test_a_gain_on_a_task_counts_above_the_best_constant(tmp_path, capsys):
    """Two prompts of gcd with equal references and one of lcm; a greedy completion and two samples each."""
    answers = {0: ("gcd", "4"), 1: ("gcd", "4"), 2: ("lcm", "12")}

    def rows(rewards):
        return [
            ROW | {"prompt_index": index, "task": task, "sample": sample, "temperature": float(sample > 0),
                   "kind": "reasoning_gym", "messages": None, "completion": f"{task} {sample}",
                   "reward": reward, "answer": json.dumps({"task": task, "answer": answer, "metadata": {}})}
            for (index, (task, answer)), of_prompt in zip(answers.items(), rewards)
            for sample, reward in enumerate(of_prompt)
        ]  # fmt: skip

    write_run(tmp_path, {"before": rows([(0, 1, 0), (0, 0, 0), (0, 0, 0)]), "after": rows([(1, 1, 1)] * 3)})
    data = real.record_of(tmp_path)
    summary = data["summary"]
    assert summary["accuracy_by_task_before"] == {"gcd": 0, "lcm": 0}
    assert summary["pass_at_1_by_task_before"] == {"gcd": 0.25, "lcm": 0}
    assert summary["best_constant_by_task"] == {"gcd": 1, "lcm": 1}
    assert summary["pass_at_1_before"] == pytest.approx(1 / 6) and summary["pass_at_1_after"] == 1
    assert real.task_lines(data)[2:] == [
        "| `gcd` | 2 | 1.00 | 0.25 | 1.00 | 1.00 | 0.00 |",
        "| `lcm` | 1 | 1.00 | 0.00 | 1.00 | 1.00 | 0.00 |",
    ]
    assert [text["before"]["completion"] for text in data["texts"]] == ["gcd 0", "lcm 0"]
    summary["pass_at_1_by_task_after"] = {"gcd": None, "lcm": None}  # with eval.num_samples=0
    assert real.task_lines(data)[2] == "| `gcd` | 2 | 1.00 | 0.25 |  | 1.00 |  |"
    data["quality"]["after"]["repeated_4grams"] = None  # no text has four words
    changes = ({"seed": 0}, {"seed": 1}, {"seed": 1}, {"seed": 2, "settings": ["train.num_steps=9"]})
    for name, change in zip("abcd", changes):
        (tmp_path / name).mkdir()
        record = data | {"settings": [], "versions": {"data": {"train": "1f"}}} | change
        real.write_json(tmp_path / name / "record.json", record)

    def collect(*names):
        file = tmp_path / "seeds.json"
        real.main(real.parse_args(["--json", str(file), "--collect", *(str(tmp_path / n) for n in names)]))
        return json.loads(file.read_text())

    assert [record["seed"] for record in collect("a", "b")] == [0, 1]
    printed = capsys.readouterr().out
    assert "3 held-out prompts, 2 seeds" in printed and "| 0.25 |  |" in printed
    with pytest.raises(ValueError, match="train.seed"):
        collect("a", "b", "c")
    with pytest.raises(ValueError, match="d has other settings"):
        collect("a", "d")


def test_a_gguf_file_of_another_architecture_is_refused(tmp_path):
    from gguf import GGUFWriter

    writer = GGUFWriter(tmp_path / "model.gguf", "gpt2")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.close()
    with pytest.raises(ValueError, match="gpt2"):
        smollm2.convert(tmp_path / "model.gguf", tmp_path / "model")
    assert not (tmp_path / "model").exists()
