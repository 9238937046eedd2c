"""Read settings into frozen pydantic models: defaults < YAML files < section.key=value.

A YAML file may name other files as its base, and overrides their values:

    base: [env.yaml, ../methods/espo.yaml]     # espo.yaml overrides env.yaml, this file overrides both
    train: {seed: 1}

This file reads settings, explains errors and prints the help for any schema; the sections are defined in
other files. A duplicate key, an unknown key and a wrong type are errors that name the setting; the error
about an unknown key names the right one if there is one.
"""

import argparse
import json
import math
import operator
import os
import re
import typing
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Annotated, ClassVar, Literal, TypeVar

import yaml
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    ValidationError,
    ValidationInfo,
    field_validator,
)
from pydantic_core import to_json

from runtime.names_elsewhere import entry_of
from runtime.old_settings import present_settings, successor_of


# ------------------------------------------------------------------------------------------------------------
# Define settings
# ------------------------------------------------------------------------------------------------------------
def kinds_in(annotation) -> set:
    """Return an annotation and all types in it: list[int | str] holds int and str."""
    return {annotation}.union(*map(kinds_in, typing.get_args(annotation)))


class Section(BaseModel):
    """A group of settings, one line per field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)
    per_stage: ClassVar[bool] = False  # a stage may set every setting of the section
    free_on_resume: ClassVar[bool] = False  # every setting of the section may change when a run resumes

    @field_validator("*", mode="before")
    @classmethod
    def refuse_true_as_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false as numbers, because pydantic would silently convert them to 1 and 0."""
        kinds = kinds_in(cls.model_fields[info.field_name].annotation)
        values = value if isinstance(value, (list, tuple)) else [value]
        if any(isinstance(each, bool) for each in values) and kinds & {int, float} and bool not in kinds:
            raise ValueError("expected a number")
        return value


def setting(
    default,
    description: str,
    *,
    on_resume: Literal["fixed", "free"] = "fixed",
    per_stage: bool | Literal["largest"] = False,
    is_path: bool = False,
    hint: str = "",
    **limits,
):
    """Define a field with a description for --help; the default `...` makes the setting required.

    on_resume: free if the value may change when a run resumes, because the setting affects speed, logging or
    checks but not the training result, for example run.log_every. per_stage: True if a stage may set it,
    because every step reads it; "largest" if engine and policy are then built for the largest value of all
    stages, for example rollout.max_new_tokens. is_path: a relative path in a YAML file starts from the folder
    of this file. hint: end of the message about a wrong value.
    """
    extra = {"on_resume": on_resume, "per_stage": per_stage, "is_path": is_path, "hint": hint}
    return Field(default, description=description, json_schema_extra=extra, **limits)


def switch_name(value):
    """Turn booleans back into "off" and "on", because YAML reads these two words as booleans."""
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


Choice = TypeVar("Choice")
Switch = Annotated[Choice, BeforeValidator(switch_name)]  # for settings with the choices "off" and "on"


# ------------------------------------------------------------------------------------------------------------
# Read settings
# ------------------------------------------------------------------------------------------------------------
TEXTS = ("system_prompt", "template", "answer_prefix", "judge_template", "stop")  # settings that may hold a #
TEXT_AS_COMMENT = re.compile(r"[ \t]+#[^\s\0]|\s*\n( *)##")


class StrictLoader(yaml.SafeLoader):
    """A safe YAML loader that refuses duplicate keys, and texts that end at # as in "write it after ####"."""

    def flatten_mapping(self, node):
        """Note the keys that the file itself has, before those of a merge (<<), which they may override."""
        if not hasattr(node, "own_keys"):
            node.own_keys = [key for key, _ in node.value if key.tag != "tag:yaml.org,2002:merge"]
        super().flatten_mapping(node)

    def construct_mapping(self, node, deep=False):
        """Read a mapping; ValueError names the line of a duplicate key."""
        mapping = super().construct_mapping(node, deep)  # called first, because it refuses unhashable keys
        keys = set()
        for key_node in node.own_keys:
            key = self.construct_object(key_node, deep=True)
            if key in keys:
                raise ValueError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            keys.add(key)
        for key_node, value in node.value:
            texts = value.value if isinstance(value, yaml.SequenceNode) else [value]
            for text in texts if key_node.value in TEXTS else ():
                if is_cut(text, key_node.start_mark.column):
                    line = text.end_mark.line + 1
                    raise ValueError(
                        f"line {line}: {key_node.value} ends at #: quote it, or write # and a space"
                    )
        return mapping


