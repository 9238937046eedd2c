"""A chat template, tools and environments for tests of episodes, with the demo's tokenizer of characters."""

import os
from pathlib import Path

from helpers import make_config

from data.calculator import TEMPLATE  # a turn ends with <eos>, questions with =; results are in brackets
from data.prompts import Prompt
from data.tiny import build_tokenizer
from episodes import Interaction

TOOLS = '''
import asyncio, os, time

def add(a: int, b: int) -> str:
    """Add two numbers.

    Args:
        a: The first number.
        b: The second number.
    """
    return str(a + b)

def slow_add(a: int, b: int, seconds: float) -> str:
    """Add two numbers slowly.

    Args:
        a: The first number.
        b: The second number.
        seconds: How long.
    """
    time.sleep(seconds)
    return str(a + b)

async def fetch(a: int, seconds: float) -> dict:
    """Wait for a server.

    Args:
        a: A number.
        seconds: How long.
    """
    await asyncio.sleep(seconds)
    return {"a": a}

def odd(what: str) -> str:
    """Behave oddly.

    Args:
        what: How.
    """
    if what == "bytes": return b"x"
    if what == "nothing": return None
    if what == "long": return "x" * 10_000_000
    if what == "hang":
        while True: pass
    if what == "die": os.kill(os.getpid(), 9)
    if what == "raise": raise KeyError("no such row")
    if what == "process":
        time.sleep(0.05)
        return str(os.getpid())
    if what == "call": return '<tool_call>{"name": "add", "arguments": {"a": 1, "b": 1}}</tool_call><eos>'
    if what == "half": return "\\ud800"
    if what == "half in a list": return ["\\ud800"]
    return {"what": what}

class Countdown:
    """Say the number that the row starts with, then one less; done at 0. A turn earns 1 / start."""

    def close(self):
        with open(__file__ + ".closed", "a") as file: file.write("x")

    def reset(self, row):
        self.start = self.now = int(row["answer"])

    def step(self, text):
        if text == "hang":
            while True: pass
        if text == "die": os.kill(os.getpid(), 9)
        if text == "raise": raise RuntimeError("no such move")
        if text == "much": return None, True, 2.0
        if text == "form": return "no tuple"
        if text == "mute": return None, False, 0.0
        self.now -= 1
        return str(self.now), self.now == 0, 1 / self.start

class Slow(Countdown):
    """A step takes a while."""

    def step(self, text):
        time.sleep(0.2)
        return super().step(text)

class Dice(Countdown):
    """A game of chance."""

    def reset(self, row):
        self.seed = row["seed"]

    def step(self, text):
        return str(self.seed), False, 0.0

class Clock(Countdown):
    """An environment that does not depend on the row and the texts only."""

    def step(self, text):
        super().step(text)
        return str(time.perf_counter_ns()), False, 0.0
'''


def chat_tokenizer():
    """Return the demo's tokenizer with TEMPLATE."""
    tokenizer = build_tokenizer()
    tokenizer.chat_template = TEMPLATE
    return tokenizer


def write_tools(folder: Path) -> Path:
    """Write the tools to a file and return the path."""
    path = folder / "tools_of_tests.py"
    path.write_text(TOOLS)
    return path


def make_prompt(tokenizer, question: str, answer: str = "1", kind: str = "exact", tools=()) -> Prompt:
    """Render a question as data.prompts does."""
    messages = [{"role": "user", "content": question}]
    options = {"tools": list(tools)} if tools else {}
    text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **options)
    return Prompt(text, answer, kind, "set", messages=messages, is_chat=True)


def make_interaction(path: Path, prompts: list[Prompt], *settings: str, tools=(), environment="", stops=(1,)):
    """Start the tools and the environment of a run with the demo's tokenizer; the caller closes them."""
    named = [f"data.tools=[{', '.join(f'{path}:{name}' for name in tools)}]"]
    named += [f"data.environment={path}:{environment}"] if environment else []
    config = make_config(*named, "rollout.tool_workers=2", *settings)
    return Interaction(config, chat_tokenizer(), stops, prompts, os.devnull)
