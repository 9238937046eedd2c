"""Compile the Triton kernels for Hopper and Blackwell GPUs on any machine, and check the machine code.

    python -m experiments.bench.kernel_compile

The CPU stack installs a later Triton than the GPU stack, whose torch 2.13.0 requires 3.7.1. To compile
with that version, `pip install --no-deps --target FOLDER triton==3.7.1`, and set PYTHONPATH=FOLDER.

The table has a row per kernel and architecture (sm_90: H100, sm_100: B200): registers per thread, bytes of
stack per thread (spilled registers are on the stack) and bytes of shared memory per block. The exit code is
1 if a kernel has a problem.
"""

import itertools
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import triton

import kernels.expert_rows as rows
import kernels.fp8_block as fp8
import kernels.linear_logprob_entropy as head
from experiments.bench.common import make_parser, markdown, write_results

TOOLS = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"  # ptxas and cuobjdump
SHARED_BYTES = 227 * 1024  # shared memory of a block on a Hopper or Blackwell GPU
TENSOR_CORES = "wgmma.mma_async"  # Hopper's instruction, in Case.contains
PRODUCTS = {90: TENSOR_CORES, 100: "tcgen05.mma"}  # {architecture: its instruction}


# ------------------------------------------------------------------------------------------------------------
# Kernels
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Case:
    """A kernel with the types of its arguments, and texts that its PTX must or must not contain.

    signature: {argument: type}. constants: {argument: value}, which take precedence over types. aligned:
    integer arguments that are multiples of 16; pointers always are. spills: registers may lie on the stack.
    """

    kernel: Any
    signature: Mapping[str, str]
    constants: Mapping[str, Any]
    options: Mapping[str, int]
    aligned: tuple[str, ...] = ("V", "D", "width", "first", "C")  # the number of rows N is arbitrary
    contains: tuple[str, ...] = (TENSOR_CORES, "cp.async.bulk.tensor")
    lacks: tuple[str, ...] = ()
    spills: bool = False


def tile_of(operand_bytes: int) -> tuple[dict[str, int], dict[str, int]]:
    """Return the tile sizes and the compiler's options of the head, by the bytes of an operand."""
    tile = head.TILES[operand_bytes]
    sizes = {name: size for name, size in tile.items() if name.startswith("B")}
    return sizes, {name: value for name, value in tile.items() if name not in sizes}


def operands_of(dtype: str, tile: dict[str, int]) -> dict[str, str]:
    """Return the types of the descriptors of x and W."""
    return {
        "x": f"tensordesc<{dtype}[{tile['BN']},{tile['BD']}]>",
        "w": f"tensordesc<{dtype}[{tile['BC']},{tile['BD']}]>",
    }


SUMS = {"sums": "*fp32", "N": "i32", "V": "i32", "D": "i32", "width": "i32", "scale": "fp32"}
GRADIENTS = {
    "dz": "*bf16", "targets": "*i64", "m": "*fp32", "log_s": "*fp32", "entropy": "*fp32",
    "grad_logprob": "*fp32", "grad_entropy": "*fp32", "N": "i32", "V": "i32", "D": "i32", "first": "i32",
    "C": "i32", "scale": "fp32",
}  # fmt: skip
QUANTISE = {
    "x": "*bf16", "codes": "*fp8e4nv", "scales": "*fp32", "M": "i32", "N": "i32", "num_columns": "i32",
    "floor": "fp32",
}  # fmt: skip


def head_cases() -> dict[str, Case]:
    """Return the cases of the head's kernels.

    Triton turns integer arguments of 1 into constants, which gives another program: `one row`. TF32 would
    keep only 10 bits of a float32 operand, which Triton's interpreter does not simulate.
    """
    tile, options = tile_of(2)
    statistics = operands_of("bf16", tile) | SUMS
    grad_logits = operands_of("bf16", tile) | GRADIENTS
    splits = tile | {"SPLITS": head.SPLITS}
    cases = {"statistics": Case(head.statistics_kernel, statistics, splits, options)}
    for name, with_entropy in (("grad_logits", False), ("grad_logits with entropy", True)):
        constants = tile | {"WITH_ENTROPY": with_entropy, "GROUP": 8}
        cases[name] = Case(head.grad_logits_kernel, grad_logits, constants, options)
    single = {"contains": (TENSOR_CORES,), "spills": True}
    row = splits | {"N": 1}
    cases["statistics, one row"] = Case(head.statistics_kernel, statistics, row, options, **single)
    block = tile | {"WITH_ENTROPY": True, "GROUP": 8, "N": 1, "C": 1, "V": 1}
    name = "grad_logits, one row and one block"
    cases[name] = Case(head.grad_logits_kernel, grad_logits, block, options, **single)
    tile, options = tile_of(4)
    cases["statistics in float32"] = Case(
        head.statistics_kernel, operands_of("fp32", tile) | SUMS, tile | {"SPLITS": head.SPLITS}, options,
        contains=("fma.rn.f32",), lacks=("tf32",), spills=True,
    )  # fmt: skip
    return cases


