"""A teacher scores the policy's completions: RSTG (arXiv 2608.00782) and on-policy distillation.

The teacher samples nothing. One forward pass gives its log-probabilities of the policy's own completions, and
the tokens of the groups that it teaches get the advantages of teacher_advantages() in place of those of their
rewards. Default: groups that are all wrong, from which rewards teach nothing.
"""

import functools
import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import moe_model
from batch import RolloutBatch
from data.chat import load_tokenizer
from data.prompts import date_of_scores, load_scores, prompt_sha
from data.score import model_digest
from extras.base import Extra, Launch
from moe_model import num_experts_of
from runtime.checks import refuse_nonfinite_weights, refuse_or_say, same_digest


@dataclass
class Lesson:
    """batch.extras["teacher"]: the completions that the teacher teaches in a step."""

    is_taught: Tensor  # [B] bool, whole groups at a time
    logprobs: Tensor  # [B, T] by the teacher, 0 in rows that it does not teach
    confidence: Tensor  # [B] factor of the advantages, in [0, 1]


@dataclass
class Teacher:
    """run.extras["teacher"]."""

    confidences: dict[str, dict[str, float]]  # {teacher.scores: {prompt_sha: pass rate}}
    model: moe_model.Policy | None = None


def taught_rows(batch: RolloutBatch, config) -> Tensor:
    """Mark, [B] bool, the completions that the teacher teaches, whole groups at a time.

    all_wrong      groups of zero variance whose scores are 0 (RSTG) [secondary]
    zero_variance  groups of two or more valid scores, all equal
    every          all groups

    A group never mixes both signals: its completions with a verdict are all taught, or all keep the
    advantages of their rewards. Completions without a verdict have no policy loss in either case [ours].
    """
    rule = config.teacher.groups
    if rule == "every":
        return batch.valid.clone()
    rows = batch.is_tied & batch.valid
    if rule == "all_wrong":
        rewarded_groups = batch.group_index[rows & (batch.scores > 0)]
        rows &= ~torch.isin(batch.group_index, rewarded_groups)
    return rows


def teacher_advantages(
    teacher_logprobs: Tensor, old_logprobs: Tensor, mask: Tensor, confidence: Tensor, coef: float
) -> Tensor:
    """Return token advantages [B, T] of on-policy distillation, 0 on padding.

        A_t = coef w (log pi_teacher(y_t) - log pi_old(y_t))

    logprobs [B, T] in nats, without gradient; mask [B, T] bool; confidence [B]: w, the teacher's pass rate on
    the prompt (RSTG, arXiv 2608.00782) [secondary], or 1. The completions are the policy's own, so that the
    expected policy gradient is minus the gradient of the token's KL(pi, pi_teacher). The student is the
    policy before the step's updates. Advantages are neither centred nor normalised (as in NeMo-RL's MOPD).
    """
    gap = (teacher_logprobs - old_logprobs) * mask  # [B, T]
    return coef * confidence.unsqueeze(1) * gap


@functools.cache  # a search makes a thousand estimates
def teacher_config(path: str):
    """Read config.json of teacher.path; ValueError names the setting."""
    try:
        return moe_model.load_config(path)
    except ValueError as error:
        raise ValueError(f"teacher.path: {str(error).removeprefix('model.path: ')}") from error


def check_fits(launch: Launch) -> Path:
    """Return the teacher's folder; ValueError if the teacher does not fit the policy.

    The teacher scores the policy's token ids, so it needs the same tokens under the same ids. Its embedding
    may have more rows, which some models of a family have as padding.
    """
    path = launch.config.teacher.path
    policy = launch.hf_config
    teacher = teacher_config(path)
    folder = moe_model.model_folder(path)
    own = launch.tokenizer.get_vocab()
    other = load_tokenizer(folder, "teacher.path").get_vocab()
    if own != other or teacher.vocab_size < policy.vocab_size:
        differing = sorted(own.items() ^ other.items(), key=lambda item: item[1])
        example = f", for example the token {differing[0][0]!r}" if differing else ""
        raise ValueError(
            f"teacher.path: {path} has another vocabulary ({len(other):,} tokens, "
            f"{teacher.vocab_size:,} embeddings) than the policy ({len(own):,}, {policy.vocab_size:,})"
            f"{example}: a teacher scores the policy's token ids, take a model with the same tokenizer"
        )
    if launch.context > teacher.max_position_embeddings:
        raise ValueError(
            f"teacher.path: completions with their prompts have up to {launch.context} tokens, but the "
            f"context of {path} is {teacher.max_position_embeddings}: lower rollout.max_new_tokens"
        )
    ep_size = launch.config.model.ep_size
    num_experts = num_experts_of(teacher)
    if num_experts % ep_size:
        raise ValueError(f"teacher.path: model.ep_size {ep_size} must divide {num_experts} experts of {path}")
    return folder


