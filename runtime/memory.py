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


def peak_bytes(parts: dict[str, int]) -> int:
    """Return the most that the trainer holds at any time: backward, optimizer step and sync never meet."""
    backward = parts["activations"] + parts["on the way back"]
    return standing_bytes(parts) + max(backward, parts["optimizer step"], parts["sync buffers"])


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
    return {
        "rollout": standing + engine,
        "update": standing + beside_update + parts["activations"] + parts["on the way back"],
        "optimizer step": standing + beside_update + parts["optimizer step"],
        "sync": standing + beside_sync + parts["sync buffers"],
    }


def why_too_small(parts: dict[str, int], engine_sleeps: bool, total: int, needed: int) -> str | None:
    """Say which phase does not fit into a GPU of `total` bytes; None if all fit.

    needed: bytes of keys and values of one completion of full length, the least that an engine works with.
    """
    phases = bytes_by_phase(parts | {"KV cache": max(parts["KV cache"], needed)}, engine_sleeps)
    phase, most = max(phases.items(), key=lambda item: item[1])
    if most > total:
        return (
            f"phase {phase} needs {most / GIB:.1f} GiB of a GPU, with keys and values of one completion of "
            f"full length, and a GPU has {total / GIB:.1f}"
        )
    if parts["KV cache"] < needed:
        return (
            f"keys and values have {max(0, parts['KV cache']) / GIB:.1f} GiB, one completion of full length "
            f"needs {needed / GIB:.1f}"
        )
    return None
