"""An environment of OpenEnv as data.environment: a guessing game, played inside the worker.

    data: {train: [{path: games.jsonl, kind: environment}], chat: always,
           environment: "examples/openenv_environment.py:GuessingGame"}

Adapter is the part to keep. For an environment of yours write the three methods of GuessingGame: make()
returns the environment, action() turns text into an action, message() turns an observation into text.
"""

from types import SimpleNamespace
from typing import Any


class Adapter:
    """Translate OpenEnv's reset() and step() into those of data.environment."""

    def make(self, row: dict) -> Any:
        """Return an openenv Environment, or a synchronous client of a server."""
        raise NotImplementedError

    def action(self, text: str) -> Any:
        """Return the action that a turn of the policy stands for; any text has to give one."""
        raise NotImplementedError

    def message(self, observation: Any) -> str | None:
        """Return the text that the policy reads."""
        raise NotImplementedError

    def reset(self, row: dict) -> None:
        """Begin an episode; the seed is the same in all episodes of a group and after a resume."""
        self.environment = self.make(row)
        self.environment.reset(seed=row["seed"] % 2**31)

    def step(self, text: str) -> tuple[str | None, bool, float]:
        """Return (message, done, reward) after a turn; clients wrap the observation in a result."""
        result = self.environment.step(self.action(text))
        observation = getattr(result, "observation", result)
        return self.message(observation), bool(result.done), float(result.reward or 0.0)

    def close(self) -> None:
        """End an episode."""
        self.environment.close()


class GuessingGame(Adapter):
    """Guess a number; the row's answer is the number, and a right guess earns 1."""

    def make(self, row: dict):
        """Define the environment with the classes of OpenEnv, so that this example is one file."""
        from openenv.core.env_server.interfaces import Environment
        from openenv.core.env_server.types import Observation, State

        class Game(Environment):
            def reset(self, seed=None, episode_id=None, **options) -> Observation:
                return Observation(done=False, reward=0.0)

            def step(self, action, timeout_s=None, **options) -> Observation:
                is_right = action.guess == int(row["answer"])
                hint = "right" if is_right else "higher" if action.guess < int(row["answer"]) else "lower"
                return Observation(done=is_right, reward=float(is_right), metadata={"hint": hint})

            @property
            def state(self) -> State:
                return State()

        return Game()

    def action(self, text: str) -> SimpleNamespace:
        """Read the last number; text without a number is the guess 0, which is the policy's mistake."""
        numbers = "".join(c if c in "0123456789" else " " for c in text).split()
        return SimpleNamespace(guess=int(numbers[-1][-18:]) if numbers else 0)

    def message(self, observation) -> str:
        """Return the hint."""
        return observation.metadata["hint"]