def load_confidences(launch: Launch) -> dict[str, dict[str, float]]:
    """Return {file: {prompt_sha: the teacher's pass rate}} of teacher.scores, for all stages.

    A prompt whose verdicts all failed has the pass rate 0. ValueError for a file of another model, or if a
    training prompt of a stage is missing.
    """
    confidences = {}
    for config, offers in zip(launch.configs, launch.offers):
        path = config.teacher.scores
        if path is None:
            continue
        scores = load_scores(path)
        with open(path, encoding="utf-8") as file:
            model = str(json.loads(file.readline())["model"])
        teacher = config.teacher.path
        if model.split()[-1:] != [model_digest(moe_model.model_folder(teacher))]:
            raise ValueError(
                f"teacher.scores: {path} was measured with another model ({model}) than teacher.path "
                f"{teacher}: score the prompts with the teacher"
            )
        shas = {prompt_sha(launch.loaded.train[index]) for index in offers.indices}
        if missing := shas - scores.keys():
            raise ValueError(
                f"teacher.scores: {path} lacks {len(missing):,} of {len(shas):,} training prompts: score all "
                f"of them with data/score.py, using the template of the training run{date_of_scores(path)}"
            )
        confidences[path] = {sha: score.pass_rate if score else 0.0 for sha, score in scores.items()}
    return confidences


def digest_of(confidences: dict[str, dict[str, float]]) -> str | None:
    """Return the digest of all pass rates, None if there are none."""
    rates = sorted(sorted(of_file.items()) for of_file in confidences.values())
    return hashlib.sha256(json.dumps(rates).encode()).hexdigest()[:16] if rates else None