def is_cut(text: yaml.Node, column: int) -> bool:
    """Tell whether YAML takes the rest of a text for a comment: "write it after ####". column: of its key."""
    if getattr(text, "style", "") is not None:  # quoted, a block, a list or a mapping
        return False
    match = TEXT_AS_COMMENT.match(text.end_mark.buffer, text.end_mark.pointer)
    is_text = text.tag == "tag:yaml.org,2002:str" or match and not text.value and "##" in match[0]
    return bool(match and is_text and (match[1] is None or len(match[1]) > column))


MAX_VALUES = 100_000  # aliases of aliases can expand a YAML of a few hundred bytes to billions of values


def parse_yaml(text: str, where: str) -> object:
    """Parse YAML; ValueError names the file and the line of a syntax error, or says which limit is exceeded.

    where: for messages, the file or the setting.
    """
    try:
        values = yaml.load(text, Loader=StrictLoader)
        num = num_values(values, {})
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"{where}: {' '.join(str(error).split())[:500]}") from error
    except RecursionError as error:
        raise ValueError(f"{where}: nested too deeply") from error
    if num > MAX_VALUES:
        raise ValueError(f"{where}: {num:,} values, aliases included; settings have at most {MAX_VALUES:,}")
    return values


def num_values(values: object, counts: dict[int, int]) -> int:
    """Count the values in nested lists and mappings. An aliased value counts each time but is visited once.

    counts: {id of a visited value: its count}.
    """
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    if id(values) not in counts:
        counts[id(values)] = 1 + sum(num_values(value, counts) for value in inner)
    return counts[id(values)]


def read_yaml(path: Path, schema: type[BaseModel], above: tuple[Path, ...] = ()) -> dict:
    """Read a YAML file and the files that `base` names, relative to this file; this file's values win.

    schema: its settings with is_path are resolved relative to this file, too. above: the files that led here
    through `base`, to detect a cycle.
    """
    if path.resolve() in above:
        raise ValueError(f"{path}: `base` leads back to this file: remove one of the references")
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    try:
        values = parse_yaml(path.read_bytes().decode("utf-8-sig"), str(path))
    except UnicodeDecodeError as error:
        raise ValueError(f"{path}: not UTF-8 text ({error}): save it as UTF-8") from error
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected sections such as `train:`, found a {type(values).__name__}")
    if path.with_name("declared.json").is_file():  # rows of a declared study keep the names of their time
        values = present_settings(values)
    values = with_paths_from(path.parent, values, schema)
    if "base" not in values:
        return values
    base = values.pop("base")
    bases = base if isinstance(base, list) else [base]
    if not all(isinstance(name, str) for name in bases):
        raise ValueError(f"{path}: base must be the path of a YAML file or a list of paths, found {base!r}")
    below: dict = {}
    for name in bases:
        below = merge(below, read_yaml(path.parent / name, schema, (*above, path.resolve())))
    return merge(below, values)


def with_paths(values: dict, schema: type[BaseModel], change: Callable[[str], str]) -> dict:
    """Return settings with change(path) for every path (is_path), also in the entries of `stages`."""
    changed = dict(values)
    for name, info in schema.model_fields.items():
        value = values.get(name)
        if is_section(info.annotation) and isinstance(value, dict):
            changed[name] = with_paths(value, info.annotation, change)
        elif section_in_list(info.annotation) and isinstance(value, list):
            # an entry of `stages` holds sections of the whole schema
            changed[name] = [with_paths(v, schema, change) if isinstance(v, dict) else v for v in value]
        elif mark(info, "is_path") and isinstance(value, str):
            changed[name] = change(value)
    return changed


def with_paths_from(folder: Path, values: dict, schema: type[BaseModel]) -> dict:
    """Return settings whose paths, relative to a folder, are relative to the working directory instead.

    A path outside of the working directory becomes absolute, so that one file always has one spelling.
    """

    def resolve(path: str) -> str:
        try:
            file = (folder / Path(path).expanduser()).resolve()
        except (ValueError, OSError, RuntimeError):  # not a path; the code that reads it raises
            return path
        return str(file.relative_to(Path.cwd()) if file.is_relative_to(Path.cwd()) else file)

    return with_paths(values, schema, resolve)


