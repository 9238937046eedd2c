"""Score centering (arXiv 2609.20807): a mismatch of trainer and engine causes no drift of the policy.

The engine returns its k most likely tokens at each position with their log-probabilities, the trainer
computes its own log-probabilities of the same tokens, and the gain of each token loses its expected value
under the engine, see score_centre().
"""

import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from extras.base import Extra
from settings import AlgorithmSettings

MAX_LOG_RATIO = 80.0  # as in train_rl.py: exp() of larger values overflows in float32
SMALLEST_TAIL = 1e-6  # a smaller tail probability is rounding error [secondary: as in torchtitan]


def weight_of_tokens(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    correction_weights: Callable[..., Tensor],
    algorithm: AlgorithmSettings,
) -> Tensor:
    """Return the factor W of A grad log pi that each token has in the loss, [n, k]: correction times ratio.

    Log-probabilities [n, k] are of any tokens, sampled or not. correction_weights() of train_rl.py.
    """
    ratio = (logprobs - old_logprobs).clamp(max=MAX_LOG_RATIO).exp()
    if algorithm.clip_mode == "weight":
        ratio = ratio.clamp(1 - algorithm.clip_eps_low, 1 + algorithm.clip_eps_high)
    mask = torch.ones_like(logprobs)
    return correction_weights(old_logprobs, rollout_logprobs, mask, algorithm) * ratio


def tail_of(probabilities: Tensor) -> Tensor:
    """Return the probability outside of the k given tokens, [n, k] -> [n, 1], at least SMALLEST_TAIL."""
    return (1 - probabilities.sum(dim=1, keepdim=True)).clamp(min=SMALLEST_TAIL)


def score_centre(
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor,
    covers_vocab: bool,
    correction_weights: Callable[..., Tensor],
    algorithm: AlgorithmSettings,
) -> Tensor:
    """Return a value per token whose gradient is the expected weighted score under the engine, [n].

    [secondary: formula as in torchtitan and NeMo RL] Let p be the policy, q the engine, s_v = grad log p_v,
    and W_v the weight of token v (weight_of_tokens()). Tokens are sampled from q, and the expected gradient
    has two parts:

        E_q[A W s] = E_q[A] mu + Cov_q(A, W s),   mu = E_q[W s] = sum_v q_v W_v s_v

    mu is 0 if W = p / q, and if q = p and W = 1. Otherwise the first part is a drift that no reward has
    caused: with W = 1 it pulls p toward q if E_q[A] > 0 and away from q if E_q[A] < 0. Every sync hands the
    result to the engine, so the drift adds up. The loss subtracts A mu. The engine returns only the head H of
    q, its k most likely tokens; the tail is modelled as q = rho p,

        rho = (1 - sum_H q) / (1 - sum_H p),   alpha = rho W(tail)
        mu  = sum_H (q_v W_v - alpha p_v) s_v,   because sum_v p_v s_v = 0

    Returns sum_H sg(q_v W_v - alpha p_v) log p_v, to be multiplied by A. Example: with W = 1, q = (0.5, 0.3)
    and p = (0.4, 0.4) on H, both tails are 0.2, rho = 1, and the coefficients are 0.1 and -0.1.

    logprobs [n, k] of the head by the policy, with gradient; old_logprobs [n, k] by the trainer before the
    update, rollout_logprobs [n, k] by the engine. covers_vocab: the head is the whole vocabulary, so the tail
    is empty, alpha = 0, and the result is exact. A correction with one weight per completion, for example
    sequence_mask, is refused: W of a token then depends on the other tokens [ours].
    """
    log_p = logprobs.detach()
    p = log_p.exp()
    q = rollout_logprobs.exp()
    expected = q * weight_of_tokens(
        log_p, old_logprobs, rollout_logprobs, correction_weights, algorithm
    )  # [n, k]
    if not covers_vocab:
        p_tail = tail_of(p)
        q_tail = tail_of(q)
        # The tail counts as one token: its weight W comes from the total probabilities of the tail.
        tail_weight = weight_of_tokens(
            p_tail.log(), tail_of(old_logprobs.exp()).log(), q_tail.log(), correction_weights, algorithm
        )
        expected = expected - q_tail / p_tail * tail_weight * p
    return (expected * logprobs).sum(dim=1)


