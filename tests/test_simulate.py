"""experiments/bench/simulate.py against a token-by-token simulation, and properties of all schedules."""

import json
import subprocess
import sys
from dataclasses import asdict, replace
from functools import reduce
from itertools import product

import numpy as np
import pytest
from conftest import ROOT

from experiments.bench import simulate as module
from experiments.bench.common import read_results
from experiments.bench.simulate import PLACES, EngineModel, simulate
from experiments.bench.workload import Recipe, Workload

SCHEDULES = ("arrival", "longest_first", "oracle")


# ------------------------------------------------------------------------------------------------------------
# Token by token, with lists only
# ------------------------------------------------------------------------------------------------------------
def deal(sizes, work, num_ranks):
    """Return the prompts of each rank: the largest first, to the rank whose larger sum stays smallest."""
    loads = [(0, 0)] * num_ranks
    dealt = [[] for _ in range(num_ranks)]
    for prompt in sorted(range(len(sizes)), key=lambda i: (-max(sizes[i], work[i]), i)):
        sums = [(tokens + sizes[prompt], verdicts + work[prompt]) for tokens, verdicts in loads]
        rank = min(range(num_ranks), key=lambda r: (max(sums[r]), sum(sums[r]), r))
        loads[rank] = sums[rank]
        dealt[rank].append(prompt)
    return [sorted(prompts) for prompts in dealt]


def run_by_token(jobs, engine, choose, decode_seconds=0.0, shared=0):
    """Return the seconds spent in steps, and [(end, job)] in the order of ends.

    jobs: dicts with group, tokens, prompt. shared: prompt tokens that siblings reuse.
    """
    for job in jobs:
        job["got"] = 0
        job["ended"] = False
    waiting, running, started_groups, ended = list(jobs), [], [], []
    now = busy = 0.0
    while waiting or running:
        prefill = 0.0
        while waiting and len(running) < engine.slots:
            job = choose(waiting, jobs)
            waiting.remove(job)
            running.append(job)
            reused = shared * (1 - engine.sibling_prefill) if job["group"] in started_groups else 0
            prefill += job["prompt"] - reused
            started_groups.append(job["group"])
        seconds = engine.a + engine.c * len(running) + engine.p * prefill
        now += seconds
        busy += seconds
        for job in list(running):
            job["got"] += 1
            if job["got"] == job["tokens"]:
                now += decode_seconds * job["tokens"]
                job["ended"] = True
                running.remove(job)
                ended.append((now, job))
    return busy, ended


def last_reward(arrivals, num_workers):
    """Return the end of the last reward; arrivals: (time, seconds) in the order of the queue.

    A reward starts at the first moment after the arrival at which fewer than num_workers of the earlier
    rewards are unfinished.
    """
    ends = []
    for arrival, seconds in arrivals:
        moments = sorted([arrival, *(end for end in ends if end > arrival)])
        start = next(t for t in moments if sum(end > t for end in ends) < num_workers)
        ends.append(start + seconds)
    return max(ends, default=0.0)


def verdict_costs(workload, engine, step):
    """Return {group: (latency, work)} of slow verdicts in tokens, by the mean seconds of the step before.

    latency: twice the tokens of one sequence in that time. work: the tokens of the whole engine while the
    workers compute one verdict.
    """
    slow = {
        group
        for rewards in workload.reward_seconds.tolist()
        for group, of_group in enumerate(rewards)
        if max(of_group) >= workload.recipe.slow_seconds[0]
    }
    previous = [r for g in sorted(slow) for r in workload.reward_seconds[step - 1, g].tolist()]
    full = engine.a + engine.c * engine.slots
    num_jobs = workload.lengths[0].size / engine.ranks
    steps = sum(previous) / len(previous) / full if previous else 0.0
    return {group: (2 * steps, steps * min(engine.slots, num_jobs) / engine.workers) for group in slow}


