"""Estimate and measure a rank's memory in each phase of a step, name the phase that does not fit.

The parts come from memory_plan.memory_by_part() (trainer) and memory_plan.engine_memory() (vLLM), as
{name: bytes}, for example {"weights": ..., "KV cache": ...}. memory_plan.check_memory() makes the estimate
before a model is loaded, and experiments/plan.py makes it without a GPU. On CPUs the ranks of a node share
its memory: node_memory() measures the memory that the node has left for the ranks.
"""

import contextlib
import ctypes
import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from runtime.schedule import from_all_ranks

GIB = 2**30
CONTEXT_BYTES = 4 * GIB  # a guess: CUDA context, workspaces of cuBLAS and cuDNN, fragments of the allocator
# Parts that are allocated at all times. Estimates for CPUs have no communicators.
STANDING = ("weights", "gradients", "master weights", "AdamW", "reference", "communicators")


def margin_bytes(total: int) -> int:
    """Return the bytes of a GPU of `total` bytes that a plan leaves free: 5 %, at least 4 GiB [ours].

    Why: no estimate for GPUs was compared with a measurement, and a run that is out of memory by 1 % fails.
    """
    return max(4 * GIB, math.ceil(total / 20))


def standing_bytes(parts: dict[str, int]) -> int:
    """Return the bytes that the trainer holds at all times."""
    return sum(parts.get(name, 0) for name in STANDING)


def extra_bytes(parts: dict[str, int]) -> dict[str, int]:
    """Return the additional bytes of each phase of the trainer; the phases follow one another."""
    gradients = parts["gradients in an update"]
    activations = parts["activations"] + parts["recomputed layer"] + parts.get("error of activations", 0)
    return {
        "update": gradients + activations + parts["on the way back"],
        "optimizer step": gradients + parts["optimizer step"],
        "sync": parts["sync buffers"],
    }


def peak_bytes(parts: dict[str, int]) -> int:
    """Return the trainer's peak, over all phases."""
    return standing_bytes(parts) + max(extra_bytes(parts).values())


def trainer_bytes(parts: dict[str, int], engine_sleeps: bool) -> int:
    """Return the bytes of a GPU that the trainer needs while the engine is awake.

    An engine that sleeps during updates wakes up for rollouts only, when the trainer is down to its standing
    bytes. Otherwise the engine has to fit beside the trainer's peak.
    """
    return CONTEXT_BYTES + (standing_bytes(parts) if engine_sleeps else peak_bytes(parts))


def bytes_by_phase(
    parts: dict[str, int], engine_sleeps: bool, context_bytes: int = CONTEXT_BYTES
) -> dict[str, int]:
    """Return the bytes of a rank in each phase. A sleeping engine keeps its CUDA graphs and workspaces.

    context_bytes: memory of the process besides the parts.
    """
    standing = standing_bytes(parts) + context_bytes + parts["engine workspace"]
    engine = parts["engine weights"] + max(0, parts["KV cache"])
    beside_update = 0 if engine_sleeps else engine
    beside_sync = parts["engine weights"] if engine_sleeps else engine  # the KV cache wakes up last
    beside = {"update": beside_update, "optimizer step": beside_update, "sync": beside_sync}
    of_trainer = {phase: standing + beside[phase] + extra for phase, extra in extra_bytes(parts).items()}
    return {"rollout": standing + engine} | of_trainer


def why_too_small(parts: dict[str, int], engine_sleeps: bool, total: int, needed: int) -> str | None:
    """Explain why the run does not fit into a GPU of `total` bytes; None if all phases fit, with a margin.

    needed: KV cache of one completion of full length, in bytes, the minimum for an engine.
    """
    phases = bytes_by_phase(parts | {"KV cache": max(parts["KV cache"], needed)}, engine_sleeps)
    phase, most = max(phases.items(), key=lambda item: item[1])
    margin = margin_bytes(total)
    if most > total - margin:
        has_cache = phase == "rollout" or not engine_sleeps
        cache = " (with the KV cache of one completion of full length)" if has_cache else ""
        return (
            f"phase {phase} needs {most / GIB:.1f} GiB{cache}, but the GPU has {total / GIB:.1f} GiB, of "
            f"which {margin / GIB:.1f} GiB stay free for errors of this estimate"
        )
    if parts["KV cache"] < needed:
        return (
            f"the KV cache has {max(0, parts['KV cache']) / GIB:.1f} GiB, but one completion of full length "
            f"needs {needed / GIB:.1f} GiB"
        )
    return None