def with_paths_to(folder: Path, values: dict, schema: type[BaseModel]) -> dict:
    """Return settings whose paths are relative to a folder, the reverse of with_paths_from()."""
    real = folder.resolve()  # ../ leads out of the folder that a link names
    return with_paths(values, schema, lambda path: os.path.relpath(path, real))


def merge(below: dict, above: dict) -> dict:
    """Merge nested mappings. A value of `above` wins; a list replaces the entire list below.

    A new value of KEY drops the arguments KEY_args below, for example gain_args of another gain.
    """
    changed = [key for key, value in above.items() if below.get(key) != value]
    obsolete = {f"{key}_args" for key in changed}
    return unite({key: value for key, value in below.items() if key not in obsolete}, above, merge)


def unite(below: dict, above: dict, merge_inner: Callable[[dict, dict], dict] | None = None) -> dict:
    """Merge nested mappings as merge() does, but keep all arguments: for settings of one command line."""
    merge_inner = merge_inner or unite
    united = dict(below)
    for key, value in above.items():
        are_mappings = isinstance(value, dict) and isinstance(below.get(key), dict)
        united[key] = merge_inner(below[key], value) if are_mappings else value
    return united


def read_override(text: str) -> dict:
    """Parse section.key=value: "train.seed=1" gives {"train": {"seed": 1}}."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r}: expected section.key=value")
    values = parse_yaml(value, name)
    # YAML drops a comment and the blanks around a text, and folds line breaks
    is_changed = values != value if isinstance(values, str) else values is None and value.strip()[:1] == "#"
    is_text = name.rpartition(".")[2] in TEXTS or "#" in value
    if is_changed and is_text and value.strip()[0] not in "\"'|>":
        raise ValueError(f"{name}: YAML reads {value!r} as {values!r}: put the text in quotes of its own")
    for key in reversed(name.split(".")):
        values = {key: values}
    return values


Schema = TypeVar("Schema", bound=BaseModel)


def read_config(schema: type[Schema], argv: list[str], prog: str, description: str = "") -> Schema:
    """Read a command line: defaults < the YAML files of --config, in order < section.key=value.

    ValueError names the setting and the remedy.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        add_help=False,
    )
    parser.add_argument(
        "-h", "--help", action=HelpAction, schema=schema, nargs="?", metavar="SECTION",
        help="print this text and all settings, or only the settings of one section, for example "
        f"--help {next(iter(schema.model_fields))}",
    )  # fmt: skip
    parser.add_argument(
        "--config", type=Path, action="append", default=[],
        help="YAML file with settings that differ from the defaults; a later file overrides an earlier one",
    )  # fmt: skip
    parser.add_argument(
        "settings", nargs="*", metavar="section.key=value",
        help="single settings, which override the YAML files, for example train.seed=1",
    )  # fmt: skip
    args = parser.parse_intermixed_args(argv)
    values: dict = {}
    for file in args.config:
        values = merge(values, read_yaml(file, schema))
    overrides: dict = {}
    for override in args.settings:
        overrides = unite(overrides, with_paths_from(Path(), read_override(override), schema))
    values = merge(values, overrides)
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, schema)) from error
    except UnicodeEncodeError as error:  # pydantic cannot print half of a surrogate pair
        half = ascii(error.object[error.start])[1:-1]
        keys = [(name, key) for name, of in values.items() for key in (of if isinstance(of, dict) else "")]
        where = [f"{name}.{key}" for name, key in keys if half in ascii(values[name][key])] or [*values]
        raise ValueError(f"{', '.join(where)}: {half} is half of a character: write the whole one") from None


# ------------------------------------------------------------------------------------------------------------
# Name and explain settings
# ------------------------------------------------------------------------------------------------------------
def is_section(annotation: object) -> bool:
    """Tell whether the type of a field is a section of settings."""
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return is_class and issubclass(annotation, BaseModel)


def section_in_list(annotation: object) -> type[BaseModel] | None:
    """Return the section class S of a field of type list[S], else None."""
    items = typing.get_args(annotation)[0] if typing.get_origin(annotation) is list else None
    return items if is_section(items) else None


