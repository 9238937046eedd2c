"""Tests of kernels/expert_rows.py in Triton's interpreter; test_expert_rows.py runs them, see there.

As a plug-in of pytest this file also lets the tests of test_model.py use the kernels.
"""

import multiprocessing
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from model_suites import DISPATCH_CASES, dispatch
from test_model import assert_dispatch

import moe_model
from kernels.expert_rows import CopyRows, SumRows, WeightedSwiGLU
from moe_model import CopyToExperts, SumOfExperts, TakeRows, grouped_linear

assert os.environ["TRITON_INTERPRET"] == "1", "start test_expert_rows.py"
moe_model.MoEBlock.kernel = "triton"


def random_ids(num_tokens: int, top_k: int, num_experts: int) -> torch.Tensor:
    return torch.stack([torch.randperm(num_experts)[:top_k] for _ in range(num_tokens)])


CASES = {  # tokens, hidden size, width, experts, ids
    "random": (18, 40, 24, 3, lambda: random_ids(18, 2, 3)),
    "rows of several blocks": (2, 1040, 1030, 2, lambda: random_ids(2, 1, 2)),
    "experts without rows": (9, 32, 16, 9, lambda: random_ids(9, 2, 3) * 3 + 1),
    "one expert has all rows": (11, 32, 16, 6, lambda: torch.full((11, 1), 4)),
    "the first and the last expert have all rows": (5, 32, 16, 6, lambda: torch.tensor([[5, 0]] * 5)),
    "every token goes to every expert": (4, 32, 16, 5, lambda: random_ids(4, 5, 5)),
    "an expert twice for one token": (4, 32, 16, 3, lambda: torch.tensor([[1, 1], [2, 2], [0, 1], [2, 0]])),
    "one token": (1, 32, 16, 4, lambda: random_ids(1, 3, 4)),
    "no token": (0, 32, 16, 4, lambda: torch.zeros(0, 2, dtype=torch.int64)),
}


def sum_of_experts(x, gate_up, down, weights, ids) -> torch.Tensor:
    """Compute the formula one pair at a time."""
    rows = [x[:0]]
    for t, token in enumerate(x):
        row = torch.zeros_like(token)
        for k, e in enumerate(ids[t].tolist()):
            gate, up = (gate_up[e] @ token).chunk(2)
            row = row + weights[t, k] * (down[e] @ (gate * torch.sigmoid(gate) * up))
        rows.append(row[None])
    return torch.cat(rows)


def by_kernels(x, gate_up, down, weights, ids) -> torch.Tensor:
    order, inverse, counts = sorted_pairs(ids, len(down))
    routes = (order // ids.shape[1], inverse.view(ids.shape))
    z = grouped_linear(CopyRows.apply(x, *routes), gate_up, counts)
    activated = WeightedSwiGLU.apply(z, TakeRows.apply(weights.flatten(), order))
    return SumRows.apply(grouped_linear(activated, down, counts), *routes)


def by_torch(x, gate_up, down, weights, ids) -> torch.Tensor:
    order, inverse, counts = sorted_pairs(ids, len(down))
    gate, up = grouped_linear(CopyToExperts.apply(x, order, inverse), gate_up, counts).chunk(2, dim=-1)
    outputs = grouped_linear(torch.nn.functional.silu(gate) * up, down, counts)
    return SumOfExperts.apply(outputs, weights, order, inverse)


def sorted_pairs(ids: torch.Tensor, num_experts: int) -> tuple[torch.Tensor, ...]:
    order = ids.flatten().argsort(stable=True)
    return order, order.argsort(), ids.flatten().bincount(minlength=num_experts)


def results_of(compute, leaves, grad) -> list[torch.Tensor]:
    leaves = [leaf.detach().clone().requires_grad_() for leaf in leaves]
    output = compute(*leaves)
    return [output.detach(), *torch.autograd.grad(output, leaves, grad, materialize_grads=True)]


def errors(values, exact) -> list[float]:
    """Return the largest error of each tensor, relative to its largest value."""
    pairs = [(value.double(), wanted) for value, wanted in zip(values, exact, strict=True) if wanted.numel()]
    return [((a - b).abs().max() / b.abs().max().clamp(min=1e-9)).item() for a, b in pairs]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("case", CASES)
def test_output_and_all_gradients_are_those_of_the_formula(case, dtype):
    """Gradients of weights include experts without rows, which are 0; a second run gives the same bits.

    float32: processors add in different orders. bfloat16: at most twice torch's errors, or some roundings.
    """
    num_tokens, hidden, width, num_experts, choose = CASES[case]
    torch.manual_seed(3)
    ids = choose()
    leaves = [torch.randn(num_tokens, hidden), torch.randn(num_experts, 2 * width, hidden) / hidden**0.5]
    leaves = [leaf.to(dtype) for leaf in [*leaves, torch.randn(num_experts, hidden, width) / width**0.5]]
    leaves.append(torch.rand(ids.shape))
    grad = torch.randn(hidden, num_tokens).t().to(dtype)  # not contiguous
    actual = results_of(lambda *leaves: by_kernels(*leaves, ids), leaves, grad)
    exact = [leaf.double() for leaf in leaves]
    expected = results_of(lambda *leaves: sum_of_experts(*leaves, ids), exact, grad.double())
    assert [value.dtype for value in actual] == [dtype] * 4 + [torch.float32]
    if dtype == torch.float32:
        assert max(errors(actual, expected), default=0) < 16 * torch.finfo(torch.float32).eps
        assert all(map(torch.equal, actual, results_of(lambda *v: by_kernels(*v, ids), leaves, grad)))
    else:
        of_torch = errors(results_of(lambda *v: by_torch(*v, ids), leaves, grad), expected)
        assert all(e < max(2 * t, 0.01) for e, t in zip(errors(actual, expected), of_torch))


def run_rank(rank: int, folder: Path) -> None:
    """Compute model_suites.dispatch() on one of two ranks."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    moe_model.init_deepspeed()
    torch.save(dispatch(folder), folder / f"rank_{rank}.pt")
    dist.barrier()


def test_two_ranks_with_expert_parallelism_equal_a_slow_loop(tmp_path):
    context = multiprocessing.get_context("fork")
    ranks = [context.Process(target=run_rank, args=(rank, tmp_path)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    results = [torch.load(tmp_path / f"rank_{rank}.pt") for rank in range(2)]
    for case in DISPATCH_CASES:
        assert_dispatch(case, [result[case] for result in results])