def chooser(schedule, expected_of_group, longest, costs, slots):
    """Return a function that picks the next of the waiting jobs: the first one with the greatest value.

    With costs, lengths are known; only the first step, which has no costs, guesses lengths.
    """

    def value(job, jobs):
        tokens = tokens_of(job, jobs)
        latency, _ = costs.get(job["group"], (0.0, 0.0))
        if not any(is_feeder(other, jobs) for other in jobs):
            return tokens + latency, 0
        if is_feeder(job, jobs):
            return 1, -tokens
        num_tokens = sum(tokens_of(other, jobs) for other in jobs if not is_feeder(other, jobs))
        return (2 if tokens > num_tokens / slots else 0), tokens + latency

    def is_feeder(job, jobs):
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
            return float("inf")  # the first length predicts the lengths of siblings
        ended = [other["tokens"] for other in siblings if other["ended"]]
        return sum(ended) / len(ended) if ended else longest

    def choose(waiting, jobs):
        best = max(value(job, jobs) for job in waiting)
        return next(job for job in waiting if value(job, jobs) == best)

    return choose


def by_token(workload, engine, schedule, overlap, decode, counts):
    """Return (makespan, mean busy seconds) of each step."""
    recipe = workload.recipe
    steps = []
    for step, lengths in enumerate(workload.lengths.tolist()):
        means = None
        if schedule == "longest_first" and step:
            means = [sum(of) / len(of) for of in workload.lengths[step - 1].tolist()]
        sizes = [sum(of) for of in lengths] if schedule == "oracle" else means or [1] * len(lengths)
        if means and len(lengths[0]) > 1:
            sizes = [len(of) * mean for of, mean in zip(lengths, means)]
        costs = verdict_costs(workload, engine, step) if counts and step and schedule != "arrival" else {}
        work = [len(of) * costs.get(group, (0, 0))[1] for group, of in enumerate(lengths)]
        choose = chooser(schedule, means, recipe.longest_tokens, costs, engine.slots)
        decode_in_loop = engine.decode if decode == "engine" else 0.0
        decode_in_worker = engine.decode - decode_in_loop
        makespan = total_busy = 0.0
        for groups in deal(sizes, work, engine.ranks):
            jobs = [
                {"group": g, "tokens": n, "prompt": recipe.prompt_tokens, "reward": r}
                for g in groups
                for n, r in zip(lengths[g], workload.reward_seconds[step, g].tolist())
            ]
            busy, ended = run_by_token(jobs, engine, choose, decode_in_loop, recipe.prompt_tokens)
            last = max((end for end, _ in ended), default=0.0)
            arrivals = [
                (end if overlap else last, job["reward"] + decode_in_worker * job["tokens"])
                for end, job in ended
            ]
            makespan = max(makespan, last_reward(arrivals, engine.workers))
            total_busy += busy
        steps.append((makespan, total_busy / engine.ranks))
    return np.array(steps)


def random_case(seed):
    """Draw a small workload and engines. Groups have 1, 2 or 4 completions, so that means are exact."""
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
def test_the_simulator_agrees_with_a_simulation_token_by_token(schedule, counts, overlap, decode):
    for seed in range(20):
        workload, engine = random_case(seed)
        result = simulate(workload, engine, schedule, overlap, decode, counts)
        expected = by_token(workload, engine, schedule, overlap, decode, counts)
        np.testing.assert_allclose(result.makespan, expected[:, 0], rtol=0, atol=1e-9)
        np.testing.assert_allclose(result.busy, expected[:, 1], rtol=0, atol=1e-9)
        assert result.seconds == pytest.approx(expected[:, 0].sum(), abs=1e-9)
        assert result.bubble == pytest.approx(1 - expected[:, 1].sum() / expected[:, 0].sum(), abs=1e-9)


