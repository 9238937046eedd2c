"""Render lists of messages with the tokenizer's chat template, as the text that the policy continues."""

import contextlib
import functools
import json
import re
import signal
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from datetime import datetime

from data.formats import BadRow, half_a_character
from runtime.launch import one_line
from verifiers.answer import final_answer, is_tag, opened_thought

ROLES = ("system", "user", "assistant")
NOT_RENDERED = "whose messages cannot be rendered"
MAX_RENDER_S = 10.0  # a template of a stranger may loop forever
MAX_RENDERED_CHARS = 10**7
LOADER_ARGUMENTS = ("conversation", "tokenize", "add_generation_prompt", "return_dict", "return_tensors")


def load_tokenizer(folder, setting: str = ""):
    """Load the tokenizer of a model folder; code in the folder is never run. ValueError if loading fails.

    setting: name of the setting that holds the folder, for example "reward.judge_path". Errors begin with it.
    """
    from transformers import AutoTokenizer

    place = f"{setting} {folder}".lstrip()
    advice = "copy the model's tokenizer files there, for example tokenizer.json and tokenizer_config.json"
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # broken files make transformers raise errors of many types
        reason = one_line(str(error))[:300]
        raise ValueError(f"{place}: the tokenizer cannot be loaded ({reason}); {advice}") from error
    if len(tokenizer) <= len(tokenizer.all_special_tokens):  # an empty folder gives a default tokenizer
        raise ValueError(f"{place} holds no tokenizer; {advice}")
    if lost := [token for token in special_tokens(tokenizer) if is_tag(token)]:
        raise ValueError(
            f"{place}: {lost[0]} is a special token, and decoding removes it before any verifier: "
            'give it "special": false in tokenizer.json and tokenizer_config.json'
        )
    return tokenizer


MARK = re.compile(r"[<\[|\u25c1](?=.*\w).*[>\]|\u25b7]")  # an added token with a role, not a run of spaces


def without_special_tokens(text: str, tokenizer, with_marks: bool = False) -> str:
    """Return a text without special tokens: a space keeps, for example, <|im_end|> from ending a turn.

    with_marks: also without other added tokens and the tags around calls and results of tools, for example
    </tool_response>. The last loop finds tokens in other characters that the tokenizer normalises, for
    example in full width.
    """
    for token in special_tokens(tokenizer):
        text = text.replace(token, f"{token[0]} {token[1:]}")
    if with_marks:
        text = re.sub(r"<(?=/?tool_(?:call|response)>)", "< ", text)
    for _ in range(10):  # once is enough, unless breaking a token makes another one
        if not (spans := token_spans(text, tokenizer, with_marks)):
            break
        for start, end in reversed(spans):
            token = text[start:end]
            indent = start + len(token) - len(token.lstrip()) + 1
            text = f"{text[:indent]} {text[indent:]}"
    return text


def token_spans(text: str, tokenizer, with_marks: bool = False) -> list[tuple[int, int]]:
    """List the places of special tokens in a text, as the tokenizer reads it; with_marks: of all marks."""
    if not tokenizer.is_fast:
        tokens = map(re.escape, special_tokens(tokenizer))
        return [match.span() for token in tokens for match in re.finditer(token, text)]
    ids = token_ids(tokenizer, with_marks)
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    spans = zip(encoded["offset_mapping"], encoded["input_ids"])
    return [(start, end) for (start, end), number in spans if number in ids and end - start > 1]


@functools.lru_cache(maxsize=8)
def token_ids(tokenizer, with_marks: bool) -> frozenset[int]:
    """Return the ids of special tokens, without that of unknown characters; with_marks: and of marks."""
    added = tokenizer.added_tokens_decoder.items()
    chosen = [i for i, token in added if token.special or (with_marks and MARK.fullmatch(str(token)))]
    return frozenset({*tokenizer.all_special_ids, *chosen} - {tokenizer.unk_token_id})


@functools.lru_cache(maxsize=8)
def special_tokens(tokenizer) -> list[str]:
    """List the special tokens, longest first, also those without a name (Llama 3: <|start_header_id|>)."""
    added = [str(token) for token in tokenizer.added_tokens_decoder.values() if token.special]
    return sorted({*tokenizer.all_special_tokens, *added}, key=lambda token: (-len(token), token))


def refuse_special_prefix(prefix: str, tokenizer, allows_special: bool) -> None:
    """Raise ValueError if data.answer_prefix has a token that ends a completion, or another special token."""
    for start, end in token_spans(prefix, tokenizer):
        token = prefix[start:end].strip()
        place = f"data.answer_prefix {prefix!r}: the special token {token!r}"
        if token == tokenizer.eos_token:
            raise ValueError(f"{place} ends a completion before it begins: remove the token")
        if not allows_special:
            raise ValueError(f"{place} may end the turn: remove it, or allow it by data.special_tokens=true")


