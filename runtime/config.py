"""Read settings: defaults < YAML files < section.key=value, as frozen pydantic models.

    base: [env.yaml, ../methods/espo.yaml]     # in a YAML: the files below it, the later above the earlier

Each part of the project defines its own section beside the code that reads it, and train_rl.py composes them
to one Config. This file knows none of them: it reads, explains what is wrong, and prints the help. A key
given twice, an unknown key and a wrong type are errors that name the setting and the nearest one.
"""

import argparse
import difflib
import json
import operator
import re
import typing
from pathlib import Path
from typing import Annotated, TypeVar

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


# ------------------------------------------------------------------------------------------------------------
# To define settings
# ------------------------------------------------------------------------------------------------------------
class Section(BaseModel):
    """A group of settings, one line per field."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def refuse_true_as_a_number(cls, value: object, info: ValidationInfo) -> object:
        """Refuse true and false where a number is wanted: pydantic would take them as 1 and 0."""
        kinds = {*typing.get_args(kind := cls.model_fields[info.field_name].annotation), kind}
        if isinstance(value, bool) and kinds & {int, float} and bool not in kinds:
            raise ValueError("expected a number")
        return value


def setting(default, description: str, free_on_resume: bool = False, **limits):
    """Define a field with its meaning for --help; the default ... makes it required.

    free_on_resume: a run may go on from a checkpoint with another value, because the setting decides how fast
    or how closely watched a run is and not what is learned.
    """
    extra = {"free_on_resume": True} if free_on_resume else None
    return Field(default, description=description, json_schema_extra=extra, **limits)


def switch_name(value):
    """Return "off" and "on" for the booleans that YAML reads them as; leave other values as they are."""
    return {False: "off", True: "on"}[value] if isinstance(value, bool) else value


Choice = TypeVar("Choice")
Switch = Annotated[Choice, BeforeValidator(switch_name)]  # for choices among which are "off" and "on"


# ------------------------------------------------------------------------------------------------------------
# To read them
# ------------------------------------------------------------------------------------------------------------
class StrictLoader(yaml.SafeLoader):
    """safe_load that refuses a key given twice."""

    def construct_mapping(self, node, deep=False):
        """Read a mapping; ValueError names the line of a key that is given twice."""
        mapping = super().construct_mapping(node, deep)  # first: it refuses keys that cannot be one
        seen = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise ValueError(f"line {key_node.start_mark.line + 1}: key {key!r} is given twice")
            seen.add(key)
        return mapping


MAX_VALUES = 100_000  # a YAML of a few hundred bytes can stand for billions, by aliases of aliases


def parse_yaml(text: str, where: str) -> object:
    """Parse YAML; ValueError names the place of what cannot be read, is nested too deeply or too large."""
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


def num_values(values: object, known: dict[int, int]) -> int:
    """Count the values in nested lists and mappings; what is used twice counts twice, and is walked once."""
    inner = values.values() if isinstance(values, dict) else values if isinstance(values, list) else ()
    if id(values) not in known:
        known[id(values)] = 1 + sum(num_values(value, known) for value in inner)
    return known[id(values)]


def read_yaml(path: Path, above: tuple[Path, ...] = ()) -> dict:
    """Read the settings of a YAML file over those of the files that its `base` names, relative to it."""
    if path.resolve() in above:
        raise ValueError(f"{path}: its `base` leads back to itself")
    if not path.is_file():
        raise ValueError(f"config file {path} does not exist")
    values = parse_yaml(path.read_text(errors="replace"), str(path))
    values = {} if values is None else values
    if not isinstance(values, dict):
        raise ValueError(f"{path}: expected sections such as `train:`, found a {type(values).__name__}")
    if "base" not in values:
        return values
    base = values.pop("base")
    bases = base if isinstance(base, list) else [base]
    if not all(isinstance(name, str) for name in bases):
        raise ValueError(f"{path}: base must be the path of a YAML file or a list of them, found {base!r}")
    below: dict = {}
    for name in bases:
        below = merge(below, read_yaml(path.parent / name, (*above, path.resolve())))
    return merge(below, values)


def merge(below: dict, above: dict) -> dict:
    """Unite nested mappings; a value of `above` wins, lists are replaced whole."""
    merged = dict(below)
    for key, value in above.items():
        both = isinstance(value, dict) and isinstance(below.get(key), dict)
        merged[key] = merge(below[key], value) if both else value
    return merged


def read_override(text: str) -> dict:
    """Read section.key=value of the command line as a nested mapping."""
    name, equals, value = text.partition("=")
    if not equals:
        raise ValueError(f"{text!r}: expected section.key=value")
    values = parse_yaml(value, name)
    for part in reversed(name.split(".")):
        values = {part: values}
    return values


Schema = TypeVar("Schema", bound=BaseModel)


def read_config(
    schema: type[Schema],
    argv: list[str],
    prog: str,
    description: str = "",
    names_elsewhere: dict[str, str] | None = None,
) -> Schema:
    """Read a command line: defaults < YAMLs of --config, in their order < section.key=value.

    names_elsewhere: {name in other libraries: setting}, see explain(). ValueError names setting and fix.
    """
    parser = argparse.ArgumentParser(
        prog=prog,
        description=description,
        epilog=settings_help(schema),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config", type=Path, action="append", default=[],
        help="YAML file of settings that differ from the defaults; given again: over the one before",
    )  # fmt: skip
    overrides = {"nargs": "*", "metavar": "section.key=value", "help": "single settings, over the files'"}
    parser.add_argument("settings", **overrides)
    args = parser.parse_intermixed_args(argv)
    values: dict = {}
    for file in args.config:
        values = merge(values, read_yaml(file))
    for override in args.settings:
        values = merge(values, read_override(override))
    try:
        return schema.model_validate(values)
    except ValidationError as error:
        raise ValueError(explain(error, schema, names_elsewhere)) from error


# ------------------------------------------------------------------------------------------------------------
# To name and explain them
# ------------------------------------------------------------------------------------------------------------
def is_section(annotation: object) -> bool:
    """Tell whether a field's type is a section of settings."""
    is_class = isinstance(annotation, type) and typing.get_origin(annotation) is None
    return is_class and issubclass(annotation, BaseModel)


