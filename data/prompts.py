"""Read and write prompt sets: load_prompts reads a local file or a hub dataset, save_prompts writes a file.

    load_prompts("data/built/gsm8k/train.jsonl", difficulty=(2, 4))
    load_prompts("HuggingFaceH4/MATH-500", split="test", columns={"prompt": "problem", "difficulty": "level"})
    load_scores("scores.jsonl")[prompt_sha(prompt)]    # what data/score.py measured of one prompt

`datasets` reads parquet files and the hub. JSON is parsed here, because the types `datasets` infers rewrite
gold answers: 1 beside 2.5 becomes 1.0, long integers lose digits, "2020-01-01" becomes a datetime.
"""

import hashlib
import json
import os
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from reward import KINDS
from runtime.config import Section, setting

JSON_SUFFIXES = (".jsonl", ".json")
FILE_SUFFIXES = (*JSON_SUFFIXES, ".parquet")
COLUMNS = ("prompt", "answer", "kind", "difficulty")


class PromptSource(Section):
    """One prompt set of a run."""

    path: str = setting(..., "JSONL or parquet file, or the name of a hub dataset")
    name: str | None = setting(None, "name in logs; null: the file's name")
    subset: str | None = setting(None, "configuration of a hub dataset, e.g. main; null: its default")
    split: str = setting("train", "split of a hub dataset; local files are taken whole")
    kind: str = setting("math", f"verifier of rows without their own: {', '.join(KINDS)}, module:function")
    columns: dict[str, str | None] = setting(
        {}, "column of prompt, answer, difficulty, kind where named otherwise"
    )
    template: str = setting("{prompt}", "text around each prompt")
    limit: int | None = setting(None, "take the first rows only, after the difficulty range; null: all", ge=1)
    difficulty: tuple[float, float] | None = setting(None, "keep this closed range; null: all")

    @property
    def label(self) -> str:
        """Return the name of the set in the metrics."""
        return self.name or Path(self.path).stem


@dataclass(frozen=True)
class Prompt:
    """One task with its reference answer."""

    text: str  # the template around the question, which the policy continues
    answer: str  # gold answer, handed to reward.verify
    kind: str  # verifier of reward.py: exact | numeric | gsm8k | math | module:function of the settings
    source: str  # name of the set, for messages
    difficulty: float | None = None  # the set's own measure (digits, steps, level), None if it has none


def load_prompts(
    path,
    *,
    name=None,
    subset=None,
    split="train",
    kind="math",
    columns=None,
    template="{prompt}",
    limit=None,
    difficulty=None,
    functions=(),
) -> list[Prompt]:
    """Load the prompts of one set in file order; ValueError names file, row (from 1) and the key to change.

    path: .jsonl, .json or .parquet file (read whole), or hub dataset (configuration `subset`, `split`).
    name: Prompt.source; None takes the file name without suffix, or the hub name.
    kind: verifier of every row of a set without a kind column.
    functions: kinds "module:function" that a row may name besides those of reward.KINDS and `kind`. They run
        code, so that only the caller may introduce one, never the data.
    columns: {role: column} where a column is not named after its role in COLUMNS; None for "kind" or
        "difficulty" ignores a column of that name.
    template: text around the prompt; only "{prompt}" is replaced, other braces stay.
    difficulty: closed range (low, high); rows outside it or without a difficulty are dropped.
    limit: number of prompts kept, from the first, after the difficulty range; None keeps all.
    """
    if "{prompt}" not in template:
        raise ValueError(f"template {template!r} does not contain {{prompt}}, the place of the prompt")
    if limit is not None and limit < 1:
        raise ValueError(f"limit {limit} must be at least 1, or None to keep all prompts")
    path = str(path)
    name = name or (Path(path).stem if path.endswith(FILE_SUFFIXES) else path)
    rows = load_rows(path, subset, split)
    columns = resolve_columns(path, rows, columns or {})
    prompts = []
    for number, row in enumerate(rows, start=1):
        where = f"{path}: row {number}"
        text = template.replace("{prompt}", field_text(row, columns["prompt"], where))
        answer = field_text(row, columns["answer"], where)
        row_kind = field_text(row, columns["kind"], where) if columns["kind"] else kind
        if row_kind != kind and row_kind not in KINDS and row_kind not in functions:
            raise ValueError(unknown_kind(row_kind, where))
        row_difficulty = field_number(row, columns["difficulty"], where) if columns["difficulty"] else None
        prompts.append(Prompt(text, answer, row_kind, name, row_difficulty))
    if difficulty is not None:
        low, high = difficulty
        known = [prompt for prompt in prompts if prompt.difficulty is not None]
        prompts = [prompt for prompt in known if low <= prompt.difficulty <= high]
        if not prompts:
            levels = [prompt.difficulty for prompt in known]
            available = f"{min(levels):g} to {max(levels):g}" if known else "none, set columns.difficulty"
            raise ValueError(f"{path}: no prompt has difficulty {low:g} to {high:g}; available: {available}")
    return prompts[:limit]