def setting_fields(schema: type[BaseModel], prefix: str = "") -> dict[str, object]:
    """Return {dotted name: pydantic field} of all settings.

    A list of sections appears as itself and as its entries, for example data.train and data.train[].path.
    """
    fields = {}
    for name, info in schema.model_fields.items():
        annotation = info.annotation
        if entry := section_in_list(annotation):
            fields[prefix + name] = info
            fields |= setting_fields(entry, f"{prefix}{name}[].")
        elif is_section(annotation):
            fields |= setting_fields(annotation, f"{prefix}{name}.")
        else:
            fields[prefix + name] = info
    return fields


def whole_sections(schema: type[BaseModel], name: str) -> set[str]:
    """List the sections that are per_stage or free_on_resume as a whole."""
    sections = {n: f.annotation for n, f in schema.model_fields.items() if is_section(f.annotation)}
    return {section for section, annotation in sections.items() if getattr(annotation, name)}


def free_on_resume(schema: type[BaseModel]) -> frozenset[str]:
    """List the dotted names of the settings that may change when a run resumes."""
    whole = whole_sections(schema, "free_on_resume")
    fields = setting_fields(schema).items()
    return frozenset(n for n, f in fields if n.split(".")[0] in whole or mark(f, "on_resume") == "free")


def free_per_stage(schema: type[BaseModel]) -> frozenset[str]:
    """List the dotted names of the settings, and of the whole sections, that a stage may set."""
    whole = whole_sections(schema, "per_stage")
    fields = setting_fields(schema).items()
    return frozenset(whole | {n for n, f in fields if mark(f, "per_stage") and n.split(".")[0] not in whole})


def mark(info, name: str) -> object:
    """Return what setting() notes about a field, for example on_resume; None for a field without a note."""
    return (info.json_schema_extra or {}).get(name)


def explain(error: ValidationError, schema: type[BaseModel], prefix: str = "") -> str:
    """Describe every wrong setting: the dotted name, the error, and for an unknown name the right one.

    A setting of an earlier version gets its successor. prefix: put in front of every name.
    """
    lines = []
    wrong = wrong_settings(error)
    for name, item in wrong[:MAX_ERRORS]:
        successor = successor_of(name, item["input"])
        if successor:
            old = name if item["type"] == "extra_forbidden" else f"{name} {item['input']!r}"
            lines.append(f"{prefix}{old}: of an earlier version, now {successor}")
        elif item["type"] == "extra_forbidden":
            lines.append(f"{prefix}{name}: {advice(name, schema)}")
        else:
            message = lowered(item["msg"].removeprefix("Value error, "))
            info = setting_fields(schema).get(name)
            hint = mark(info, "hint") if info else ""
            end = f" ({hint})" if hint else ""
            lines.append(f"{prefix}{name}: {message}, found {repr(item['input'])[:200]}{end}")
    more = [f"and {len(wrong) - MAX_ERRORS:,} more"] if len(wrong) > MAX_ERRORS else []
    return "; ".join(lines + more)


def advice(name: str, schema: type[BaseModel]) -> str:
    """Describe what to write in place of an unknown setting: a setting, or why there is none.

    Names of other libraries come from their table (runtime/names_elsewhere.py). Similarity proposes near
    misses only, because a setting that merely resembles the name would do something else.
    """
    names = [*setting_fields(schema), *schema.model_fields]
    ours, note = entry_of(name) or ("", "")
    if ours is None:
        return f"unknown setting, no counterpart ({note})"
    if ours in names:
        return f"unknown setting, did you mean {ours}?{f' ({note})' if note else ''}"
    if near := near_misses(name, names):
        return f"unknown setting, did you mean {' or '.join(near)}?"
    section = re.split(r"[.\[]", name)[0]
    where = f"--help {section}" if section in schema.model_fields else "--help"
    return f"unknown setting; {where} lists what there is"


MAX_PROPOSALS = 3


