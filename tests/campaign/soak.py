"""Watch one long run of short steps with all features on, and check for leaks (faults.py --soak STEPS).

Both ranks train in two stages, with zero-variance elimination, ESPO, router replay R3, weights rounded to
FP8, penalties, a scalar judge of random weights, and prompts scored by a program in the sandbox of
verifiers/code.py. Every second the soak counts memory, threads, descriptors, processes and files in /dev/shm.
The rows are written to rows.jsonl and drawn in curve.png. A killed run resumes.
"""

import contextlib
import json
import os
import time
from collections import Counter
from pathlib import Path

import psutil

from data.chat import load_tokenizer
from tests.campaign.started import Started, build_tiny, start_trainer
from tests.campaign.verdicts import LEFT_S, TINY, Failed, end_of
from tests.random_judge import save_random_judge

EVERY_S = 1.0  # seconds between two samples
MIN_LOOKS = 20  # minimum samples of a start for a verdict
GROWTH = 0.05  # allowed growth of a median, from the second quarter of a start to the last
SETTINGS = [
    "--config", "experiments/environments/tiny.yaml", "--config", "experiments/methods/zero_variance.yaml",
    "--config", "experiments/methods/replay_r3.yaml", "--config", "experiments/methods/espo.yaml",
    "rollout.prompts_per_step=4", "rollout.group_size=4", "rollout.max_new_tokens=8",
    "zero_variance.probe_size=2", "reward.overlong_buffer=4", "reward.repetition_coef=0.1",
    "reward.functions=['tests.campaign.soak:prints_the_sum']", "reward.judge=scalar",
    "rollout.fp8=simulate", "rollout.parity_mean=1", "rollout.parity_p99=10",
    "train.learning_rate=1.0e-5", "eval.every=100", "checkpoint.every=100", "checkpoint.keep=1",
    "run.log_every=100", f"data.eval=[{{path: {TINY.parent / 'test.jsonl'}, name: additions, limit: 20}}]",
]  # fmt: skip


def prints_the_sum(completion: str, answer: str) -> float:
    """Score a program that prints the completion, by the code verifier: the output must be the answer."""
    from verifiers import code

    program = f"```python\nprint({completion!r})\n```"
    reward, status, detail = code.verify(program, json.dumps({"inputs": [""], "outputs": [answer]}))
    if status == "error":  # the sandbox failed to start
        raise RuntimeError(detail)
    return reward


