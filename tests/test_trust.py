"""Sockets of a job, links in a run folder, and other ways in which a stranger could reach a run."""

import gzip
import io
import json
import math
import os
import stat
import subprocess
import typing
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import pyarrow.parquet
import pytest
from conftest import ROOT, SMALL, torchrun_command, trained

from data import chat, formats
from data.chat import ChatTemplate, load_tokenizer
from judges import refuse_kernels_of_the_hub
from runtime import machine
from runtime.agreement import digests_of_input
from runtime.checkpoint import (
    TrainState,
    digest_of_record,
    list_checkpoints,
    lock_run_dir,
    read_state,
    save_checkpoint,
    wrong_counters,
)
from runtime.machine import is_loopback
from runtime.stages import StagePosition
from tests import preloaded
from tests.patience import limit
from verifiers.tools import refuse_other_types

START = ROOT / "experiments" / "starts" / "tiny"

SPY = """
import json, os, psutil

def gain(inputs, file):
    process = psutil.Process()
    if "TORCHELASTIC_RUN_ID" in os.environ:
        process = process.parent()
    addresses = [
        (connection.laddr.ip, member.name())
        for member in [process, *process.children(recursive=True)]
        for connection in member.net_connections("inet")
        if connection.status == "LISTEN" or not connection.raddr
    ]
    with open(f"{file}_{os.environ['RANK']}", "w") as listed:
        json.dump(addresses, listed)
    return inputs.ratio * inputs.advantages, {}
"""


def runtime_torchrun(num_ranks: int, *arguments: object, **options):
    """Run a script by `python -m runtime.torchrun`, as experiments/run.py does."""
    command = torchrun_command(num_ranks, *arguments)
    command[command.index("torch.distributed.run")] = "runtime.torchrun"
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=limit(240))


@pytest.mark.slow
@pytest.mark.parametrize(
    "start, ranks", [(runtime_torchrun, 2), (preloaded.run, 2), (preloaded.run, 0)],
    ids=["torchrun", "two ranks without torchrun", "one process"],
)  # fmt: skip
def test_a_job_on_one_node_listens_on_loopback_only(start, ranks, demo_model, tmp_path):
    (tmp_path / "spy.py").write_text(SPY)
    done = trained(
        *SMALL, "train.num_steps=1", "eval.every=0", "checkpoint.every=0", f"run.dir={tmp_path}/run",
        f"algorithm.gain={tmp_path}/spy.py:gain", f"algorithm.gain_args={{file: {tmp_path}/addresses}}",
        f"model.ep_size={max(1, ranks)}", ranks=ranks, start=start,
    )  # fmt: skip
    files = sorted(tmp_path.glob("addresses_*"))
    assert len(files) == max(1, ranks)
    addresses = [entry for file in files for entry in json.loads(file.read_text())]
    assert ranks == 0 or addresses, "ranks connect to each other"
    assert [entry for entry in addresses if not is_loopback(entry[0])] == []
    assert "listens on all interfaces" not in done.stdout + done.stderr


@pytest.mark.parametrize("host", ["127.0.0.1", "0.0.0.0", "::1", "::"])
def test_a_store_that_others_reach_is_told(host, monkeypatch):
    family = machine.socket.AF_INET6 if ":" in host else machine.socket.AF_INET
    with machine.socket.create_server((host, 0), family=family) as server:
        port = server.getsockname()[1]
        assert (host, port) in machine.listening_addresses()
        monkeypatch.setenv("MASTER_PORT", str(port))
        assert (machine.open_store() is not None) is not is_loopback(host)
        monkeypatch.setenv("WORLD_SIZE", "4")
        monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
        assert machine.open_store() is None, "several nodes need the network"


@pytest.mark.parametrize("name, value", [
    ("GLOO_SOCKET_IFNAME", "eth0"), ("NCCL_SOCKET_IFNAME", "^docker0"), ("VLLM_HOST_IP", "10.0.0.7"),
])  # fmt: skip
def test_variables_that_open_sockets_to_others_are_told(name, value, monkeypatch):
    monkeypatch.setenv("MASTER_PORT", "0")
    monkeypatch.setenv(name, value)
    assert f"{name}={value}" in machine.open_store()
    monkeypatch.setenv("WORLD_SIZE", "4")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert machine.open_store() is None


