"""Load the rows of a dataset from local files or from the hub.

    load_tables("train.jsonl")             # also .json, .csv and .parquet, each with or without .gz
    load_tables("shards/train-*.parquet")  # a glob pattern, a folder of data files, or a save_to_disk folder
    load_tables("openai/gsm8k", "main")    # a hub dataset

A row is a dict of JSON values. JSON and CSV files are parsed here and not by `datasets`, whose type inference
rewrites gold answers: for example, 1 in a column with 2.5 becomes 1.0, long integers lose digits, and
"2020-01-01" becomes a datetime. All fields of a CSV file are text; an empty field is None.
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
from decimal import Decimal
from pathlib import Path

SUFFIXES = (".jsonl", ".json", ".csv", ".parquet")
FILE_SUFFIXES = (*SUFFIXES, *(f"{suffix}.gz" for suffix in SUFFIXES))
OTHER_SUFFIXES = (".txt", ".tsv", ".arrow", ".gz", ".zip", ".zst", ".xz", ".bz2", ".xlsx", ".ndjson", ".pkl")
SPLITS = frozenset("train training test testing valid validation val dev eval".split())  # in names of files
HUB_NAME = r"\w[\w.-]*(/[\w.-]+)?"

Table = tuple[str, list[dict]]  # (name of the file or hub dataset, for error messages; rows)


def is_data_path(path: str) -> bool:
    """Tell whether a path names data files: a file or pattern with a known suffix, or a folder."""
    return path.endswith(FILE_SUFFIXES) or os.path.isdir(path)


def stem_of(path: str) -> str:
    """Return a short name, for example "math" for data/math-*.jsonl.gz and for the hub dataset owner/math."""
    name = os.path.basename(path.rstrip("/"))
    suffix = next((suffix for suffix in sorted(FILE_SUFFIXES, key=len)[::-1] if name.endswith(suffix)), "")
    name = re.sub(r"\[.*?\]|[*?]", "", name.removesuffix(suffix)).strip("-_.")
    return name or os.path.basename(os.path.dirname(path.rstrip("/"))) or path


def load_tables(path: str, subset: str | None = None, split: str = "train") -> list[Table]:
    """Load the rows of a path, file by file. ValueError names the file. Local files need no network.

    subset, split: configuration and split of a hub dataset. In a save_to_disk folder with several splits,
    `split` selects one of the splits. In a folder of files, `split` selects the files whose names hold the
    split as a word, for example train-00.parquet; if no name does, train means all files of one split.
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
# From a path to files
# ------------------------------------------------------------------------------------------------------------
def find_files(path: str, local: str, split: str) -> list[str]:
    """List the files of a path, sorted by name; [] if the path is the name of a hub dataset."""
    if os.path.isdir(local):
        return files_of_folder(path, local, split)
    if os.path.isfile(local):
        if local.endswith(FILE_SUFFIXES):
            return [local]
        raise ValueError(f"{path}: not a data file; expected {', '.join(SUFFIXES)}, optionally with .gz")
    if glob.has_magic(path):
        files = sorted(file for file in glob.glob(local, recursive=True) if file.endswith(FILE_SUFFIXES))
        if files:
            return files
        raise ValueError(f"{path}: matches no {', '.join(SUFFIXES)} file, relative to {os.getcwd()}")
    parent = os.path.dirname(local)
    looks_like_path = local.endswith((*FILE_SUFFIXES, *OTHER_SUFFIXES)) or (parent and os.path.isdir(parent))
    if looks_like_path or not re.fullmatch(HUB_NAME, path):
        raise ValueError(
            f"{path}: no such file or folder, seen from {os.getcwd()}; check data.train[].path or "
            "data.eval[].path, or create the file with a script in data/. A hub dataset is named owner/set"
        )
    return []


def files_of_folder(path: str, folder: str, split: str) -> list[str]:
    """List the data files of a folder whose names hold the split as a word, for example gsm8k_train1.jsonl.

    If no name does, these are all data files. ValueError if they are of several splits, or not of the split.
    """
    files = sorted(file for file in os.listdir(folder) if file.endswith(FILE_SUFFIXES) and file[0] != ".")
    if not files:
        raise ValueError(f"{path}: the folder holds no {', '.join(SUFFIXES)} file, with or without .gz")
    word = re.compile(rf"(?<![a-z]){re.escape(split)}(?![a-z])", re.IGNORECASE)
    words = {
        file: SPLITS.intersection(re.findall("[a-z]+", file.lower())) - {split.lower()} for file in files
    }
    split_files = [file for file in files if word.match(file) or word.search(file) and not words[file]]
    has_one_split = len({*words.values()}) == 1 and (split == "train" or not words[files[0]])
    if not split_files and not has_one_split:
        raise ValueError(
            f"{path}: no file is of the split {split!r} alone, of {files[0]} to {files[-1]}; set another "
            "`split`, or name a file or a pattern"
        )
    return [os.path.join(folder, file) for file in split_files or files]


