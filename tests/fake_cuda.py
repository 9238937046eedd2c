"""A stand-in for a GPU: the statistics of torch.cuda while a run takes the memory of a plan."""

from types import SimpleNamespace

import torch

from runtime.memory import CONTEXT_BYTES, MemoryMeter
from runtime.metrics import Clock


class FakeCuda:
    """Stands in for torch.cuda; run() allocates and frees the parts of a plan in the order of a run."""

    def __init__(self, parts: dict[str, int], sleeps: bool, total: int = 8 * CONTEXT_BYTES):
        self.parts = parts
        self.sleeps = sleeps
        self.allocated = self.peak = 0
        self.unmapped = 0  # bytes of a sleeping engine, which torch still counts
        self.total = total
        self.room = total - CONTEXT_BYTES - parts["engine workspace"] - parts.get("communicators", 0)

    def install(self, monkeypatch) -> "FakeCuda":
        """Replace functions of torch.cuda until the test ends; fragments are left out."""
        functions = {
            "is_available": lambda: True,
            "reset_peak_memory_stats": lambda: setattr(self, "peak", self.allocated),
            "mem_get_info": lambda: (self.room - self.allocated + self.unmapped, self.total),
        }
        functions |= dict.fromkeys(("memory_allocated", "memory_reserved"), lambda: self.allocated)
        functions |= dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), lambda: self.peak)
        for name, function in functions.items():
            monkeypatch.setattr(torch.cuda, name, function)
        return self

    def take(self, *names: str) -> None:
        self.allocated += sum(self.parts[name] for name in names)
        self.peak = max(self.peak, self.allocated)

    def free(self, *names: str) -> None:
        self.allocated -= sum(self.parts[name] for name in names)

    def sleep(self, *names: str) -> None:
        self.unmapped = self.sleeps * sum(self.parts[name] for name in names)

    def run(self, num_steps: int) -> MemoryMeter:
        """Start an engine and a trainer and take steps; return the meter that has watched them."""
        clock = Clock({})
        self.take("engine weights", "KV cache")
        meter = MemoryMeter()
        policy = torch.nn.Module()
        policy.forward = lambda: self.take("activations")
        trainer = SimpleNamespace(module=policy, step=self.step)
        clock.on_end = meter.end_phase
        meter.watch(trainer)
        self.at_first_step = ["gradients", "AdamW"]
        self.take("weights", "master weights", "reference")
        self.sync(clock)
        for _ in range(num_steps):
            with clock("rollout"):
                self.sleep()
            self.sleep("engine weights", "KV cache")
            with clock("deal"):
                pass
            with clock("update"):
                policy()
                self.take(
                    *self.at_first_step[:1], "gradients in an update", "recomputed layer", "on the way back"
                )
                self.free("recomputed layer", "on the way back", "activations")
                trainer.step()
            self.sync(clock)
        return meter

    def step(self) -> None:
        self.take(*self.at_first_step[1:], "optimizer step")
        self.free("optimizer step", "gradients in an update")
        self.at_first_step = []

    def sync(self, clock: Clock) -> None:
        with clock("sync"):
            self.sleep("KV cache")  # wakes up last
            self.take("sync buffers")
            self.free("sync buffers")
            self.sleep()