class Centering(Extra):
    """The calls of a run with score centering.

    batch.extras["centering"]: [B] of [c, k], topk_logprobs of the policy before the updates of a step.
    """

    name = "centering.enabled"

    def contradictions(self, config):
        """Centering needs the weight of every token, also of those not sampled."""
        algo = config.algorithm
        per_completion = ("sequence_tis", "sequence_mask", "geometric_mask")
        if config.has_turns:
            yield "{centering.enabled} is not implemented for turns of {data.tools} or {data.environment}"
        if algo.gain is not None:
            yield (
                "{centering.enabled} needs the weight of every token, also of those not sampled, and "
                "{algorithm.gain} hides it: leave one of them out"
            )
        if algo.clip_mode not in ("none", "weight"):
            yield (
                "{centering.enabled} centers a weight of log pi, not the min of {algorithm.clip_mode}: set "
                "clip_mode to none or weight"
            )
        if algo.ratio_level != "token":
            yield "{centering.enabled} needs a ratio per token, not per {algorithm.ratio_level}"
        if algo.rollout_correction in per_completion:
            yield (
                "{centering.enabled} needs a weight per token; {algorithm.rollout_correction} has one per "
                "completion: set it to none, token_tis or token_mask"
            )
        if config.centering.topk == 0:
            yield (
                "{centering.enabled} needs the engine's most likely tokens, not {centering.topk}: set it to "
                "128, or to the size of a small vocabulary"
            )

    def memory(self, config, hf_config, tokens):
        """Return the bytes that centering adds to the backward pass of a micro-batch.

        For k tokens of each position: log-probabilities, weights and gradients of 40 bytes [ours: from the
        sizes of the tensors, not measured], and a float32 gradient of the head. With k at least an eighth of
        the vocabulary, all logits and their gradient are held instead (kernels: topk_logprobs()).
        """
        k = config.centering.topk
        vocab = hf_config.vocab_size
        if 8 * (k + 1) >= vocab:
            return {"on the way back": tokens * (40 * k + 2 * 4 * vocab)}
        return {"on the way back": tokens * 40 * k + 4 * vocab * hf_config.hidden_size}

    def check(self, launch):
        """Refuse more log-probabilities per token than the engine can return."""
        k = launch.config.centering.topk
        if k > launch.hf_config.vocab_size:
            raise ValueError(
                f"centering.topk {k} exceeds the engine's limit, the {launch.hf_config.vocab_size:,} tokens "
                "of the model's vocabulary: set it to that number or less"
            )

    def engine_options(self, config):
        """Allow requests for k log-probabilities per token."""
        return {"max_logprobs": config.centering.topk}

    def requests(self, run, jobs, requests):
        """Ask for the log-probabilities of the engine's most likely tokens."""
        return [replace(request, topk=run.config.centering.topk) for request in requests]

    def after_old_pass(self, batch, outputs):
        """Keep the log-probabilities of these tokens by the policy before the updates."""
        batch.extras["centering"] = outputs.topk_logprobs

    def gain(self, micro_batch):
        """Return -A times score_centre() of each token, [b, T].

        The old log-probabilities follow algorithm.old_policy, as in the ratio of the sampled tokens.
        """
        batch = micro_batch.batch
        rows = micro_batch.rows
        algorithm = micro_batch.inputs.settings
        current = torch.cat(micro_batch.outputs.topk_logprobs)  # [N, k], N completion tokens
        rollout = torch.cat([batch.topk_logprobs[i] for i in rows]).to(current)
        recorded = batch.extras.get("centering")
        if recorded is not None:
            recorded = torch.cat([recorded[i] for i in rows]).to(current)
        old = micro_batch.old_logprobs_of(
            current, recorded, rollout, micro_batch.has_moved, algorithm.old_policy
        )
        covers_vocab = math.log(current.shape[1]) >= micro_batch.inputs.log_vocab
        centre_N = score_centre(
            current, old, rollout, covers_vocab, micro_batch.correction_weights, algorithm
        )
        mask = batch.response_mask[rows].to(current.device)  # [b, T]
        advantages = batch.advantages[rows].to(current)
        return -(advantages * torch.zeros_like(advantages).masked_scatter(mask, centre_N))


EXTRA = Centering()
