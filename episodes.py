"""Episodes of several turns: calls of tools and answers of an environment between the turns of the policy.

    turn of the policy -> text -> calls -> workers -> results -> inserted tokens -> next turn of the policy

The next prompt is the exact token ids so far plus the ids of the inserted text. No earlier token is rendered
or tokenised again, so that the tokens that are trained on are the tokens that were sampled. Only sampled text
is searched for calls: a result may contain the text of a call.

Reading order: formats of calls, the text between two turns, Interaction (one per run), Episodes (one per call
of RolloutEngine.generate). verifiers/tools.py runs in the workers.
"""

import contextlib
import json
import os
import re
import threading
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from batch import Completion, Request, Turn
from data.chat import ChatTemplate, special_tokens, without_special_tokens
from data.prompts import Prompt
from data.stream import seed_of
from reward import Verdict, worker_options
from rollout import Event
from runtime.metrics import warn_once
from settings import Config
from verifiers.answer import final_answer, opened_thought
from verifiers.kinds import ENVIRONMENT
from verifiers.own import BadResult, Scale, load_function, read_result
from verifiers.sandbox import check_sandbox
from verifiers.tools import Answer, Close, Step, ToolCall, ToolResult, check_environment, python, schemas_of
from workers import FAILED, WorkerPool


# ------------------------------------------------------------------------------------------------------------
# Formats of calls
# ------------------------------------------------------------------------------------------------------------
class Call(NamedTuple):
    """A call in the text of the policy."""

    name: str
    arguments: dict
    problem: str = ""  # of a malformed call


CALL_KEYS = {"type", "id", "name", "function", "arguments", "parameters"}
_FENCE = re.compile(r"```\w*+\s*+")
_GAP = re.compile(r"[\s,;]*")  # between two calls


def read_values(text: str, start: int = 0) -> tuple[list, int]:
    """Read consecutive JSON values, lists flattened; return them and the end. ValueError if none."""
    values: list = []
    end = start
    place = _GAP.match(text, start).end()
    while not values or text[place : place + 1] in ("{", "["):
        try:
            value, end = json.JSONDecoder().raw_decode(text, place)
        except RecursionError as error:
            raise ValueError("too deep") from error
        values += value if isinstance(value, list) and value else [value]
        place = _GAP.match(text, end).end()
    return values, end


def call_of(value) -> Call:
    """Read a call, {"name": ..., "arguments" or "parameters": {...}}, perhaps inside of {"function": ...}."""
    function = value.get("function") if isinstance(value, dict) else None
    value = function if isinstance(function, dict) else value
    value = {"name": function} | value if isinstance(function, str) else value
    if not isinstance(value, dict) or not isinstance(value.get("name"), str):
        return Call("", {}, "the call must be a JSON object with name and arguments")
    arguments = value.get("arguments", value.get("parameters"))
    try:
        arguments = json.loads(arguments) if isinstance(arguments, str) else arguments
    except (ValueError, RecursionError):
        return Call("", {}, "the arguments are not valid JSON")
    if not isinstance(arguments, dict | None):
        return Call("", {}, "arguments must be a JSON object")
    return Call(value["name"], arguments or {})


def hermes_calls(text: str, tools: Collection[str] = ()) -> list[Call]:
    """Find calls <tool_call>{"name": ..., "arguments": {...}}</tool_call> (Hermes, Qwen 2.5, Qwen 3)."""
    calls: list[Call] = []
    end = 0
    while tag := re.compile(r"<tool_call>(?:\s*```\w*)?").search(text, end):
        try:
            values, end = read_values(text, tag.end())  # a string in it may hold </tool_call>
            calls += map(call_of, values)
        except ValueError:
            end = text.find("</tool_call>", tag.end())
            calls.append(Call("", {}, "the call is not valid JSON"))
        end = len(text) if end < 0 else end
    return calls


def llama_calls(text: str, tools: Collection[str] = ()) -> list[Call]:
    """Find a turn that is one or several objects {"name": ..., "parameters": {...}}, fenced or not (Llama 3).

    An object that names none of the tools is an answer, unless all of its keys are those of a call.
    """
    text = text.strip().removeprefix("<|python_tag|>").strip()
    if fence := _FENCE.match(text):
        text = text[fence.end() :].removesuffix("```")
    if not text.startswith(("{", "[")):
        return []
    try:
        values, _ = read_values(text)
    except ValueError:
        is_named = not tools or any(f'"{name}"' in text for name in tools)
        is_call = is_named and re.match(r'[\[{\s]*"(?:name|type|function)"', text)
        return [Call("", {}, "the call is not valid JSON")] if is_call else []
    calls = [call_of(value) for value in values]
    has_form = all(isinstance(value, dict) and value.keys() <= CALL_KEYS for value in values)
    has_form = has_form and all(len(value.keys() - {"id", "type", "name"}) == 1 for value in values)
    return calls if has_form or all(call.name in tools for call in calls) else []


