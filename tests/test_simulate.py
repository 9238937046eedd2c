"""experiments/bench/simulate.py against a simulation token by token; what must hold for any schedule."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from itertools import product

import numpy as np
import pytest
from conftest import ROOT

from experiments.bench import simulate as module
from experiments.bench.simulate import PLACES, EngineModel, simulate
from experiments.bench.workload import Recipe, Workload

SCHEDULES = ("arrival", "longest_first", "oracle")


# ------------------------------------------------------------------------------------------------------------
# Token by token, with lists only
# ------------------------------------------------------------------------------------------------------------
def deal(sizes, work, num_ranks):
    """Prompts of each rank: the largest first, to the rank whose larger sum stays the least."""
    held, dealt = [(0, 0)] * num_ranks, [[] for _ in range(num_ranks)]
    for prompt in sorted(range(len(sizes)), key=lambda i: (-max(sizes[i], work[i]), i)):
        after = [(tokens + sizes[prompt], verdicts + work[prompt]) for tokens, verdicts in held]
        rank = min(range(num_ranks), key=lambda r: (max(after[r]), sum(after[r]), r))
        held[rank] = after[rank]
        dealt[rank].append(prompt)
    return [sorted(prompts) for prompts in dealt]


def run_by_token(jobs, engine, choose, decode_seconds=0.0, shared=0):
    """jobs: dicts with group, tokens, prompt. Returns (seconds in steps, [(when, job) that ended])."""
    for job in jobs:
        job["got"], job["ended"] = 0, False
    waiting, running, seen, ended, now, busy = list(jobs), [], [], [], 0.0, 0.0
    while waiting or running:
        prefill = 0.0
        while waiting and len(running) < engine.slots:
            job = choose(waiting, jobs)
            waiting.remove(job)
            running.append(job)
            prefill += job["prompt"] - (shared * (1 - engine.sibling_prefill) if job["group"] in seen else 0)
            seen.append(job["group"])
        seconds = engine.a + engine.c * len(running) + engine.p * prefill
        now, busy = now + seconds, busy + seconds
        for job in list(running):
            job["got"] += 1
            if job["got"] == job["tokens"]:
                now += decode_seconds * job["tokens"]
                job["ended"] = True
                running.remove(job)
                ended.append((now, job))
    return busy, ended


def last_reward(arrivals, num_workers):
    """End of the last reward; arrivals: (when, seconds) in the order of the queue.

    An item starts at the first moment, from its arrival on, at which all but num_workers - 1 of those before
    it have ended.
    """
    ends = []
    for when, seconds in arrivals:
        moments = sorted([when, *(end for end in ends if end > when)])
        start = next(t for t in moments if sum(end > t for end in ends) < num_workers)
        ends.append(start + seconds)
    return max(ends, default=0.0)


def verdict_costs(workload, engine, step):
    """Return {group: (latency, work)} of slow verdicts in tokens, by the mean seconds of the step before.

    Twice the tokens of one sequence in that time; and those of the whole engine while the workers do one.
    """
    slow = {
        group
        for rewards in workload.reward_seconds.tolist()
        for group, of_group in enumerate(rewards)
        if max(of_group) >= workload.recipe.slow_seconds[0]
    }
    before = [r for g in sorted(slow) for r in workload.reward_seconds[step - 1, g].tolist()]
    full = engine.a + engine.c * engine.slots
    num_jobs = workload.lengths[0].size / engine.ranks
    steps = sum(before) / len(before) / full if before else 0.0
    return {group: (2 * steps, steps * min(engine.slots, num_jobs) / engine.workers) for group in slow}


def chooser(schedule, expected_of_group, longest, costs, slots):
    """Return a function that says which of the waiting jobs starts: the first with the greatest value.

    With costs the lengths are known: nothing is guessed after the first step, which has none.
    """

    def expected(job, jobs):
        tokens, (latency, _) = tokens_of(job, jobs), costs.get(job["group"], (0.0, 0.0))
        if not any(is_fed(other, jobs) for other in jobs):
            return tokens + latency, 0
        if is_fed(job, jobs):
            return 1, -tokens
        rest = sum(tokens_of(other, jobs) for other in jobs if not is_fed(other, jobs))
        return (2 if tokens > rest / slots else 0), tokens + latency

    def is_fed(job, jobs):
        return job["group"] in costs and costs[job["group"]][1] > tokens_of(job, jobs)

    def tokens_of(job, jobs):
        siblings = [other for other in jobs if other["group"] == job["group"]]
        if schedule == "oracle":
            return job["tokens"]
        if schedule == "arrival":
            return 0
        if expected_of_group is not None:
            return expected_of_group[job["group"]]
        if job is siblings[0]:
            return float("inf")  # it tells what to expect
        ended = [other["tokens"] for other in siblings if other["ended"]]
        return sum(ended) / len(ended) if ended else longest

    def choose(waiting, jobs):
        best = max(expected(job, jobs) for job in waiting)
        return next(job for job in waiting if expected(job, jobs) == best)

    return choose


def by_token(workload, engine, schedule, overlap, decode, counts):
    """(makespan, mean busy) of each step."""
    recipe, steps = workload.recipe, []
    for step, lengths in enumerate(workload.lengths.tolist()):
        before = None
        if schedule == "longest_first" and step:
            before = [sum(of) / len(of) for of in workload.lengths[step - 1].tolist()]
        sizes = [sum(of) for of in lengths] if schedule == "oracle" else before or [1] * len(lengths)
        costs = verdict_costs(workload, engine, step) if counts and step and schedule != "arrival" else {}
        work = [len(of) * costs.get(group, (0, 0))[1] for group, of in enumerate(lengths)]
        choose = chooser(schedule, before, recipe.longest_tokens, costs, engine.slots)
        makespan, total = 0.0, 0.0
        if before and len(lengths[0]) > 1:
            sizes = [len(of) * mean for of, mean in zip(lengths, before)]
        for own in deal(sizes, work, engine.ranks):
            jobs = [
                {"group": g, "tokens": n, "prompt": recipe.prompt_tokens, "reward": r}
                for g in own
                for n, r in zip(lengths[g], workload.reward_seconds[step, g].tolist())
            ]
            in_loop = engine.decode if decode == "engine" else 0.0
            busy, ended = run_by_token(jobs, engine, choose, in_loop, recipe.prompt_tokens)
            last = max((when for when, _ in ended), default=0.0)
            in_worker = engine.decode - in_loop
            arrivals = [
                (when if overlap else last, job["reward"] + in_worker * job["tokens"]) for when, job in ended
            ]
            makespan, total = max(makespan, last_reward(arrivals, engine.workers)), total + busy
        steps.append((makespan, total / engine.ranks))
    return np.array(steps)


def random_case(seed):
    """A small workload and engines for it; groups of 1, 2 or 4, so that means are exact."""
    rng = np.random.default_rng(seed)
    recipe = Recipe(
        num_steps=3, num_prompts=int(rng.integers(2, 10)), group_size=int(rng.choice([1, 2, 4])),
        prompt_tokens=int(rng.integers(0, 20)), median_tokens=float(rng.uniform(2, 12)), longest_tokens=30,
        slow_seconds=(0.05, float(rng.uniform(0.1, 1.0))), seed=seed,
    )  # fmt: skip
    engine = EngineModel(
        a=float(rng.uniform(0.001, 0.02)), c=float(rng.uniform(0, 0.01)), p=float(rng.uniform(0, 0.001)),
        slots=int(rng.integers(1, 5)), ranks=int(rng.integers(1, 5)), workers=int(rng.integers(1, 4)),
        decode=float(rng.uniform(0, 0.005)), sibling_prefill=float(rng.uniform(0, 1)),
    )  # fmt: skip
    return Workload.make(recipe), engine


@pytest.mark.parametrize("decode", ["engine", "workers"])
@pytest.mark.parametrize("overlap", [True, False])
@pytest.mark.parametrize("counts", [True, False])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_agrees_with_a_simulation_token_by_token(schedule, counts, overlap, decode):
    for seed in range(50):
        workload, engine = random_case(seed)
        found = simulate(workload, engine, schedule, overlap, decode, counts)
        expected = by_token(workload, engine, schedule, overlap, decode, counts)
        np.testing.assert_allclose(found.makespan, expected[:, 0], rtol=0, atol=1e-9)
        np.testing.assert_allclose(found.busy, expected[:, 1], rtol=0, atol=1e-9)
        assert found.seconds == pytest.approx(expected[:, 0].sum(), abs=1e-9)
        assert found.bubble == pytest.approx(1 - expected[:, 1].sum() / expected[:, 0].sum(), abs=1e-9)


# ------------------------------------------------------------------------------------------------------------
# What must hold
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_beats_the_bounds_and_neither_workers_nor_overlap_make_it_slower(schedule):
    num_faster = {"overlap": 0, "workers": 0}
    for seed, decode in product(range(30), ("engine", "workers")):
        workload, engine = random_case(1000 + seed)
        found = simulate(workload, engine, schedule, True, decode)
        assert (found.bound <= found.makespan + 1e-9).all()
        after = simulate(workload, engine, schedule, False, decode)
        assert (found.makespan <= after.makespan + 1e-9).all()
        more = replace(engine, workers=engine.workers + 1)
        helped = simulate(workload, more, schedule, True, decode)
        assert (helped.makespan <= found.makespan + 1e-9).all()
        num_faster["overlap"] += found.seconds < after.seconds - 1e-6
        num_faster["workers"] += helped.seconds < found.seconds - 1e-6
    assert min(num_faster.values()) > 0


def test_one_sequence_at_a_time_takes_all_the_work():
    workload, engine = random_case(7)
    workload = replace(workload, reward_seconds=np.zeros_like(workload.reward_seconds))
    engine = replace(engine, slots=1, ranks=1, decode=0.0, sibling_prefill=1.0)
    found = simulate(workload, engine, "oracle")
    num_completions = workload.lengths[0].size
    work = workload.lengths.sum((1, 2)) * (engine.a + engine.c)
    work += engine.p * workload.recipe.prompt_tokens * num_completions
    np.testing.assert_allclose(found.makespan, work, rtol=1e-12)
    np.testing.assert_allclose(found.bound, work, rtol=1e-12)
    assert found.bubble == pytest.approx(0, abs=1e-12)


def test_bound_of_a_long_completion_among_short_ones():
    """By hand: 10 tokens alone at 1.1 s and a reward of 5 s, against 13 tokens at 1.2 / 2 s on two ranks."""
    recipe = Recipe(num_steps=1, num_prompts=2, group_size=2, prompt_tokens=0, longest_tokens=10)
    workload = Workload(recipe, np.array([[[10, 1], [1, 1]]]), np.array([[[5.0, 0.1], [0.1, 0.1]]]))
    found = simulate(workload, EngineModel(a=1.0, c=0.1, p=0.0, slots=2, ranks=2, workers=1), "arrival")
    assert found.bound.tolist() == pytest.approx([16.0])
    assert found.makespan.tolist() == pytest.approx([1.2 + 9 * 1.1 + 5.0])
    assert found.busy.tolist() == pytest.approx([(1.2 + 9 * 1.1 + 1.2) / 2])


def test_bound_of_much_work():
    """By hand: 8 tokens at 1.2 / 2 s and 1.5 prompts of 10 tokens at 0.2 s per group, on two ranks."""
    recipe = Recipe(num_steps=1, num_prompts=2, group_size=2, prompt_tokens=10, longest_tokens=2)
    workload = Workload(recipe, np.full((1, 2, 2), 2), np.zeros((1, 2, 2)))
    engine = EngineModel(a=1.0, c=0.1, p=0.2, slots=2, ranks=2, workers=1, sibling_prefill=0.5)
    for schedule in SCHEDULES:
        found = simulate(workload, engine, schedule)
        assert found.bound.tolist() == pytest.approx([(8 * 0.6 + 2 * 15 * 0.2) / 2])
        assert found.makespan.tolist() == pytest.approx([2 * 1.2 + 15 * 0.2])


def test_unknown_schedules_and_places_are_refused():
    workload, engine = random_case(0)
    with pytest.raises(ValueError, match="shortest_first"):
        simulate(workload, engine, "shortest_first")
    with pytest.raises(ValueError, match="nowhere"):
        simulate(workload, engine, "oracle", decode="nowhere")


# ------------------------------------------------------------------------------------------------------------
# Command line
# ------------------------------------------------------------------------------------------------------------
def run_main(monkeypatch, capsys, *arguments):
    monkeypatch.setattr(sys, "argv", ["simulate", *map(str, arguments)])
    module.main()
    return capsys.readouterr().out


def printed_rows(out):
    """Rows of all tables in out, as text."""
    rows = []
    for table in out.split("\n\n"):
        lines = [
            [cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if line[:1] == "|"
        ]
        rows += [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]
    return rows


def bench_file(tmp_path):
    """Write what the benchmark writes, its seconds those of the simulator."""
    workload, engine = random_case(3)
    engine = replace(engine, sibling_prefill=1.0)
    rows = [
        {"name": f"{schedule} {overlap} {decode} {counts}", "overlap": overlap, "decode": decode,
         "schedule": schedule, "count_reward_time": counts,
         "seconds": simulate(workload, engine, schedule, overlap, decode, counts).seconds}
        for schedule, overlap, decode, counts in product(SCHEDULES, (True, False), PLACES, (True, False))
    ]  # fmt: skip
    model = {name: value for name, value in asdict(engine).items() if name != "sibling_prefill"}
    case = {"ratio": 0.5, "recipes": [asdict(workload.recipe)], "rows": rows}
    record = {"engine": model, "cases": [case]}
    (tmp_path / "bench.json").write_text(json.dumps(record))
    return tmp_path / "bench.json", record


def test_json_is_what_is_printed(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "LOADS", (16, 32))
    arguments = ("--engines", 1, 3, "--json", tmp_path / "rows.json", "--plot", tmp_path / "rows.png")
    out = run_main(monkeypatch, capsys, *arguments)
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert len(rows) == 2 * 2 * 4 * 5  # engines, loads, judges, rows of each
    printed, num_cells = printed_rows(out), 0
    for row in rows:
        names = [name for name in module.ROWS if name != module.BASELINE]
        case = f"{row['completions']}, {row['judge']}"
        (line,) = [line for line in printed if line["completions per engine, slow rewards"] == case]
        if row["name"] in names:
            cell = line[f"{row['engines']} engines"].split(" / ")[names.index(row["name"])]
            assert cell == f"{row['speedup']:.2f}"
            num_cells += 1
    assert num_cells == 4 * sum(len(line) - 1 for line in printed) == 4 * 2 * 2 * 4
    assert all(row.keys() >= {"name", "seconds", "speedup", "bubble", "bound"} for row in rows)
    assert {row["speedup"] for row in rows if row["name"] == module.BASELINE} == {1.0}
    assert all(row["ratio"] >= 1 and 0 <= row["bubble"] < 1 for row in rows)
    assert "assumed, not measured" in out
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_fit_prints_measured_and_simulated_seconds(tmp_path, monkeypatch, capsys):
    path, record = bench_file(tmp_path)
    measured = record["cases"][0]["rows"]
    measured[4]["seconds"] *= 1.25
    path.write_text(json.dumps(record))
    out = run_main(monkeypatch, capsys, "--fit", path, "--json", tmp_path / "rows.json")
    rows = json.loads((tmp_path / "rows.json").read_text())
    assert [tuple(row.values()) for row in printed_rows(out)] == [
        ("0.5", r["name"], f"{r['seconds']:.2f}", f"{r['simulated']:.2f}", f"{r['error']:+.1%}") for r in rows
    ]
    assert [row["name"] for row in rows] == [row["name"] for row in measured]
    errors = [row["error"] for row in rows]
    assert errors[4] == pytest.approx(1 / 1.25 - 1, abs=1e-4)
    assert np.abs(np.delete(errors, 4)).max() < 1e-9
    assert f"largest error: -20.0% (rewards 0.5, {rows[4]['name']})" in out


@pytest.mark.parametrize(
    "where, name",
    [
        ("engine", "c"),
        ("cases[0]", "ratio"),
        ("cases[0].recipes[0]", "seed"),
        ("cases[0].rows[1]", "overlap"),
    ],
)
def test_fit_names_what_is_missing(tmp_path, monkeypatch, capsys, where, name):
    path, record = bench_file(tmp_path)
    case = record["cases"][0]
    parts = {"engine": record["engine"], "cases[0]": case, "cases[0].recipes[0]": case["recipes"][0]}
    (parts | {"cases[0].rows[1]": case["rows"][1]})[where].pop(name)
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as exit:
        run_main(monkeypatch, capsys, "--fit", path)
    assert exit.value.code == f"error: {path}: there is no {where}.{name}"


def test_fit_names_a_field_that_no_recipe_has(tmp_path, monkeypatch, capsys):
    path, record = bench_file(tmp_path)
    record["cases"][0]["recipes"][0]["sede"] = 1
    path.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as exit:
        run_main(monkeypatch, capsys, "--fit", path)
    assert exit.value.code == f"error: {path}: a recipe has no field sede"


@pytest.mark.parametrize("text", [None, "{", "[]", "{}"])
def test_fit_of_a_broken_file_is_an_error_of_one_line(tmp_path, monkeypatch, capsys, text):
    path = tmp_path / "bench.json"
    if text is not None:
        path.write_text(text)
    with pytest.raises(SystemExit) as exit:
        run_main(monkeypatch, capsys, "--fit", path)
    assert exit.value.code.startswith(f"error: {path}: ") and "\n" not in exit.value.code
    assert "no cases[0].rows" in exit.value.code or text != "{}"


def test_the_simulator_needs_neither_vllm_nor_deepspeed():
    code = (
        "import sys, experiments.bench.simulate\n"
        "print(sorted({'vllm', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr


def test_help():
    command = [sys.executable, "-m", "experiments.bench.simulate", "--help"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and "--fit" in done.stdout and "--engines" in done.stdout
