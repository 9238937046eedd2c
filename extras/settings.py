"""Settings of the extras, one section each. Without torch: `--help` and error messages know every extra,
also if it is off and its file is not imported.
"""

from collections.abc import Iterator
from typing import ClassVar, Literal

from runtime.config import Section, setting

TeacherGroups = Literal["all_wrong", "zero_variance", "every"]
LoraTarget = Literal["attention", "mlp", "experts"]


class TeacherSettings(Section):
    """Extra: a teacher scores the policy's completions (RSTG, on-policy distillation), extras/teacher.py."""

    per_stage: ClassVar[bool] = True

    path: str | None = setting(
        None,
        "model that scores the policy's completions, as the folder of a Hugging Face checkpoint with the "
        "policy's tokenizer; null: no teacher",
        per_stage="largest",
    )
    groups: TeacherGroups = setting(
        "all_wrong",
        "groups that the teacher teaches in place of the rewards. all_wrong: all scores are 0. "
        "zero_variance: all scores are equal. every: all groups.",
    )
    coef: float = setting(1.0, "factor of the advantages log pi_teacher - log pi_old, in nats", gt=0)
    scores: str | None = setting(
        None,
        "file of the teacher's pass rates, written by data/score.py with the teacher as its model; a "
        "prompt's pass rate is then a factor of the advantages (RSTG's confidence); null: factor 1",
    )
    token_cost: float = setting(
        0.0,
        "price of a token that the teacher scores, in generated tokens, for example 1 for a teacher of the "
        "policy's size; train.max_generated_tokens counts the price; 0: the teacher is free",
        ge=0,
    )

    @property
    def is_on(self) -> bool:
        """Tell whether there is a teacher."""
        return self.path is not None


class CenteringSettings(Section):
    """Extra: score centering, no drift by a mismatch of trainer and engine, extras/centering.py."""

    enabled: bool = setting(
        False,
        "subtract the expected gradient under the engine's distribution from the gradient of each token, so "
        "that a mismatch of trainer and engine causes no drift; needs topk, algorithm.clip_mode none or "
        "weight, and algorithm.rollout_correction none, token_tis or token_mask",
        per_stage="largest",
    )
    topk: int = setting(
        0,
        "k: the engine also returns the log-probabilities of its k most likely tokens at each position, for "
        "example 128; centering is exact if k is the size of the vocabulary",
        ge=0,
    )

    @property
    def is_on(self) -> bool:
        """Tell whether gradients are centered."""
        return self.enabled


class LoraSettings(Section):
    """Extra: train low-rank adapters of frozen weights, experts included, extras/lora.py."""

    rank: int | None = setting(
        None,
        "r: rank of the adapters, for example 8; the weights of model.path then stay frozen, and checkpoints "
        "hold adapters only; null: no adapters, all weights are trained",
        ge=1,
    )
    alpha: float = setting(32.0, "factor alpha / rank of the adapters' product (lora_alpha of PEFT)", gt=0)
    rslora: bool = setting(False, "multiply by alpha / sqrt(rank) instead (rank-stabilised LoRA)")
    targets: list[LoraTarget] | None = setting(
        None,
        "matrices that get adapters. attention: q, k, v and o. mlp: gate, up and down of dense layers and "
        "of shared experts. experts: two pairs for each expert. null: all that the model has; the router, "
        "embeddings and the head get none",
        min_length=1,
    )

    @property
    def is_on(self) -> bool:
        """Tell whether adapters are trained in place of the weights."""
        return self.rank is not None


class CarrySettings(Section):
    """Extra: partial rollouts, unfinished completions go on in the next step, extras/carry.py."""

    per_stage: ClassVar[bool] = True

    share: float | None = setting(
        None,
        "fraction of a step's groups after which each rank ends the rollout; the others go on in the next "
        "step, with the tokens that they have; null: wait for all",
        per_stage="largest",
        gt=0,
        le=1,
    )
    max_age: int = setting(2, "number of rollouts that may leave a group unfinished", ge=1)
    late: Literal["finish", "drop"] = setting(
        "finish",
        "what becomes of a group that max_age rollouts have left unfinished. finish: the next rollout waits "
        "for it. drop: it is lost until the next epoch, and long answers with it",
    )

    @property
    def is_on(self) -> bool:
        """Tell whether a rollout may leave groups unfinished."""
        return self.share is not None


class DraftsSettings(Section):
    """Extra: completions begin with tokens of the prompt's last visit (SPEC-RL), extras/drafts.py."""

    form: Literal["literal", "residual"] | None = setting(
        None,
        "source of the token at the first rejected position of a draft. literal: today's policy (SPEC-RL). "
        "residual: the part of today's distribution that exceeds the old one, as in speculative sampling. "
        "null: no drafts",
    )
    lenience: float = setting(
        1.0,
        "l: a token of a draft is accepted with probability min(1, l x its probability today / at the last "
        "visit); above 1 more is kept, and completions drift toward earlier policies; SPEC-RL: 1.65 for GRPO",
        per_stage=True,
        ge=1,
        allow_inf_nan=False,
    )
    topk: int = setting(
        0,
        "k: likely tokens per position whose log-probabilities are kept for residual, for example 128; 0: "
        "the whole vocabulary, for which residual is exact",
        ge=0,
    )
    token_cost: float = setting(
        0.0,
        "price of a verified token in generated tokens, which train.max_generated_tokens counts; 0: free",
        ge=0,
    )

    @property
    def is_on(self) -> bool:
        """Tell whether completions begin with drafts."""
        return self.form is not None


def without_effect(config) -> Iterator[str]:
    """List settings that change nothing while their extra is off, for refuse_contradictions()."""
    for switch in ("teacher.path", "lora.rank", "carry.share", "drafts.form"):
        section = getattr(config, switch.partition(".")[0])
        for name, value in section:
            if not section.is_on and value != getattr(type(section)(), name):
                yield f"{{{switch.partition('.')[0]}.{name}}} has no effect without {{{switch}}}"


# {name of an extra, which is that of its section and of its file: class of the section}
SECTIONS = {
    "teacher": TeacherSettings,
    "centering": CenteringSettings,
    "lora": LoraSettings,
    "carry": CarrySettings,
    "drafts": DraftsSettings,
}