def unknown_kind(kind: str, where: str) -> str:
    """Say why a row's kind is refused, and where a function of one's own is to be named."""
    if ":" not in kind:
        return f"{where}: kind {kind!r} is none of {', '.join(KINDS)}"
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
    """The pass rate and length that data/score.py found for a prompt."""

    pass_rate: float  # in [0, 1]
    mean_tokens: float  # mean length of its completions


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
            raise ValueError(f"{path}: row {number}: prompt_sha must be 64 hex digits, found {sha!r}")
        if rate is not None and (type(rate) not in (int, float) or not 0 <= rate <= 1):
            raise ValueError(f"{path}: row {number}: pass_rate must be in [0, 1] or null, found {rate!r}")
        if type(tokens) not in (int, float) or not tokens >= 0:
            raise ValueError(f"{path}: row {number}: mean_tokens must be 0 or more, found {tokens!r}")
        if sha in scores:
            raise ValueError(f"{path}: row {number}: prompt {sha} for the second time; remove one of them")
        scores[sha] = None if rate is None else OfflineScore(rate, tokens)
    return scores


def load_rows(path: str, subset=None, split="train") -> list[dict]:
    """Load all rows of a file, or of one split of a hub dataset. A file never needs the network."""
    is_file = path.endswith(FILE_SUFFIXES)
    if is_file and not os.path.isfile(path):
        raise ValueError(f"{path}: no such file; check data.train[].path or create it with a script in data/")
    if not is_file and (os.path.exists(path) or not re.fullmatch(r"\w[\w.-]*(/[\w.-]+)?", path)):
        raise ValueError(f"{path}: neither a {', '.join(FILE_SUFFIXES)} file nor a hub name (owner/set)")
    rows = read_json(path) if path.endswith(JSON_SUFFIXES) else read_with_datasets(path, subset, split)
    if not rows:
        raise ValueError(f"{path}: no rows")
    return rows


def read_json(path: str) -> list[dict]:
    """Read a file with one JSON object per line (blank lines are skipped), or with one list of objects."""
    try:
        content = Path(path).read_text(encoding="utf-8-sig")  # with or without a byte order mark
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None
    is_list = content.lstrip().startswith("[")
    rows = []
    for number, document in enumerate([content] if is_list else content.split("\n"), start=1):
        try:
            if document.strip():
                rows.extend(json.loads(document) if is_list else [json.loads(document)])
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number + error.lineno - 1} is not JSON: {error.msg}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} must be an object with columns, found {repr(row)[:80]}")
    return rows


def read_with_datasets(path: str, subset, split) -> list[dict]:
    """Read a parquet file or a hub split; the library is silent meanwhile, and as before afterwards."""
    import datasets  # slow, and not needed for JSON

    show_bars, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        if not path.endswith(".parquet"):
            return datasets.load_dataset(path, subset, split=split).to_list()
        with tempfile.TemporaryDirectory() as cache:  # the user's cache would keep a copy of every file
            return datasets.Dataset.from_parquet(path, cache_dir=cache).to_list()
    except OSError as error:  # no such hub set, no network
        raise ValueError(f"{path}: neither a file here nor a hub set that can be reached: {error}") from error
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{path}: cannot be read or has no rows: {error.__cause__ or error}") from error
    finally:
        datasets.logging.set_verbosity(verbosity)
        if show_bars:
            datasets.enable_progress_bars()


def resolve_columns(path: str, rows: list[dict], columns: dict) -> dict:
    """Return the column of each role in COLUMNS; None for a "kind" or "difficulty" that the set lacks."""
    available = list(dict.fromkeys(column for row in rows for column in row))
    if unknown := set(columns) - set(COLUMNS):
        raise ValueError(f"{path}: columns.{min(unknown)} is unknown, expected one of {', '.join(COLUMNS)}")
    resolved = {}
    for role in COLUMNS:
        column = columns.get(role, role)
        if column in available:
            resolved[role] = column
        elif role in ("kind", "difficulty") and columns.get(role) is None:
            resolved[role] = None
        else:
            raise ValueError(f"{path}: no column {column!r} for columns.{role} among {', '.join(available)}")
    return resolved


def field_text(row: dict, column: str, where: str) -> str:
    """Return a field as text. Whole floats become integers, since tables often store integers as floats."""
    value = row.get(column)
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    if not isinstance(value, (str, int, float)) or value != value or not str(value).strip():  # != itself: NaN
        raise ValueError(f"{where}: column {column!r} must hold text or a number, found {repr(value)[:80]}")
    return str(value)


def field_number(row: dict, column: str, where: str) -> float | None:
    """Return a field as a number; None where the row has none."""
    value = row.get(column)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        raise ValueError(
            f"{where}: column {column!r} must hold a number, found {value!r}; "
            "set columns.difficulty to another column, or to null for none"
        ) from None
