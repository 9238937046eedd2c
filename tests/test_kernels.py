"""kernels/ against slow loops written from the formulas, and against vLLM's own quantisation.

On a GPU the Triton kernels run directly. Otherwise a subprocess computes all of their cases in Triton's
interpreter (this file as a script, because TRITON_INTERPRET must be set before triton is imported), and the
tests compare the stored results. The last section compiles the kernels for a Hopper GPU, which the
interpreter cannot test.

Tolerances:
- float64 rounds at 1e-16, so 1e-10 passes any order of summation.
- float32 rounds at 6e-8. Logits are at most 30 in size and are sums of at most 72 products, so values and
  gradients err by about 2e-6. The tolerance is 1e-5; wrong formulas are off by 1e-2 and more.
- Gradients in bfloat16 or float16 are rounded once as a whole and once before the product that makes them: at
  most twice half a unit in the last place, 2 x 2^-9 or 2 x 2^-12. Norms are compared.
- Codes and scales of FP8 are equal bit by bit.
"""

import functools
import os
import subprocess
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from conftest import MISSING, ROOT
from torch.utils._python_dispatch import TorchDispatchMode

os.environ.setdefault("TRITON_DEFAULT_FP_FUSION", "1")
import kernels.fp8_block as fp8
import kernels.linear_logprob_entropy as head
from experiments.bench import kernel_compile
from kernels.linear_logprob_entropy import linear_logprob_entropy
from tests.patience import limit

GPU = torch.cuda.is_available()
DEVICE = "cuda" if GPU else "cpu"
ROUNDING = {torch.float32: 1e-5, torch.float16: 2**-11, torch.bfloat16: 2**-8}  # of gradients, see above
TRITON = pytest.param("triton", marks=pytest.mark.slow)  # the interpreter takes half a minute, once
# The interpreter multiplies the bits of bfloat16 matrices as integers, so only GPUs run bfloat16.
TRITON_DTYPES = [torch.float32, torch.float16, *([torch.bfloat16] if GPU else [])]


# ---- The head: cases and the slow reference ----------------------------------------------------------------
# rows, hidden size, vocabulary, temperature, outputs used by the loss, columns per block (0: one block).
# Triton's tiles are 64 x 64 x 32 in float32 and 128 x 256 x 64 in two bytes, in 8 splits of whole tiles.
HEAD_CASES = {
    "one row": (1, 8, 300, 1.0, "both", 112),
    "small vocabulary": (5, 8, 3, 0.7, "both", 0),
    "whole tiles": (128, 64, 1024, 0.7, "both", 128),  # float32: all splits full
    "ragged": (67, 40, 994, 0.7, "both", 304),  # float32: the last split has 98 of 128 columns
    "empty splits": (70, 72, 600, 1.0, "both", 0),  # float32: 5 of 8 used; two bytes: 3
    "rising": (20, 24, 1500, 1.0, "both", 400),
    "falling": (20, 24, 1500, 0.7, "both", 400),
    "many rows": (1100, 8, 300, 1.0, "both", 0),  # more than 8 blocks of rows, several of columns
    "logprob only": (33, 16, 300, 0.7, "logprob", 112),
    "entropy only": (33, 16, 300, 0.7, "entropy", 112),
    "odd depth": (9, 7, 261, 0.7, "both", 32),  # not for Triton: rows are no multiples of 16 bytes
}
TRITON_HEAD_CASES = [name for name in HEAD_CASES if name != "odd depth"]


def head_inputs(name, dtype):
    """Return x, W, targets, g and h of a case; logits are of size 3, and rise or fall by 12 if the case says
    so."""
    num_rows, depth, vocab, _, uses, _ = HEAD_CASES[name]
    generator = torch.Generator().manual_seed(len(name) + vocab)
    x = torch.randn(num_rows, depth, generator=generator, dtype=torch.float64)
    weight = torch.randn(vocab, depth, generator=generator, dtype=torch.float64) * 3 / depth**0.5
    if name in ("rising", "falling"):
        x[:, 0] = 3
        weight[:, 0] = torch.linspace(-2, 2, vocab) * (1 if name == "rising" else -1)
    targets = torch.randint(vocab, (num_rows,), generator=generator)
    targets[0] = vocab - 1
    targets[-1] = 0
    g, h = torch.randn(2, num_rows, generator=generator, dtype=torch.float64)
    return (
        x.to(dtype),
        weight.to(dtype),
        targets,
        g if uses != "entropy" else None,
        h if uses != "logprob" else None,
    )


