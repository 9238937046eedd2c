"""Kill a run in the middle of an episode and resume: the weights must be those of an undisturbed run.

    python -m tests.campaign.episodes --out runs/episodes      # two cores, about five minutes

The policy is a small random MoE on two ranks with router replay R3. The environment answers after random
delays, and once kills the rank that it works for while other episodes are under way. The program prints one
line for each comparison and ends with status 0 if all of them hold.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from data import random_model
from experiments.bench.common import ROOT
from tests.campaign.verdicts import rows_of, weights_of

GAME = '''
import os, pathlib, random, signal, time

class Game:
    """Four turns; a turn with an even number of characters earns 0.25."""

    def reset(self, row):
        self.turn = 0

    def step(self, text):
        self.turn += 1
        time.sleep(0.02 * random.random())
        order = pathlib.Path(__file__).with_name("kill")
        if self.turn == 2 and order.exists() and pathlib.Path(order.read_text()).is_dir():
            order.unlink()
            guard = os.getppid()
            rank = int(pathlib.Path(f"/proc/{guard}/stat").read_text().split()[3])
            os.kill(rank, signal.SIGKILL)
        message = f"turn {self.turn} had {len(text)} characters"
        return message, self.turn == 4, 0.25 * (len(text) % 2 == 0)
'''
SMALL = "--hidden 64 --layers 2 --experts 8 --expert-width 32 --vocab 320".split()


def prepare(out: Path) -> list[str]:
    """Write model, prompts and environment; return the settings of the runs."""
    out.mkdir(parents=True)
    rows = [json.dumps({"prompt": f"say number {i}", "answer": str(i)}) for i in range(16)]
    (out / "rows.jsonl").write_text("\n".join(rows) + "\n")
    (out / "game.py").write_text(GAME)
    random_model.main(["--output", str(out / "model"), "--text", str(out / "rows.jsonl"), *SMALL])
    stops = ",".join(map(str, range(20, 41)))  # with random weights, the end of a turn alone is too rare
    return [
        f"model.path={out}/model", "model.dtype=float32",
        f"data.train=[{{path: {out}/rows.jsonl, kind: environment}}]", "data.chat=always",
        f"data.environment={out}/game.py:Game", "rollout.max_turns=6", "rollout.tool_workers=1",
        "rollout.max_prompt_tokens=64", "rollout.max_new_tokens=300", "rollout.prompts_per_step=4",
        "rollout.group_size=4", f"rollout.stop=[{stops}]", "rollout.kv_cache_gib=0.1",
        "rollout.dtype=float32", "train.num_steps=3", "train.learning_rate=1e-3", "checkpoint.every=1",
        "run.log_every=1", "algorithm.router_replay=r3",
    ]  # fmt: skip


def train(*settings: str) -> int:
    """Run train_rl.py on two ranks; return the exit code."""
    command = [sys.executable, "-m", "runtime.torchrun", "--nproc-per-node=2"]
    return subprocess.run([*command, "train_rl.py", *settings], cwd=ROOT, capture_output=True).returncode


def main() -> int:
    """Run the campaign."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--out", type=Path, required=True, help="folder to create")
    out = parser.parse_args().out.resolve()
    settings = prepare(out)
    checks = {"undisturbed run": train(*settings, f"run.dir={out}/undisturbed") == 0}
    (out / "kill").write_text(f"{out}/killed/checkpoints/step_000001")
    checks["killed run ends with an error"] = train(*settings, f"run.dir={out}/killed") != 0
    checks["kill was in the second step"] = not (out / "killed/checkpoints/step_000002").exists()
    checks["resumed run"] = train(*settings, f"run.dir={out}/killed") == 0
    checks["weights are equal"] = weights_of(out / "undisturbed") == weights_of(out / "killed")
    checks["metrics are equal"] = rows_of(out / "undisturbed") == rows_of(out / "killed")
    for name, holds in checks.items():
        print(f"{'same' if holds else 'failed'}: {name}")
    return 0 if all(checks.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