def is_saved_to_disk(folder: str) -> bool:
    """Tell whether the folder was written by save_to_disk of `datasets`."""
    names = ("dataset_dict.json", "state.json")
    return any(os.path.isfile(os.path.join(folder, name)) for name in names)


# ------------------------------------------------------------------------------------------------------------
# Files
# ------------------------------------------------------------------------------------------------------------
def read_file(path: str) -> list[dict]:
    """Read one data file in the format of the suffix; ValueError for a pipe or a device."""
    if not os.path.isfile(path):
        raise ValueError(f"{path}: no file, but a folder, pipe, device or broken link")
    kind = Path(path.removesuffix(".gz")).suffix
    if kind == ".parquet":
        return read_parquet(path)
    return read_csv(path) if kind == ".csv" else read_json(path)


MIN_LIMIT = 2**28  # bytes that any .gz file may hold
MAX_RATIO = 50  # of further bytes in a .gz file to bytes on the disk [ours: JSON shrinks to a tenth]


def read_bytes(path: str) -> bytes:
    """Read the bytes of a file, and decompress a .gz file."""
    try:
        if not path.endswith(".gz"):
            return Path(path).read_bytes()
        limit = MIN_LIMIT + MAX_RATIO * os.path.getsize(path)
        with gzip.open(path) as file:
            content = file.read(limit + 1)
        if len(content) > limit:
            raise ValueError(f"{path}: more than {limit:,} bytes when decompressed: decompress it first")
        return content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise ValueError(f"{path}: not a complete gzip file: {error}") from None


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
                parsed = json.loads(document, object_pairs_hook=object_without_duplicates)
                rows.extend(parsed if is_list else [parsed])
        except json.JSONDecodeError as error:
            if not is_list and is_json(content):
                raise ValueError(
                    f"{path}: one JSON document over several lines; expected one object per line or one list "
                    "of objects"
                ) from None
            raise ValueError(f"{path}: line {number + error.lineno - 1} is not JSON: {error.msg}") from None
        except (ValueError, RecursionError) as error:  # a duplicate key, or thousands of digits or brackets
            raise ValueError(f"{path}: line {number} cannot be read: {error}") from None
    for number, row in enumerate(rows, start=1):
        if not isinstance(row, dict):
            raise ValueError(f"{path}: row {number} must be an object with columns, found {repr(row)[:80]}")
    return rows


def is_json(text: str) -> bool:
    """Tell whether a text is one JSON document."""
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def object_without_duplicates(pairs: list[tuple[str, object]]) -> dict:
    """Build a JSON object; ValueError for a duplicate key, because json would silently drop one value."""
    row = dict(pairs)
    if len(row) < len(pairs):
        names = [name for name, _ in pairs]
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} is given twice")
    return row


def read_csv(path: str) -> list[dict]:
    """Read comma-separated values; the first line names the columns."""
    csv.field_size_limit(sys.maxsize)  # the library's default limit is shorter than a long prompt
    reader = csv.reader(io.StringIO(read_text(path), newline=""), strict=True)
    try:
        header, *records = [record for record in reader if record] or [[]]
    except csv.Error as error:
        raise ValueError(f"{path}: line {reader.line_num} is not CSV: {error}") from None
    if len(set(header)) < len(header):
        raise ValueError(f"{path}: duplicate column names in the first line: {', '.join(header)}")
    for number, record in enumerate(records, start=1):
        if len(record) != len(header):
            raise ValueError(f"{path}: row {number} has {len(record)} fields, the first line {len(header)}")
    return [{name: field or None for name, field in zip(header, record)} for record in records]


def read_parquet(path: str) -> list[dict]:
    """Read a parquet file with pyarrow, which preserves types and writes no cache."""
    import pyarrow.parquet  # imported here because the import is slow and JSON files do not need pyarrow

    limit = MIN_LIMIT + MAX_RATIO * os.path.getsize(path)
    rows: list[dict] = []
    try:
        source = io.BytesIO(read_bytes(path)) if path.endswith(".gz") else path
        with pyarrow.parquet.ParquetFile(source) as file:
            groups = (file.metadata.row_group(number) for number in range(file.num_row_groups))
            num_bytes = sum(group.total_byte_size for group in groups)
            num_read = 0
            for batch in file.iter_batches(1024) if num_bytes <= limit else ():
                num_read += batch.nbytes  # repeated values take no space in the file
                if num_read > limit:
                    break
                rows += batch.to_pylist()
        if max(num_bytes, num_read) > limit:
            raise ValueError(f"{path}: more than {limit:,} bytes when decompressed: write it as JSONL first")
        return rows
    except pyarrow.ArrowException as error:
        raise ValueError(f"{path}: cannot be read as parquet: {error}") from None