def section_in_list(annotation: object) -> type[BaseModel] | None:
    """Return the section that a field is a list of, or None."""
    items = typing.get_args(annotation)[0] if typing.get_origin(annotation) is list else None
    return items if is_section(items) else None


def setting_fields(schema: type[BaseModel], prefix: str = "") -> dict[str, object]:
    """List {dotted name: pydantic field} of every setting, with [] for the entries of a list of sections."""
    names = {}
    for name, info in schema.model_fields.items():
        inner = info.annotation
        if items := section_in_list(inner):
            names[prefix + name] = info
            inner, name = items, f"{name}[]"
        if is_section(inner):
            names |= setting_fields(inner, f"{prefix}{name}.")
        else:
            names[prefix + name] = info
    return names


def free_on_resume(schema: type[BaseModel]) -> frozenset[str]:
    """List the dotted names of the settings that may change between a checkpoint and its continuation."""
    fields = setting_fields(schema).items()
    return frozenset(name for name, info in fields if (info.json_schema_extra or {}).get("free_on_resume"))


def explain(
    error: ValidationError,
    schema: type[BaseModel],
    names_elsewhere: dict[str, str] | None = None,
    prefix: str = "",
) -> str:
    """Say of each wrong setting its dotted name, what is wrong, and the nearest known name.

    names_elsewhere: {last part of the name that another library
    uses: our setting}; it goes before a name that is only spelt alike. prefix: stands before each name.
    """
    lines, wrong = [], wrong_settings(error)
    for name, item in wrong[:MAX_ERRORS]:
        found = repr(item["input"])[:200]
        if item["type"] == "extra_forbidden":
            known, leaf = [*setting_fields(schema), *schema.model_fields], name.rsplit(".", 1)[-1]
            same_leaf = [k for k in known if k.rsplit(".", 1)[-1] == leaf]
            (near,) = difflib.get_close_matches(name, same_leaf or known, n=1, cutoff=0.0)
            near = near if same_leaf else (names_elsewhere or {}).get(leaf, near)
            lines.append(f"{prefix}{name}: unknown setting, did you mean {near}?")
        else:
            lines.append(
                f"{prefix}{name}: {lowered(item['msg'].removeprefix('Value error, '))}, found {found}"
            )
    more = [f"and {len(wrong) - MAX_ERRORS:,} more"] if len(wrong) > MAX_ERRORS else []
    return "; ".join(lines + more)


