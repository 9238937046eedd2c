"""A plug-in that trains by a built-in loss and also measures the ratios of token groups.

    algorithm: {gain: recorded_gain.py:recorded_gain, gain_args: {clip_mode: entropy_adaptive}}

All settings act as without the plug-in; algorithm.clip_mode is an argument, because a plug-in excludes it.
Two kinds of token groups are measured in every run, whatever its algorithm.ratio_level: `uncertain`, the
tokens of entropy group 0, and `completion`, all tokens of a completion. With the mean log-ratio d of a group,
the metrics are, as means over the computed tokens of a step:

    regime/squared_KIND_N    d^2 / |tau|, for groups of completions of N / 2 + 1 to N tokens (N = 4: 1 to 4)
    regime/groups_KIND_N     1 / |tau| of the same groups: squared / groups is the mean of d^2 over groups
    regime/cut_A             1 for uncertain tokens with an advantage that ESPO's clip with alpha A would cut
    regime/cut_tokens        1 for all uncertain tokens with an advantage: cut_A / cut_tokens is a share
    regime/rl_zvp_wrong      max_k H_k - H_t, the size that RL-ZVP's advantage over its coefficient has in a
                             group of wrong completions, measured in all trained groups; in a group of right
                             completions the entropy is this size
"""

import copy

import torch
from torch import Tensor

from batch import LossInputs
from train_rl import entropy_clip_eps, entropy_groups, token_gain, token_group_mean, token_group_size

ALPHAS = (0.02, 0.06, 0.2, 0.6)
LENGTHS = (4, 8, 16, 32, 64, 128, 256, 512)  # largest number of tokens of a completion, per bin


def recorded_gain(inputs: LossInputs, clip_mode: str = "fixed") -> tuple[Tensor, dict[str, Tensor]]:
    """Return the gain of the built-in loss, and its statistics with those of this module, [b, T] each."""
    inputs = copy.copy(inputs)
    inputs.settings = inputs.settings.model_copy(update={"gain": None, "clip_mode": clip_mode})
    gain, statistics = token_gain(inputs)
    log_ratio = inputs.log_ratio.detach()
    uncertain_groups = entropy_groups(inputs.entropy, inputs.mask, inputs.settings.entropy_groups)
    is_uncertain = (uncertain_groups == 0) & inputs.mask
    kinds = {
        "uncertain": (uncertain_groups, is_uncertain),
        "completion": (torch.zeros_like(uncertain_groups), inputs.mask),
    }
    for name, (groups, chosen) in kinds.items():
        statistics |= spread_by_length(name, log_ratio, groups, inputs.mask, chosen)
    log_s = token_group_mean(log_ratio, uncertain_groups, inputs.mask)
    counted = is_uncertain & (inputs.advantages != 0)
    statistics["regime/cut_tokens"] = counted.to(log_s.dtype)
    for alpha in ALPHAS:
        form = {"entropy_clip_coef": alpha, "entropy_clip_form": "token_group_mean"}
        espo = inputs.settings.model_copy(update=form)
        eps = entropy_clip_eps(inputs.entropy, uncertain_groups, inputs.mask, inputs.log_vocab, espo)
        excess = log_s.exp() - 1
        is_cut = torch.where(inputs.advantages > 0, excess > eps, excess < -eps)
        statistics[f"regime/cut_{alpha}"] = (counted & is_cut).to(log_s.dtype)
    largest = inputs.entropy.masked_fill(~inputs.mask, 0.0).amax(dim=1, keepdim=True)  # [b, 1]
    statistics["regime/rl_zvp_wrong"] = largest - inputs.entropy
    return gain, statistics


def spread_by_length(
    name: str, log_ratio: Tensor, groups: Tensor, mask: Tensor, chosen: Tensor
) -> dict[str, Tensor]:
    """Return regime/squared_NAME_N and regime/groups_NAME_N, [b, T]; chosen [b, T] marks the tokens."""
    squared = token_group_mean(log_ratio, groups, mask).square()
    weight = chosen / token_group_size(groups, mask).to(squared.dtype)  # sums to 1 over a group
    lengths = mask.sum(dim=1, keepdim=True)  # [b, 1]
    statistics = {}
    for shortest, largest in zip((0, *LENGTHS), LENGTHS):
        in_bin = (lengths > shortest) & (lengths <= largest)
        statistics[f"regime/squared_{name}_{largest}"] = squared * weight * in_bin
        statistics[f"regime/groups_{name}_{largest}"] = weight * in_bin
    return statistics
