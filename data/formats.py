"""Read the rows of a data set from the files people have, or from the hub.

    load_rows("train.jsonl")             # also .json, .csv, .parquet, and each of them with .gz behind it
    load_rows("shards/train-*.parquet")  # a pattern; a folder of such files; a folder of save_to_disk
    load_rows("openai/gsm8k", "main")    # a data set of the hub

A row is a dict of JSON values. JSON and CSV are parsed here, because the types that `datasets` infers rewrite
gold answers: 1 beside 2.5 becomes 1.0, long integers lose digits, "2020-01-01" becomes a datetime. A field of
a CSV file is text, and an empty one is None.
"""

import csv
import glob
import gzip
import io
import json
import math
import os
import re
import sys
import zlib
from contextlib import contextmanager
from decimal import Decimal
from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
FILE_SUFFIXES = (*SUFFIXES, *(f"{suffix}.gz" for suffix in SUFFIXES))
OTHER_SUFFIXES = (".txt", ".tsv", ".arrow", ".gz", ".zip", ".zst", ".xz", ".bz2", ".xlsx", ".ndjson", ".pkl")
HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"

Table = tuple[str, list[dict]]  # (file or hub set, for messages; its rows)


def is_data_path(path: str) -> bool:
    """Tell whether a path names data files: by the suffix of a file or pattern, or as a folder."""
    return path.endswith(FILE_SUFFIXES) or os.path.isdir(path)


def stem_of(path: str) -> str:
    """Return a short name: of a file or pattern without suffix and wildcards, of a hub set without owner."""
    name = os.path.basename(path.rstrip("/"))
    suffix = next((suffix for suffix in sorted(FILE_SUFFIXES, key=len)[::-1] if name.endswith(suffix)), "")
    name = re.sub(r"\[.*?\]|[*?]", "", name.removesuffix(suffix)).strip("-_.")
    return name or os.path.basename(os.path.dirname(path.rstrip("/"))) or path


def load_rows(path: str, subset: str | None = None, split: str = "train") -> list[dict]:
    """Load all rows of a path; see load_tables."""
    return [row for _, rows in load_tables(path, subset, split) for row in rows]


def load_tables(path: str, subset: str | None = None, split: str = "train") -> list[Table]:
    """Load the rows of a path, by file; ValueError names the file. What is a file never needs the network.

    subset, split: configuration and split of a hub data set. A folder of save_to_disk with several splits
    gives that split; of a folder of files, those are taken whose names begin with the split, or all if none
    does.
    """
    local = os.path.expanduser(path)
    if is_saved_to_disk(local):
        tables = [(path, read_saved_to_disk(path, local, split))]
    elif files := find_files(path, local, split):
        tables = [(file, read_file(file)) for file in files]
    else:
        tables = [(path, read_hub(path, subset, split))]
    for name, rows in tables:
        if not rows:
            raise ValueError(f"{name}: no rows")
    return tables


# ------------------------------------------------------------------------------------------------------------
# What a path means
# ------------------------------------------------------------------------------------------------------------
def find_files(path: str, local: str, split: str) -> list[str]:
    """List the files of a path in the order of their names; [] for a hub name."""
    if os.path.isdir(local):
        return files_of_folder(path, local, split)
    if os.path.isfile(local):
        if local.endswith(FILE_SUFFIXES):
            return [local]
        raise ValueError(f"{path}: not a data file; expected one of {', '.join(SUFFIXES)}, or these with .gz")
    if glob.has_magic(path):
        files = sorted(file for file in glob.glob(local, recursive=True) if file.endswith(FILE_SUFFIXES))
        if files:
            return files
        raise ValueError(
            f"{path}: the pattern matches no {', '.join(SUFFIXES)} file, seen from {os.getcwd()}"
        )
    parent = os.path.dirname(local)
    looks_like_path = local.endswith((*FILE_SUFFIXES, *OTHER_SUFFIXES)) or (parent and os.path.isdir(parent))
    if looks_like_path or not re.fullmatch(HUB_NAME, path):
        raise ValueError(
            f"{path}: no such file or folder, seen from {os.getcwd()}; check data.train[].path or "
            "data.eval[].path, or make it with a script in data/. A hub data set is named owner/set"
        )
    return []