def near_misses(name: str, names: list[str]) -> list[str]:
    """Return the nearest of the names whose last part differs by a typing error at most; [] for none or many.

    The part before must be near as well, or one of our own, or missing, unless the last part is unmistakable
    (it has an underscore). For example trian.seed and seed lead to train.seed, and ema.coef to nothing.
    """

    def split(dotted: str) -> tuple[str, str]:
        section, _, leaf = re.sub(r"\[\d*\]|\.\d+(?=\.)", "", dotted).rpartition(".")
        return section, leaf

    section, leaf = split(name)
    sections = {split(candidate)[0] for candidate in names}
    distances = {}
    for candidate in names:
        own_section, own_leaf = split(candidate)
        is_same_place = section == own_section or section.endswith(f".{own_section}")
        edits = 0 if is_same_place or not section else num_edits(section, own_section)
        of_section = edits if edits <= max_edits(section) else math.inf
        has_place = of_section < math.inf or section in sections or "_" in leaf
        if has_place and num_edits(leaf, own_leaf) <= max_edits(leaf):
            distances[candidate] = (num_edits(leaf, own_leaf), of_section)
    nearest = [name for name, distance in distances.items() if distance == min(distances.values())]
    return nearest if len(nearest) <= MAX_PROPOSALS else []


def max_edits(text: str) -> int:
    """Return the number of edits that a typing error may have: one in four characters, at most two."""
    return min(2, len(text) // 4)


def num_edits(a: str, b: str) -> int:
    """Count the letters to insert, remove, replace or swap with a neighbour on the way from a to b."""
    rows = [list(range(len(b) + 1))]
    for i, x in enumerate(a, start=1):
        row = [i]
        for j, y in enumerate(b, start=1):
            row.append(min(rows[-1][j] + 1, row[-1] + 1, rows[-1][j - 1] + (x != y)))
            if i > 1 and j > 1 and (x, y) == (b[j - 2], a[i - 2]):
                row[-1] = min(row[-1], rows[-2][j - 2] + 1)
        rows.append(row)
    return rows[-1][-1]


def lowered(message: str) -> str:
    """Make the first letter of a message lower case."""
    return message[:1].lower() + message[1:]


MAX_ERRORS = 10  # most wrong settings in one message


def wrong_settings(error: ValidationError) -> list[tuple[str, dict]]:
    """Return (dotted name, pydantic's error item) of each wrong setting.

    An unknown mapping is replaced by its entries: {"trian": {"seed": 1}} gives the name trian.seed.
    """
    wrong = []
    for item in error.errors():
        keys = [str(key) for key in item["loc"]]
        if any(isinstance(key, int) for key in item["loc"][1:2]):
            keys[:2] = [f"{keys[0]}[{keys[1]}]"]  # an entry of a list at the top level, for example stages[1]
        name = ".".join(keys).replace(".0.", "[].")
        leaves = [(name, item["input"])]
        while item["type"] == "extra_forbidden" and any(
            isinstance(value, dict) and value for _, value in leaves
        ):
            leaves = [
                (f"{name}.{key}" if key else name, inner)
                for name, value in leaves
                for key, inner in (value.items() if isinstance(value, dict) and value else [("", value)])
            ]
        wrong += [(leaf, item | {"input": value}) for leaf, value in leaves]
    return wrong


def refuse_contradictions(config: BaseModel, messages: Iterable[str]) -> None:
    """Raise ValueError for the first message about settings that contradict each other, if there is one.

    In a message, {section.key} is replaced by the name and the value, for example "{model.ep_size} is too
    large" by "model.ep_size 8 is too large".
    """

    def name_and_value(match: re.Match) -> str:
        return f"{match[1]} {operator.attrgetter(match[1])(config)!r}"

    for message in messages:
        raise ValueError(re.sub(r"\{(.+?)\}", name_and_value, message))


# ------------------------------------------------------------------------------------------------------------
# Print the help
# ------------------------------------------------------------------------------------------------------------
class HelpAction(argparse.Action):
    """--help [SECTION]: print usage, sections and settings, or the settings of one section, and exit."""

    def __init__(self, *args, schema: type[BaseModel], **kwargs):
        super().__init__(*args, **kwargs)
        self.schema = schema

    def __call__(self, parser, namespace, section, option_string=None):
        if section is None:
            print(parser.format_help(), sections_help(self.schema), settings_help(self.schema), sep="\n")
        elif section in self.schema.model_fields:
            print(settings_help(self.schema, section))
        else:
            sections = list(self.schema.model_fields)
            near = near_misses(section, sections)
            proposal = f", did you mean {' or '.join(near)}?" if near else "."
            parser.error(f"--help {section}: unknown section{proposal} Sections: {', '.join(sections)}")
        parser.exit()


def section_text(info) -> str:
    """Return the first paragraph of a section's docstring; for any other field, the description."""
    section = section_in_list(info.annotation) or info.annotation
    text = section.__doc__ if is_section(section) else info.description
    return " ".join(text.partition("\n\n")[0].split())


def sections_help(schema: type[BaseModel]) -> str:
    """List the sections with their docstrings, for --help."""
    width = max(len(name) for name in schema.model_fields)
    lines = ["sections (print the settings of one with --help SECTION):"]
    lines += [f"  {name:<{width}}  {section_text(info)}" for name, info in schema.model_fields.items()]
    return "\n".join([*lines, ""])


def settings_help(schema: type[BaseModel], section: str | None = None) -> str:
    """List all settings, or the settings of one section, with default and description, for --help."""
    title = f"{section}: {section_text(schema.model_fields[section])}\n\n" if section else ""
    lines = [f"{title}settings (section.key=value, or in YAML):"]
    free = free_on_resume(schema)
    per_stage = free_per_stage(schema)
    for name, info in setting_fields(schema).items():
        if section in (None, re.split(r"[.\[]", name)[0]):
            default = "required" if info.is_required() else f"default {info.default!r}"
            marks = "; may change on resume" if name in free else ""
            marks += "; per stage" if {name, name.split(".")[0]} & per_stage else ""
            lines.append(f"  {name}  ({default}{marks})\n      {info.description}")
    return "\n".join(lines)


# ------------------------------------------------------------------------------------------------------------
# Compare settings
# ------------------------------------------------------------------------------------------------------------
def complete(schema: type[BaseModel], saved: dict) -> dict:
    """Fill a dump of settings with the defaults of missing settings, also inside lists of sections.

    Settings that the schema lacks stay, so that differences() names them.
    """
    completed = {name: value for name, value in saved.items() if name not in schema.model_fields}
    for name, info in schema.model_fields.items():
        value = saved.get(name)
        entry = section_in_list(info.annotation)
        if is_section(info.annotation):
            completed[name] = complete(info.annotation, value or {})
        elif name in saved and entry:
            completed[name] = [complete(entry, item) for item in value]
        elif name in saved or info.is_required():
            completed[name] = value
        else:
            completed[name] = json.loads(to_json(info.get_default(call_default_factory=True)))
    return completed


def with_settings_apart(args: argparse.Namespace, option: str) -> argparse.Namespace:
    """Move section.key=value from a list option, where argparse leaves them, to args.settings."""
    words = list(map(str, getattr(args, option)))
    settings = [word for word in words if re.match(r"[a-z_]+(\.\w+)+=", word)]
    others = [value for value in getattr(args, option) if str(value) not in settings]
    vars(args).update({option: others, "settings": settings + args.settings})
    return args


def command_line(prog: str | None, description: str) -> argparse.ArgumentParser:
    """Return a parser whose --help prints a docstring as it is written; prog: None for the file's name."""
    formatter = argparse.RawDescriptionHelpFormatter
    return argparse.ArgumentParser(prog, description=description, formatter_class=formatter)


def read_mapping(option: str, text: str) -> dict:
    """Parse {key: value} of the command line as YAML; ValueError names the option."""
    value = parse_yaml(text, option)
    if not isinstance(value, dict):
        raise ValueError(f"{option} {text}: expected {{name: value, ...}}")
    return value


def flat_settings(dump: dict, prefix: str = "") -> dict[str, object]:
    """Flatten a dump of settings to {"section.key": value}, for example {"stages[0].rollout.top_p": 1.0}."""
    flat = {}
    for section, values in dump.items():
        if isinstance(values, dict):
            flat |= {f"{prefix}{section}.{key}": value for key, value in values.items()}
        elif isinstance(values, list):
            for number, item in enumerate(values):
                flat |= flat_settings(item, f"{prefix}{section}[{number}].")
        else:
            flat[prefix + section] = values
    return flat


def differences(saved: dict, present: dict) -> list[str]:
    """List "section.key old -> new" for the settings that differ between two dumps; a missing one is None."""
    old = flat_settings(saved)
    new = flat_settings(present)
    names = [*new, *(name for name in old if name not in new)]
    return [f"{n} {old.get(n)!r} -> {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]