# ------------------------------------------------------------------------------------------------------------
# What must hold
# ------------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_no_schedule_beats_the_bound_and_workers_and_overlap_only_help(schedule):
    num_faster = {"overlap": 0, "workers": 0}
    for seed, decode in product(range(30), ("engine", "workers")):
        workload, engine = random_case(1000 + seed)
        result = simulate(workload, engine, schedule, True, decode)
        assert (result.bound <= result.makespan + 1e-9).all()
        without_overlap = simulate(workload, engine, schedule, False, decode)
        assert (result.makespan <= without_overlap.makespan + 1e-9).all()
        more_workers = simulate(workload, replace(engine, workers=engine.workers + 1), schedule, True, decode)
        assert (more_workers.makespan <= result.makespan + 1e-9).all()
        num_faster["overlap"] += result.seconds < without_overlap.seconds - 1e-6
        num_faster["workers"] += more_workers.seconds < result.seconds - 1e-6
    assert min(num_faster.values()) > 0


def test_one_sequence_at_a_time_takes_the_sum_of_all_work():
    workload, engine = random_case(7)
    workload = replace(workload, reward_seconds=np.zeros_like(workload.reward_seconds))
    engine = replace(engine, slots=1, ranks=1, decode=0.0, sibling_prefill=1.0)
    result = simulate(workload, engine, "oracle")
    work = workload.lengths.sum((1, 2)) * (engine.a + engine.c)
    work += engine.p * workload.recipe.prompt_tokens * workload.lengths[0].size
    np.testing.assert_allclose(result.makespan, work, rtol=1e-12)
    np.testing.assert_allclose(result.bound, work, rtol=1e-12)
    assert result.bubble == pytest.approx(0, abs=1e-12)


def test_bound_of_a_long_completion_among_short_ones():
    """By hand: 10 tokens alone at 1.1 s and a reward of 5 s, against 13 tokens at 1.2 / 2 s on two ranks."""
    recipe = Recipe(num_steps=1, num_prompts=2, group_size=2, prompt_tokens=0, longest_tokens=10)
    workload = Workload(recipe, np.array([[[10, 1], [1, 1]]]), np.array([[[5.0, 0.1], [0.1, 0.1]]]))
    result = simulate(workload, EngineModel(a=1.0, c=0.1, p=0.0, slots=2, ranks=2, workers=1), "arrival")
    assert result.bound.tolist() == pytest.approx([16.0])
    assert result.makespan.tolist() == pytest.approx([1.2 + 9 * 1.1 + 5.0])
    assert result.busy.tolist() == pytest.approx([(1.2 + 9 * 1.1 + 1.2) / 2])


def test_bound_of_much_work():
    """By hand: 8 tokens at 1.2 / 2 s and 1.5 prompts of 10 tokens at 0.2 s per group, on two ranks."""
    recipe = Recipe(num_steps=1, num_prompts=2, group_size=2, prompt_tokens=10, longest_tokens=2)
    workload = Workload(recipe, np.full((1, 2, 2), 2), np.zeros((1, 2, 2)))
    engine = EngineModel(a=1.0, c=0.1, p=0.2, slots=2, ranks=2, workers=1, sibling_prefill=0.5)
    for schedule in SCHEDULES:
        result = simulate(workload, engine, schedule)
        assert result.bound.tolist() == pytest.approx([(8 * 0.6 + 2 * 15 * 0.2) / 2])
        assert result.makespan.tolist() == pytest.approx([2 * 1.2 + 15 * 0.2])


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


def printed_rows(output):
    """Return the rows of all printed tables, as text."""
    rows = []
    for table in output.split("\n\n"):
        lines = [
            [cell.strip() for cell in line[1:-1].split("|")] for line in table.splitlines() if line[:1] == "|"
        ]
        rows += [dict(zip(lines[0], cells, strict=True)) for cells in lines[2:]]
    return rows


def bench_file(tmp_path):
    """Write a file as the benchmark does, with the seconds of the simulator; return path and content."""
    workload, engine = random_case(3)
    engine = replace(engine, sibling_prefill=1.0)
    rows = [
        {"name": f"{schedule} {overlap} {decode} {counts}", "overlap": overlap, "decode": decode,
         "schedule": schedule, "count_reward_time": counts,
         "seconds": simulate(workload, engine, schedule, overlap, decode, counts).seconds}
        for schedule, overlap, decode, counts in product(SCHEDULES, (True, False), PLACES, (True, False))
    ]  # fmt: skip
    model = {name: value for name, value in asdict(engine).items() if name != "sibling_prefill"}
    record = {"engine": model, "cases": [{"ratio": 0.5, "recipes": [asdict(workload.recipe)], "rows": rows}]}
    (tmp_path / "bench.json").write_text(json.dumps(record))
    return tmp_path / "bench.json", record


