"""Stop a run, or warn: failed verdicts, values that are not finite, an engine that is not the policy.

An error says what to change. All checks but mismatch_gate() are collective.
"""

from pathlib import Path
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from runtime.launch import one_line
from runtime.metrics import histogram, reduce_metrics

if TYPE_CHECKING:
    from reward import Verdict
    from runtime.checkpoint import TrainState
    from train_rl import Config, RolloutBatch


def say(line: str) -> None:
    """Print a line on rank 0, above the progress bar."""
    if dist.get_rank() == 0:
        tqdm.write(one_line(line))


def check_verdicts(verdicts: "list[Verdict]", max_failed_frac: float, where: str) -> None:
    """Warn of timeouts and errors among a step's verdicts; RuntimeError if there are too many. Collective.

    verdicts: this rank's; those of all ranks count. where: what they are of, for messages.
    """
    failed = [v for v in verdicts if v.failed]
    first = failed[0].detail or "raise reward.timeout_s or reward.memory_gib" if failed else ""
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (len(failed), len(verdicts), failed and f"{failed[0].status}: {first}"))
    num_failed, num = (sum(part[i] for part in parts) for i in (0, 1))
    if not num_failed:
        return
    first = next(part[2] for part in parts if part[2])
    message = f"{num_failed} of {num} verdicts failed; first: {first}"
    if num_failed > max_failed_frac * num:
        raise RuntimeError(f"{where}: {message} (reward.max_failed_frac {max_failed_frac})")
    say(f"warning: {where}: {message}")


def check_routes(invalid: int, total: int, max_invalid_frac: float) -> None:
    """Raise RuntimeError if too many rows of routes are invalid (rollout.validate_routes). Collective.

    invalid, total: of this rank; those of all ranks count.
    """
    parts = [None] * dist.get_world_size()
    dist.all_gather_object(parts, (invalid, total))
    invalid, total = map(sum, zip(*parts))
    if invalid > max_invalid_frac * total:
        raise RuntimeError(
            f"{invalid} of {total} rows of routed experts are invalid: missing, with an expert twice in a "
            f"layer, or with none of the model's (rollout.max_invalid_routes {max_invalid_frac}). The engine "
            "does not capture what it computes: try rollout.prefix_caching=false, or go without "
            "(algorithm.router_replay=off and rollout.capture_routes=off)"
        )


def check_parity(old_logprobs: Tensor, batch: "RolloutBatch", config: "Config", step: int) -> None:
    """Compare the trainer's log-probabilities [B, T] with the sampler's for the same weights. Collective.

    RuntimeError if they differ by more than rounding explains: the engine then samples from another policy
    than the one that is trained, most likely after a faulty weight sync.
    """
    dlogp = (old_logprobs - batch.rollout_logprobs).abs()[batch.response_mask]
    sums = {"mean": (dlogp.sum().item(), dlogp.numel()), "dlogp_p99": (histogram(dlogp), 1)}
    mean, p99 = reduce_metrics(sums).values()
    rollout = config.rollout
    exact = rollout.dtype == config.model.dtype == "float32"
    exact = exact and rollout.fp8 == "off" and not rollout.kv_cache_fp8
    if not mean <= rollout.parity_mean or (exact and not p99 <= rollout.parity_p99):
        raise RuntimeError(
            f"step {step}: trainer and engine disagree on the sampled tokens: |dlogp| mean {mean:.2g}, p99 "
            f"{p99:.2g} nats (rollout.parity_mean {rollout.parity_mean}, rollout.parity_p99 "
            f"{rollout.parity_p99} for float32). The engine does not hold the policy's weights."
        )