def use_blocks(patch, name):
    """Set the width of the blocks of the vocabulary to the one of a case."""
    num_rows, *_, columns = HEAD_CASES[name]
    if columns:
        patch.setattr(head, "MIN_COLUMNS", 16)
        patch.setitem(head.BLOCK_ELEMENTS, DEVICE, num_rows * columns)
        patch.setitem(head.BLOCK_ELEMENTS, "cpu", num_rows * columns)


def run_head(x, weight, targets, g, h, temperature, backend):
    """Return logprob, entropy, dx and dW of the loss sum(g logprob + h entropy)."""
    x = x.detach().requires_grad_()
    weight = weight.detach().requires_grad_()
    logprob, entropy = linear_logprob_entropy(x, weight, targets, temperature, backend)
    used = [(out, v.to(out.dtype)) for out, v in ((logprob, g), (entropy, h)) if v is not None]
    outputs, gradients = zip(*used)
    dx, dw = torch.autograd.grad(outputs, (x, weight), gradients)
    return logprob.detach(), entropy.detach(), dx, dw


def slow_head(x, weight, targets, g, h, temperature):
    """Return the results of run_head() from the equations, row by row, in float64."""
    x = x.double().numpy()
    weight = weight.double().numpy()
    logprob = np.zeros(len(x))
    entropy = np.zeros(len(x))
    dx = np.zeros_like(x)
    dw = np.zeros_like(weight)
    for n, target in enumerate(targets.tolist()):
        z = weight @ x[n] / temperature
        highest = z.max()
        logp = z - (highest + np.log(np.sum(np.exp(z - highest))))
        p = np.exp(logp)
        logprob[n] = logp[target]
        entropy[n] = -np.sum(p * logp)
        dz = np.zeros(len(weight))
        if g is not None:
            dz += g[n].item() * ((np.arange(len(weight)) == target) - p)
        if h is not None:
            dz -= h[n].item() * p * (logp + entropy[n])
        dx[n] = dz @ weight / temperature
        dw += np.outer(dz, x[n]) / temperature
    return [torch.from_numpy(value) for value in (logprob, entropy, dx, dw)]


def relative(actual, expected):
    """Return the norm of the difference, relative to the norm of the expected values."""
    return ((actual.double() - expected.double()).norm() / expected.double().norm()).item()


def assert_head(actual, expected, forward_tolerance, gradient_tolerance):
    for result, reference in zip(actual[:2], expected[:2]):
        assert (result.double() - reference.double()).abs().max() <= forward_tolerance
    assert (actual[0] <= 0).all() and (actual[1] >= -forward_tolerance).all()
    for result, reference in zip(actual[2:], expected[2:]):
        assert relative(result, reference) <= gradient_tolerance


# ---- Extreme logits. Operands are small integers times powers of two, so that logits are exact. ------------
EXTREME_CASES = ["spread", "offset", "certain", "other target", "equal", "cold", "hot", "one token"]


def extreme_inputs(name):
    """Return x, W, targets, g, h and the temperature of a case, in float32."""
    generator = torch.Generator().manual_seed(5)
    temperature = {"cold": 1e-2, "hot": 1e2}.get(name, 1.0)
    x = torch.randint(-2, 3, (40, 32), generator=generator).float()
    weight = torch.randint(-3, 4, (700, 32), generator=generator).float()
    targets = torch.randint(700, (40,), generator=generator)
    g, h = torch.randn(2, 40, generator=generator, dtype=torch.float64)
    if name == "spread":
        weight *= 256
    if name == "offset":  # logits of size 2, plus 8192
        weight /= 8
        x[:, 0] = 4
        weight[:, 0] = 2048
    if name in ("certain", "other target"):  # column 500 is 2000 above all other columns
        x[:, 0] = 4
        weight[:, 0] = 0
        weight[500, 0] = 512
        targets[:] = 500 if name == "certain" else 3
    if name == "equal":
        weight[:] = weight[0] * 64
    if name == "one token":
        weight = weight[:1]
        targets = torch.zeros_like(targets)
    return x, weight, targets, g, h, temperature


