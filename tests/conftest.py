"""Shared fixtures: quiet libraries, ways to run a script on several ranks, and an undisturbed run."""

import atexit
import filecmp
import gc
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import psutil
import pytest

from tests import preloaded
from tests.patience import limit

ROOT = Path(__file__).resolve().parents[1]
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
SHARED_DATA = ROOT.parent / "shared" / "data"  # public sets as JSONL; tests skip if it is missing

# A test that starts a program of the operating system names the program by this marker. On a machine without
# the program, the test is skipped, and pytest's last lines count the skipped tests by program.
needs_program = pytest.mark.needs_program
NEEDS_BUBBLEWRAP = needs_program(name="bubblewrap", command="bwrap")
MISSING = "missing program: "  # begins the reason of every such skip; the program's name follows


def hide_leak_reports() -> None:
    """Discard the standard error of this process from here on; the exit code does not change.

    Triton's bindings use nanobind, which prints 30 lines about leaked types when an interpreter that has run
    vLLM exits. Triton's own compile workers hide the report the same way, since Triton has no switch for it.
    """
    sys.stderr.flush()
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


@pytest.fixture(autouse=True)
def unwarned() -> None:
    """Forget which kinds of warnings earlier tests have printed."""
    if checks := sys.modules.get("runtime.checks"):
        checks.warned.clear()


def pytest_configure() -> None:
    """Register the exit handler first, because Python calls handlers in reverse order."""
    atexit.register(hide_leak_reports)


@pytest.hookimpl(tryfirst=True)  # before -m looks at the marks
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Distribute the slow tests over the two processes of `make test`.

    The process of the mark `ranks` runs tests that use the demo's model, and files that start ranks, because
    several files share runs, starts and the server of tests/preloaded.py. The other process runs the
    remaining tests. A slow test that shares nothing may name its process, `slow(process="others")` or
    `slow(process="ranks")`, so that both processes take equally long. Only one process makes the demo's
    model, so the process `ranks` begins with tests that need the model and the other process begins without.
    """
    for item in items:
        skip_without_programs(item)
        slow = item.get_closest_marker("slow")
        starts_ranks = any(
            hasattr(item.module, name) for name in ("preloaded", "torchrun", "train", "trained", "RankSuite")
        )
        chosen = slow.kwargs.get("process") if slow else "others"
        if chosen == "ranks" or (chosen is None and (starts_ranks or needs_demo(item))):
            item.add_marker("ranks")
    late = {item.module for item in items if needs_demo(item)}
    items.sort(key=lambda item: (item.module in late) != (item.get_closest_marker("ranks") is not None))


def pytest_collection_finish() -> None:
    """Exempt libraries and collected tests from garbage collection: a tenth of the time of quick tests."""
    gc.collect()
    gc.freeze()


def skip_without_programs(item: pytest.Item) -> None:
    """Skip a test if this machine lacks a program that a `needs_program` marker names."""
    for marker in item.iter_markers("needs_program"):
        name = marker.kwargs["name"]
        command = marker.kwargs.get("command", name)
        if shutil.which(command) is None:
            item.add_marker(pytest.mark.skip(reason=f"{MISSING}{name} ({command} is not on PATH)"))


def pytest_terminal_summary(terminalreporter) -> None:
    """Print in one line how many tests were skipped for each missing program."""
    counts: Counter[str] = Counter()
    for report in terminalreporter.stats.get("skipped", []):
        if match := re.search(rf"{MISSING}(\S+)", str(report.longrepr)):
            counts[match[1]] += 1
    if counts:
        programs = ", ".join(f"{name} {count}" for name, count in counts.most_common())
        terminalreporter.write_line(f"skipped for missing programs: {programs}")


def needs_demo(item: pytest.Item) -> bool:
    """Say whether a test uses the demo's model."""
    return "demo_model" in item.fixturenames


def torchrun(
    num_ranks: int, *arguments: object, timeout_s: float = 240, **options
) -> subprocess.CompletedProcess:
    """Run a script by torchrun itself, as a user does. preloaded.run() starts six times as fast.

    timeout_s: on a quiet machine.
    """
    address = ["--master-addr=127.0.0.1", f"--master-port={free_port()}"]
    command = torchrun_command(num_ranks, *address, *arguments)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)} | options.pop("env", {})
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=limit(timeout_s),
        **options,
    )


def alive(pid: int) -> bool:
    """Tell whether a process runs, and is no zombie."""
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def torchrun_command(num_ranks: int, *arguments: object) -> list[str]:
    launcher = [sys.executable, "-m", "torch.distributed.run", f"--nproc-per-node={num_ranks}"]
    return [*launcher, *map(str, arguments)]


def two_agents(num_ranks: int, *arguments: object, timeout_s: float = 240) -> subprocess.CompletedProcess:
    """Run a script as on two nodes, both on this machine: each agent of torchrun starts half of the ranks."""
    port = free_port()
    deadline = time.monotonic() + limit(timeout_s)
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    agents = []
    for node in range(2):
        node_options = ["--nnodes=2", f"--node-rank={node}"]
        address = ["--master-addr=127.0.0.1", f"--master-port={port}"]
        command = torchrun_command(num_ranks // 2, *node_options, *address, *arguments)
        stdout, stderr = (tempfile.TemporaryFile("w+") for _ in range(2))
        agent = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=stdout, stderr=stderr)
        agents.append((agent, stdout, stderr))
    try:
        codes = [agent.wait(max(0.0, deadline - time.monotonic())) for agent, _, _ in agents]
    finally:
        for agent, _, _ in agents:
            agent.kill()
    texts = ["".join(f.seek(0) or f.read() for f in files) for files in list(zip(*agents))[1:]]
    return subprocess.CompletedProcess(arguments, max(codes, key=abs), *texts)


