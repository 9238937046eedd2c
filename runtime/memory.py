"""Add up what a rank holds of its GPU in each phase of a step, and say what does not fit.

The parts come from moe_model.memory_by_part() (trainer) and rollout.engine_memory() (vLLM), as {name: bytes}.
train_rl.py asks before anything is loaded, experiments/plan.py without a GPU: both say the same.
"""

GIB = 2**30
CONTEXT_BYTES = 4 * GIB  # CUDA context, NCCL's buffers, fragments of the allocator: a guess
STANDING = ("weights", "gradients", "master weights", "AdamW", "reference")  # held at all times


def standing_bytes(parts: dict[str, int]) -> int:
    """Return what the trainer holds at all times."""
    return sum(parts[name] for name in STANDING)


def extra_bytes(parts: dict[str, int]) -> dict[str, int]:
    """Return what the trainer takes besides in each of its phases, which never meet."""
    summed = parts["gradients in an update"]
    return {
        "update": summed + parts["activations"] + parts["on the way back"],
        "optimizer step": summed + parts["optimizer step"],
        "sync": parts["sync buffers"],
    }


def peak_bytes(parts: dict[str, int]) -> int:
    """Return the most that the trainer holds at any time."""
    return standing_bytes(parts) + max(extra_bytes(parts).values())


def trainer_bytes(parts: dict[str, int], engine_sleeps: bool) -> int:
    """Return what the trainer takes of a GPU beside an engine that is awake.

    An engine that sleeps during updates shares the GPU with what stands between them only.
    """
    return CONTEXT_BYTES + (standing_bytes(parts) if engine_sleeps else peak_bytes(parts))


def bytes_by_phase(parts: dict[str, int], engine_sleeps: bool) -> dict[str, int]:
    """Return the bytes of a GPU in each phase; graphs and workspaces of an engine stay when it sleeps."""
    standing = standing_bytes(parts) + CONTEXT_BYTES + parts["engine workspace"]
    engine = parts["engine weights"] + max(0, parts["KV cache"])
    beside_update = 0 if engine_sleeps else engine
    beside_sync = parts["engine weights"] if engine_sleeps else engine  # keys and values wake up last
    beside = {"update": beside_update, "optimizer step": beside_update, "sync": beside_sync}
    extra = {phase: standing + beside[phase] + own for phase, own in extra_bytes(parts).items()}
    return {"rollout": standing + engine} | extra


def why_too_small(parts: dict[str, int], engine_sleeps: bool, total: int, needed: int) -> str | None:
    """Say which phase does not fit into a GPU of `total` bytes; None if all fit.

    needed: bytes of keys and values of one completion of full length, the least that an engine works with.
    """
    phases = bytes_by_phase(parts | {"KV cache": max(parts["KV cache"], needed)}, engine_sleeps)
    phase, most = max(phases.items(), key=lambda item: item[1])
    if most > total:
        has_cache = phase == "rollout" or not engine_sleeps
        cache = ", with keys and values of one completion of full length," if has_cache else ""
        return f"phase {phase} needs {most / GIB:.1f} GiB of a GPU{cache} and a GPU has {total / GIB:.1f}"
    if parts["KV cache"] < needed:
        return (
            f"keys and values have {max(0, parts['KV cache']) / GIB:.1f} GiB, one completion of full length "
            f"needs {needed / GIB:.1f}"
        )
    return None