FORMATS: dict[str, Callable[..., list[Call]]] = {"hermes": hermes_calls, "llama": llama_calls}


def calls_of(text: str, call_format: str, opening: str = "", tools: Collection[str] = ()) -> list[Call]:
    """Find the calls in a turn; a thought calls nothing. opening: see verifiers.answer.final_answer()."""
    return FORMATS[call_format](final_answer(text, opening) or "", tools)


# ------------------------------------------------------------------------------------------------------------
# The text between two turns
# ------------------------------------------------------------------------------------------------------------
PROBES = (  # turns of the policy whose rendering is compared at the start
    "a",
    "<think>\nb\n</think>\n\nc",
    '<tool_call>\n{"name": "d", "arguments": {}}\n</tool_call>',
)
INEXACT = "the template cannot be extended exactly"


class Extension:
    """The tokens that the chat template puts between two turns of the policy: end of turn, results, opening.

    template: with the tools. stop_ids: token ids that end a turn. has_system: prompts have a system message.
    The text is rendered in a short conversation, because check() has proven that it does not depend on the
    conversation.
    """

    def __init__(self, template: ChatTemplate, stop_ids: Sequence[int], has_system: bool = False):
        self.template = template
        self.tokenizer: Any = template.tokenizer
        self.stop_ids = stop_ids
        system = [{"role": "system", "content": "s"}] if has_system else []
        self.opening = [*system, {"role": "user", "content": "q"}]
        self.prompt = template.text(self.opening)
        self.thought = opened_thought(self.prompt)

    def text(self, messages: list[dict], history: Sequence[dict] = (), turn: str = "a") -> str:
        """Return the text after a turn, up to the next turn; ValueError if the template changes the past.

        history: earlier messages after the opening, which end before the turn.
        """
        before = self.template.text([*self.opening, *history]) + turn
        whole = self.template.text(
            [*self.opening, *history, {"role": "assistant", "content": turn}, *messages]
        )
        if not whole.startswith(before):
            same = len(os.path.commonprefix([whole, before]))
            raise ValueError(
                f"{INEXACT}, because it renders an earlier turn in another way than the policy has read and "
                f"written the turn: {before[max(0, same - 20) : same + 40]!r} becomes "
                f"{whole[max(0, same - 20) : same + 40]!r}. Put a chat_template.jinja that keeps earlier "
                "turns into the model's folder (data.chat_template_args may help)"
            )
        return whole[len(before) :]

    def ids(self, messages: list[dict], last_id: int) -> list[int]:
        """Return the token ids of the text after a turn that ended with the token last_id."""
        ids = self.tokenizer(self.text(messages), add_special_tokens=False)["input_ids"]
        return ids[1:] if ids[0] == last_id else ids

    def turn_text(self, token_ids: list[int]) -> str:
        """Return the text of a sampled turn without the token that ended the turn."""
        ids = token_ids[:-1] if token_ids[-1] in self.stop_ids else token_ids
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def check(self, role: str) -> None:
        """Raise ValueError unless the text between turns is the same in every conversation.

        role: of the inserted messages. The text after a turn must not depend on the turn or on earlier turns,
        must begin with a token that ends turns, and must give the same tokens alone and inside of the
        conversation.
        """
        messages = [{"role": role, "content": "RESULT"}]
        expected = self.text(messages)
        if "RESULT" not in expected:
            raise ValueError(f"the chat template does not render messages of role {role}")
        for turn in PROBES:
            history = [{"role": "assistant", "content": turn}, *messages]
            for text in (self.text(messages, turn=turn), self.text(messages, history, turn)):
                if text != expected:
                    raise ValueError(f"{INEXACT}: after {turn!r} it inserts {text!r}, not {expected!r}")
        ids = self.tokenizer(expected, add_special_tokens=False)["input_ids"]
        if ids[0] not in self.stop_ids:
            first = self.tokenizer.convert_ids_to_tokens(ids[0])
            raise ValueError(
                f"{INEXACT}: it ends a turn with {first!r}, which does not end a completion; if {first!r} is "
                f"the end of a turn, set rollout.stop=[{ids[0]}]"
            )
        whole = self.tokenizer(self.prompt + "a" + expected, add_special_tokens=False)["input_ids"]
        if whole[-len(ids) :] != ids:
            raise ValueError(f"{INEXACT}: {expected!r} gives other tokens alone than after a turn")

    def call_format(self, tool: str) -> str:
        """Return the name of the format in FORMATS in which the template writes calls."""
        call = {"name": tool, "arguments": {"x": "y"}}
        message = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": call}]}
        try:
            whole = self.template.text([*self.opening, message], add_generation_prompt=False)
        except Exception as error:  # a template can raise errors of any type
            raise ValueError(f"data.tools: the chat template cannot render a call: {error}") from error
        turn = whole[len(os.path.commonprefix([whole, self.prompt])) :]
        for token in special_tokens(self.tokenizer):
            turn = turn.partition(token)[0]
        for name in FORMATS:
            if calls_of(turn, name) == [Call(tool, {"x": "y"})]:
                return name
        raise ValueError(
            f"data.tools: the chat template writes a call as {turn!r}, which is none of the formats "
            f"{', '.join(FORMATS)} of episodes.py: add the format to FORMATS, or use a template that renders "
            "tool_calls"
        )