# ------------------------------------------------------------------------------------------------------------
# The plan beside measured peaks, on GPUs
# ------------------------------------------------------------------------------------------------------------
def planned_rows(parts: dict[str, int], engine_sleeps: bool) -> dict[str, int]:
    """Return the sums of a plan that a MemoryMeter measures, {row: bytes}.

    The trainer's rows count its tensors, and a GPU's rows all of its memory. Between updates the trainer has
    weights, gradients (ZeRO 1), master weights, AdamW's states and the reference. `besides the trainer`, in
    an update, are CUDA's context, NCCL, fragments of the allocator, graphs and an engine that is awake.
    """
    standing = standing_bytes(parts) - parts.get("communicators", 0)
    extra = extra_bytes(parts)
    rows = {"trainer between updates": standing, "activations": parts["activations"]}
    rows |= {f"trainer in {phase}": standing + num_bytes for phase, num_bytes in extra.items()}
    if "engine weights" in parts:
        phases = bytes_by_phase(parts, engine_sleeps)
        if engine_sleeps:
            rows["freed by sleep"] = parts["engine weights"] + parts["KV cache"]
        rows["besides the trainer"] = phases["update"] - standing - extra["update"]
        rows |= {f"GPU in {phase}": phases[phase] for phase in ("rollout", "update", "optimizer step")}
    return rows


class MemoryMeter:
    """Measure the rows of planned_rows() on this rank's GPU; `largest` holds the most bytes of each row.

    A meter begins when the engine is ready and the trainer is not. torch counts an engine's tensors even
    while the engine sleeps, so the trainer's bytes are the allocated ones beyond those of that moment.
    """

    def __init__(self):
        self.engine_bytes = torch.cuda.memory_allocated()
        self.used = 0  # bytes of the GPU in use at the end of the last phase
        self.largest: dict[str, int] = {}

    def note(self, row: str, num_bytes: int) -> None:
        """Keep the largest value of a row."""
        self.largest[row] = max(num_bytes, self.largest.get(row, 0))

    def end_phase(self, phase: str) -> None:
        """Note the peaks since the last call, which are those of a phase of runtime.metrics.Clock."""
        free, total = torch.cuda.mem_get_info()
        used_before = self.used
        self.used = total - free
        trainer = torch.cuda.max_memory_allocated() - self.engine_bytes
        on_gpu = self.used + torch.cuda.max_memory_reserved() - torch.cuda.memory_reserved()
        torch.cuda.reset_peak_memory_stats()
        if phase == "rollout":
            self.note("trainer between updates", torch.cuda.memory_allocated() - self.engine_bytes)
        elif phase == "deal":  # follows the rollout, after RolloutEngine.sleep()
            self.note("freed by sleep", used_before - self.used)
        else:
            self.note(f"trainer in {phase}", trainer)
        if phase == "update":
            self.note("besides the trainer", on_gpu - trainer)
        self.note(f"GPU in {phase}", on_gpu)

    def watch(self, trainer) -> None:
        """Tell activations, backward pass and optimizer step apart. trainer: DeepSpeed's engine."""
        before = 0

        def start(*_) -> None:
            nonlocal before
            before = torch.cuda.memory_allocated()

        def end(*_) -> None:
            if torch.is_grad_enabled():
                self.note("activations", torch.cuda.memory_allocated() - before)

        trainer.module.register_forward_pre_hook(start)
        trainer.module.register_forward_hook(end)
        take_step = trainer.step

        def step(*args, **options) -> None:
            self.end_phase("update")
            take_step(*args, **options)
            self.end_phase("optimizer step")

        trainer.step = step


