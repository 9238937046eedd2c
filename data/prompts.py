"""Make prompts of the rows that people have: plain text or messages, by their own columns, verl's or TRL's.

    load_prompts("data/built/gsm8k/train.jsonl", difficulty=(2, 4))
    load_prompts("HuggingFaceH4/MATH-500", split="test", columns={"prompt": "problem", "difficulty": "level"})
    load_prompts("verl/train.parquet", tokenizer=tokenizer)     # messages, rendered by the chat template
    load_scores("scores.jsonl")[prompt_sha(prompt)]             # what data/score.py measured of one prompt

A set is a file, a pattern, a folder or a hub name, see data/formats.py. Its columns are found by name: the
prompt in `prompt`, `question`, `problem` or `messages`; the answer in `reward_model.ground_truth` (verl,
DAPO-17k), `answer`, `ground_truth` or `solution` (TRL); `columns` of the settings names others. The sets of a
run are put together in data/stream.py.
"""

import hashlib
import json
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import AfterValidator, BeforeValidator

from data.chat import ChatTemplate, is_messages, read_messages
from data.formats import (
    BadRow,
    Table,
    column_names,
    field_number,
    field_of,
    field_text,
    has_field,
    json_value,
    load_tables,
    read_json,
    stem_of,
    text_from,
)
from settings import DataSettings, PromptSource
from verifiers.kinds import KINDS, RULE_KINDS, functions_of, is_kind, parts_of
from verifiers.math import last_boxed

COLUMNS = ("prompt", "answer", "kind", "difficulty")
# Where the settings name no column, the first of these that a set has is taken for the role.
KNOWN_COLUMNS = {
    "prompt": ("prompt", "question", "problem", "messages"),
    "answer": ("reward_model.ground_truth", "answer", "ground_truth", "solution"),
    "kind": ("kind",),
    "difficulty": ("difficulty",),
}
# Columns of these names are not handed to a verifier, which gets values of its own by them.
NOT_PASSED_ON = ("kind", "completion", "answer", "prompt", "messages")


def check_data(data: DataSettings) -> None:
    """Raise ValueError where settings of the data contradict each other."""
    if data.chat == "never" and (data.system_prompt is not None or data.chat_template_args):
        raise ValueError(
            "data.chat never renders nothing: leave out data.system_prompt and chat_template_args"
        )
    for source in data.eval:
        if source.holdout or source.weight != 1:
            raise ValueError(f"data.eval[] {source.place}: weight and holdout are for data.train[] only")
    for source in data.train:
        if source.holdout > 1 and not source.holdout.is_integer():
            raise ValueError(
                f"data.train[].holdout {source.holdout:g}: a share below 1, or a whole number of rows"
            )
    held_out = [*data.eval, *(source for source in data.train if source.holdout)]
    for name, sources in (("train", data.train), ("eval", held_out)):
        labels = [source.label for source in sources]
        why = " (a holdout is an eval set, too)" if name == "eval" else ""
        for source in sources:
            if labels.count(source.label) > 1:
                raise ValueError(
                    f"data.{name}[].name: two sets are called {source.label!r}{why}; name one, for "
                    f"example {{path: {source.path}, name: {source.label}_2}}"
                )


# ------------------------------------------------------------------------------------------------------------
# Prompts
# ------------------------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Prompt:
    """One task with its reference answer."""

    text: str  # the template around the question, or the rendered messages: the policy continues it
    answer: str  # gold answer, handed to reward.verify
    kind: str  # verifier of reward.py: one of KINDS, a function of the settings, or a weighted sum of these
    source: str  # name of the set, for messages
    difficulty: float | None = None  # the set's own measure (digits, steps, level), None if it has none
    messages: list[dict] | None = field(default=None, hash=False)  # {role, content} each; None for plain text
    columns: dict = field(default_factory=dict, hash=False)  # the other columns of the row, for own verifiers
    is_chat: bool = False  # the text is the chat template's, which has put in special tokens itself

    @property
    def fields(self) -> dict:
        """Return what a verifier may ask for besides completion and answer."""
        return {**self.columns, "prompt": self.text, "messages": self.messages}