def extension_of(config: Config, tokenizer, stop_ids: Sequence[int], prompts: list[Prompt]) -> Extension:
    """Return the checked text between turns for the prompts of a run; ValueError names setting and reason."""
    data = config.data
    plain = next((prompt for prompt in prompts if not prompt.is_chat), None)
    setting = "data.tools" if data.tools else "data.environment"
    if plain is not None:
        raise ValueError(
            f"{setting}: turns are messages of a chat, but the prompt {plain.text[:80]!r} of {plain.source} "
            "is plain text; set data.chat=always"
        )
    schemas = schemas_of(data.tools)
    template = ChatTemplate(tokenizer, None, data.chat_template_args, schemas, date=data.date)
    has_system = prompts[0].messages[0]["role"] == "system"
    extension = Extension(template, stop_ids, has_system)
    missing = [s["function"]["name"] for s in schemas if s["function"]["name"] not in extension.prompt]
    if missing:
        raise ValueError(
            f"data.tools: the chat template does not show the tool {missing[0]!r} to the policy; use a model "
            "whose template supports tools, or put a chat_template.jinja into the model's folder"
        )
    roles = ["tool"] * bool(data.tools) + ["user"] * (data.environment is not None)
    for role in roles:
        try:
            extension.check(role)
        except Exception as error:  # a template can raise errors of any type
            raise ValueError(f"data.{'tools' if role == 'tool' else 'environment'}: {error}") from error
    return extension


# ------------------------------------------------------------------------------------------------------------
# One per run
# ------------------------------------------------------------------------------------------------------------
class Interaction:
    """The tools and the environment of a run, with their workers. log_path: see WorkerOptions.

    Tools share the workers of one pool. An environment's episodes are spread over pools of one worker, so
    that the steps of an episode meet the worker that holds the episode's environment.
    """

    def __init__(self, config: Config, tokenizer, stop_ids: Sequence[int], prompts: list[Prompt], log_path):
        data = config.data
        self.extension = extension_of(config, tokenizer, stop_ids, prompts)
        self.tools = {s["function"]["name"]: name for s, name in zip(schemas_of(data.tools), data.tools)}
        self.call_format = self.extension.call_format(next(iter(self.tools))) if self.tools else ""
        self.environment = data.environment
        self.scales = config.reward.scale
        self.max_turns = config.rollout.max_turns
        self.max_chars = config.rollout.max_tool_chars
        self.timeout_s = config.rollout.tool_timeout_s
        self.log_note = f"; see {log_path}"
        self.has_warned = False  # of a call that failed in a worker
        self.num_rollouts = 0
        if self.environment:
            check_environment_in_time(self.environment, row_of(prompts[0], 0), self.timeout_s)
        if any(load_function(name).call is python for name in data.tools):
            check_sandbox(config.reward.sandbox)

        options = worker_options(config.reward, log_path) | {"timeout_s": self.timeout_s}
        num_workers = config.rollout.tool_workers
        self.tool_pool: WorkerPool | None = None
        if self.tools:
            self.tool_pool = WorkerPool("verifiers.tools", num_workers, **options)
        self.environment_pools: list[WorkerPool] = []
        if self.environment:
            self.environment_pools = [WorkerPool("verifiers.tools", **options) for _ in range(num_workers)]

    @property
    def pools(self) -> list[WorkerPool]:
        """Return all pools."""
        return [*self.environment_pools, *([self.tool_pool] if self.tool_pool else [])]

    def mean_seconds(self) -> float:
        """Return the recent mean of the seconds of a call or step, 0 before the first one."""
        seconds = [seconds for pool in self.pools for seconds in pool.seconds.values()]
        return sum(seconds) / max(1, len(seconds))

    def close(self) -> None:
        """Wait until the environments of the last episodes are closed, then end the workers."""
        for pool in self.environment_pools:
            pool.collect()  # the pool's time limits bound the wait
        for pool in self.pools:
            pool.close()

    def episodes(self, requests: list[Request], prompts: list[Prompt]) -> "Episodes":
        """Return the episodes of some requests; prompts: the prompt of each."""
        self.num_rollouts += 1
        return Episodes(self, self.num_rollouts, requests, prompts)

    def error_text(self, result: ToolResult) -> str:
        """Return the text that the policy reads in place of a result."""
        if result.status == "timeout":
            return f"Error: no result after {self.timeout_s:g} s"
        return f"Error: {result.detail.removesuffix(self.log_note)}"