# ------------------------------------------------------------------------------------------------------------
# Folders and hub datasets, read with `datasets`
# ------------------------------------------------------------------------------------------------------------
def silent_datasets():
    """Import `datasets` without its progress bars and log; plain files do not need this slow import."""
    import datasets

    datasets.disable_progress_bars()
    datasets.logging.set_verbosity_error()
    return datasets


def read_saved_to_disk(path: str, folder: str, split: str) -> list[dict]:
    """Read one split of a save_to_disk folder; if the split is missing, ValueError lists the splits."""
    datasets = silent_datasets()
    try:
        saved = datasets.load_from_disk(folder)
    except (OSError, ValueError, KeyError) as error:
        raise ValueError(f"{path}: save_to_disk wrote this folder, but it cannot be read: {error}") from None
    if isinstance(saved, datasets.DatasetDict):
        if split not in saved:
            raise ValueError(f"{path}: no split {split!r} among {', '.join(saved)}; set data.train[].split")
        saved = saved[split]
    return saved.to_list()


def read_hub(name: str, subset: str | None, split: str) -> list[dict]:
    """Load one split of a hub dataset."""
    datasets = silent_datasets()
    try:
        return datasets.load_dataset(name, subset, split=split).to_list()
    except OSError as error:  # the dataset does not exist, or there is no network
        raise ValueError(f"{name}: neither a local file nor a reachable hub dataset: {error}") from error
    except (ValueError, datasets.exceptions.DatasetGenerationError) as error:
        raise ValueError(f"{name}: cannot be read from the hub: {error.__cause__ or error}") from error


# ------------------------------------------------------------------------------------------------------------
# Fields
# ------------------------------------------------------------------------------------------------------------
class BadRow(ValueError):
    """A row that cannot become a prompt.

    where: file and row, for the message. reason: category for counting, for example "without an answer".
    detail: the value that was read, and the remedy.
    """

    def __init__(self, where: str, reason: str, detail: str):
        super().__init__(f"{where}: {detail}")
        self.reason = reason
        self.detail = detail


def field_of(row: dict, column: str):
    """Return a field, or None. "a.b" is the column "a.b" if it exists, else field b of field a."""
    if column in row:
        return row[column]
    for name in column.split("."):
        row = row.get(name) if isinstance(row, dict) else None
    return row


def has_field(row: dict, column: str) -> bool:
    """Tell whether a row has a column, even if the field is None."""
    parent_column, _, name = column.rpartition(".")
    parent = field_of(row, parent_column)
    return column in row or (isinstance(parent, dict) and name in parent)


def column_names(rows: list[dict]) -> list[str]:
    """List the columns of all rows; nested columns are written with dots, for example reward_model.style."""
    names = {}
    for row in rows:
        for name, value in row.items():
            names[name] = None
            if isinstance(value, dict):
                names |= {f"{name}.{inner}": None for inner in column_names([value])}
    return list(names)


def text_from(value, column: str, where: str, reason: str) -> str:
    """Return a value of a column as text; BadRow unless it is text or a number.

    The float 3.0 becomes "3", because tables often store integers as floats.
    """
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    is_whole = isinstance(value, int) and not isinstance(value, bool)
    is_number = is_whole or (isinstance(value, (float, Decimal)) and math.isfinite(value))
    if not (isinstance(value, str) or is_number) or not str(value).strip():
        raise BadRow(where, reason, f"column {column!r} must hold text or a number, found {repr(value)[:80]}")
    text = f"{Decimal(str(value)):f}" if isinstance(value, float) else str(value)  # 0.00001, not 1e-05
    if half_a_character(text):
        raise BadRow(where, reason, f"column {column!r} holds half a character (a surrogate): {text[:80]!a}")
    return text


def half_a_character(text: str) -> bool:
    """Tell whether a text holds a lone surrogate, which can neither be tokenized nor written to a file."""
    return any("\ud800" <= character <= "\udfff" for character in text)


def field_number(row: dict, column: str, where: str) -> float | None:
    """Return a field as a number, or None for NaN or if the row lacks the field; BadRow for other values."""
    value = field_of(row, column)
    try:
        return None if value is None or math.isnan(number := float(value)) else number
    except (TypeError, ValueError):
        detail = f"column {column!r} must hold a number, found {repr(value)[:80]}; "
        detail += "set columns.difficulty to another column, or to null to load prompts without difficulties"
        raise BadRow(where, "whose difficulty is no number", detail) from None


def json_value(value):
    """Convert a field to JSON: other types, for example dates, become text; bytes become "123 bytes"."""
    if isinstance(value, dict):
        return {str(name): json_value(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_value(inner) for inner in value]
    if isinstance(value, bytes):
        return f"{len(value)} bytes"
    return value if value is None or isinstance(value, (str, int, float)) else str(value)