class Row(NamedTuple):
    """A prompt, and the row that it was made of."""

    file: str
    number: int  # in the file, from 1
    question: str  # the prompt without template and system prompt: what tells equal tasks
    prompt: Prompt

    @property
    def where(self) -> str:
        """Return file and row, for messages."""
        return f"{self.file}: row {self.number}"


@dataclass
class PromptSet:
    """The rows of one set that made prompts, and what is to be said of it."""

    source: PromptSource
    rows: list[Row]
    description: str  # columns, kinds and rendering, for a line at the start
    dropped: list[dict]  # {set, file, row, reason, detail} of each row that on_bad_row drop left out


def load_prompts(path, *, tokenizer=None, functions=(), **options) -> list[Prompt]:
    """Load the prompts of one set in file order; ValueError names file, row (from 1) and the key to change.

    tokenizer: its chat template renders messages; prompts that are text need none.
    functions: kinds that run code and that a row may name besides those of reward.KINDS and `kind`. Only the
        caller may introduce one, never the data.
    options: settings of PromptSource and of DataSettings, such as columns, limit or chat.
    """
    of_source = {name: value for name, value in options.items() if name in PromptSource.model_fields}
    of_data = {name: value for name, value in options.items() if name not in PromptSource.model_fields}
    source = PromptSource(path=str(path), **of_source)
    return [row.prompt for row in load_set(source, DataSettings(**of_data), tokenizer, functions).rows]


def load_set(source: PromptSource, data: DataSettings, tokenizer=None, functions=()) -> PromptSet:
    """Load one set in file order: all rows that make prompts, of the wanted difficulty, up to the limit."""
    tables = load_tables(source.path, source.subset, source.split)
    maker = PromptMaker.of(source, data, tokenizer, {*functions, source.kind}, tables)
    rows, dropped = [], []
    for file, fields in tables:
        for number, row in enumerate(fields, start=1):
            try:
                rows.append(Row(file, number, *maker.make(row, f"{file}: row {number}")))
            except BadRow as error:
                drop_or_stop(error, data, source, file, number, dropped)
    if rows:
        refuse_unused_kind(source, maker.columns, rows)
        rows = in_difficulty_range(rows, source)[: source.limit]
    files = f"{len(tables)} files, " if len(tables) > 1 else ""
    return PromptSet(source, rows, files + maker.describe([row.prompt for row in rows]), dropped)


def drop_or_stop(
    error: BadRow, data: DataSettings, source: PromptSource, file: str, number: int, dropped: list[dict]
) -> None:
    """Enter a bad row into `dropped`, or raise ValueError, as data.on_bad_row says."""
    if data.on_bad_row == "stop":
        raise ValueError(f"{error}; data.on_bad_row=drop leaves such rows out") from error
    place = {"set": source.label, "file": file, "row": number}
    dropped.append({**place, "reason": error.reason, "detail": error.detail})


def in_difficulty_range(rows: list[Row], source: PromptSource) -> list[Row]:
    """Return the rows in the difficulty range of the settings; ValueError if there is none."""
    if source.difficulty is None:
        return rows
    low, high = source.difficulty
    known = [row for row in rows if row.prompt.difficulty is not None]
    kept = [row for row in known if low <= row.prompt.difficulty <= high]
    if not kept:
        levels = [row.prompt.difficulty for row in known]
        available = f"{min(levels):g} to {max(levels):g}" if known else "none, set columns.difficulty"
        raise ValueError(
            f"{source.path}: no prompt has difficulty {low:g} to {high:g}; available: {available}"
        )
    return kept