def check_environment_in_time(name: str, row: dict, timeout_s: float) -> None:
    """Raise ValueError unless check_environment() accepts an environment within rollout.tool_timeout_s.

    reset() may wait for a server forever, so a thread calls it. As in the workers, the import of the file has
    no limit.
    """
    errors: list[BaseException] = []

    def check() -> None:
        try:
            check_environment(name, row)
        except BaseException as error:  # a thread would drop for example SystemExit
            errors.append(error)

    with contextlib.suppress(Exception):  # check_environment() explains the error
        load_function(name)
    thread = threading.Thread(target=check, daemon=True)
    thread.start()
    thread.join(timeout_s)
    if errors:
        raise errors[0]
    if thread.is_alive():
        raise ValueError(
            f"data.environment {name}: reset() of the first prompt did not end within {timeout_s:g} s; start "
            "the server that the environment waits for, or raise rollout.tool_timeout_s"
        )


def row_of(prompt: Prompt, seed: int) -> dict:
    """Return the row that an environment's reset() gets. A column named seed takes precedence.

    seed: for random games, the same in all episodes of a group and after a resume.
    """
    return {"seed": seed, **prompt.fields, "answer": prompt.answer}


# ------------------------------------------------------------------------------------------------------------
# One per call of generate()
# ------------------------------------------------------------------------------------------------------------
@dataclass
class Episode:
    """One running episode."""

    request: Request  # of the first turn
    prompt: Prompt
    token_ids: list[int] = field(default_factory=list)  # after the prompt
    logprobs: list[float] = field(default_factory=list)
    turns: list[Turn] = field(default_factory=list)
    texts: list[str] = field(default_factory=list)  # of each turn
    routes: list[np.ndarray] = field(default_factory=list)  # of consecutive tokens, from the prompt on
    results: dict[int, str | None] = field(default_factory=dict)  # by call of the last turn; None: running
    actions: list[str] = field(default_factory=list)  # turns that went to the environment, not to tools
    messages: list[str] = field(default_factory=list)  # of the environment
    num_turns: int = 0  # of the policy
    num_calls: int = 0
    num_call_errors: int = 0
    num_late: int = 0  # calls of the last turn that timed out
    has_open_call: bool = False  # calls of the last turn have no result in the episode yet
    reward: float = 0.0  # sum of the environment's rewards
    verdict: Verdict | None = None
    seconds: float = 0.0  # until the end of the last turn

    def add_turn(self, turn: Completion, text: str, routes: np.ndarray | None) -> None:
        """Add a turn of the policy; routes: of prompt and turn.

        A token's routes are those of its first computation: the engine may compute the end of the history
        again, beyond the cached prefix, but earlier log-probabilities came from the first routes.
        """
        self.token_ids += turn.token_ids
        self.logprobs += turn.logprobs
        self.turns.append(Turn("assistant", len(turn.token_ids)))
        self.texts.append(text)
        self.num_turns += 1
        self.seconds = turn.seconds
        if routes is not None:
            num_known = sum(map(len, self.routes))
            self.routes.append(routes[num_known:])

    def completion(self, finish_reason: str) -> Completion:
        """Return the finished episode."""
        return Completion(
            self.token_ids, self.logprobs, finish_reason, self.seconds, turns=tuple(self.turns),
            texts=tuple(self.texts), num_calls=self.num_calls, num_call_errors=self.num_call_errors,
            has_open_call=self.has_open_call, verdict=self.verdict,
        )  # fmt: skip