def test_json_holds_the_printed_figures(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(module, "LOADS", (16, 32))
    arguments = ("--engines", 1, 3, "--json", tmp_path / "rows.json", "--plot", tmp_path / "rows.png")
    cells = {}
    for line in printed_rows(run_main(monkeypatch, capsys, *arguments)):
        case = line.pop("completions per engine, slow rewards")
        cells |= {(case, engines): cell.split(" / ") for engines, cell in line.items()}
    rows = read_results(tmp_path / "rows.json")
    assert len(rows) == 2 * 2 * 4 * 5  # engines, loads, judges, rows of each
    expected = {}
    for row in rows:
        assert row["ratio"] >= 1 and 0 <= row["bubble"] < 1
        if row["name"] != module.BASELINE:
            case = f"{row['completions']}, {row['judge']}"
            expected.setdefault((case, f"{row['engines']} engines"), []).append(f"{row['speedup']:.2f}")
    assert cells == expected
    assert (tmp_path / "rows.png").read_bytes().startswith(b"\x89PNG")


def test_fit_prints_measured_and_simulated_seconds(tmp_path, monkeypatch, capsys):
    path, record = bench_file(tmp_path)
    measured = record["cases"][0]["rows"]
    measured[4]["seconds"] *= 1.25
    path.write_text(json.dumps(record))
    output = run_main(monkeypatch, capsys, "--fit", path, "--json", tmp_path / "rows.json")
    rows = read_results(tmp_path / "rows.json")
    assert [tuple(row.values()) for row in printed_rows(output)] == [
        ("0.5", r["name"], f"{r['seconds']:.2f}", f"{r['simulated']:.2f}", f"{r['error']:+.1%}") for r in rows
    ]
    assert [row["name"] for row in rows] == [row["name"] for row in measured]
    errors = [row["error"] for row in rows]
    assert errors[4] == pytest.approx(1 / 1.25 - 1, abs=1e-4)
    assert np.abs(np.delete(errors, 4)).max() < 1e-9
    assert "-20.0%" in output


@pytest.mark.parametrize(
    "keys, change, keyword",
    [
        (["engine"], lambda part: part.pop("c"), "engine.c"),
        (["cases", 0], lambda part: part.pop("ratio"), "cases[0].ratio"),
        (["cases", 0, "recipes", 0], lambda part: part.pop("seed"), "cases[0].recipes[0].seed"),
        (["cases", 0, "rows", 1], lambda part: part.pop("overlap"), "cases[0].rows[1].overlap"),
        (["cases", 0, "recipes", 0], lambda part: part.update(sede=1), "sede"),
        ([], lambda record: record.clear(), ""),
        ("{", None, "bench.json"),
        (None, None, "bench.json"),  # no file
    ],
)
def test_a_broken_file_to_fit_is_an_error_of_one_line(keys, change, keyword, tmp_path, monkeypatch, capsys):
    path, record = bench_file(tmp_path)
    if keys is None:
        path.unlink()
    elif isinstance(keys, str):
        path.write_text(keys)
    else:
        change(reduce(lambda part, key: part[key], keys, record))
        path.write_text(json.dumps(record))
    with pytest.raises(SystemExit) as exit:
        run_main(monkeypatch, capsys, "--fit", path)
    message = exit.value.code
    assert message.startswith(f"error: {path}: ") and keyword in message and "\n" not in message


def test_the_simulator_needs_neither_vllm_nor_deepspeed():
    code = (
        "import sys, experiments.bench.simulate\n"
        "print(sorted({'vllm', 'deepspeed', 'transformers'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout == "[]\n", done.stderr