def end_of_turn(tokenizer, messages: list[dict]) -> str:
    """Return the special token that a chat template writes after an assistant's turn; "" if it has none."""
    with contextlib.suppress(Exception):  # a template can raise errors of any type
        text = ChatTemplate(tokenizer).text([*messages, {"role": "assistant", "content": "7"}], False)
        rest = text.rpartition("7")[2]
        return next((rest[start:end] for start, end in token_spans(rest, tokenizer)), "").strip()
    return ""


@contextlib.contextmanager
def time_limit(seconds: float, what: str = "the chat template") -> Iterator[None]:
    """Raise TimeoutError in the main thread after some seconds of a with block; no limit in other threads."""
    is_late = False

    def stop(number, frame):
        nonlocal is_late
        is_late = True
        raise KeyboardInterrupt  # each second, because libraries catch every Exception

    if threading.current_thread() is not threading.main_thread():
        yield
        return
    earlier = signal.signal(signal.SIGALRM, stop)
    try:
        signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
        try:
            yield
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
    except BaseException:
        if not is_late:
            raise
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)  # again: an alarm may have interrupted the line above
        signal.signal(signal.SIGALRM, earlier)
    if is_late:
        raise TimeoutError(f"{what} has not ended after {seconds:g} s")


def reads_clock(tokenizer) -> bool:
    """Tell whether the chat template may write the date, as those of Llama 3.2 and Granite 3 do."""
    return "strftime_now" in str(getattr(tokenizer, "chat_template", None))


def clock_of(tokenizer, date: str | None) -> dict:
    """Return the argument that makes a template write this date; {} if the template writes none."""
    is_fixed = date is not None and reads_clock(tokenizer)
    return {"strftime_now": datetime.fromisoformat(date).strftime} if is_fixed else {}


def is_messages(value) -> bool:
    """Tell whether a field holds messages: a list, or a list of messages written as JSON text."""
    starts = r"""\s*\[\s*\{\s*["'](role|content)["']"""
    return isinstance(value, list) or (isinstance(value, str) and re.match(starts, value) is not None)


def read_messages(value, where: str) -> list[dict]:
    """Return messages as {role, content} with text contents; BadRow if the messages do not form a prompt."""

    def refuse(detail: str) -> BadRow:
        return BadRow(where, NOT_RENDERED, detail)

    if isinstance(value, str):
        try:
            value = json.loads(value)
        except json.JSONDecodeError as error:
            raise refuse(f"a list of messages that is written as text must be JSON: {error.msg}") from None
    if not value:
        raise refuse("the list of messages is empty")
    messages = []
    for number, message in enumerate(value, start=1):
        if not isinstance(message, dict) or "role" not in message:
            raise refuse(f"message {number} must have a role and a content, found {repr(message)[:80]}")
        if message["role"] not in ROLES:
            raise refuse(f"message {number} has role {message['role']!r}; expected {', '.join(ROLES)}")
        content = text_of(message.get("content"))
        if content is None:
            shown = repr(message.get("content"))[:80]
            raise refuse(f"message {number}: only text can be rendered, found the content {shown}")
        if message.get("tool_calls"):
            raise refuse(f"message {number} has tool_calls, which are not rendered: write them as text")
        if half_a_character(content):
            raise refuse(f"message {number} holds half a character (a surrogate): {content[:80]!a}")
        messages.append({"role": message["role"], "content": content})
    if problem := wrong_order([message["role"] for message in messages]):
        raise refuse(problem)
    if not messages[-1]["content"].strip():
        raise refuse("the last message is empty")
    return messages


def text_of(content) -> str | None:
    """Return the text of a message, joining a list of text parts; None for other content, such as images."""
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) and content else [None]
    if all(isinstance(p, dict) and p.get("type") == "text" and isinstance(p.get("text"), str) for p in parts):
        return "".join(part["text"] for part in parts)
    return None


def wrong_order(roles: list[str]) -> str | None:
    """Return the problem with the order of roles, or None.

    Expected: an optional system message, then user and assistant in turns, ending with the user.
    """
    turns = roles[1:] if roles[0] == "system" else roles
    for number, role in enumerate(turns, start=1 + len(roles) - len(turns)):
        expected = ("assistant", "user")[(number - len(roles) + len(turns)) % 2]
        if role == "system":
            return f"message {number} has role 'system', which may only come first and once"
        if role != expected:
            return f"message {number} has role {role!r} where the {expected}'s turn is"
    if not turns or turns[-1] == "assistant":
        last = "assistant" if turns else "system"
        return f"the last message is from the {last}, but a prompt ends with one from the user"
    return None