# ---- FP8: cases --------------------------------------------------------------------------------------------
FP8_SHAPES = [
    (1, 1), (128, 128), (130, 257), (33, 300), (127, 129), (3, 100, 140), (2, 2, 5, 131), (0, 5), (5, 0),
]  # fmt: skip
FP8_DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def fp8_values(shape, dtype=torch.float32, spread=1.0):
    """Return rows and columns of very different sizes, so that the scales of neighbouring blocks differ; some
    zeros."""
    generator = torch.Generator().manual_seed(sum(shape))
    values = torch.randn(shape, generator=generator) * spread
    values *= torch.logspace(0, 2, shape[-2]).unsqueeze(-1) * torch.logspace(0, -2, shape[-1])
    return (values * (torch.rand(shape, generator=generator) > 0.02)).to(dtype)


def fp8_nonfinite():
    """Return [130, 300] with infinities, a NaN, and blocks and rows of only zeros or only infinities."""
    values = fp8_values((130, 300))
    values[[3, 128], [5, 200]] = torch.inf
    values[4, 6] = -torch.inf
    values[7, 8] = torch.nan
    values[10:20, :128] = 0
    values[:128, 128:256] = 0
    values[128:, 256:] = -torch.inf
    values[50, 256:] = torch.inf
    return values


def fp8_cases():
    cases = {f"{shape} {dtype}": fp8_values(shape, dtype) for shape in FP8_SHAPES for dtype in FP8_DTYPES}
    cases |= {f"spread {spread}": fp8_values((130, 257), spread=spread) for spread in (1e-12, 3e-6, 1e30)}
    every_second = fp8_values((66, 520))[::2, ::2]  # not contiguous
    return cases | {"nonfinite": fp8_nonfinite(), "strided": every_second}


def quantise(kind, values, **options):
    return (fp8.quantise_weight if kind == "weight" else fp8.quantise_activation)(values, **options)


def code_bits(codes):
    """Return the bytes of FP8 codes; both codes of NaN become the same byte."""
    bits = codes.view(torch.uint8)
    return torch.where((bits & 127) == 127, 127, bits)


# ---- The Triton kernels' results ---------------------------------------------------------------------------
def mend_interpreter():
    """Let Triton's interpreter cast float32 to E4M3 by torch, which rounds like the hardware.

    The cast of Triton 3.9's interpreter loses the carry of rounding up to a power of two (127.7 becomes 64)
    and rounds ties away from zero.
    """
    import triton.language as tl
    import triton.runtime.interpreter as interpreter

    convert = interpreter._convert_float

    def convert_float(values, from_dtype, to_dtype, rounding_mode):
        if (from_dtype, to_dtype) != (tl.float32, tl.float8e4nv):
            return convert(values, from_dtype, to_dtype, rounding_mode)
        values = torch.from_numpy(np.ascontiguousarray(values, dtype=np.float32))
        return values.to(torch.float8_e4m3fn).view(torch.uint8).numpy()

    interpreter._convert_float = convert_float


def compute_triton_cases() -> dict[str, list[torch.Tensor]]:
    results = {}
    for name in TRITON_HEAD_CASES:
        for dtype in TRITON_DTYPES:
            with pytest.MonkeyPatch.context() as patch:
                use_blocks(patch, name)
                inputs = [v if v is None else v.to(DEVICE) for v in head_inputs(name, dtype)]
                results[f"{name} {dtype}"] = run_head(*inputs, HEAD_CASES[name][3], "triton")
    for name in EXTREME_CASES:
        *inputs, temperature = extreme_inputs(name)
        results[name] = run_head(*(v.to(DEVICE) for v in inputs), temperature, "triton")
    x, weight, targets, g, h = (v.to(DEVICE) for v in head_inputs("ragged", torch.float32))
    transposed = x.T.contiguous().T, weight.T.contiguous().T  # the same values with other strides
    results["transposed"] = run_head(*transposed, targets, g, h, 0.7, "triton")
    results["contiguous"] = run_head(x, weight, targets, g, h, 0.7, "triton")
    expanded = g[:1].float().expand(67), h[:1].float().expand(67)  # like the gradients of sums
    results["expanded gradients"] = run_head(x, weight, targets, *expanded, 0.7, "triton")
    certain = [v if v is None else v.to(DEVICE) for v in almost_certain_inputs()]
    results["almost certain"] = run_head(*certain, 1.0, "triton")
    results["no rows"] = run_head(x[:0], weight, targets[:0], g[:0], h[:0], 0.7, "triton")
    for name, values in fp8_cases().items():
        for kind in ("weight", "activation"):
            codes, scales = quantise(kind, values.to(DEVICE), use_triton=True)
            assert codes.dtype == torch.float8_e4m3fn
            results[f"{kind} {name}"] = [codes.view(torch.uint8), scales]
    return {name: [value.cpu() for value in values] for name, values in results.items()}