def refuse_unused_kind(source: PromptSource, columns: dict, rows: list[Row]) -> None:
    """Raise ValueError if a kind of the settings decides nothing, because the rows of the set name theirs."""
    kinds = {row.prompt.kind for row in rows}
    if source.kind and columns["kind"] and source.kind not in kinds:
        raise ValueError(
            f"{source.path}: kind {source.kind!r} of the settings is not used, because the column "
            f"{columns['kind']!r} says {', '.join(sorted(kinds))}; set columns: {{kind: null}} to ignore the "
            "column, or leave out the setting"
        )


# ------------------------------------------------------------------------------------------------------------
# From a row to a prompt
# ------------------------------------------------------------------------------------------------------------
@dataclass
class PromptMaker:
    """Makes prompts of the rows of one set."""

    source: PromptSource
    chat: str  # data.chat
    renderer: ChatTemplate
    columns: dict[str, str | None]  # {role: column} for each role in COLUMNS
    kind: str | None  # verifier of rows that say nothing else; None: by data_source
    allowed: set[str]  # functions that rows may name

    @classmethod
    def of(cls, source: PromptSource, data: DataSettings, tokenizer, allowed: set, tables: list[Table]):
        """Find the columns of a set; ValueError if a role has none."""
        columns = resolve_columns(source, tables)
        renderer = ChatTemplate(tokenizer, data.system_prompt, data.chat_template_args)
        if data.chat == "always":
            renderer.check(source.path)
        kind, column = source.kind, columns["answer"]
        answers = [answer for row in rows_of(tables) if column and (answer := field_of(row, column))]
        if kind is None and answers and all("####" in str(answer) for answer in answers):
            kind = "gsm8k"
        allowed = {function for kind in allowed - {None} for function in functions_of(kind)}
        return cls(source, data.chat, renderer, columns, kind, allowed)

    def make(self, row: dict, where: str) -> tuple[str, Prompt]:
        """Return the question and the prompt of a row; BadRow if it makes none."""
        kind = self.kind_of(row, where)
        question, text, messages = self.text_of(row, where)
        answer = self.answer_of(row, kind, where)
        level = self.columns["difficulty"]
        difficulty = field_number(row, level, where) if level else None
        not_passed_on = {*NOT_PASSED_ON, self.columns["prompt"]}
        columns = {name: json_value(value) for name, value in row.items() if name not in not_passed_on}
        is_chat = messages is not None
        return question, Prompt(text, answer, kind, self.source.label, difficulty, messages, columns, is_chat)

    def kind_of(self, row: dict, where: str) -> str:
        """Return the verifier of a row; ValueError if the row names a function that the settings do not."""
        column = self.columns["kind"]
        if column and not (self.kind and field_of(row, column) is None):
            kind = field_text(row, column, where, "without a kind")
            if not is_kind(kind) or not self.allowed.issuperset(functions_of(kind)):
                raise ValueError(unknown_kind(kind, where))
            return kind
        is_gsm8k = field_of(row, "data_source") == "openai/gsm8k"
        return self.kind or ("gsm8k" if is_gsm8k else "math")

    def text_of(self, row: dict, where: str) -> tuple[str, str, list[dict] | None]:
        """Return the question, the text that the policy continues, and its messages if it was rendered."""
        column = self.columns["prompt"]
        value, in_template = field_of(row, column), self.source.template.replace
        if not is_messages(value):
            question = text_from(value, column, where, "without a prompt")
            text = in_template("{prompt}", question)
            if self.chat != "always":
                return question, text, None
            messages = [{"role": "user", "content": text}]
        else:
            if self.chat == "never":
                raise ValueError(
                    f"{where}: column {column!r} is a list of messages, which data.chat never does not "
                    "render; set it to auto"
                )
            messages = read_messages(value, where)
            question = json.dumps(messages, ensure_ascii=False)
            last = {"role": "user", "content": in_template("{prompt}", messages[-1]["content"])}
            messages = [*messages[:-1], last]
            self.renderer.check(where)
        messages, text = self.renderer.render(messages, where)
        return question, text, messages

    def answer_of(self, row: dict, kind: str, where: str) -> str:
        """Return the gold answer: for kinds that read structure as JSON, of a whole solution its last box."""
        column, parts = self.columns["answer"], {part for _, part in parts_of(kind)}
        if column is None:
            if parts & set(RULE_KINDS):
                raise ValueError(f"{where}: kind {kind} compares with an answer: name it in columns.answer")
            return ""
        value = field_of(row, column)
        if isinstance(value, (list, dict)) and value:
            if not parts & set(RULE_KINDS):
                value = json.dumps(json_value(value), ensure_ascii=False)
                return text_from(value, column, where, "without an answer")
            if isinstance(value, list) and len(value) == 1:
                (value,) = value
        text = text_from(value, column, where, "without an answer")
        boxed = last_boxed(text) if "math" in parts and column.endswith("solution") else None
        return boxed.strip() if boxed and boxed.strip() else text

    def describe(self, prompts: list[Prompt]) -> str:
        """Say which columns were taken for what, which verifiers judge, and how prompts become text."""
        prompt, answer = self.columns["prompt"], self.columns["answer"]
        num_chat = sum(one.is_chat for one in prompts)
        is_conversation = num_chat > 0 and self.chat != "always"
        shape = "columns"
        if answer == "reward_model.ground_truth":
            shape = "verl's columns"
        elif prompt == "question" and self.kind == "gsm8k":
            shape = "GSM8K's columns"
        elif prompt == "prompt" and (is_conversation or answer in ("ground_truth", "solution")):
            shape = f"TRL's {'conversational' if is_conversation else 'standard'} columns"
        taken = [f"{prompt}: messages" if is_conversation else prompt, answer or "no answer"]
        taken += [self.columns[role] for role in ("kind", "difficulty") if self.columns[role]]
        kinds = sorted({one.kind for one in prompts})
        if not self.kind and not self.columns["kind"] and "gsm8k" in kinds:
            taken.append("data_source")  # it alone can have said so
        how = "rendered by the chat template" if num_chat else "plain text"
        if 0 < num_chat < len(prompts):
            how = f"{num_chat:,} rendered by the chat template, the others plain text"
        return f"{shape} ({', '.join(taken)}), verified by {', '.join(kinds)}, {how}"