def files_of_folder(path: str, folder: str, split: str) -> list[str]:
    """List the data files of a folder: those whose names begin with the split, or all if none does."""
    files = sorted(file for file in os.listdir(folder) if file.endswith(FILE_SUFFIXES) and file[0] != ".")
    if not files:
        raise ValueError(f"{path}: the folder holds no {', '.join(SUFFIXES)} file, also not with .gz")
    of_split = [file for file in files if re.match(rf"{re.escape(split)}(?![A-Za-z0-9])", file)]
    return [os.path.join(folder, file) for file in of_split or files]


def is_saved_to_disk(folder: str) -> bool:
    """Tell whether `datasets` wrote this folder by save_to_disk."""
    names = ("dataset_dict.json", "state.json")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


# ------------------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------------------
def read_file(path: str) -> list[dict]:
    """Read one data file; its suffix says how."""
    kind = Path(path.removesuffix(".gz")).suffix
    if kind == ".parquet":
        return read_parquet(path)
    return read_csv(path) if kind == ".csv" else read_json(path)


def read_bytes(path: str) -> bytes:
    """Read a file whole, unpacked if it is a .gz."""
    try:
        content = Path(path).read_bytes()
        return gzip.decompress(content) if path.endswith(".gz") else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a whole gzip file: {error}") from None


def read_text(path: str) -> str:
    """Read a file of UTF-8 text, with or without a byte order mark."""
    try:
        return read_bytes(path).decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text: {error}") from None