@pytest.fixture(scope="session")
def triton_results(tmp_path_factory):
    """Return a function from a case to the results of the Triton kernels; the first call computes all
    cases."""

    @functools.cache
    def compute() -> dict[str, list[torch.Tensor]]:
        if GPU:
            return compute_triton_cases()
        output = tmp_path_factory.mktemp("kernels") / "results.pt"
        environment = {**os.environ, "TRITON_INTERPRET": "1", "PYTHONPATH": str(ROOT)}
        command = [sys.executable, __file__, str(output)]
        done = subprocess.run(
            command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=limit(300)
        )
        assert done.returncode == 0, done.stderr[-4000:]
        return torch.load(output, weights_only=True)

    return lambda case: compute()[case]


# ---- The head: values and gradients ------------------------------------------------------------------------
@pytest.mark.parametrize("name", HEAD_CASES)
@pytest.mark.parametrize("backend", ["naive", "chunked"])
def test_torch_head_is_the_formula_in_float64(name, backend, monkeypatch):
    inputs, temperature = head_inputs(name, torch.float64), HEAD_CASES[name][3]
    use_blocks(monkeypatch, name)
    if HEAD_CASES[name][-1]:
        assert len(head.column_blocks(*inputs[:2])) > 2, "the running maximum would not be tested"
    actual = run_head(*inputs, temperature, backend)
    assert all(value.dtype == torch.float64 for value in actual)
    assert_head(actual, slow_head(*inputs, temperature), 1e-10, 1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("name", TRITON_HEAD_CASES)
@pytest.mark.parametrize("dtype", TRITON_DTYPES, ids=str)
def test_triton_head_is_the_formula(name, dtype, triton_results):
    """The reference reads the operands after rounding to the dtype; logits are float32 for every dtype."""
    actual = triton_results(f"{name} {dtype}")
    assert [value.dtype for value in actual] == [torch.float32, torch.float32, dtype, dtype]
    assert_head(actual, slow_head(*head_inputs(name, dtype), HEAD_CASES[name][3]), 1e-5, ROUNDING[dtype])


@pytest.mark.parametrize("name", EXTREME_CASES)
@pytest.mark.parametrize("backend", ["naive", "chunked", TRITON])
def test_extreme_logits(name, backend, triton_results, monkeypatch):
    """The largest logits are near 2e4.

    At temperature 1 logits and their differences are exact. Log-probabilities and entropies err by a few
    roundings, 2e-6 and 2^-23 of the size. Otherwise z / temperature errs by one or two of
    2^-24 of its size, log-probabilities by at most 2^-22 of the size of logits, and entropies by up to 10
    times the error of logits. Every summand of a gradient may err as much, and the summands cancel if all
    logits are equal, so the error is compared with a bound of the sum of their sizes; 2e-6 of this sum is for
    equal roundings, which do not average out.
    """
    *inputs, temperature = extreme_inputs(name)
    monkeypatch.setattr(head, "MIN_COLUMNS", 64)
    monkeypatch.setattr(head, "CACHED_ELEMENTS", 3 * 192)
    monkeypatch.setitem(head.BLOCK_ELEMENTS, "cpu", 40 * 192)
    actual = triton_results(name) if backend == "triton" else run_head(*inputs, temperature, backend)
    expected = slow_head(*inputs, temperature)
    size = max(1.0, (inputs[0] @ inputs[1].T).abs().max().item() / temperature)
    assert name not in ("spread", "offset", "cold") or size > 4000
    assert all(torch.isfinite(value).all() for value in actual)
    logprob, entropy = actual[:2]
    rounding = 0.0 if temperature == 1 else 2**-22 * size
    limit = 2**-23 * expected[0].abs() + 2e-6 + rounding
    assert (logprob <= 0).all() and ((logprob - expected[0]).abs() <= limit).all()
    assert (entropy > -1e-6).all() and (entropy - expected[1]).abs().max() <= 2e-6 + 10 * rounding
    g, h = inputs[3:]
    summands = (g.abs() + h.abs()).norm() * inputs[0].shape[1] ** 0.5 / temperature
    for result, reference, factor in zip(actual[2:], expected[2:], inputs[1::-1]):
        assert (result - reference).norm() <= (rounding + 2e-6) * summands * factor.abs().max()
    if name == "certain":
        assert (logprob == 0).all() and (entropy == 0).all()
    if name == "equal":
        torch.testing.assert_close(entropy, torch.full_like(entropy, np.log(700)), rtol=1e-6, atol=0)


def almost_certain_inputs():
    """Return rounded logits of size 100; the target of each row is its largest logit."""
    generator = torch.Generator().manual_seed(7)
    x = torch.randn(200, 64, generator=generator)
    weight = 12 * torch.randn(300, 64, generator=generator)
    return x, weight, (x @ weight.T).argmax(1), torch.ones(200), None


@pytest.mark.parametrize("backend", ["chunked", TRITON])
def test_no_logprob_is_rounded_above_zero(backend, triton_results):
    """The target's logit and the maximum are summed in different orders, and so differ by 2^-24 of 1000."""
    inputs = almost_certain_inputs()
    actual = triton_results("almost certain") if backend == "triton" else run_head(*inputs, 1.0, backend)
    logprob, expected = actual[0], slow_head(*inputs, 1.0)[0]
    assert (logprob <= 0).all() and (logprob - expected).abs().max() < 1e-3
    x, weight, targets, *_ = inputs
    _, m, log_s, _ = head.chunked_statistics(x, weight, targets, 1.0)
    assert (head.target_logits(x, weight, targets, 1.0) - m > log_s).any(), "the test needs the limit"


@pytest.mark.parametrize("backend", ["naive", "chunked", TRITON])
def test_no_rows(backend, triton_results):
    x, weight, targets, g, h = head_inputs("ragged", torch.float32)
    inputs = x[:0], weight, targets[:0], g[:0], h[:0]
    actual = triton_results("no rows") if backend == "triton" else run_head(*inputs, 0.7, backend)
    assert [tuple(value.shape) for value in actual] == [(0,), (0,), (0, 40), (994, 40)]
    assert (actual[3] == 0).all()


@pytest.mark.parametrize("needs_grad", [(True, True), (False, True), (True, False)], ids=["both", "W", "x"])
def test_gradcheck_of_chunked(needs_grad, monkeypatch):
    x, weight, targets, _, _ = head_inputs("odd depth", torch.float64)
    x, weight, targets = x[:4], weight[:21], targets[:4] % 21
    monkeypatch.setattr(head, "MIN_COLUMNS", 4)
    monkeypatch.setitem(head.BLOCK_ELEMENTS, "cpu", 4 * 8)
    assert [s.stop - s.start for s in head.column_blocks(x, weight)] == [8, 8, 5]
    x, weight = x.requires_grad_(needs_grad[0]), weight.requires_grad_(needs_grad[1])
    function = lambda x, weight: linear_logprob_entropy(x, weight, targets, 0.7, "chunked")
    assert torch.autograd.gradcheck(function, (x, weight))


def test_bfloat16_chunked_has_float32_logits(monkeypatch):
    """Compare with float64 of the same bfloat16 operands, whose products are exact in float32.

    Sums in float32 err by about 1e-7 of the values. Logits rounded to bfloat16 err by 2^-9 of their size, so
    naive is 100 times worse.
    """
    inputs = head_inputs("rising", torch.bfloat16)
    temperature = 1.0
    monkeypatch.setattr(head, "MIN_COLUMNS", 16)
    monkeypatch.setitem(head.BLOCK_ELEMENTS, "cpu", 20 * 16)  # 94 blocks: dx summed in bfloat16 would be off
    expected = slow_head(*inputs, temperature)
    actual = run_head(*inputs, temperature, "chunked")
    naive = run_head(*inputs, temperature, "naive")
    assert [value.dtype for value in actual] == [torch.float32] * 2 + [torch.bfloat16] * 2
    for result, rounded, reference in zip(actual[:2], naive[:2], expected[:2]):
        assert relative(result, reference) < 1e-6
        assert relative(rounded, reference) > 100 * relative(result, reference)
    for result, rounded, reference in zip(actual[2:], naive[2:], expected[2:]):
        assert relative(result, reference) < ROUNDING[torch.bfloat16] < relative(rounded, reference)
    operands = torch.tensor([[1.0, 2**-12]]), torch.tensor([[1.0], [1.0]])
    assert (operands[0] @ operands[1]).item() == 1 + 2**-12, "products of float32 are exact again afterwards"


class LargestTensor(TorchDispatchMode):
    """Record the number of elements of the largest tensor that any operation returns."""

    elements = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        result = function(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, torch.Tensor):
                self.elements = max(self.elements, value.numel())
        return result


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("wide_blocks", [True, False])  # limited by the elements or by the least width
def test_chunked_never_makes_the_logits(dtype, wide_blocks, monkeypatch):
    num_rows, depth, vocab = 100, 8, 2000
    x = torch.randn(num_rows, depth, dtype=dtype)
    weight = torch.randn(vocab, depth, dtype=dtype)
    targets = torch.randint(vocab, (num_rows,))
    g = torch.randn(num_rows)
    monkeypatch.setitem(head.BLOCK_ELEMENTS, "cpu", num_rows * 300 if wide_blocks else 1000)
    monkeypatch.setattr(head, "MIN_COLUMNS", 64)
    most = max(head.BLOCK_ELEMENTS["cpu"], num_rows * 64, vocab * depth, num_rows * depth)
    largest_made = {}
    largest_saved = {}
    for backend in ("naive", "chunked"):
        sizes = []

        def record(tensor, sizes=sizes):
            sizes.append(tensor.numel())
            return tensor

        hooks = torch.autograd.graph.saved_tensors_hooks(record, lambda tensor: tensor)
        with LargestTensor() as largest, hooks:
            run_head(x, weight, targets, g, g, 0.7, backend)
        largest_made[backend] = largest.elements
        largest_saved[backend] = max(sizes)
    assert largest_made["chunked"] <= most < num_rows * vocab == largest_made["naive"]
    assert largest_saved == {"chunked": vocab * depth, "naive": num_rows * vocab}  # chunked: only the weight


@pytest.mark.slow
def test_triton_reads_operands_of_any_strides(triton_results):
    """The kernels read contiguous copies, so entropies are equal; torch computes the remaining products:
    1e-5."""
    actual, expected = triton_results("transposed"), triton_results("contiguous")
    assert torch.equal(actual[1], expected[1])
    assert_head(actual, expected, 1e-5, 1e-5)
    x, weight, targets, g, h = head_inputs("ragged", torch.float32)
    expected = slow_head(x, weight, targets, g[:1].expand(67), h[:1].expand(67), 0.7)
    assert_head(triton_results("expanded gradients"), expected, 1e-5, 1e-5)


@pytest.mark.parametrize(
    ("bytes_per_value", "depth", "room", "backend"),
    [(2, 64, 227, "triton"), (2, 64, 99, "chunked"), (2, 60, 227, "chunked"), (4, 64, 227, "chunked")],
)
def test_a_gpu_uses_triton_if_the_tiles_fit(bytes_per_value, depth, room, backend, monkeypatch):
    """room: shared memory of a Hopper and of a desktop GPU, in KiB. 60 x 2 bytes are no multiple of 16."""
    properties = SimpleNamespace(shared_memory_per_block_optin=room * 1024)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)
    monkeypatch.setattr(torch.version, "hip", None)
    x = SimpleNamespace(is_cuda=True, element_size=lambda: bytes_per_value, shape=(5, depth), device="cuda")
    assert head.choose_backend(x) == backend
    assert head.choose_backend(torch.ones(2, 4)) == "chunked", "a CPU"