@pytest.mark.parametrize("kind", ["pipe", "device", "broken link", "folder"])
def test_what_is_no_file_is_not_opened(kind, tmp_path):
    for name in ("rows.jsonl", "config.json"):
        path = tmp_path / name
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to("/dev/zero" if kind == "device" else tmp_path / "nowhere")
    with pytest.raises(ValueError, match="(rows.jsonl|config.json): no file"):
        formats.load_tables(str(tmp_path))
    with pytest.raises(ValueError, match="model.path: .*config.json is no file"):
        digests_of_input("model.path", tmp_path)


# ---- links in a run folder ---------------------------------------------------------------------------------
PLACES = (
    "checkpoints/step_000001.tmp", "checkpoints/step_000001/state.json", "checkpoints/step_000001",
    "checkpoints",
    "checkpoints/step_000001/model/config.json", "source", "metrics.jsonl", "config.yaml.partial", "model",
    "nonfinite", "stacks/rank_0.txt", "earlier_1/metrics.jsonl", "lock", "tensorboard/x/y",
)  # fmt: skip


@pytest.mark.parametrize("kind", ["link", "dangling link", "hard link", "pipe", "socket"])
@pytest.mark.parametrize("place", PLACES)
def test_a_run_refuses_a_folder_that_leads_elsewhere(place, kind, tmp_path):
    outside = tmp_path / "outside"
    outside.write_text("mine")
    path = tmp_path / "run" / place
    path.parent.mkdir(parents=True)
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "hard link":
        path.hardlink_to(outside)
    else:
        path.symlink_to(outside if kind == "link" else tmp_path / "nowhere")
    with pytest.raises(ValueError, match=f"run.dir: {path} is a symbolic link"):
        lock_run_dir(tmp_path / "run")
    assert outside.read_text() == "mine" and not (tmp_path / "nowhere").exists()


def test_hard_links_among_the_files_of_a_run_are_its_own(tmp_path):
    """The folder itself may be a symbolic link."""
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "a").write_text("evaluate.py links the newest checkpoint")
    (tmp_path / "run" / "b").hardlink_to(tmp_path / "run" / "a")
    (tmp_path / "link").symlink_to(tmp_path / "run")
    assert not lock_run_dir(tmp_path / "link").closed


def test_a_checkpoint_is_not_written_through_a_link_that_came_later(tmp_path, one_rank):
    (tmp_path / "outside").mkdir()
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    (tmp_path / "run" / "checkpoints" / "step_000001.tmp").symlink_to(tmp_path / "outside")
    config = SimpleNamespace(run=SimpleNamespace(dir=tmp_path / "run"))
    with pytest.raises(RuntimeError, match="step_000001"):
        save_checkpoint(config, {"step": 1}, lambda folder: (folder / "weights").write_text("w"))
    assert not any((tmp_path / "outside").iterdir())
    assert list_checkpoints(tmp_path / "run" / "checkpoints") == []


# ---- what strangers write ----------------------------------------------------------------------------------
@pytest.mark.parametrize("name, value", [
    ("step", -1), ("step", 1.5), ("step", "3"), ("step", True), ("consumed_prompts", -4),
    ("abs_dlogp_sum", math.nan), ("charged_tokens", math.inf), ("evaluated_step", -2), ("number", -1),
])  # fmt: skip
def test_a_counter_that_no_run_writes_is_refused(name, value, tmp_path):
    assert wrong_counters(asdict(TrainState())) == []
    of_stage = {name: value} if name in asdict(StagePosition()) else {}
    state = vars(TrainState(step=3)) | {"stage": of_stage} | ({} if of_stage else {name: value})
    record = {"topology": {}, "config": {}, "state": state}
    record["sha256"] = digest_of_record(record)
    (tmp_path / "state.json").write_text(json.dumps(record))
    _, (problem,) = read_state(tmp_path)
    assert name in problem