class TeacherExtra(Extra):
    """The calls of a run with a teacher."""

    name = "teacher.path"
    replaces_advantages = True
    num_passes = 1  # of a model of the policy's size over all groups, the most that it can be

    def contradictions(self, config):
        """A teacher needs groups that are kept, and pass rates of single turns."""
        zero = config.zero_variance
        teacher = config.teacher
        if zero.drop:
            yield "{teacher.path} teaches groups that {zero_variance.drop} removes: choose one"
        if zero.rl_zvp and teacher.groups != "all_wrong":
            yield "{teacher.groups} leaves no group to {zero_variance.rl_zvp}: set it to all_wrong"
        if config.has_turns and teacher.scores is not None:
            yield (
                "{teacher.scores} holds pass rates of single turns, but completions have turns with "
                "data.tools or data.environment: set it to null"
            )

    def check_stages(self, configs):
        """A run has one teacher."""
        paths = sorted({config.teacher.path for config in configs if config.teacher.path is not None})
        if len(paths) > 1:
            raise ValueError(f"teacher.path: stages name {', '.join(paths)}, a run has one teacher")

    def warnings(self, config):
        """Records of prompts keep the teacher from teaching them."""
        zero = config.zero_variance
        by_record = [name for name in ("history", "offline_scores", "probe_size") if getattr(zero, name)]
        if not by_record:
            return []
        return [
            f"teacher.path with zero_variance.{', '.join(by_record)}: prompts of equal scores are skipped or "
            "stopped early, although the teacher would teach them"
        ]

    def needs_baseline(self, config):
        """A teacher of every group needs no rewards."""
        return config.teacher.groups != "every"

    def memory(self, config, hf_config, tokens):
        """Return the bytes of the teacher's weights, which are held in the policy's dtype.

        Its forward pass keeps no activations and is smaller than an update of a policy of the same width. A
        wider teacher takes more than the estimate says, by the size of one layer's activations.
        """
        counts = moe_model.parameter_counts(teacher_config(config.teacher.path))
        num_held = counts.experts // config.model.ep_size + counts.embeddings + counts.others
        return {"reference": num_held * getattr(torch, config.model.dtype).itemsize}

    def models(self, config):
        """Name the teacher."""
        return {"teacher_weights": str(moe_model.model_folder(config.teacher.path))}

    def inputs(self, config):
        """Name the teacher and its pass rates."""
        teacher_config(config.teacher.path)  # whose error names the setting
        folder = moe_model.model_folder(config.teacher.path)
        return {"teacher.path": str(folder), "teacher.scores": config.teacher.scores}

    def check(self, launch):
        """Refuse a teacher or pass rates that do not fit, or that have changed since the checkpoint."""
        recorded = launch.state.extras.setdefault("teacher", {})
        folder = check_fits(launch)
        recorded["weights"] = same_digest(launch.config, "teacher.path", folder, recorded.get("weights"))
        confidences = load_confidences(launch)
        digest = digest_of(confidences)
        if digest is not None:
            if recorded.get("scores") not in (None, digest):
                refuse_or_say(launch.config, "teacher.scores", "the pass rates have", "the file")
            recorded["scores"] = digest
        launch.extras["teacher"] = Teacher(confidences)

    def build(self, launch, ep_group, device):
        """Build the teacher in the policy's dtype, spread over the expert-parallel ranks."""
        path = launch.config.teacher.path
        is_moe = num_experts_of(teacher_config(path)) > 0
        changes = {} if is_moe else {"freeze_router": False, "expert_kernel": "auto"}  # it has neither
        settings = launch.config.model.model_copy(update=changes)
        model = moe_model.build_policy(settings, path, ep_group if is_moe else None, device)
        refuse_nonfinite_weights(model, f"teacher.path: {path}", "take a model with finite weights")
        launch.extras["teacher"].model = model

    def after_rewards(self, run, batch, forward_batch):
        """Choose the completions to teach; add the teacher's log-probabilities and confidence. Collective.

        The teacher computes these completions only, at the temperature of the policy and with its own router:
        it never replays the student's routes.
        """
        if batch.old_logprobs is None:
            return  # every group was dropped
        teacher = run.extras["teacher"]
        with run.clock("logprobs"):
            is_taught = taught_rows(batch, run.config)
            rows = is_taught.nonzero().flatten().tolist()
            outputs = forward_batch(teacher.model, batch, run.config, replay=False, rows=rows)
        confidence = torch.ones(len(batch.prompts))
        if scores := run.config.teacher.scores:
            pass_rates = teacher.confidences[scores]
            confidence = torch.tensor([pass_rates[prompt_sha(prompt)] for prompt in batch.prompts])
        batch.extras["teacher"] = Lesson(is_taught, outputs.logprobs, confidence)

    def advantages(self, batch, advantages, config):
        """Replace the advantages of the taught completions."""
        lesson = batch.extras.get("teacher")
        if lesson is None:
            return advantages
        rows = lesson.is_taught  # [B]
        advantages[rows] = teacher_advantages(
            lesson.logprobs[rows], batch.old_logprobs[rows], batch.response_mask[rows],
            lesson.confidence[rows], config.teacher.coef,
        )  # fmt: skip
        batch.replaced = rows
        return advantages

    def metrics(self, batch):
        """Measure the teacher's work on a batch, as (sum, count).

        teacher_frac                  share of the groups that the teacher taught
        account/teacher_tokens_total  tokens of completions that the teacher scored
        teacher_kl_k1                 mean of log pi_old - log pi_teacher over these, KL (k1)
        """
        lesson = batch.extras.get("teacher")
        if lesson is None:
            return {}
        num_groups = len(batch.group_index.unique())
        num_taught = len(batch.group_index[lesson.is_taught].unique())
        mask = batch.response_mask & lesson.is_taught.unsqueeze(1)  # [B, T]
        num_tokens = mask.sum().item()
        gap = (batch.old_logprobs - lesson.logprobs)[mask]
        return {
            "teacher_frac": (num_taught, num_groups),
            "account/teacher_tokens_total": (num_tokens, 1),
            "teacher_kl_k1": (gap.sum().item(), num_tokens),
        }

    def charged_tokens(self, metrics, config):
        """Charge the scored tokens at their price."""
        return config.teacher.token_cost * metrics.get("account/teacher_tokens_total", 0)


EXTRA = TeacherExtra()