REFUSED = {  # x, weight, backend
    "unknown backend": (torch.ones(2, 4), torch.ones(5, 4), "tritn"),
    "weight between two multiples of 16 bytes": (torch.ones(2, 4), torch.ones(21)[1:].view(5, 4), "triton"),
    "values of 8 bytes": (torch.ones(2, 4).double(), torch.ones(5, 4).double(), "triton"),
    "rows of 3 x 4 bytes": (torch.ones(2, 3), torch.ones(5, 3), "triton"),
    "rows of 4 x 2 bytes": (torch.ones(2, 4).half(), torch.ones(5, 4).half(), "triton"),
    "rows of 12 x 2 bytes": (torch.ones(2, 12).bfloat16(), torch.ones(5, 12).bfloat16(), "triton"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_backend_refuses_unreadable_operands(case):
    x, weight, backend = REFUSED[case]
    with pytest.raises(ValueError, match="model.logprob_kernel"):
        linear_logprob_entropy(x, weight, torch.tensor([0, 1]), 1.0, backend)


# ---- FP8 ---------------------------------------------------------------------------------------------------
@pytest.mark.gpu
@pytest.mark.skipif(not GPU, reason="10 GB of memory on a GPU")
def test_the_last_of_more_than_2_to_the_31_elements_are_those_of_the_same_rows_alone():
    """Offsets of 32 bits would wrap. The experts of a large model, and many rows of logits, are this long."""
    num_rows, columns = 2**16 + 256, 2**15
    generator = torch.Generator("cuda").manual_seed(0)
    x, weight = (
        torch.randn(rows, 64, generator=generator, device="cuda", dtype=torch.bfloat16) / 3
        for rows in (num_rows, columns)
    )
    m, log_s, entropy, g = torch.randn(4, num_rows, generator=generator, device="cuda")
    targets = torch.arange(num_rows, device="cuda") % columns
    last = slice(num_rows - 256, num_rows)
    rows = (targets, m, log_s, entropy, g, None)
    logits = head.triton_grad_logits(x, weight, slice(0, columns), *rows, 1.0)[last]
    alone = [value if value is None else value[last] for value in rows]
    assert torch.equal(logits, head.triton_grad_logits(x[last], weight, slice(0, columns), *alone, 1.0))
    codes, scales = fp8.quantise_weight(torch.cat([x.new_ones(num_rows - 256, columns), logits]))
    expected, expected_scales = fp8.quantise_weight(logits)
    assert torch.equal(codes[last].float(), expected.float()) and torch.equal(scales[-2:], expected_scales)


@pytest.mark.slow
@pytest.mark.parametrize("name", fp8_cases())
@pytest.mark.parametrize("kind", ["weight", "activation"])
def test_triton_quantises_as_torch_does(kind, name, triton_results):
    values = fp8_cases()[name]
    codes, scales = quantise(kind, values, use_triton=False)
    rows = -(-values.shape[-2] // 128) if kind == "weight" else values.shape[-2]
    assert codes.shape == values.shape and codes.dtype == torch.float8_e4m3fn
    assert scales.shape == (*values.shape[:-2], rows, -(-values.shape[-1] // 128))
    triton_codes, triton_scales = triton_results(f"{kind} {name}")
    assert torch.equal(triton_scales, scales)
    assert torch.equal(code_bits(triton_codes), code_bits(codes))


def slow_quantise(values, kind):
    """Return codes (as float32) and scales of [M, N] by the formulas, block by block, in float32."""
    values = values.float().numpy()
    one = np.float32(1)
    rows = 128 if kind == "weight" else 1
    codes = np.zeros_like(values)
    scales = np.zeros((-(-values.shape[0] // rows), -(-values.shape[1] // 128)), np.float32)
    for i, j in np.ndindex(scales.shape):
        at = slice(i * rows, (i + 1) * rows), slice(j * 128, (j + 1) * 128)
        sizes = np.abs(values[at])
        amax = sizes[np.isfinite(sizes)].max(initial=np.float32(1e-4 if kind == "weight" else 1e-10))
        if kind == "weight":
            scales[i, j] = amax * (one / np.float32(448))
            scaled = values[at] * (one / scales[i, j])
        else:
            scales[i, j] = amax / np.float32(448)
            scaled = values[at] / scales[i, j]
        scaled = np.clip(scaled, -448, 448)
        # E4M3 has 3 bits after the leading one and no exponents below -6; rint rounds ties to even.
        step = np.exp2(np.maximum(np.frexp(scaled)[1] - 1, -6) - 3).astype(np.float32)
        codes[at] = np.rint(scaled / step) * step
    return torch.from_numpy(codes), torch.from_numpy(scales)


FP8_NAMES = ["(33, 300) torch.float32", "(130, 257) torch.bfloat16", "(127, 129) torch.float16"]


@pytest.mark.parametrize("kind", ["weight", "activation"])
@pytest.mark.parametrize("name", [*FP8_NAMES, "spread 3e-06", "nonfinite"])
def test_quantisation_is_the_formula(kind, name):
    values = fp8_cases()[name]
    codes, scales = quantise(kind, values)
    expected, expected_scales = slow_quantise(values, kind)
    assert torch.equal(scales, expected_scales)
    torch.testing.assert_close(codes.float(), expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow  # vLLM takes seconds to import
@pytest.mark.parametrize("name", FP8_NAMES)
def test_activations_equal_vllm(name):
    """vLLM's torch version has a larger minimum scale than the kernel of vLLM; all rows here exceed both."""
    pytest.importorskip("vllm", reason="the kernels need only torch and Triton, this comparison vLLM")
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers.quantization.input_quant_fp8 import GroupShape, QuantFP8

    values = fp8_cases()[name]
    values[..., ::16] = values[..., ::16].sign() + 1e-2  # in every row of 128
    with set_current_vllm_config(VllmConfig()):
        vllm_quantise = QuantFP8(static=False, group_shape=GroupShape(1, 128), use_ue8m0=False)
    expected_codes, expected_scales = vllm_quantise.forward_native(values)
    codes, scales = fp8.quantise_activation(values)
    assert torch.equal(scales, expected_scales)
    assert torch.equal(codes.view(torch.uint8), expected_codes.view(torch.uint8))


@pytest.mark.slow  # vLLM takes seconds to import
@pytest.mark.parametrize("num_rows", [1, 4, 33])
def test_column_major_scales_have_the_strides_of_deep_gemm(num_rows):
    pytest.importorskip("vllm", reason="the kernels need only torch and Triton, this comparison vLLM")
    from vllm.utils.deep_gemm import get_tma_aligned_size

    values = fp8_values((num_rows, 384))
    codes, scales = fp8.quantise_activation(values)
    same_codes, column_major = fp8.quantise_activation(values, column_major=True)
    assert column_major.stride() == (1, get_tma_aligned_size(num_rows, 4))  # of float32
    assert torch.equal(column_major, scales)
    assert torch.equal(same_codes.view(torch.uint8), codes.view(torch.uint8))


def test_dequantise_gives_every_block_its_scale():
    codes = torch.ones(2, 130, 257).to(torch.float8_e4m3fn)
    scales = torch.arange(12.0).view(2, 2, 3)
    result = fp8.dequantise(codes, scales, 128)
    assert result.shape == codes.shape and result.dtype == torch.float32
    for e, i, j in np.ndindex(result.shape):
        if i in (0, 127, 128, 129) and j in (0, 127, 128, 255, 256):
            assert result[e, i, j] == scales[e, i // 128, j // 128]


def test_fp8_round_is_quantise_and_dequantise_of_bfloat16():
    weight = fp8_values((2, 130, 257))
    expected, scales = zip(*(slow_quantise(matrix.bfloat16(), "weight") for matrix in weight))
    assert torch.equal(fp8.fp8_round(weight), fp8.dequantise(torch.stack(expected), torch.stack(scales), 128))
    assert not torch.equal(fp8.fp8_round(weight), fp8.dequantise(*fp8.quantise_weight(weight), 128))


# ---- Machine code; compiling works on any machine ----------------------------------------------------------
ON_BLACKWELL = ("statistics", "grad_logits", "sum", "swiglu", "swiglu_backward")
COMPILED = [(90, name) for name in kernel_compile.CASES]
COMPILED += [pytest.param(100, name, marks=pytest.mark.slow) for name in ON_BLACKWELL]


@pytest.mark.parametrize(("architecture", "name"), COMPILED)
def test_kernels_compile_to_the_expected_instructions(architecture, name, tmp_path, monkeypatch):
    """Tensor cores, bulk copies, the hardware's casts; no spilled registers, TF32, approximate division."""
    tools = kernel_compile.TOOLS
    if not (tools / "ptxas").exists() or not (tools / "cuobjdump").exists():
        pytest.skip(f"{MISSING}ptxas (this build of Triton ships no compiler for NVIDIA GPUs)")
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    case = kernel_compile.CASES[name]
    compiled = kernel_compile.compile_for(architecture, case, tmp_path)
    assert kernel_compile.problems(case, compiled, architecture) == []


if __name__ == "__main__":
    mend_interpreter()
    torch.save(compute_triton_cases(), sys.argv[1])