def settings_of(steps: int, folder: Path) -> list[str]:
    """Write the prompts, an eighth with programs, and return the settings of a run of this many steps."""
    rows = [json.loads(line) for line in (TINY.parent / "train.jsonl").read_text().splitlines()[:2000]]
    for kind, kind_rows in (("characters", rows[:1500]), ("tests.campaign.soak:prints_the_sum", rows[1500:])):
        text = "".join(json.dumps(row | {"kind": kind}) + "\n" for row in kind_rows)
        (folder / f"{kind.rpartition(':')[2]}.jsonl").write_text(text)
    train = [
        {"path": str(folder / f"{name}.jsonl"), "weight": weight}
        for name, weight in (("characters", 7), ("prints_the_sum", 1))
    ]
    stages = [
        {"name": "one update", "until": {"steps": max(1, steps // 5)}, "rollout": {"max_new_tokens": 6}},
        {"name": "two updates", "train": {"minibatches_per_step": 2}},
    ]
    settings = [f"data.train={json.dumps(train)}", f"train.num_steps={steps}"]
    settings += [f"reward.judge_path={folder / 'judge'}"]
    return [*SETTINGS, *settings, *([f"stages={json.dumps(stages)}"] if steps > 1 else [])]


def step_of(run_dir: Path) -> int:
    """Return the last step in metrics.jsonl."""
    with contextlib.suppress(OSError, ValueError, IndexError), (run_dir / "metrics.jsonl").open("rb") as file:
        file.seek(max(0, os.fstat(file.fileno()).st_size - (1 << 16)))
        return json.loads(file.read().splitlines()[-1])["step"]
    return 0


def sizes_of(run: Started) -> dict[str, float]:
    """Count MiB, threads and descriptors of each role, and processes and files of the entire run."""
    sizes: Counter = Counter()
    for role, processes in run.parts().items():
        for process in processes:
            with contextlib.suppress(psutil.Error):
                sizes[f"{role} MiB"] += process.memory_info().rss / 2**20
                sizes[f"{role} threads"] += process.num_threads()
                sizes[f"{role} descriptors"] += process.num_fds()
    sizes["processes"] = len(run.processes())
    sizes["files in /dev/shm"] = len(set(os.listdir("/dev/shm")) - run.shared_before)
    return dict(sizes)


def watch(run: Started, file: Path, every_s: float = EVERY_S) -> None:
    """Append a row to a JSONL file at every sample of a run, from its first step to its end."""
    first_step = step_of(run.run_dir)  # a resumed run first drops the rows after its checkpoint
    while run.process.poll() is None:
        step = step_of(run.run_dir)
        first_step = min(first_step, step)
        sizes = sizes_of(run) if step > first_step else {}
        if sizes.get("rank 0 MiB") and run.process.poll() is None:  # a process that ends has 0 MiB
            row = {"start": run.started, "seconds": run.seconds(), "step": step, **sizes}
            with file.open("a") as rows:
                rows.write(json.dumps({name: round(value, 2) for name, value in row.items()}) + "\n")
        time.sleep(every_s)


def must_be_flat(rows: list[dict[str, float]]) -> None:
    """Raise Failed naming each size whose median grows too much from the second quarter to the last."""
    quarter = len(rows) // 4
    grown = []
    if len(rows) < MIN_LOOKS:
        raise Failed(f"{len(rows)} looks at the run are too few, {MIN_LOOKS} are needed")
    names = {name: None for row in rows for name in row if name not in ("start", "seconds", "step")}
    for name in names:
        early, late = (
            sorted(row.get(name, 0.0) for row in quarter_rows)[quarter // 2]
            for quarter_rows in (rows[quarter : 2 * quarter], rows[-quarter:])
        )
        if late > early * (1 + GROWTH) + 1:
            grown.append(f"{name} grows from {early:.0f} to {late:.0f}")
    if grown:
        raise Failed("; ".join(grown))


def starts_of(file: Path) -> list[list[dict[str, float]]]:
    """Return the rows of each start of the run."""
    starts: dict[float, list] = {}
    for line in file.read_text().splitlines():
        row = json.loads(line)
        starts.setdefault(row["start"], []).append(row)
    return list(starts.values())


def draw(starts: list[list[dict[str, float]]], file: Path) -> None:
    """Draw memory, descriptors, threads, and the numbers of processes and files over steps."""
    import matplotlib

    matplotlib.use("Agg")  # needs no display
    from matplotlib import pyplot as plt

    figure, panels = plt.subplots(2, 2, figsize=(10, 6), sharex=True)
    names = {name: None for rows in starts for row in rows for name in row}
    for panel, ending in zip(panels.flat, ("MiB", "descriptors", "threads", ("processes", "/dev/shm"))):
        for number, name in enumerate(name for name in names if name.endswith(ending)):
            for rows in starts:
                points = [(row["step"], row[name]) for row in rows if name in row]
                label = name if rows is starts[0] else None
                panel.plot(*zip(*points), color=f"C{number}", label=label, linewidth=1)
        panel.set(ylim=(0, None), title=ending if isinstance(ending, str) else "processes, files")
        panel.legend(fontsize=7)
    for panel in panels[1]:
        panel.set_xlabel("step")
    figure.tight_layout()
    figure.savefig(file, dpi=110)
    plt.close(figure)


def soak(steps: int, folder: Path) -> tuple[str, str]:
    """Run or resume the steps in this folder, and summarise the sizes along the way."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tiny()
    save_random_judge(folder / "judge", load_tokenizer(TINY))
    (file := folder / "rows.jsonl").touch()
    run = start_trainer(folder / "run", *settings_of(steps, folder))
    try:
        watch(run, file)
        if run.process.returncode:
            raise Failed(end_of(run.log.read_text(errors="replace")))
        run.wait_until_gone(LEFT_S, "the end of the soak")
    finally:
        run.kill()
        if starts := starts_of(file):
            draw(starts, folder / "curve.png")
    if not starts:
        raise Failed("the run ended before the first look")
    for rows in [rows for rows in starts if len(rows) >= MIN_LOOKS] or [max(starts, key=len)]:
        must_be_flat(rows)
    rows = starts[-1]
    names = ("rank 0 MiB", "rank 1 MiB", "worker MiB", "rank 0 descriptors", "processes")
    marks = [rows[len(rows) * i // 5] for i in range(5)] + rows[-1:]
    shown = [f"{name} {', '.join(f'{row.get(name, 0):.0f}' for row in marks)}" for name in names]
    pace = (rows[-1]["seconds"] - rows[0]["seconds"]) / max(1, rows[-1]["step"] - rows[0]["step"])
    summary = (
        f"{steps} steps in {len(starts)} starts, the last one with {len(rows)} looks, {pace:.2f} s a step"
    )
    return "same", f"{summary}: {'; '.join(shown)}; rows and curve are in {folder}"