def rows_of(tables: list[Table]) -> Iterator[dict]:
    """Yield the rows of all files."""
    for _, rows in tables:
        yield from rows


def resolve_columns(source: PromptSource, tables: list[Table]) -> dict[str, str | None]:
    """Return the column of each role in COLUMNS; None for a kind, difficulty or answer that the set lacks."""
    if unknown := set(source.columns) - set(COLUMNS):
        expected = ", ".join(COLUMNS)
        raise ValueError(f"{source.path}: columns.{min(unknown)} is unknown, expected one of {expected}")
    optional = {"kind", "difficulty"}
    if source.kind and not any(part in RULE_KINDS for _, part in parts_of(source.kind)):
        optional.add("answer")  # no rule compares with it
    has = lambda column: any(has_field(row, column) for row in rows_of(tables))
    resolved = {}
    for role in COLUMNS:
        named = source.columns.get(role)
        candidates = (named,) if named else () if role in source.columns else KNOWN_COLUMNS[role]
        resolved[role] = next(filter(has, candidates), None)
        if resolved[role] or (role in optional and not named) or (role == "answer" and not candidates):
            continue
        names = ", ".join(column_names([row for _, rows in tables for row in rows[:100]]))
        lacking = f"no column {named!r} for columns.{role}" if named else f"no column for the {role}"
        looked = f" (looked for {', '.join(candidates)})" if candidates and not named else ""
        raise ValueError(
            f"{source.path}: {lacking}{looked} among {names}; name it in the settings, "
            f"columns: {{{role}: ...}}, or --columns of data.score"
        )
    return resolved