MAX_CALLS = 16  # of a turn; the others are answered with an error [ours]
MAX_LATE_CALLS = 3  # of a turn; after as many timeouts the calls that still wait do not run [ours]
CLOSE = -1  # in place of the number of a turn: the end of an environment


class Episodes:
    """The episodes of one rollout. end_turn() takes a turn; poll() returns next turns and ended episodes."""

    def __init__(self, interaction: Interaction, number: int, requests: list[Request], prompts: list[Prompt]):
        self.interaction = interaction
        self.number = number
        self.episodes = [Episode(*pair) for pair in zip(requests, prompts)]
        self.events: list[Event] = []
        self.num_waiting = 0  # episodes that wait for workers

    def end_turn(self, row: int, turn: Completion, routes: np.ndarray | None) -> None:
        """Record a turn of the policy, and start its calls or the environment's step."""
        episode = self.episodes[row]
        extension = self.interaction.extension
        text = extension.turn_text(turn.token_ids)
        episode.add_turn(turn, text, routes)
        calls = []
        if self.interaction.tools:
            tools = self.interaction.tools
            calls = calls_of(text, self.interaction.call_format, extension.thought, tools)
        episode.has_open_call = bool(calls)
        if turn.finish_reason != "stop":
            self.end(row, turn.finish_reason)
            return
        is_last = episode.num_turns == self.interaction.max_turns
        if calls and is_last:
            self.end(row, "turns")
        elif calls:
            self.start_calls(row, calls)
        elif self.interaction.environment:
            self.start_step(row)
        else:
            self.end(row, "stop")

    def start_calls(self, row: int, calls: list[Call]) -> None:
        """Send calls to the workers; malformed calls and unknown tools get an error at once."""
        episode = self.episodes[row]
        episode.results = {}
        episode.num_late = 0
        for number, call in enumerate(calls):
            name = self.interaction.tools.get(call.name)
            problem = call.problem
            if not problem and name is None:
                known = ", ".join(self.interaction.tools)
                problem = f"there is no tool {call.name[:80]!r}; the tools are {known}"
            if number >= MAX_CALLS:
                problem = f"a turn may call {MAX_CALLS} times"
            episode.num_calls += 1
            episode.num_call_errors += bool(problem)
            episode.results[number] = f"Error: {problem}" if problem else None
            if name is not None and not problem:
                key = (self.number, row, episode.num_turns, number)
                task = ToolCall(name, json.dumps(call.arguments), self.interaction.max_chars)
                self.interaction.tool_pool.put(key, task)
        self.num_waiting += 1
        self.insert_if_complete(row)

    def start_step(self, row: int) -> None:
        """Send the last turn to the environment, and all earlier turns in case it is rebuilt."""
        episode = self.episodes[row]
        episode.actions.append(episode.texts[-1])
        first_row = row_of(episode.prompt, episode.request.group_seed)
        step = Step(
            self.interaction.environment, f"{self.number}.{row}", first_row, episode.actions,
            episode.messages, self.interaction.max_chars,
        )  # fmt: skip
        self.pool_of(row).put((self.number, row, episode.num_turns, 0), step)
        self.num_waiting += 1

    def pool_of(self, row: int) -> WorkerPool[Answer]:
        """Return the pool whose worker holds the environment of an episode."""
        pools = self.interaction.environment_pools
        return pools[row % len(pools)]

    def poll(self, wait_s: float = 0.0) -> list[Event]:
        """Return the next turns and the ended episodes since the last call.

        wait_s: seconds to wait for an event, if there is none and an episode waits for workers.
        """
        deadline = time.monotonic() + wait_s
        while True:
            for pool in self.interaction.pools:
                for (rollout, row, turn, number), reply in pool.take().items():
                    if rollout != self.number or turn == CLOSE:
                        continue
                    if isinstance(reply, ToolResult):
                        self.take_result(row, number, reply)
                    else:
                        self.take_answer(row, reply)
                pool.latencies.clear()  # nobody reports the latencies of tools and environments
            if self.events or not self.num_waiting or time.monotonic() >= deadline:
                break
            time.sleep(0.001)
        events = self.events
        self.events = []
        return events

    def take_result(self, row: int, number: int, result: ToolResult) -> None:
        """Record the result of a call."""
        episode = self.episodes[row]
        episode.num_call_errors += result.failed
        episode.num_late += result.status == "timeout"
        text = self.interaction.error_text(result) if result.failed else result.text
        if result.failed and not self.interaction.has_warned:
            self.interaction.has_warned = True
            note = self.interaction.tool_pool.memory_note(result)
            warn_once(f"the policy reads the error of a tool, here of the first that failed: {text}{note}")
        episode.results[number] = text
        for other in [number for number, text in episode.results.items() if text is None]:
            key = (self.number, row, episode.num_turns, other)
            if episode.num_late >= MAX_LATE_CALLS and self.interaction.tool_pool.withdraw(key):
                episode.num_call_errors += 1
                episode.results[other] = (
                    f"Error: not run, because {MAX_LATE_CALLS} calls of the turn were late"
                )
        self.insert_if_complete(row)

    def insert_if_complete(self, row: int) -> None:
        """Insert the results of all calls of a turn, as soon as the last one has arrived."""
        results = self.episodes[row].results.values()
        if None not in results:
            self.num_waiting -= 1
            self.insert(row, [{"role": "tool", "content": text} for text in results])

    def take_answer(self, row: int, answer: Answer) -> None:
        """Record the environment's answer to a turn."""
        episode = self.episodes[row]
        self.num_waiting -= 1
        if answer.status in FAILED:
            episode.verdict = Verdict(0.0, answer.status, answer.detail, by_text=answer.by_text)
            self.end(row, "stop")
            return
        episode.reward += answer.reward
        if answer.done:
            self.end(row, "stop")
        elif episode.num_turns == self.interaction.max_turns:
            self.end(row, "turns")
        else:
            episode.messages.append(answer.message)
            self.insert(row, [{"role": "user", "content": answer.message}])

    def insert(self, row: int, messages: list[dict]) -> None:
        """Insert messages after a turn and ask for the next turn; end the episode if there is no room."""
        episode = self.episodes[row]
        extension = self.interaction.extension
        plain = [without_special_tokens(m["content"], extension.tokenizer, with_marks=True) for m in messages]
        messages = [message | {"content": text} for message, text in zip(messages, plain)]
        ids = extension.ids(messages, last_id=episode.token_ids[-1])
        request = episode.request
        rest = request.max_new_tokens - len(episode.token_ids) - len(ids)
        if rest < 1:
            self.end(row, "context")
            return
        episode.has_open_call = False
        episode.token_ids += ids
        episode.logprobs += [0.0] * len(ids)
        episode.turns.append(Turn(messages[0]["role"], len(ids)))
        episode.texts.append("\n".join(message["content"] for message in messages))
        num_tokens = len(episode.token_ids)
        expected = max(1.0, request.expected_tokens - num_tokens) if request.expected_tokens else 0.0
        next_turn = replace(
            request, prompt_ids=[*request.prompt_ids, *episode.token_ids], max_new_tokens=rest,
            seed=seed_of(request.seed, "turn", episode.num_turns), min_new_tokens=0, expected_tokens=expected,
        )  # fmt: skip
        self.events.append((row, next_turn))

    def end(self, row: int, finish_reason: str) -> None:
        """End an episode; the environment's rewards become the verdict of prompts of kind environment."""
        episode = self.episodes[row]
        if self.interaction.environment and episode.verdict is None and episode.prompt.kind == ENVIRONMENT:
            name = self.interaction.environment
            episode.verdict = verdict_of(episode.reward, name, self.interaction.scales.get(name, (0.0, 1.0)))
        if self.interaction.environment:
            close = Close(self.interaction.environment, f"{self.number}.{row}")
            self.pool_of(row).put((self.number, row, CLOSE, 0), close)
        self.events.append((row, episode.completion(finish_reason)))

    def routes_of(self, row: int) -> np.ndarray | None:
        """Return the routes of an ended episode, [prompt + completion - 1, L, K]."""
        tables = self.episodes[row].routes
        return np.concatenate(tables) if tables else None


def verdict_of(reward: float, name: str, scale: Scale) -> Verdict:
    """Return the verdict of an episode's rewards; RuntimeError if the sum lies outside of the scale.

    name: of the environment. scale: from reward.scale, see read_result().
    """
    try:
        score, _ = read_result(name, reward, scale)
    except BadResult as error:
        raise RuntimeError(f"environment: the rewards of an episode are summed, and {error}") from None
    except ValueError as error:
        return Verdict(0.0, "error", f"the rewards of the episode: {error}")
    return Verdict(score, "ok" if score == 1 else "wrong")