def mismatch_gate(metrics: dict[str, float], state: "TrainState", config: "Config") -> str | None:
    """Count steps in a row with a k3 KL of trainer and engine above the gate; return why to stop or None.

    A step that did not measure it, for lack of rows with gradient, neither counts nor ends the row.
    """
    limit, patience = config.algorithm.mismatch_gate, config.algorithm.mismatch_patience
    if limit <= 0 or "mismatch_k3" not in metrics:
        return None
    above = not metrics["mismatch_k3"] <= limit  # NaN is above
    state.steps_above_gate = state.steps_above_gate + 1 if above else 0
    if not above:
        return None
    what = (
        f"step {state.step}: k3 KL of trainer and engine is {metrics['mismatch_k3']:.3g}, "
        f"algorithm.mismatch_gate is {limit} ({state.steps_above_gate} steps in a row)"
    )
    if patience and state.steps_above_gate >= patience:
        return (
            f"{what}: the policy is trained on samples of another one. Bring them together "
            "(algorithm.router_replay=r3, rollout.fp8=off, rollout.dtype=float32); or raise the gate or "
            "algorithm.mismatch_patience, if algorithm.rollout_correction takes care of the difference"
        )
    say(f"warning: {what}")
    return None


def handle_nonfinite(
    what: str, batch: "RolloutBatch", rows: list[int], config: "Config", step: int, **more: Tensor
) -> None:
    """Write the batch aside, name the prompts of rows, and stop or go on (run.on_nonfinite). Collective.

    more: tensors to write besides the batch's fields. Without rows on any rank every loss was finite and the
    gradient is not.
    """
    texts = [prompt.text for prompt in batch.prompts]
    named = [None] * dist.get_world_size()
    dist.all_gather_object(named, [texts[row] for row in rows])
    examples = list(dict.fromkeys(sum(named, [])))
    what = what if examples else "gradient"
    path = Path(config.run.dir) / "nonfinite" / f"step_{step + 1:06d}_{what}_rank_{dist.get_rank()}.pt"
    path.parent.mkdir(parents=True, exist_ok=True)
    fields = {name: value for name, value in vars(batch).items() if name not in ("prompts", "verdicts")}
    torch.save(fields | {"prompts": texts, "rows": rows} | more, path)  # plain types: loads with weights_only
    prompts = ", ".join(repr(text[:80]) for text in examples[:3]) or "none in particular"
    message = (
        f"step {step + 1}: a {what} is NaN or infinite; prompts ({len(examples)}): {prompts}; the batch is "
        f"in {path.parent}, the weights are unchanged by it"
    )
    if config.run.on_nonfinite == "stop":
        raise RuntimeError(f"{message}; run.on_nonfinite=skip would go on without it")
    say(message)


def refuse_nonfinite_rewards(
    rewards: Tensor, valid: Tensor, batch: "RolloutBatch", config: "Config", step: int
) -> tuple[Tensor, Tensor]:
    """Stop the run for a reward that is NaN or infinite or, by run.on_nonfinite, count it as no verdict.

    rewards [B] float, valid [B] bool; returns both, with 0 and False where a reward is not finite.
    Collective.
    """
    bad = ~rewards.isfinite()  # [B]
    if reduce_metrics({"bad_max": (int(bad.any()), 1)})["bad_max"]:
        handle_nonfinite("reward", batch, bad.nonzero().flatten().tolist(), config, step, rewards=rewards)
    return rewards.masked_fill(bad, 0.0), valid & ~bad


def refuse_nonfinite_weights(policy: torch.nn.Module, whose: str, advice: str) -> None:
    """Raise RuntimeError on all ranks if a weight is NaN or infinite on any of them. Collective.

    It stands before weights reach an engine, a checkpoint or an export, so that none of these is ever made
    of them. whose: where the weights come from; advice: what to do.
    """
    with torch.no_grad():  # the largest absolute value is NaN if any is; a sum of finite values may overflow
        largest = {name: torch.linalg.vector_norm(p, torch.inf) for name, p in policy.named_parameters()}
    finite = torch.stack(list(largest.values())).isfinite().tolist()
    bad = [name for name, is_finite in zip(largest, finite) if not is_finite]
    everyone = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, bad)
    if named := sorted(set(sum(everyone, []))):
        raise RuntimeError(
            f"{whose}: {len(named)} of {len(largest)} weight tensors hold NaN or infinity, the first is "
            f"{named[0]}; {advice}"
        )