def unknown_kind(kind: str, where: str) -> str:
    """Say why a row's kind is refused, and where a function of one's own is to be named."""
    if ":" not in kind:
        ignored = "if the column is no verifier, set columns: {kind: null}"
        return f"{where}: kind {kind!r} is none of {', '.join(KINDS)}; {ignored}"
    return (
        f"{where}: kind {kind!r} would run code that a data file names. If it is yours, name it in the "
        "settings: in data.train[].kind, data.eval[].kind or reward.functions"
    )


def check_disjoint(train: list[Prompt], evaluation: list[Prompt]) -> None:
    """Raise ValueError when a text of `evaluation`, template included, is also in `train`."""
    trained = {prompt.text for prompt in train}
    shared = [prompt for prompt in evaluation if prompt.text in trained]
    if shared:
        example = shared[0]
        raise ValueError(
            f"{len(shared)} evaluation prompts are also training prompts, "
            f"for example {example.text[:200]!r} of {example.source!r}"
        )


def save_prompts(path, prompts: list[Prompt]) -> None:
    """Write JSONL for load_prompts, aside first, so that no reader ever sees half a file."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        for prompt in prompts:
            row = (prompt.text, prompt.answer, prompt.kind, prompt.difficulty)
            file.write(json.dumps(dict(zip(COLUMNS, row)), ensure_ascii=False) + "\n")
    os.replace(partial, path)


def prompt_sha(prompt: Prompt) -> str:
    """Name a prompt in a file of scores: its text, template included, and its answer, in SHA-256."""
    return hashlib.sha256(f"{prompt.text}\0{prompt.answer}".encode()).hexdigest()


class OfflineScore(NamedTuple):
    """The rates and the length that data/score.py found for a prompt."""

    pass_rate: float  # in [0, 1], share of completions that are right as a whole
    mean_tokens: float  # mean length of its completions
    wrong_rate: float  # in [0, 1], share of completions with no part right


def load_scores(path) -> dict[str, OfflineScore | None]:
    """Load {prompt_sha: score} of a file that data/score.py wrote; None where no verdict came back.

    The file may be unfinished: a prompt that is not in it has not been scored. ValueError names the file and
    the row, counted from 1 for the header.
    """
    path = str(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file; make it with `python -m data.score --output {path}`")
    try:
        header, *rows = read_json(path) or [{}]
    except ValueError as error:  # the last line of a killed run
        raise ValueError(f"{error}; the command that made the file repairs a cut last line") from None
    if "model" not in header or "prompt_sha" in header:
        raise ValueError(f"{path}: row 1 is no header of data/score.py, found {repr(header)[:80]}")
    scores = {}
    for number, row in enumerate(rows, start=2):
        sha, rate, tokens = row.get("prompt_sha"), row.get("pass_rate", "nothing"), row.get("mean_tokens")
        if not isinstance(sha, str) or not re.fullmatch("[0-9a-f]{64}", sha):
            raise ValueError(
                f"{path}: row {number}: prompt_sha must be 64 hex digits, found {repr(sha)[:80]}"
            )
        if rate is not None and (type(rate) not in (int, float) or not 0 <= rate <= 1):
            raise ValueError(
                f"{path}: row {number}: pass_rate must be in [0, 1] or null, found {repr(rate)[:80]}"
            )
        if type(tokens) not in (int, float) or not tokens >= 0:
            raise ValueError(
                f"{path}: row {number}: mean_tokens must be 0 or more, found {repr(tokens)[:80]}"
            )
        if sha in scores:
            raise ValueError(f"{path}: row {number}: prompt {sha} for the second time; remove one of them")
        wrong = row.get("wrong_rate")
        if rate is not None and (type(wrong) not in (int, float) or not 0 <= wrong <= 1 - rate + 1e-9):
            raise ValueError(
                f"{path}: row {number}: wrong_rate must be in [0, 1 - pass_rate], found {repr(wrong)[:80]}; "
                "make a file without it anew"
            )
        scores[sha] = None if rate is None else OfflineScore(rate, tokens, wrong)
    return scores
