"""Turn the rows of a dataset into prompts: plain text or messages, in the columns of verl, TRL or your own.

    load_prompts("data/built/gsm8k/train.jsonl", difficulty=(2, 4))
    load_prompts("HuggingFaceH4/MATH-500", split="test", columns={"prompt": "problem", "difficulty": "level"})
    load_prompts("verl/train.parquet", tokenizer=tokenizer)     # messages, rendered by the chat template
    load_scores("scores.jsonl")[prompt_sha(prompt)]             # pass rate of a prompt, from data/score.py

A dataset is a file, a pattern, a folder or a hub name, see data/formats.py. Columns are recognised by name:
the prompt is in `prompt`, `question`, `problem` or `messages`; the answer is in `reward_model.ground_truth`
(verl, DAPO-17k), `answer`, `ground_truth` or `solution` (TRL). The setting `columns` names other columns.
data/stream.py combines the datasets of a run.
"""

import hashlib
import json
import os
import re
from collections import defaultdict
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple

from data.chat import ChatTemplate, is_messages, read_messages, refuse_special_prefix, token_spans
from data.formats import (
    BadRow,
    Table,
    column_names,
    field_number,
    field_of,
    has_field,
    json_value,
    load_tables,
    read_json,
    text_from,
)
from data.references import plain_reference, refusal
from settings import DataSettings, PromptSource
from verifiers.answer import final_answer, opened_thought, without_opened_thought
from verifiers.kinds import RULE_KINDS, functions_of, parts_of, with_shares
from verifiers.tools import schemas_of

COLUMNS = ("prompt", "answer", "kind", "difficulty")
# Used for roles that the settings leave open: the first column in the list that the dataset has.
KNOWN_COLUMNS = {
    "prompt": ("prompt", "question", "problem", "messages"),
    "answer": ("reward_model.ground_truth", "answer", "ground_truth", "solution"),
    "kind": ("kind",),
    "difficulty": ("difficulty",),
}
# Columns that are not passed to a verifier. Except for kind, the loader passes values of its own instead.
NOT_PASSED_ON = ("kind", "completion", "answer", "prompt", "messages")


