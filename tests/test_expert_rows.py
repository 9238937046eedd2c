"""kernels/expert_rows.py: Triton kernels for the rows of a MoE block.

TRITON_INTERPRET must be set before triton is imported, so one subprocess runs interpreted_rows.py and tests
of test_model.py with it. test_kernels.py reads the machine code of the kernels.
"""

import os
import re
import subprocess
import sys

import pytest
import torch
from conftest import ROOT
from model_suites import tiny_config
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

import kernels.expert_rows as rows
import moe_model
from moe_model import MoEBlock, Policy, use_expert_kernel
from settings import ModelSettings
from tests.patience import limit

OF_MODELS = (  # against transformers and slow loops
    "test_logprobs_and_gradients_match_transformers[1.0-moe]",
    "test_logprobs_and_gradients_match_transformers[1.0-glm]",
    "test_replay_of_random_routes_matches_transformers[moe]",
    "test_moe_block_against_slow_loop[1048576-True]",
    "test_recomputed_layers_use_the_experts_of_the_forward_pass",
)


@pytest.mark.slow
def test_the_kernels_compute_what_torch_does():
    tests = ["tests/interpreted_rows.py", *(f"tests/test_model.py::{name}" for name in OF_MODELS)]
    environment = os.environ | {
        "TRITON_INTERPRET": "1",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": f"{ROOT}/tests",
    }
    command = [sys.executable, "-m", "pytest", "-q", "-p", "interpreted_rows", "-p", "no:cacheprovider"]
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": limit(300)}
    done = subprocess.run([*command, *tests], **options)
    assert done.returncode == 0, done.stdout[-6000:]
    assert re.search(rf"^{19 + len(OF_MODELS)} passed", done.stdout, re.MULTILINE), done.stdout


@pytest.mark.parametrize("ep_size", [1, 2])
def test_the_host_waits_only_for_the_exchange_of_rows(ep_size, monkeypatch):
    """As in test_model.py, with kernels that do nothing, forward and backward."""
    waits = []
    products = lambda x, weight, tokens_per_expert: x @ weight[0].mT
    monkeypatch.setattr(FakeTensor, "tolist", lambda self: waits.append(self) or [[10, 8], [9, 9]])
    monkeypatch.setattr(moe_model.dist, "all_to_all_single", lambda *tensors, group: None)
    monkeypatch.setattr(moe_model, "grouped_linear", products)
    monkeypatch.setattr(MoEBlock, "kernel", "triton")
    for name in ("sum_kernel", "swiglu_kernel", "swiglu_backward_kernel"):
        monkeypatch.setattr(rows, name, {grid: lambda *_, **__: None for grid in ((6, 1), (18,))})
    with FakeTensorMode():
        block = MoEBlock(tiny_config("moe"), None)
        block.ep_size = ep_size
        block.num_local_experts = 8 // ep_size
        block.experts = moe_model.Experts(tiny_config("moe"), block.num_local_experts, "ep_size_2")
        x_TD = torch.empty(6, 32, requires_grad=True)
        output, _ = block(x_TD)
        output.sum().backward()
    assert x_TD.grad.shape == output.shape == (6, 32)
    assert len(waits) == ep_size - 1


REFUSED = {  # part of the message: (device, compute capability)
    "NVIDIA": ("cpu", (9, 0)),
    "8.0": ("cuda", (7, 5)),
    "": ("cuda", (8, 0)),
}


@pytest.mark.parametrize("message", REFUSED)
def test_devices_that_cannot_run_the_kernels_are_refused(message, monkeypatch):
    device, capability = REFUSED[message]
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    reason = rows.unsupported(torch.device(device))
    assert message in reason if message else reason is None


@pytest.mark.parametrize(("kind", "message"), [("moe", "GPU"), ("dense", "dense")])
def test_a_policy_that_cannot_use_the_kernels_is_refused(kind, message):
    policy = Policy(tiny_config(kind))
    with pytest.raises(ValueError, match="model.expert_kernel") as caught:
        use_expert_kernel(policy, ModelSettings(expert_kernel="triton"))
    assert message in str(caught.value)
    use_expert_kernel(policy, ModelSettings())


class ScaledGradient(torch.autograd.Function):
    """Return x; the gradient is multiplied by a factor, as if a kernel were compiled wrongly."""

    @staticmethod
    def forward(ctx, x, factor: float):
        ctx.factor = factor
        return x.clone()

    @staticmethod
    def backward(ctx, grad):
        return grad * ctx.factor, None


@pytest.mark.parametrize("factor", [1.0, 0.5, float("nan")])
@pytest.mark.parametrize("tensor", ["rows", "weights"])
def test_kernels_that_are_compiled_wrongly_are_refused(tensor, factor, monkeypatch):
    """The gradient of x or of the routing weights is wrong; nothing else."""
    place = lambda token_P, places_TK: (places_TK.flatten().argsort(), places_TK.flatten())
    copy = lambda x, *routes: moe_model.CopyToExperts.apply(
        ScaledGradient.apply(x, factors["rows"]), *place(*routes)
    )
    total = lambda out, token_P, places_TK: out[places_TK].sum(1)
    factors = {"rows": 1.0, "weights": 1.0} | {tensor: factor}

    def swiglu(z_PI, weights_P):
        gate, up = z_PI.chunk(2, dim=-1)
        weights_P = ScaledGradient.apply(weights_P, factors["weights"])
        return torch.nn.functional.silu(gate) * up * weights_P.unsqueeze(1)

    for name, function in (("CopyRows", copy), ("SumRows", total), ("WeightedSwiGLU", swiglu)):
        monkeypatch.setattr(getattr(moe_model, name), "apply", function)
    monkeypatch.setattr(moe_model, "unsupported", lambda _: None)
    policy = Policy(tiny_config("moe"))
    for parameter in policy.parameters():
        torch.nn.init.normal_(parameter)
    settings = ModelSettings(expert_kernel="triton")
    blocks = [module for module in policy.modules() if isinstance(module, MoEBlock)]
    if factor == 1.0:
        use_expert_kernel(policy, settings)
    else:
        with pytest.raises(ValueError, match="model.expert_kernel"):
            use_expert_kernel(policy, settings)
    assert {block.kernel for block in blocks} == {"triton" if factor == 1.0 else "torch"}
    assert all(block.load_E is None for block in blocks)