def read_json(path: str) -> list[dict]:
    """Read one JSON object per line (blank lines are skipped), or one list of objects."""
    content = read_text(path)
    is_list = content.lstrip().startswith("[")
    rows = []
    for number, document in enumerate([content] if is_list else content.split("\n"), start=1):
        try:
            if document.strip():
                parsed = json.loads(document, object_pairs_hook=without_doubles)
                rows.extend(parsed if is_list else [parsed])
        except json.JSONDecodeError as error:
            raise ValueError(f"{path}: line {number + error.lineno - 1} is not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:  # a key twice, thousands of digits or of brackets
            raise ValueError(f"{path}: line {number} cannot be read: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} must be an object with columns, found {repr(row)[:80]}")
    return rows


def without_doubles(pairs: list[tuple[str, object]]) -> dict:
    """Make a JSON object of its pairs; ValueError if a key is given twice, since one value would be lost."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return row


def read_csv(path: str) -> list[dict]:
    """Read comma-separated values with the names of the columns in the first line."""
    csv.field_size_limit(sys.maxsize)  # the library's own limit is shorter than a long prompt
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header, *records = [record for record in reader if record] or [[]]
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num} is not CSV: {error}") from None
    if len(set(header)) < len(header):
        raise ValueError(f"{path}: two columns of one name in the first line: {', '.join(header)}")
    for number, record in enumerate(records, start=1):
        if len(record) != len(header):
            raise ValueError(f"{path}: row {number} has {len(record)} fields, the first line {len(header)}")
    return [{name: field or None for name, field in zip(header, record)} for record in records]


def read_parquet(path: str) -> list[dict]:
    """Read a parquet file by pyarrow, which keeps types and makes no copy in a cache."""
    import pyarrow.parquet  # slow, and not needed for JSON

    try:
        source = io.BytesIO(read_bytes(path)) if path.endswith(".gz") else path
        return pyarrow.parquet.read_table(source, partitioning=None).to_pylist()
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None


# ------------------------------------------------------------------------------------------------------------
# What `datasets` reads
# ------------------------------------------------------------------------------------------------------------
@contextmanager
def silent_datasets():
    """Import `datasets`, silent within the block and as before after it."""
    import datasets  # slow, and not needed for files

    show_bars, verbosity = not datasets.are_progress_bars_disabled(), datasets.logging.get_verbosity()
    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    try:
        yield datasets
    finally:
        datasets.logging.set_verbosity(verbosity)
        if show_bars:
            datasets.enable_progress_bars()


def read_saved_to_disk(path: str, folder: str, split: str) -> list[dict]:
    """Read a folder that save_to_disk wrote; ValueError names its splits where it lacks the wanted one."""
    with silent_datasets() as datasets:
        try:
            saved = datasets.load_from_disk(folder)
        except (OSError, ValueError, KeyError) as error:
            raise ValueError(
                f"{path}: save_to_disk wrote this folder, but it cannot be read: {error}"
            ) from None
        if isinstance(saved, datasets.DatasetDict):
            if split not in saved:
                raise ValueError(
                    f"{path}: no split {split!r} among {', '.join(saved)}; set data.train[].split"
                )
            saved = saved[split]
        return saved.to_list()


def read_hub(name: str, subset: str | None, split: str) -> list[dict]:
    """Load one split of a hub data set."""
    with silent_datasets() as datasets:
        try:
            return datasets.load_dataset(name, subset, split=split).to_list()
        except OSError as error:  # no such set, no network
            raise ValueError(f"{name}: no file here, and no hub set that can be reached: {error}") from error
        except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
            raise ValueError(f"{name}: cannot be read from the hub: {error.__cause__ or error}") from error


# ------------------------------------------------------------------------------------------------------------
# Fields
# ------------------------------------------------------------------------------------------------------------
class BadRow(ValueError):
    """A row that makes no prompt: where it is, why ("without an answer"), and what was found."""

    def __init__(self, where: str, reason: str, detail: str):
        super().__init__(f"{where}: {detail}")
        self.where, self.reason, self.detail = where, reason, detail


def field_of(row: dict, column: str):
    """Return a field, or None; a.b is field b of field a, unless a column has that very name."""
    if column in row:
        return row[column]
    for part in column.split("."):
        row = row.get(part) if isinstance(row, dict) else None
    return row


def has_field(row: dict, column: str) -> bool:
    """Tell whether a row has a column, whose field may be None."""
    parent, _, name = column.rpartition(".")
    inside = field_of(row, parent)
    return column in row or (isinstance(inside, dict) and name in inside)


def column_names(rows: list[dict]) -> list[str]:
    """List the columns of all rows, those inside others by dots."""
    names = {}
    for row in rows:
        for name, value in row.items():
            names[name] = None
            if isinstance(value, dict):
                names |= {f"{name}.{inner}": None for inner in column_names([value])}
    return list(names)


def field_text(row: dict, column: str, where: str, reason: str = "without text") -> str:
    """Return a field as text. Whole floats become integers, since tables often store integers as floats."""
    return text_from(field_of(row, column), column, where, reason)


def text_from(value, column: str, where: str, reason: str) -> str:
    """Return a value of a column as text, see field_text; BadRow if it is neither text nor a number."""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_whole or (isinstance(value, (float, Decimal)) and math.isfinite(value))
    if not (isinstance(value, str) or is_number) or not str(value).strip():
        found = repr(value)[:80]
        raise BadRow(where, reason, f"column {column!r} must hold text or a number, found {found}")
    text = str(value)
    if half_a_character(text):
        raise BadRow(where, reason, f"column {column!r} holds half a character (a surrogate): {text[:80]!a}")
    return text


def half_a_character(text: str) -> bool:
    """Tell whether a text holds a lone surrogate, which no tokenizer and no file takes."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def field_number(row: dict, column: str, where: str) -> float | None:
    """Return a field as a number; None where the row has none."""
    value = field_of(row, column)
    try:
        return None if value is None else float(value)
    except (TypeError, ValueError):
        detail = f"column {column!r} must hold a number, found {value!r}; "
        detail += "set columns.difficulty to another column, or to null for none"
        raise BadRow(where, "whose difficulty is no number", detail) from None


def json_value(value):
    """Return a field as a value that JSON knows: dates and the like as text, bytes as their number."""
    if isinstance(value, dict):
        return {str(name): json_value(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner) for inner in value]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