def check_data(data: DataSettings) -> None:
    """Raise ValueError where settings of the data contradict each other."""
    if data.chat == "never" and (data.system_prompt is not None or data.chat_template_args):
        raise ValueError("data.chat never renders nothing: remove data.system_prompt and chat_template_args")
    if data.chat == "never" and (data.tools or data.environment):
        raise ValueError(
            "data.chat never renders nothing, but turns are messages of the chat template: set "
            "data.chat=always"
        )
    if data.answer_prefix and (data.tools or data.environment):
        raise ValueError(
            "data.answer_prefix opens a single completion, and data.tools or data.environment make several "
            "turns: leave one of the two out"
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
    """One task with a reference answer."""

    text: str  # text that the policy continues: the question in the template, or the rendered messages
    answer: str  # gold answer, passed to reward.verify
    kind: str  # verifier of reward.py: one of KINDS, a function named in the settings, or a weighted sum
    source: str  # name of the dataset, for messages
    difficulty: float | None = None  # in the dataset's own unit, for example digits, steps or level
    messages: list[dict] | None = field(default=None, hash=False)  # {role, content} each; None for plain text
    columns: dict = field(default_factory=dict, hash=False)  # other columns of the row, for custom verifiers
    is_chat: bool = False  # rendered by the chat template, so the text already contains the special tokens
    question: str = field(default="", compare=False)  # without template and system prompt: names the task
    # {name: value} of the prompt's own column, for custom verifiers; {} if it is called prompt or messages.
    # `columns` lacks it, because a resume compares the digest of `columns`, and the text says the same.
    prompt_column: dict = field(default_factory=dict, compare=False)
    prefix: str = ""  # data.answer_prefix, the end of `text`: verifiers read prefix + completion

    @property
    def fields(self) -> dict:
        """Return the values that a verifier can request besides completion and answer."""
        return {**self.columns, **self.prompt_column, "prompt": self.text, "messages": self.messages}

    @property
    def task(self) -> str | None:
        """Return the short text in the row's column `task`, by which evaluations group, or None."""
        task = self.columns.get("task")
        return task if isinstance(task, str) and 0 < len(task) <= 40 else None

    @property
    def conversation(self) -> str:
        """Return the prompt for a reader with another chat template: the messages without special tokens."""
        if self.messages is None:
            return without_opened_thought(self.text.removesuffix(self.prefix))
        if len(self.messages) == 1:
            return self.messages[0]["content"]
        return "\n\n".join(f"{message['role']}: {message['content']}" for message in self.messages)


class Row(NamedTuple):
    """A prompt and the row that the prompt was made from."""

    file: str
    number: int  # row in the file, from 1
    prompt: Prompt


@dataclass
class PromptSet:
    """The prompts of one dataset, with a description and the dropped rows."""

    source: PromptSource
    rows: list[Row]
    description: str  # columns, verifiers and rendering, for the log at the start
    dropped: list[dict]  # {set, file, row, reason, detail} of each row dropped by data.on_bad_row


def load_prompts(path, *, tokenizer=None, functions=(), **options) -> list[Prompt]:
    """Load the prompts of one dataset in file order; ValueError names file, row (from 1) and key to change.

    tokenizer: needed to render messages with its chat template; None for text prompts.
    functions: custom verifiers that rows may name, besides verifiers.kinds.KINDS and `kind`. A function that
        is missing here is refused, because otherwise a data file could run arbitrary code.
    options: settings of PromptSource and of DataSettings, for example columns, limit or chat.
    """
    source_options = {name: value for name, value in options.items() if name in PromptSource.model_fields}
    data_options = {name: value for name, value in options.items() if name not in PromptSource.model_fields}
    source = PromptSource(path=str(path), **source_options)
    return [row.prompt for row in load_set(source, DataSettings(**data_options), tokenizer, functions).rows]


def load_set(source: PromptSource, data: DataSettings, tokenizer=None, functions=()) -> PromptSet:
    """Load one dataset in file order: drop bad rows, then filter by difficulty, then apply the limit."""
    tables = load_tables(source.path, source.subset, source.split)
    maker = PromptMaker.of(source, data, tokenizer, {*functions, source.kind}, tables)
    dropped: list[dict] = []
    rows, num_copies = make_rows(tables, maker, dropped)
    remarks = ""
    chat = next((row.prompt for row in rows if row.prompt.is_chat), None)
    if data.answer_prefix and chat is not None:
        maker.renderer.check_prefix(data.answer_prefix, chat)
    system = {"role": "system", "content": data.system_prompt}
    if data.system_prompt and chat is not None and chat.messages[0] == system:
        maker.renderer.check_system(chat.messages)
    opening = opened_thought(rows[0].prompt.text.removesuffix(data.answer_prefix)) if rows else ""
    if opening and data.answer_prefix and final_answer(data.answer_prefix, opening) is None:
        remarks = ", data.answer_prefix continues a thought: answers count only after the thought ends"
    if rows:
        refuse_unused_kind(source, maker.columns, rows, tables)
        num_ungraded = sum(row.prompt.difficulty is None for row in rows) if source.difficulty else 0
        remarks += f", {num_ungraded:,} rows without a difficulty left out" if num_ungraded else ""
        rows = in_difficulty_range(rows, source)
        distinct = distinct_rows(rows)
        if num_copies := num_copies + len(rows) - len(distinct):
            effect = "left out" if source.distinct else "kept as prompts of their own, see distinct"
            remarks += f", {num_copies:,} copies of earlier rows {effect}"
        rows = (distinct if source.distinct else rows)[: source.limit]
    files = f"{len(tables)} files, " if len(tables) > 1 else ""
    description = files + maker.describe([row.prompt for row in rows]) + remarks
    return PromptSet(source, rows, description, dropped)


def make_rows(tables: list[Table], maker: "PromptMaker", dropped: list[dict]) -> tuple[list[Row], int]:
    """Return the rows of a dataset in file order, without bad rows (see drop_or_stop), and skipped copies.

    Ends with the row that fills the limit, because a trial run should not wait for the rest of a large set.
    With `distinct` all rows are read, because copies are dropped before the limit counts. Rows that equal an
    earlier one in every column are not made, because published sets repeat rows (DAPO-Math-17k).
    """
    source = maker.source
    rows: list[Row] = []
    num_in_range = num_copies = 0
    digests: set[bytes] = set()  # of rows
    for file, fields in tables:
        for number, row in enumerate(fields, start=1):
            if num_in_range == source.limit and not source.distinct:
                return rows, 0
            if source.distinct:
                digest = hashlib.blake2b(repr(row).encode(errors="surrogatepass"), digest_size=16).digest()
                if digest in digests:
                    num_copies += 1
                    continue
                digests.add(digest)
            try:
                prompt = maker.make(row, f"{file}: row {number}")
            except BadRow as error:
                drop_or_stop(error, maker.data, source, file, number, dropped)
                continue
            rows.append(Row(file, number, prompt))
            num_in_range += is_in_range(prompt, source)
    return rows, num_copies


def drop_or_stop(
    error: BadRow, data: DataSettings, source: PromptSource, file: str, number: int, dropped: list[dict]
) -> None:
    """Handle a bad row: raise ValueError for data.on_bad_row=stop, add the row to `dropped` for drop."""
    if data.on_bad_row == "stop":
        raise ValueError(f"{error}; data.on_bad_row=drop skips bad rows") from error
    place = {"set": source.label, "file": file, "row": number}
    dropped.append({**place, "reason": error.reason, "detail": error.detail})


def is_in_range(prompt: Prompt, source: PromptSource) -> bool:
    """Tell whether a prompt lies in the difficulty range of the settings; True without a range."""
    if source.difficulty is None:
        return True
    low, high = source.difficulty
    return prompt.difficulty is not None and low <= prompt.difficulty <= high


def in_difficulty_range(rows: list[Row], source: PromptSource) -> list[Row]:
    """Return the rows in the difficulty range of the settings; ValueError if the range is empty."""
    matching = [row for row in rows if is_in_range(row.prompt, source)]
    if not matching:
        low, high = source.difficulty
        levels = [row.prompt.difficulty for row in rows if row.prompt.difficulty is not None]
        known = f"{min(levels):g} to {max(levels):g}" if levels else "none, set columns.difficulty"
        raise ValueError(f"{source.path}: no prompt has difficulty {low:g} to {high:g}; available: {known}")
    return matching


def distinct_rows(rows: list[Row]) -> list[Row]:
    """Return the first row of each question and answer, in file order."""
    first_rows: dict[tuple[str, str], Row] = {}
    for row in rows:
        first_rows.setdefault((task_of(row.prompt), row.prompt.answer), row)
    return list(first_rows.values())


def refuse_unused_kind(source: PromptSource, columns: dict, rows: list[Row], tables: list[Table]) -> None:
    """Raise ValueError if the setting `kind` has no effect, because every row names another verifier.

    rows: the prompts, which may be fewer than the rows of the tables, because of the limit.
    """
    kinds = {row.prompt.kind for row in rows}
    column = columns["kind"]
    if not source.kind or not column or source.kind in kinds:
        return
    if all(field_of(row, column) not in (None, source.kind) for _, rows in tables for row in rows):
        raise ValueError(
            f"{source.path}: kind {source.kind!r} of the settings is not used, because the column "
            f"{columns['kind']!r} says {', '.join(sorted(kinds))}; set columns: {{kind: null}} to ignore the "
            "column, or remove the setting"
        )


# ------------------------------------------------------------------------------------------------------------
# From a row to a prompt
# ------------------------------------------------------------------------------------------------------------
@dataclass
class PromptMaker:
    """Makes prompts from the rows of one dataset."""

    source: PromptSource
    data: DataSettings
    renderer: ChatTemplate
    columns: dict[str, str | None]  # {role: column} for each role in COLUMNS
    allowed: set[str]  # functions that rows may name

    @classmethod
    def of(cls, source: PromptSource, data: DataSettings, tokenizer, allowed: set, tables: list[Table]):
        """Resolve the columns and the default verifier of a dataset; ValueError if a column is missing."""
        columns = resolve_columns(source, tables)
        tools = schemas_of(data.tools)
        renderer = ChatTemplate(tokenizer, data.system_prompt, data.chat_template_args, tools, date=data.date)
        if data.chat == "always":
            renderer.check(source.path)
        if data.answer_prefix and tokenizer is not None:
            refuse_special_prefix(data.answer_prefix, tokenizer, data.special_tokens)
        allowed = {function for kind in allowed - {None} for function in functions_of(kind)}
        return cls(source, data, renderer, columns, allowed)

    def make(self, row: dict, where: str) -> Prompt:
        """Return the prompt of a row; BadRow if the row cannot become a prompt."""
        kind = self.kind_of(row, where)
        question, text, messages = self.text_of(row, where)
        answer = self.answer_of(row, kind, where)
        level = self.columns["difficulty"]
        difficulty = field_number(row, level, where) if level else None
        columns = {name: json_value(value) for name, value in row.items() if name not in NOT_PASSED_ON}
        own = self.columns["prompt"]
        prompt_column = {own: columns.pop(own)} if own in columns else {}
        is_chat = messages is not None
        prefix = self.data.answer_prefix
        return Prompt(
            text + prefix, answer, kind, self.source.label, difficulty, messages, columns, is_chat, question,
            prompt_column, prefix,
        )  # fmt: skip

    def kind_of(self, row: dict, where: str) -> str:
        """Return the verifier of a row; ValueError if the row names a function outside of the settings."""
        column = self.columns["kind"]
        value = field_of(row, column) if column else None
        if value is not None:
            kind = text_from(value, column, where, "without a kind")
            try:
                is_allowed = self.allowed.issuperset(functions_of(kind))
            except ValueError as error:
                remedy = "if the column does not name verifiers, set columns: {kind: null}"
                raise ValueError(f"{where}: {error}; {remedy}") from None
            if not is_allowed:
                raise ValueError(
                    f"{where}: kind {kind!r} would run code that a data file names. If you trust it, name it "
                    "in the settings: in data.train[].kind, data.eval[].kind or reward.functions"
                )
            return kind
        answer = field_of(row, self.columns["answer"]) if self.columns["answer"] else None
        is_gsm8k = field_of(row, "data_source") == "openai/gsm8k" or "####" in str(answer)
        return self.source.kind or ("gsm8k" if is_gsm8k else "math")

    def text_of(self, row: dict, where: str) -> tuple[str, str, list[dict] | None]:
        """Return the question, the text that the policy continues, and the messages (None for plain text)."""
        column = self.columns["prompt"]
        value = field_of(row, column)
        template = self.source.template
        if not is_messages(value):
            question = text_from(value, column, where, "without a prompt")
            text = template.replace("{prompt}", question)
            if self.data.chat != "always":
                return question, text, None
            self.check_tokens([question], where)
            messages = [{"role": "user", "content": text}]
        else:
            if self.data.chat == "never":
                raise ValueError(
                    f"{where}: column {column!r} is a list of messages, but data.chat=never renders none; "
                    "set data.chat=auto"
                )
            messages = read_messages(value, where)
            self.renderer.check(where)
            self.check_tokens([message["content"] for message in messages], where)
            asked = [message for message in messages if message["role"] != "system"]
            question = asked[0]["content"] if len(asked) == 1 else json.dumps(asked, ensure_ascii=False)
            last = {"role": "user", "content": template.replace("{prompt}", messages[-1]["content"])}
            messages = [*messages[:-1], last]
        messages, text = self.renderer.render(messages, where)
        return question, text, messages

    def check_tokens(self, texts: list[str], where: str) -> None:
        """Raise BadRow if a text of a message contains a special token, which would end the message."""
        for text in () if self.data.special_tokens else texts:
            if spans := token_spans(text, self.renderer.tokenizer):
                start, end = spans[0]
                detail = (
                    f"a message contains the special token {text[start:end]!r}, which the chat template uses "
                    "for its own: remove the token, or allow it with data.special_tokens=true"
                )
                raise BadRow(where, "with special tokens", detail)

    def answer_of(self, row: dict, kind: str, where: str) -> str:
        """Return the gold answer as text.

        A list or object becomes JSON for verifiers that read structured answers (for example code). For
        verifiers that compare values, plain_reference() removes the frame. BadRow for an answer that no
        completion can equal, see refusal().
        """
        column = self.columns["answer"]
        verifiers = {verifier for _, verifier in parts_of(kind)}
        compares_answer = bool(verifiers & set(RULE_KINDS))
        if column is None:
            if compares_answer:
                raise ValueError(
                    f"{where}: kind {kind} needs a reference answer: name its column in columns.answer"
                )
            return ""
        value = field_of(row, column)
        if isinstance(value, (list, dict)) and value:
            if not compares_answer:
                value = json.dumps(json_value(value), ensure_ascii=False)
                return text_from(value, column, where, "without an answer")
            if isinstance(value, list) and len(value) == 1:
                (value,) = value
        if is_text := not isinstance(value, (list, dict)):
            text = text_from(value, column, where, "without an answer")
        else:
            text = json.dumps(json_value(value))
        if verifiers & {"math", "numeric"}:
            text = plain_reference(text)
        if reason := refusal(text, verifiers):
            raise BadRow(where, "whose answer is none", f"column {column!r}: {reason}")
        return text if is_text else text_from(value, column, where, "without an answer")

    def describe(self, prompts: list[Prompt]) -> str:
        """Describe the columns, the verifiers and the rendering of the dataset in one line for the log."""
        prompt_column = self.columns["prompt"]
        answer_column = self.columns["answer"]
        num_chat = sum(prompt.is_chat for prompt in prompts)
        is_conversation = num_chat > 0 and self.data.chat != "always"
        shown_column = f"{prompt_column}: messages" if is_conversation else prompt_column
        columns = [shown_column, answer_column or "no answer"]
        columns += [self.columns[role] for role in ("kind", "difficulty") if self.columns[role]]
        kinds = sorted({prompt.kind for prompt in prompts})
        is_by_source = any(prompt.columns.get("data_source") == "openai/gsm8k" for prompt in prompts)
        if not self.source.kind and not self.columns["kind"] and is_by_source:
            columns.append("data_source")  # selected gsm8k, see kind_of()
        rendering = "rendered by the chat template" if num_chat else "plain text"
        if 0 < num_chat < len(prompts):
            rendering = f"{num_chat:,} rendered by the chat template, the others plain text"
        return (
            f"columns ({', '.join(columns)}), verified by {', '.join(map(with_shares, kinds))}, {rendering}"
        )


def resolve_columns(source: PromptSource, tables: list[Table]) -> dict[str, str | None]:
    """Return the column of each role in COLUMNS; None if the dataset has no column for an optional role."""
    if unknown := set(source.columns) - set(COLUMNS):
        expected = ", ".join(COLUMNS)
        raise ValueError(f"{source.path}: columns.{min(unknown)} is unknown, expected one of {expected}")
    optional = {"kind", "difficulty"}
    if source.kind and not any(verifier in RULE_KINDS for _, verifier in parts_of(source.kind)):
        optional.add("answer")  # custom functions may judge a completion by itself
    resolved = {}
    all_rows = [row for _, rows in tables for row in rows]
    for role in COLUMNS:
        named = source.columns.get(role)
        candidates = (named,) if named else () if role in source.columns else KNOWN_COLUMNS[role]
        present = (column for column in candidates if any(has_field(row, column) for row in all_rows))
        resolved[role] = next(present, None)
        if resolved[role] or (role in optional and not named) or (role == "answer" and not candidates):
            continue
        names = ", ".join(column_names([row for _, rows in tables for row in rows[:100]]))
        missing = f"no column {named!r} for columns.{role}" if named else f"no column for the {role}"
        tried = f" (looked for {', '.join(candidates)})" if candidates and not named else ""
        raise ValueError(
            f"{source.path}: {missing}{tried} among {names}; name it in the settings, "
            f"columns: {{{role}: ...}}, or --columns of data.score"
        )
    return resolved


def task_of(prompt: Prompt) -> str:
    """Return the question of a prompt with single spaces; equal questions are one task."""
    return " ".join((prompt.question or prompt.text).split())


def check_disjoint(train: list[Prompt], evaluation: list[Prompt]) -> None:
    """Raise ValueError if a question is in both `evaluation` and `train`, in any template and spacing."""
    train_tasks = set(map(task_of, train))
    shared = [prompt for prompt in evaluation if task_of(prompt) in train_tasks]
    if shared:
        example = shared[0]
        raise ValueError(
            f"{len(shared)} evaluation prompts are also training prompts, "
            f"for example {example.text[:200]!r} of {example.source!r}"
        )


LONG_QUESTION = 8  # words; shorter questions may be part of others by chance [ours]


def questions_within(inner: list[Prompt], outer: list[Prompt]) -> set[str]:
    """Return the long questions of `inner` that are a part of a longer question of `outer`.

    The part is at the end, or ends a sentence: "add 3 5" is no part of "add 3 5 7".
    """
    by_start = defaultdict(lambda: defaultdict(set))  # {first words: {number of words: questions}}
    for task in map(task_of, inner):
        words = tuple(task.split())
        by_start[words[:LONG_QUESTION]][len(words)].add(words)
    found = set()
    for task in map(task_of, outer):
        words = tuple(task.split())
        for start in range(len(words) - LONG_QUESTION + 1):
            for number, questions in by_start.get(words[start : start + LONG_QUESTION], {}).items():
                part = words[start : start + number]
                is_whole = start + number == len(words) or part[-1][-1] in ".?!:"
                if number < len(words) and part in questions and is_whole:
                    found.add(" ".join(part))
    return found


def containment_warning(train: list[Prompt], evaluation: list[Prompt]) -> list[str]:
    """Warn of questions that training and evaluation share, except for an instruction around one of them."""
    found = questions_within(evaluation, train) | questions_within(train, evaluation)
    if not found:
        return []
    return [
        f"warning: training and evaluation share {len(found)} questions, with other words around them on one "
        f"side, for example {min(found)[:200]!r}"
    ]


def save_prompts(path, prompts: list[Prompt]) -> None:
    """Write JSONL for load_prompts, through a .partial file and a rename, so that readers see whole files."""
    path = Path(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    with open(partial, "w", encoding="utf-8", newline="\n") as file:
        for prompt in prompts:
            row = (prompt.text, prompt.answer, prompt.kind, prompt.difficulty)
            file.write(json.dumps(dict(zip(COLUMNS, row)), ensure_ascii=False) + "\n")
    os.replace(partial, path)


def prompt_sha(prompt: Prompt) -> str:
    """Return the key of a prompt in a score file: SHA-256 of the text (with template) and the answer."""
    return hashlib.sha256(f"{prompt.text}\0{prompt.answer}".encode()).hexdigest()


class OfflineScore(NamedTuple):
    """The pass rate and the completion length of a prompt, measured by data/score.py."""

    pass_rate: float  # in [0, 1], share of fully right completions
    mean_tokens: float  # mean completion length
    wrong_rate: float  # in [0, 1], share of fully wrong completions


def date_of_scores(path) -> str:
    """Return a hint for a message, if a score file holds the date of its prompts."""
    with open(path, encoding="utf-8") as file:
        date = json.loads(file.readline()).get("date")
    return f"; its prompts hold the date {date}, which data.date={date} sets" if date else ""


def load_scores(path) -> dict[str, OfflineScore | None]:
    """Load {prompt_sha: score} from a file of data/score.py; the score is None if every verdict failed.

    The file may be unfinished; prompts that have not been scored yet are missing from the result. ValueError
    names the file and the row (the header is row 1).
    """
    path = str(path)
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no such file; make it with `python -m data.score --output {path}`")
    try:
        header, *rows = read_json(path) or [{}]
    except ValueError as error:  # the last line of a killed run is incomplete
        raise ValueError(f"{error}; rerun the data.score command to repair an incomplete last line") from None
    if "model" not in header or "prompt_sha" in header:
        raise ValueError(f"{path}: row 1 is no header of an output of data/score.py: {repr(header)[:80]}")
    scores = {}
    for number, row in enumerate(rows, start=2):
        where = f"{path}: row {number}"
        sha = row.get("prompt_sha")
        rate = row.get("pass_rate", "nothing")
        wrong = row.get("wrong_rate")
        tokens = row.get("mean_tokens")
        if not isinstance(sha, str) or not re.fullmatch("[0-9a-f]{64}", sha):
            raise ValueError(f"{where}: prompt_sha must be 64 hex digits, found {repr(sha)[:80]}")
        if rate is not None and (type(rate) not in (int, float) or not 0 <= rate <= 1):
            raise ValueError(f"{where}: pass_rate must be in [0, 1] or null, found {repr(rate)[:80]}")
        if type(tokens) not in (int, float) or not tokens >= 0:
            raise ValueError(f"{where}: mean_tokens must be 0 or more, found {repr(tokens)[:80]}")
        if sha in scores:
            raise ValueError(f"{where}: prompt {sha} for the second time; remove one of the two rows")
        if rate is not None and (type(wrong) not in (int, float) or not 0 <= wrong <= 1 - rate + 1e-9):
            raise ValueError(
                f"{where}: wrong_rate must be in [0, 1 - pass_rate], found {repr(wrong)[:80]}; if the column "
                "is missing, score the prompts again with `python -m data.score`"
            )
        scores[sha] = None if rate is None else OfflineScore(rate, tokens, wrong)
    return scores