@dataclass(frozen=True)
class ChatTemplate:
    """The tokenizer's chat template, for example with data.system_prompt and data.chat_template_args."""

    tokenizer: object
    system_prompt: str | None = None  # inserted if the messages have no system message
    args: dict = field(default_factory=dict)  # arguments of the template, for example enable_thinking
    tools: list[dict] = field(default_factory=list)  # JSON schemas of data.tools
    setting: str = "data.chat_template_args"  # that gave args, for errors
    date: str | None = None  # data.date, which a template writes by strftime_now; None: the clock of the host

    @property
    def exists(self) -> bool:
        """Tell whether the tokenizer has a chat template."""
        return bool(getattr(self.tokenizer, "chat_template", None))

    def check(self, where: str) -> None:
        """Raise ValueError if the tokenizer has no template, or if the template ignores an argument."""
        if not self.exists:
            raise ValueError(
                f"{where}: the prompts have to be rendered, but the tokenizer has no chat template; use the "
                "tokenizer of a chat model, put a chat_template.jinja into the model's folder, or use text "
                "prompts"
            )
        text = self.tokenizer.get_chat_template()
        for name in self.args:
            if name in LOADER_ARGUMENTS or not re.search(rf"\b{re.escape(name)}\b", text):
                is_loaders = name in LOADER_ARGUMENTS
                why = "is set by the loader" if is_loaders else "is not read by the chat template"
                raise ValueError(f"{self.setting}.{name} {why}; check the spelling or remove the argument")

    def render(self, messages: list[dict], where: str) -> tuple[list[dict], str]:
        """Return the messages with the system prompt, and the rendered text that the policy continues."""
        if self.system_prompt is not None and messages[0]["role"] != "system":
            messages = [{"role": "system", "content": self.system_prompt}, *messages]
        try:
            text = self.text(messages)
        except TimeoutError as error:
            raise ValueError(f"{where}: {error}") from error
        except Exception as error:  # a template can raise errors of any type
            why = f"the chat template failed: {type(error).__name__}: {error}"
            raise BadRow(where, NOT_RENDERED, why) from error
        return messages, text

    def check_system(self, messages: list[dict]) -> None:
        """Raise ValueError if the template drops data.system_prompt, the first of a prompt's messages."""
        try:
            without = self.text(messages[1:])
        except Exception:  # a template can raise errors of any type
            return
        if without == self.text(messages):
            raise ValueError(
                "data.system_prompt: the chat template drops system messages: write the text into the set's "
                "template, or take another chat template"
            )

    def check_prefix(self, prefix: str, prompt) -> None:
        """Raise ValueError unless the template keeps a text that begins the assistant's turn.

        prompt: a rendered prompt, which ends with the prefix. If template or prefix write a thought, only the
        text after it is compared, because templates rewrite the thoughts of turns that have ended.
        """
        turn = {"role": "assistant", "content": f"{prefix}7"}  # a character of the completion
        try:
            start = len(self.text(prompt.messages, add_generation_prompt=False))
            text = self.text([*prompt.messages, turn], add_generation_prompt=False)
            is_kept = text.startswith(f"{prompt.text}7")
            if final_answer(prompt.text[start:]) != prompt.text[start:]:
                opening = opened_thought(prompt.text.removesuffix(prefix))
                is_kept = f"{final_answer(prefix, opening) or prefix}7" in text
            reason = "" if is_kept else "the chat template drops or changes this text"
        except Exception as error:  # a template can raise errors of any type
            reason = f"the chat template takes no turn of the assistant ({error})"
        if reason:
            raise ValueError(
                f"data.answer_prefix {prefix!r}: {reason} at the beginning of the assistant's turn; use "
                "another text (spaces and line breaks at its ends are often dropped; if the template writes "
                "an empty thought, begin with it), or data.chat=never"
            )

    def text(self, messages: list[dict], add_generation_prompt: bool = True) -> str:
        """Render messages as they are, with the tools; a template can raise errors of any type."""
        tools = {"tools": self.tools} if self.tools else {}
        tools |= clock_of(self.tokenizer, self.date)
        with time_limit(MAX_RENDER_S):
            text = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt, **tools, **self.args
            )
        if len(text) > MAX_RENDERED_CHARS:
            raise ValueError(f"the chat template writes {len(text):,} characters")
        return text
