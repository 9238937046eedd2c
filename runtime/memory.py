"""Estimate a rank's GPU memory in each phase of a step, and name the phase that does not fit.

The parts come from memory_plan.memory_by_part() (trainer) and rollout.engine_memory() (vLLM), as
{name: bytes}, for example {"weights": ..., "KV cache": ...}. memory_plan.check_memory() makes the estimate
before a model is loaded, and experiments/plan.py makes it without a GPU.
"""

GIB = 2**30
CONTEXT_BYTES = 4 * GIB  # a guess: CUDA context, NCCL buffers, fragmentation of the allocator
STANDING = ("weights", "gradients", "master weights", "AdamW", "reference")  # allocated at all times


def standing_bytes(parts: dict[str, int]) -> int:
    """Return the bytes that the trainer holds at all times."""
    return sum(parts[name] for name in STANDING)


def extra_bytes(parts: dict[str, int]) -> dict[str, int]:
    """Return the additional bytes of each phase of the trainer; the phases follow one another."""
    gradients = parts["gradients in an update"]
    return {
        "update": gradients + parts["activations"] + parts["on the way back"],
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


def bytes_by_phase(parts: dict[str, int], engine_sleeps: bool) -> dict[str, int]:
    """Return the bytes of a GPU in each phase. A sleeping engine keeps its CUDA graphs and workspaces."""
    standing = standing_bytes(parts) + CONTEXT_BYTES + parts["engine workspace"]
    engine = parts["engine weights"] + max(0, parts["KV cache"])
    beside_update = 0 if engine_sleeps else engine
    beside_sync = parts["engine weights"] if engine_sleeps else engine  # the KV cache wakes up last
    beside = {"update": beside_update, "optimizer step": beside_update, "sync": beside_sync}
    of_trainer = {phase: standing + beside[phase] + extra for phase, extra in extra_bytes(parts).items()}
    return {"rollout": standing + engine} | of_trainer


def why_too_small(parts: dict[str, int], engine_sleeps: bool, total: int, needed: int) -> str | None:
    """Explain why the run does not fit into a GPU of `total` bytes; None if all phases fit.

    needed: KV cache of one completion of full length, in bytes, the minimum for an engine.
    """
    phases = bytes_by_phase(parts | {"KV cache": max(parts["KV cache"], needed)}, engine_sleeps)
    phase, most = max(phases.items(), key=lambda item: item[1])
    if most > total:
        has_cache = phase == "rollout" or not engine_sleeps
        cache = " (with the KV cache of one completion of full length)" if has_cache else ""
        return f"phase {phase} needs {most / GIB:.1f} GiB{cache}, but the GPU has {total / GIB:.1f} GiB"
    if parts["KV cache"] < needed:
        return (
            f"the KV cache has {max(0, parts['KV cache']) / GIB:.1f} GiB, but one completion of full length "
            f"needs {needed / GIB:.1f} GiB"
        )
    return None
