"""Checks during a run, which warn or stop: failed verdicts, NaN or infinite values, engine against trainer.

Every error names the setting to change. All checks except mismatch_gate() are collective.
"""

from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from tqdm import tqdm

from batch import RolloutBatch
from runtime.checkpoint import TrainState, digest_of_weights
from runtime.launch import one_line
from runtime.metrics import histogram, reduce_metrics, warn_once
from runtime.schedule import from_all_ranks
from runtime.summary import figure
from settings import Config

MAX_UNREADABLE_FRAC = 0.1  # of a judge's answers in a step, before a warning [ours]


def say(line: str) -> None:
    """Print a line on rank 0, above the progress bar."""
    if dist.get_rank() == 0:
        tqdm.write(one_line(line))


warned: set[str] = set()  # kinds of warnings that this launch has printed


def warn_first(kind: str, text: str) -> None:
    """Print the first warning of a kind; the metrics have the figures of later steps."""
    if dist.get_rank() == 0 and kind not in warned:
        warned.add(kind)
        say(f"warning: {text}; said once")


def check_verdicts(verdicts: list, max_failed_frac: float, where: str) -> None:
    """Warn of timeouts and errors among verdicts; RuntimeError if the fraction is too large. Collective.

    Failures that completions cause are verdicts with reward 0, and each reason is printed once per rank.

    verdicts: of this rank; the fraction is over all ranks. where: for messages, for example "step 3".
    """
    failed = [v for v in verdicts if v.failed]
    example = ""
    if failed:
        reason = failed[0].detail or "raise reward.timeout_s or reward.memory_gib"
        example = f"{failed[0].status}: {reason}"
    for reason in {f"{v.status}: {v.detail.partition(':')[0]}" for v in verdicts if v.by_text}:
        warn_once(f"completions that make their verifier fail count as wrong; reason: {reason}")
    gathered = from_all_ranks((len(failed), len(verdicts), example))
    num_failed = sum(failed_on_rank for failed_on_rank, _, _ in gathered)
    num_verdicts = sum(verdicts_on_rank for _, verdicts_on_rank, _ in gathered)
    if not num_failed:
        return
    example = next(text for _, _, text in gathered if text)
    message = f"{num_failed} of {num_verdicts} verdicts failed; first: {example}"
    if num_failed > max_failed_frac * num_verdicts:
        raise RuntimeError(f"{where}: {message} (reward.max_failed_frac {max_failed_frac})")
    warn_first(f"verdicts of {where.split()[0]}", f"{where}: {message}")


def warn_of_unreadable_answers(metrics: dict[str, float], step: int) -> None:
    """Warn if the generative judge gives no verdict in many answers, because each of them counts as a tie."""
    unreadable_frac = metrics.get("judge/unreadable_frac", 0.0)
    if unreadable_frac > MAX_UNREADABLE_FRAC:
        warn_first(
            "judge",
            f"step {step}: {unreadable_frac:.2f} of the judge's answers contain no verdict and "
            "count as ties: reward.judge_template must be the question on which the judge was trained",
        )


MAX_IDLE_STEPS = 10  # steps in a row without gradient before a warning [ours]


def warn_of_idle_steps(metrics: dict[str, float], state: TrainState) -> None:
    """Warn if no update has had a gradient for MAX_IDLE_STEPS steps."""
    if state.idle_steps < MAX_IDLE_STEPS:
        return
    cause = (
        f"score {figure(metrics['score'], '.3f')}, zero-variance {metrics['zero_variance_frac']:.2f}: "
        "read samples.jsonl, then check kinds, answers and rollout.max_new_tokens, or take other prompts"
    )
    if metrics.get("nonfinite_updates_max"):
        cause = "the updates were skipped, because loss or gradient is not finite: see the folder nonfinite"
    text = f"no gradient in the last {MAX_IDLE_STEPS} steps, so the policy did not learn"
    warn_first("idle", f"step {state.step}: {text} ({cause})")


def check_routes(invalid: int, total: int, max_invalid_frac: float) -> None:
    """Raise RuntimeError if too many rows of routes are invalid (rollout.validate_routes). Collective.

    invalid, total: rows of this rank; the fraction is over all ranks.
    """
    invalid, total = map(sum, zip(*from_all_ranks((invalid, total))))
    if invalid > max_invalid_frac * total:
        raise RuntimeError(
            f"{invalid} of {total} rows of routed experts are invalid: missing, with an expert twice in a "
            f"layer, or with an unknown expert (rollout.max_invalid_routes {max_invalid_frac}). The engine "
            "records other routes than it computes: try rollout.prefix_caching=false, or train without "
            "routes (algorithm.router_replay=off and rollout.capture_routes=off)"
        )