def example(
    count: int, share: float = 1.0, names: list[str] | None = None, deep: bool | None = None, x=None,
    old: typing.List = (), table: typing.Dict | None = None,  # noqa: UP006
):  # fmt: skip
    """A tool."""


@pytest.mark.parametrize("arguments", [
    {"count": 3}, {"count": 3, "share": 2}, {"count": 3, "names": ["a"]}, {"count": 3, "names": None},
    {"count": 0, "deep": True, "x": {"any": math.nan}}, {"count": 10**30, "old": [1, "a"], "table": {"a": 1}},
])  # fmt: skip
def test_arguments_of_the_right_type_reach_a_tool(arguments):
    assert refuse_other_types(example, arguments) is None


@pytest.mark.parametrize("arguments", [
    {"count": math.nan}, {"count": 3.0}, {"count": "3"}, {"count": True}, {"count": None},
    {"count": 3, "share": math.inf}, {"count": 3, "share": "1"}, {"count": 3, "names": "a"},
    {"count": 3, "names": [1]}, {"count": 3, "deep": 1},
])  # fmt: skip
def test_arguments_of_another_type_are_told(arguments):
    with pytest.raises(ValueError, match=f"{[*arguments][-1]} is"):
        refuse_other_types(example, arguments)


@pytest.mark.parametrize("suffix", ["jsonl.gz", "csv.gz", "parquet.gz"])
def test_a_compressed_file_has_a_bound(suffix, tmp_path, monkeypatch):
    monkeypatch.setattr(formats, "MIN_LIMIT", 1000)
    file = tmp_path / f"rows.{suffix}"
    file.write_bytes(gzip.compress(b" " * 10**6))
    with pytest.raises(ValueError, match="decompress it first"):
        formats.read_file(str(file))
    file.write_bytes(gzip.compress(b"PAR1" * 200))
    assert len(formats.read_bytes(str(file))) == 800


@pytest.mark.parametrize("columns", [{"a": ["x" * 10**6]}, {"a": ["text"] * 10**5}, {"a": [[0] * 10**6]}])
@pytest.mark.parametrize("suffix", ["parquet", "parquet.gz"])
def test_a_parquet_file_has_a_bound(columns, suffix, tmp_path, monkeypatch):
    file = tmp_path / f"rows.{suffix}"
    content = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table(columns), content, compression="zstd")
    file.write_bytes(gzip.compress(content.getvalue()) if suffix.endswith("gz") else content.getvalue())
    assert formats.read_file(str(file)) == [{"a": value} for value in columns["a"]]
    monkeypatch.setattr(formats, "MIN_LIMIT", 10**4)
    with pytest.raises(ValueError, match="when decompressed"):
        formats.read_file(str(file))


ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
LONG = "{% for a in range(2000) %}{{ 'x' * 10000 }}{% endfor %}"


@pytest.mark.parametrize("template", [ENDLESS, LONG])
def test_a_chat_template_has_a_bound(template, tmp_path, monkeypatch):
    monkeypatch.setattr(chat, "MAX_RENDER_S", 0.3)
    tokenizer = load_tokenizer(START / "model")
    tokenizer.chat_template = template
    with pytest.raises(ValueError, match="chat template"):
        ChatTemplate(tokenizer).render([{"role": "user", "content": "1"}], "row 1")


@pytest.mark.parametrize("config", [
    {"_attn_implementation": "kernels-community/flash-attn"}, {"attn_implementation": "a/b"},
    {"text_config": {"_experts_implementation": "a/b@main:f"}}, {"_attn_implementation_internal": "a/b"},
])  # fmt: skip
@pytest.mark.parametrize("indent", [None, 1])
def test_a_judge_that_asks_for_code_of_the_hub_is_refused(config, indent, tmp_path):
    file: Path = tmp_path / "config.json"
    file.write_text(json.dumps({"_name_or_path": "org/model", "_attn_implementation": "sdpa"}, indent=indent))
    refuse_kernels_of_the_hub(str(tmp_path))
    file.write_text(json.dumps({"_name_or_path": "org/model"} | config, indent=indent))
    with pytest.raises(ValueError, match="hub"):
        refuse_kernels_of_the_hub(str(tmp_path))