@contextlib.contextmanager
def fixed_segments() -> Iterator[None]:
    """Run a block with fixed segments of GPU memory; after the block torch's segments grow and shrink.

    Why growing segments: micro-batches differ in size, so that fixed segments leave gaps that no later tensor
    fits into. Why not while vLLM starts: vLLM allocates its pools for sleep, and shares the buffers of CUDA
    graphs with other ranks by CUDA IPC. Neither works with growing segments, and both happen at the start
    only: a later all-reduce outside of a graph copies its input to a buffer that was shared at the start
    (vLLM: device_allocator/cumem.py, use_memory_pool; custom_all_reduce.py, capture and all_reduce).

    expandable_segments:False in PYTORCH_ALLOC_CONF or PYTORCH_CUDA_ALLOC_CONF keeps fixed segments at all
    times. expandable_segments:True is hidden during the block, because vLLM would switch it on too early.
    """
    names = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
    texts = {name: os.environ[name] for name in names if name in os.environ}
    if not torch.cuda.is_available() or any("expandable_segments:False" in text for text in texts.values()):
        yield
        return
    for name, text in texts.items():
        os.environ[name] = text.replace("expandable_segments:True", "expandable_segments:False")
    torch._C._accelerator_setAllocatorSettings("expandable_segments:False")  # the function that vLLM calls
    try:
        yield
    finally:
        os.environ.update(texts)
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")


# ------------------------------------------------------------------------------------------------------------
# The memory of a node, which its ranks share on CPUs
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class NodeMemory:
    """Memory that the ranks of a node may take together, including the memory that they hold already."""

    num_bytes: int
    num_ranks: int  # ranks on this node
    source: str  # where num_bytes comes from, for messages

    @property
    def bytes_per_rank(self) -> float:
        """Return the share of a rank."""
        return self.num_bytes / self.num_ranks


def node_memory(memory_gib: float | None) -> NodeMemory:
    """Return the memory of the node that has the least memory per rank. Collective.

    memory_gib: run.memory_gib, which replaces the measurement.
    """
    num_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    if memory_gib is None:
        free, source = free_memory()
        local = NodeMemory(free + num_ranks * psutil.Process().memory_info().rss, num_ranks, source)
    else:
        local = NodeMemory(int(memory_gib * GIB), num_ranks, "run.memory_gib")
    return min(from_all_ranks(local), key=lambda node: node.bytes_per_rank)


def return_freed_memory() -> None:
    """Give pages of freed tensors back to the system if memory is short, on Linux with glibc.

    Freed tensors lie between used ones, and micro-batches differ in size. Without this call the gaps add up:
    in a run of 48 steps of a MoE of 373 M parameters, both ranks together peaked at 18.9 GiB, with it at
    17.5 GiB (the two runs differ in temperature too). But the next update pays for every page again: 0.4 s of
    the 4.1 s of processor time of a forward and backward pass of SmolLM2-135M (8 completions of 90 tokens).
    """
    if free_memory()[0] > psutil.virtual_memory().total / 4:  # [ours] then freed pages stay with the process
        return
    if trim := getattr(ctypes.CDLL(None), "malloc_trim", None):
        trim(0)


def free_memory(root: Path = Path("/")) -> tuple[int, str]:
    """Return the bytes that new allocations can take on this node, and the limit that sets this number.

    The smaller of the system's available memory (MemAvailable, which counts page cache that can be dropped)
    and, for every control group that contains this process, limit - usage + page cache. root: the file system
    to read control groups from.
    """
    limits = [(psutil.virtual_memory().available, "MemAvailable")]
    limits += [(num_bytes, f"the limit of control group {folder}") for folder, num_bytes in cgroup_room(root)]
    return min(limits)


CGROUPS = {  # version: folder of all groups, limit, usage, key of memory.stat for page cache
    2: ("sys/fs/cgroup", "memory.max", "memory.current", "inactive_file"),
    1: ("sys/fs/cgroup/memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
}


def cgroup_room(root: Path) -> Iterator[tuple[Path, int]]:
    """Yield (folder, bytes left) of each control group that limits the memory of this process.

    A process belongs to a group and to all parents of the group. In a container the group's own path may be
    invisible; the container's limit then stands in the top folder, which is read as well.
    """
    file = root / "proc" / "self" / "cgroup"
    for line in file.read_text().splitlines() if file.is_file() else []:
        _, controllers, path = line.split(":", 2)  # for example 0::/user.slice or 4:memory:/job
        if controllers and "memory" not in controllers.split(","):
            continue
        top, limit_name, usage_name, cache_key = CGROUPS[1 if controllers else 2]
        group = root / top / path.lstrip("/")
        for folder in (group, *group.parents):
            if not folder.is_relative_to(root / top):
                break
            try:
                limit = int((folder / limit_name).read_text())  # "max" without a limit
                usage = int((folder / usage_name).read_text())
                stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
            except (OSError, ValueError):
                continue
            yield folder, limit - usage + int(stat.get(cache_key, 0))