def check_parity(old_logprobs: Tensor, batch: RolloutBatch, config: Config, step: int) -> None:
    """Compare log-probabilities of trainer and engine, [B, T], under the same weights. Collective.

    Tokens of earlier policies (batch.policy_versions) are left out. RuntimeError if the difference exceeds
    the bounds: then the engine samples from another policy than the trained one, by its rounding, by other
    routes or by a faulty weight sync.
    """
    compared = batch.response_mask
    if batch.policy_versions is not None:
        compared = compared & (batch.policy_versions == step)
    dlogp = (old_logprobs - batch.rollout_logprobs).abs()[compared]
    sums = {"mean": (dlogp.sum().item(), dlogp.numel()), "dlogp_p99": (histogram(dlogp), 1)}
    mean, p99 = reduce_metrics(sums).values()
    rollout = config.rollout
    exact = rollout.dtype == config.model.dtype == "float32"
    exact = exact and rollout.fp8 == "off" and not rollout.kv_cache_fp8
    if not mean <= rollout.parity_mean or (exact and not p99 <= rollout.parity_p99):
        raise RuntimeError(
            f"step {step}: trainer and engine disagree on the sampled tokens: |dlogp| mean {mean:.2g}, p99 "
            f"{p99:.2g} nats (rollout.parity_mean {rollout.parity_mean}, rollout.parity_p99 "
            f"{rollout.parity_p99} for float32). If so with both dtypes float32 and no fp8, the weight sync "
            'is faulty; else see "trainer and engine disagree" in docs/troubleshooting.md'
        )


def mismatch_gate(metrics: dict[str, float], state: TrainState, config: Config) -> str | None:
    """Count consecutive steps whose mismatch exceeds a gate; return why to stop the run, or None.

    Two gates share the count: mismatch_gate bounds the KL of trainer and engine (k3), skew_gate the absolute
    values of skew_positive and skew_negative. A step that measures neither, because no row has gradient and
    there was no old-logprob pass, leaves the count as it is.
    """
    algorithm = config.algorithm
    gates = {
        "mismatch_k3": ("k3 KL of trainer and engine", "mismatch_gate", algorithm.mismatch_gate),
        "skew_positive": ("skew over tokens with A > 0", "skew_gate", algorithm.skew_gate),
        "skew_negative": ("skew over tokens with A < 0", "skew_gate", algorithm.skew_gate),
    }
    measured = {name: gate for name, gate in gates.items() if gate[2] > 0 and name in metrics}
    if not measured:
        return None
    # NaN is above
    above = [name for name, (*_, limit) in measured.items() if not abs(metrics[name]) <= limit]
    state.steps_above_gate = state.steps_above_gate + 1 if above else 0
    if not above:
        return None
    texts = [
        f"{text} is {metrics[name]:.3g}, algorithm.{setting} is {limit}"
        for name, (text, setting, limit) in measured.items()
        if name in above
    ]
    message = f"step {state.step}: {'; '.join(texts)} ({state.steps_above_gate} steps in a row)"
    patience = algorithm.mismatch_patience
    if patience and state.steps_above_gate >= patience:
        setting = gates[above[0]][1]
        return (
            f"{message}: the engine samples from another policy than the trained one. Reduce the mismatch "
            "(algorithm.router_replay=r3, rollout.fp8=off, rollout.dtype=float32), or, if "
            "algorithm.rollout_correction or centering.enabled handles the difference, raise "
            f"algorithm.{setting} or algorithm.mismatch_patience"
        )
    warn_first("mismatch", message)
    return None


MAX_SAVED_BATCHES = 3  # per rank, in a run folder, with run.on_nonfinite skip