def quantise_cases() -> dict[str, Case]:
    """Return the cases of the FP8 kernel.

    Codes are cast by the hardware. Division is exact: an approximation would change the last bit of scales.
    """
    cases = {}
    for name, one_scale in (("quantise weights", True), ("quantise activations", False)):
        rows = fp8.BLOCK if one_scale else fp8.ROWS
        constants = {"E4M3_MAX": fp8.E4M3_MAX, "ROWS": rows, "BLOCK": fp8.BLOCK, "ONE_SCALE": one_scale}
        cases[name] = Case(
            fp8.quantise_kernel, QUANTISE, constants, {"num_warps": fp8.WARPS[one_scale]}, ("N",),
            contains=("cvt.rn.satfinite.e4m3x2.f32", "div.rn.f32"), lacks=("div.full", "div.approx"),
        )  # fmt: skip
    return cases


def row_cases() -> dict[str, Case]:
    """Return the cases of the kernels for rows of experts: loads of 16 bytes, nothing added atomically."""
    swiglu = {"z": "*bf16", "weights": "*fp32", "width": "i32"}
    backward = swiglu | {"grad_a": "*bf16", "grad_z": "*bf16", "grad_weights": "*fp32"}
    signatures = {
        rows.sum_kernel: {"rows": "*bf16", "places": "*i64", "y": "*bf16", "D": "i32"},
        rows.swiglu_kernel: swiglu | {"a": "*bf16"},
        rows.swiglu_backward_kernel: backward,
    }
    cases = {}
    for kernel, signature in signatures.items():
        constants = {"COLUMNS": rows.COLUMNS} | ({"K": 8} if kernel is rows.sum_kernel else {})
        cases[kernel.__name__.removesuffix("_kernel")] = Case(
            kernel, signature, constants, {"num_warps": rows.WARPS},
            contains=("ld.global.v4",), lacks=("atom.global", "red.global"),
        )  # fmt: skip
    return cases


CASES = head_cases() | quantise_cases() | row_cases()


# ------------------------------------------------------------------------------------------------------------
# Compile and check
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Compiled:
    """Machine code of a kernel: registers and bytes of stack per thread, bytes of shared memory, PTX."""

    registers: int
    stack: int
    shared: int
    ptx: str


def compile_for(architecture: int, case: Case, folder: Path) -> Compiled:
    """Compile a kernel for an architecture, for example 90. folder: empty, for the machine code."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    names = case.kernel.arg_names
    signature = {name: type for name, type in case.signature.items() if name not in case.constants}
    types = {name: signature.get(name, "constexpr") for name in names}
    aligned = [name for name, type in signature.items() if type[0] == "*" or name in case.aligned]
    attributes = {(names.index(name),): [["tt.divisibility", 16]] for name in aligned}
    source = ASTSource(fn=case.kernel, signature=types, constexprs=dict(case.constants), attrs=attributes)
    compiled = triton.compile(source, target=GPUTarget("cuda", architecture, 32), options=dict(case.options))
    cubin = folder / "kernel.cubin"
    cubin.write_bytes(compiled.asm["cubin"])
    command = [TOOLS / "cuobjdump", "--dump-resource-usage", cubin]
    usage = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    registers, stack = (int(re.search(rf"{name}:(\d+)", usage)[1]) for name in ("REG", "STACK"))
    return Compiled(registers, stack, compiled.metadata.shared, compiled.asm["ptx"])


def problems(case: Case, compiled: Compiled, architecture: int = 90) -> list[str]:
    """List the expectations that the machine code of a kernel does not meet."""
    texts = [PRODUCTS[architecture] if text == TENSOR_CORES else text for text in case.contains]
    lines = [f"no {text} in the PTX" for text in texts if text not in compiled.ptx]
    lines += [f"{text} in the PTX" for text in case.lacks if text in compiled.ptx]
    if compiled.stack and not case.spills:
        lines.append(f"{compiled.stack} bytes of stack per thread")
    limit = min(SHARED_BYTES, head.TILE_BYTES)
    if compiled.shared > limit:
        lines.append(f"{compiled.shared:,} bytes of shared memory, more than {limit:,}")
    return lines


def main() -> int:
    """Compile all kernels, print the table and return the exit code."""
    args = make_parser(__doc__).parse_args()
    records = {}
    for architecture, (name, case) in itertools.product(PRODUCTS, CASES.items()):
        with tempfile.TemporaryDirectory() as folder:
            os.environ["TRITON_CACHE_DIR"] = folder
            compiled = compile_for(architecture, case, Path(folder))
        record = asdict(compiled) | {"problems": problems(case, compiled, architecture)}
        del record["ptx"]
        records[f"{name}, sm_{architecture}"] = record
    columns = ("registers", "stack", "shared", "problems")
    rows = [
        [name, *(record[column] for column in columns[:3]), "; ".join(record["problems"])]
        for name, record in records.items()
    ]
    print(f"Triton {triton.__version__}\n")
    print("\n".join(markdown(["kernel", *columns], rows)))
    write_results(args.json, {"triton": triton.__version__, "kernels": records})
    return 1 if any(record["problems"] for record in records.values()) else 0


if __name__ == "__main__":
    sys.exit(main())