def lowered(message: str) -> str:
    """Begin a message with a small letter."""
    return message[:1].lower() + message[1:]


MAX_ERRORS = 10  # wrong settings that are named at once


def wrong_settings(error: ValidationError) -> list[tuple[str, dict]]:
    """Return (dotted name, pydantic's item) of each wrong setting; of an unknown mapping those inside it."""
    found = []
    for item in error.errors():
        parts = [str(part) for part in item["loc"]]
        if any(isinstance(part, int) for part in item["loc"][1:2]):
            parts[:2] = [f"{parts[0]}[{parts[1]}]"]  # an entry of a list at the top
        name = ".".join(parts).replace(".0.", "[].")
        leaves = [(name, item["input"])]
        while item["type"] == "extra_forbidden" and any(
            isinstance(value, dict) and value for _, value in leaves
        ):
            leaves = [
                (f"{name}.{key}" if key else name, inner)
                for name, value in leaves
                for key, inner in (value.items() if isinstance(value, dict) and value else [("", value)])
            ]
        found += [(leaf, item | {"input": value}) for leaf, value in leaves]
    return found


def settings_help(schema: type[BaseModel]) -> str:
    """Write every setting with its default and meaning, for --help."""
    lines = ["settings (section.key=value, or in YAML):"]
    for name, info in setting_fields(schema).items():
        default = "required" if info.is_required() else f"default {info.default!r}"
        lines.append(f"  {name}  ({default})\n      {info.description}")
    return "\n".join(lines).replace("%", "%%")


def refuse_contradictions(config: BaseModel, contradictions: dict[str, bool]) -> None:
    """Raise ValueError for the first contradiction between settings.

    contradictions: {message: whether it holds}; a {section.key} of a message becomes the name and the value.
    """
    named = lambda match: f"{match[1]} {operator.attrgetter(match[1])(config)!r}"
    for message, refused in contradictions.items():
        if refused:
            raise ValueError(re.sub(r"\{(.+?)\}", named, message))


def complete(schema: type[BaseModel], saved: dict) -> dict:
    """Return a dump of settings with the default of each setting that it lacks, also in lists of sections."""
    completed = {}
    for name, info in schema.model_fields.items():
        value, items = saved.get(name), section_in_list(info.annotation)
        if is_section(info.annotation):
            completed[name] = complete(info.annotation, value or {})
        elif name in saved and items:
            completed[name] = [item | complete(items, item) for item in value]
        elif name in saved or info.is_required():
            completed[name] = value
        else:
            completed[name] = json.loads(to_json(info.get_default(call_default_factory=True)))
    return completed


def flat_settings(dump: dict, prefix: str = "") -> dict[str, object]:
    """Return {"section.key": value} of a dump of settings; of a list of sections "list[0].section.key"."""
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
    """List "section.key old -> new" for the settings that differ between two dumps of a Config.

    A setting that one of them lacks counts as None.
    """
    old, new = flat_settings(saved), flat_settings(present)
    names = [*new, *(name for name in old if name not in new)]
    return [f"{n} {old.get(n)!r} -> {new.get(n)!r}" for n in names if old.get(n) != new.get(n)]