def handle_nonfinite(
    quantity: str, batch: RolloutBatch, rows: list[int], config: Config, step: int, **more: Tensor
) -> None:
    """Save the batch, name the prompts of the bad rows, then stop or continue (run.on_nonfinite). Collective.

    quantity: "reward" or "loss". rows: this rank's rows with NaN or infinity; if no rank has any, every loss
    was finite and the gradient overflowed. more: tensors to save beside the fields of the batch. A run that
    continues saves MAX_SAVED_BATCHES batches at most, because every bad step has one.
    """
    texts = [prompt.text for prompt in batch.prompts]
    texts_by_rank = from_all_ranks([texts[row] for row in rows])
    examples = list(dict.fromkeys(sum(texts_by_rank, [])))
    quantity = quantity if examples else "gradient"
    folder = Path(config.run.dir) / "nonfinite"
    of_rank = f"rank_{dist.get_rank()}.pt"
    stops = config.run.on_nonfinite == "stop"
    is_saved = stops or len(list(folder.glob(f"*_{of_rank}"))) < MAX_SAVED_BATCHES
    if is_saved:
        folder.mkdir(parents=True, exist_ok=True)
        fields = {name: value for name, value in vars(batch).items() if name not in ("prompts", "verdicts")}
        fields |= {"prompts": texts, "rows": rows} | more  # plain types: loads with weights_only
        fields["extras"] = {name: getattr(state, "__dict__", state) for name, state in batch.extras.items()}
        if batch.turns is not None:
            fields["turns"] = [[(turn.role, turn.num_tokens) for turn in turns] for turns in batch.turns]
        torch.save(fields, folder / f"step_{step + 1:06d}_{quantity}_{of_rank}")
    prompts = ", ".join(repr(text[:80]) for text in examples[:3]) or "none in particular"
    skipped = "reward" if quantity == "reward" else "update"
    message = (
        f"step {step + 1}: a {quantity} is NaN or infinite; prompts ({len(examples)}): {prompts}; the batch "
        f"is {'' if is_saved else 'not '}saved in {folder}"
        f"{'' if stops else f', which keeps the first {MAX_SAVED_BATCHES}'}, and this {skipped} has not "
        "changed the weights"
    )
    if stops:
        raise RuntimeError(f"{message}; run.on_nonfinite=skip continues without this {skipped}")
    say(message)


def refuse_nonfinite_rewards(
    rewards: Tensor, valid: Tensor, batch: RolloutBatch, config: Config, step: int
) -> tuple[Tensor, Tensor]:
    """Stop the run for a NaN or infinite reward, or mark it as invalid (run.on_nonfinite=skip). Collective.

    rewards [B] float, valid [B] bool. Returns (rewards, valid), in which a bad reward becomes (0, False).
    """
    bad = ~rewards.isfinite()  # [B]
    if reduce_metrics({"bad_max": (int(bad.any()), 1)})["bad_max"]:
        handle_nonfinite("reward", batch, bad.nonzero().flatten().tolist(), config, step, rewards=rewards)
    return rewards.masked_fill(bad, 0.0), valid & ~bad


def refuse_nonfinite_weights(policy: torch.nn.Module, whose: str, advice: str) -> None:
    """Raise RuntimeError on all ranks if a weight is NaN or infinite on any rank. Collective.

    Call this before weights reach an engine, a checkpoint or an export. whose: the origin of the weights, for
    example "model.path: runs/demo/model"; advice: the remedy.
    """
    with torch.no_grad():  # the maximum of |w| is NaN if any w is; a sum could overflow on finite weights
        largest = {name: torch.linalg.vector_norm(p, torch.inf) for name, p in policy.named_parameters()}
    finite = torch.stack(list(largest.values())).isfinite().tolist()
    bad = [name for name, is_finite in zip(largest, finite) if not is_finite]
    if names := sorted(set(sum(from_all_ranks(bad), []))):
        raise RuntimeError(
            f"{whose}: {len(names)} of {len(largest)} weight tensors hold NaN or infinity, the first is "
            f"{names[0]}; {advice}"
        )


def same_digest(config, setting: str, folder: Path, recorded: str | None) -> str | None:
    """Return the digest of the weights that a setting names; ValueError if the recorded one differs.

    None if the folder has no weights, for example if a judge is a function.
    """
    digest = digest_of_weights(folder)
    if recorded not in (None, digest):
        refuse_or_say(config, setting, f"the weights in {folder} have", "them")
    return digest


def refuse_or_say(config, setting: str, subject: str, pronoun: str) -> None:
    """Raise ValueError for a file that changed since the checkpoint; with resume=weights only report it."""
    if config.checkpoint.resume == "auto":
        raise ValueError(
            f"{setting}: {subject} changed since the checkpoint: restore {pronoun}, or resume from the "
            "weights alone with checkpoint.resume=weights"
        )
    say(f"{setting}: {subject} changed since the checkpoint")
