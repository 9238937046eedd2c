"""Sample and score completions: requests with expected costs, generation, verdicts that overlap generation.

train_rl.py decides which completions to sample (Job) and which rank samples them. The expectations serve the
length-aware schedule (arXiv 2512.07710): they order requests and balance ranks, and change no completion.
"""

import statistics
from collections.abc import Hashable
from dataclasses import replace

import torch.distributed as dist
from tqdm import tqdm

from batch import UNFINISHED, Completion, Group, Job, Request
from data.prompts import Prompt
from data.stream import seed_of
from extras.base import active
from lifecycle import Run
from runtime.schedule import from_all_ranks, verdict_tokens
from settings import Config


def rollout_number(run: Run) -> int:
    """Return the number of the next rollout, which is the step that trains on it (rollout.lag)."""
    return run.state.step + len(run.queue)


def captures_routes(config: Config, step: int) -> bool:
    """Tell whether the engine returns the experts of the tokens that it samples at a step."""
    rollout = config.rollout
    if config.algorithm.router_replay == "r3" or rollout.capture_routes == "on":
        return True
    is_checked = step % rollout.check_every == 0 if rollout.check_every else step == 0
    return rollout.capture_routes == "auto" and is_checked


def set_expected_costs(run: Run, jobs: list[Job]) -> None:
    """Set the expected lengths of the groups' completions and the costs of their verdicts. Collective.

    With `rollout.schedule: arrival` (the baseline), prompts keep their order and nothing is expected.
    """
    rollout = run.config.rollout
    if rollout.schedule == "arrival":
        return
    # seconds differ from run to run, and with carry.share the order decides which groups a step trains on
    is_timed = rollout.count_reward_time and not any(extra.ends_rollouts for extra in active(run.config))
    costs = verdict_costs(run) if is_timed else {}
    lengths = run.history.expected_lengths([job.group.prompt_index for job in jobs], run.prompts)
    for (group, _), (tokens, guessed) in zip(jobs, lengths):
        latency_tokens, work_tokens = costs.get(run.prompts[group.prompt_index].kind, (0.0, 0.0))
        group.expected_tokens = tokens
        group.guessed = guessed
        group.latency_tokens = latency_tokens + wait_tokens(run, group)
        group.work_tokens = work_tokens


def wait_tokens(run: Run, group: Group) -> float:
    """Return the time that an episode is expected to wait between its turns, in tokens of one completion.

    This is waits at the prompt's last visit x mean seconds of a call / seconds of an engine step. An episode
    with tools ends with a turn without calls; an environment answers every turn.
    """
    if run.interaction is None:
        return 0.0
    num_turns = float(run.history.mean_turns[group.prompt_index])
    num_waits = num_turns if run.interaction.environment else max(0.0, num_turns - 1)
    return num_waits * run.interaction.mean_seconds() / run.engine.seconds_per_step


def verdict_costs(run: Run) -> dict[str, tuple[float, float]]:
    """Return latency_tokens and work_tokens of a verdict for each kind of verifier. Collective.

    latency_tokens: tokens that one completion generates in the time until a verdict. work_tokens: tokens that
    the whole engine generates in a worker's time for it. The mean is over the ranks that have scored this
    kind; a kind that no rank has scored is not in the result.
    """
    tokens_per_second = run.engine.tokens_per_second / run.config.rollout.tensor_parallel
    local_costs = {
        kind: verdict_tokens(seconds, run.engine.seconds_per_step, tokens_per_second, run.pool.at_once(kind))
        for kind, seconds in run.pool.seconds.items()
    }
    gathered: list[dict[str, tuple[float, float]]] = from_all_ranks(local_costs)
    costs = {}
    for kind in sorted({kind for rank_costs in gathered for kind in rank_costs}):
        latencies, works = zip(*(rank_costs[kind] for rank_costs in gathered if kind in rank_costs))
        costs[kind] = (statistics.fmean(latencies), statistics.fmean(works))
    return costs


def requests_of(run: Run, jobs: list[Job]) -> tuple[list[Request], list[Prompt]]:
    """Return the engine's requests for some jobs, job after job, and the prompt of each."""
    config = run.config
    rollout = config.rollout
    number = rollout_number(run)
    requests = []
    prompts = []
    for group, samples in jobs:
        for sample in samples:
            prompts.append(run.prompts[group.prompt_index])
            requests.append(
                Request(
                    prompt_ids=run.prompt_ids[group.prompt_index],
                    seed=seed_of(config.train.seed, number, group.slot, sample),
                    group_seed=seed_of(config.train.seed, number, group.slot),
                    temperature=rollout.temperature,
                    max_new_tokens=rollout.max_new_tokens,
                    group=group.slot,
                    expected_tokens=group.expected_tokens,
                    guessed=group.guessed,
                    latency_tokens=group.latency_tokens,
                    work_tokens=group.work_tokens,
                )
            )
    return requests, prompts


def generate(run: Run, requests: list[Request], prompts: list[Prompt], phase: str) -> list[Completion]:
    """Generate completions and score each as soon as it ends (overlapped rewards); keep the requests' order.

    prompts: the prompt of each request. phase: "rollout" or "eval", under which the clock records the
    generation. The clock's phase "reward" is the remaining wait for verdicts. With reward.overlap off,
    scoring begins after generation.
    """
    overlap = run.config.reward.overlap
    hidden = None if dist.get_rank() == 0 else True  # None: visible on a terminal only
    progress = tqdm(total=len(requests), desc=phase, position=1, leave=False, delay=1.0, disable=hidden)
    num_ended = 0
    ended = [False] * len(requests)

    def on_finished(index: int, completion: Completion) -> None:
        nonlocal num_ended
        num_ended += 1
        ended[index] = True
        if overlap:
            submit(run, index, prompts[index], completion)
        progress.update()

    def describe() -> str:
        return f"{len(requests) - num_ended} of {len(requests)} completions to generate"

    enders = [extra for extra in active(run.config) if extra.ends_rollouts and phase == "rollout"]
    is_over = lambda: any(extra.is_over(run, requests, ended) for extra in enders)
    captures = phase == "rollout" and captures_routes(run.config, run.state.step)
    episodes = run.interaction.episodes(requests, prompts) if run.interaction else None
    with run.clock(phase, describe):
        completions = run.engine.generate(
            requests, run.state.step, on_finished, run.pool.poll, captures, episodes,
            **{"is_over": is_over} if enders else {},
        )  # fmt: skip
    progress.close()
    with run.clock("reward", run.pool.describe):
        if not overlap:
            for index, completion in enumerate(completions):
                if completion.finish_reason != UNFINISHED:
                    submit(run, index, prompts[index], completion)
        verdicts = run.pool.collect()
    return [
        completion
        if completion.verdict or completion.finish_reason == UNFINISHED
        else replace(completion, verdict=verdicts[index])
        for index, completion in enumerate(completions)
    ]


def submit(run: Run, key: Hashable, prompt: Prompt, completion: Completion) -> None:
    """Queue a completion for the reward workers, as token ids or, with reward.decode engine, as text.

    Of an episode, the verifier scores the last turn. Functions of the user may also take `turns`.
    """
    if completion.verdict is not None:  # by the environment
        return
    completion_or_text = completion.answer_ids
    if run.config.reward.decode == "engine":
        completion_or_text = run.tokenizer.decode(completion.answer_ids, skip_special_tokens=True)
    fields = prompt.fields | completion.fields
    run.pool.submit(key, prompt.kind, completion_or_text, prompt.answer, fields, prefix=prompt.prefix)
