"""SAPO (arXiv 2511.20347): a soft gate in place of the clip."""

import torch
from torch import Tensor

from batch import LossInputs


def sapo(
    inputs: LossInputs, tau_positive: float = 1.0, tau_negative: float = 1.05
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return 4 / tau sigmoid(tau (r - 1)) A for each token, [b, T].

    r is the ratio of the token's group, tau is tau_positive for A > 0 and tau_negative for the other tokens.
    At r = 1 the gradient equals that of r A.
    """
    if min(tau_positive, tau_negative) <= 0:
        raise ValueError("tau_positive and tau_negative must be above 0")
    positive = inputs.ratio.new_tensor(tau_positive)
    negative = inputs.ratio.new_tensor(tau_negative)
    tau = torch.where(inputs.advantages > 0, positive, negative)
    return 4 / tau * torch.sigmoid(tau * (inputs.ratio - 1)) * inputs.advantages, {}