TWO_ENDS = ROOT / "data" / "built" / "two_ends" / "model"  # its generation_config.json has two end tokens
SMALL = [  # six quick steps with two checkpoints before the last one
    "--config", "experiments/environments/tiny.yaml", f"model.path={TWO_ENDS}", "train.num_steps=6",
    "rollout.prompts_per_step=8", "rollout.group_size=4", "checkpoint.every=2", "eval.every=2",
    "eval.num_samples=2", "run.log_every=1",
    "data.train=[{path: data/built/tiny/train.jsonl, limit: 400}]",
    "data.eval=[{path: data/built/tiny/test.jsonl, name: additions, limit: 20}]",
]  # fmt: skip


def train(*settings, ranks=2, start=preloaded.run, **options) -> subprocess.CompletedProcess:
    """Run train_rl.py on some ranks."""
    return start(ranks, ROOT / "train_rl.py", *settings, **options)


def trained(*settings, **options) -> subprocess.CompletedProcess:
    """Run train_rl.py, which has to succeed; options: see train()."""
    done = train(*settings, **options)
    assert done.returncode == 0, done.stderr[-3000:]
    return done


@pytest.fixture(scope="session")
def demo_model():
    """Provide the demo's model with the committed weights, and a copy with a second end token, digit 7.

    No test may train this model anew: on another processor its weights would change between tests.
    """
    start = ROOT / "experiments" / "starts" / "tiny"
    files = ("model/model-00001-of-00001.safetensors", "train.jsonl", "test.jsonl")
    equal, _, _ = filecmp.cmpfiles(start, ROOT / "data" / "built" / "tiny", files, shallow=False)
    if len(equal) < len(files):
        command = [sys.executable, "-m", "data.tiny", "--model", str(start / "model")]
        subprocess.run(command, cwd=ROOT, check=True, timeout=limit(600))
    TWO_ENDS.mkdir(parents=True, exist_ok=True)
    for file in (ROOT / "data" / "built" / "tiny" / "model").iterdir():
        if not (TWO_ENDS / file.name).exists():  # a link of a moved checkout leads nowhere
            (TWO_ENDS / file.name).unlink(missing_ok=True)
            (TWO_ENDS / file.name).symlink_to(os.path.relpath(file, TWO_ENDS))
    vocabulary = json.loads((TWO_ENDS / "tokenizer.json").read_text())["model"]["vocab"]
    ends = {"eos_token_id": [vocabulary["<eos>"], vocabulary["7"]]}
    (TWO_ENDS / "generation_config.json").write_text(json.dumps(ends))


@pytest.fixture(scope="session")
def undisturbed(demo_model, tmp_path_factory) -> Path:
    """Return the folder of an uninterrupted run of SMALL, with experts spread over two nodes.

    Tests compare this run with runs on one node, because the number of nodes changes no bit.
    """
    run_dir = tmp_path_factory.mktemp("run") / "undisturbed"
    trained(*SMALL, f"run.dir={run_dir}", num_nodes=2)
    return run_dir


@pytest.fixture(scope="session")
def python_stand_in():
    """Provide a program that scripts start in place of Python, without its slow imports."""
    with preloaded.python_stand_in() as file:
        yield file


@pytest.fixture
def ranks(monkeypatch):
    """Return ranks(N), which makes torch.distributed consist of N threads of this process."""
    from fake_ranks import FakeRanks

    return lambda world_size: FakeRanks(world_size).install(monkeypatch)


@pytest.fixture
def one_rank(ranks):
    """Make this process the only rank, for collective functions."""
    ranks(1)


@pytest.fixture
def float64():
    """Make float64 the default dtype of tensors during a test."""
    import torch

    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def edit(file: Path, old: str, new: str) -> None:
    """Replace the first occurrence of a text in a file that has the text."""
    text = file.read_text()
    assert old in text
    file.write_text(text.replace(old, new, 1))


def git(folder: Path, *words: str) -> str:
    """Run git in a folder and return its output."""
    identity = ["-c", "user.name=test", "-c", "user.email=test@localhost"]
    command = ["git", "-C", str(folder), *identity, *words]
    outer = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}  # of a hook
    env = outer | {"GIT_CONFIG_GLOBAL": os.devnull, "GIT_CONFIG_NOSYSTEM": "1"}  # such as signed commits
    done = subprocess.run(command, capture_output=True, text=True, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def commit_all(folder: Path) -> str:
    """Commit all files of a repository and return the digest of the commit."""
    git(folder, "add", "--all")
    git(folder, "commit", "-q", "--allow-empty", "-m", "next")
    return git(folder, "rev-parse", "HEAD")


def assert_close(actual, expected, rtol=1e-10, atol=1e-13):
    import torch

    torch.testing.assert_close(torch.as_tensor(actual), torch.as_tensor(expected), rtol=rtol, atol=atol)


def save_small_moe(folder: Path) -> None:
    """Save a random Qwen3-MoE of 24 tokens, 2 layers and 4 experts by transformers, always the same."""
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=24, hidden_size=16, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=8, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=8, norm_topk_prob=True,
        initializer_range=0.3, tie_word_embeddings=False, max_position_embeddings=64,
    )  # fmt: skip
    Qwen3MoeForCausalLM(config).save_pretrained(folder)
