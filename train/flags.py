"""From a command line to a frozen dataclass and back to `--help`: one field, one absl flag, one line of help."""

import dataclasses
import difflib
import math
import os
import re
import sys
import textwrap
import types
import typing
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeVar

from absl import flags

from train.environment import redact
from train.exits import UsageError

Config = TypeVar("Config")
_LARGEST = 2**32  # sizes and counts beyond fit no array
# Flags of these names are folders: a shell leaves the ~ of --workdir=~/runs as it stands.
_FOLDERS = ("workdir", "out", "data_dir")
# Field name -> the table (or names) its values come from: {"loss": LOSSES, "task": TASKS, ...}
Tables = Mapping[str, Collection[str]]


def flag_field(
    help: str,
    default: Any = dataclasses.MISSING,
    *,
    at_least: float | None = None,
    above: float | None = None,
    below: float | None = None,
    resumable: bool = False,
    other_form: tuple[str, str] | None = None,
) -> Any:
    """Declare a config field that is also a flag.

    Args:
        help: one line: what the value means, with its unit.
        default: the value without the flag; a field without one is required.
        at_least: smallest value allowed; `above` and `below` are open bounds.
        resumable: whether a resumed run may have another value than the run it goes on with.
        other_form: (regular expression, words) of values allowed beside the names of the field's table.
    """
    metadata = dict(help=help, at_least=at_least, above=above, below=below, resumable=resumable, other_form=other_form)
    return dataclasses.field(default=default, metadata=metadata)


def parse_flags(
    cls: type, argv: Sequence[str], *, tables: Tables, usage: str, task_defaults: bool = True
) -> dict[str, Any]:
    """Return the values of the flags that stand on the command line, also where they repeat a default.

    Args:
        cls: the config dataclass.
        argv: program name first.
        tables: field name -> names allowed; see `Tables`.
        usage: the first line of `--help`.
        task_defaults: whether the command takes the defaults of a task's row, which `--help` then shows.

    Raises:
        UsageError: unknown flag (with the nearest known one), unreadable value, positional argument, an access token.
        SystemExit: with code 0, after `--help`.
    """
    for argument in argv[1:]:
        # Values are written to files as they stand; no flag takes a secret.
        if redact(argument) != argument:
            raise UsageError(f"{redact(argument)}: this looks like an access token or password, and no flag takes one.")
    kinds = typing.get_type_hints(cls)
    fields = {field.name: field for field in dataclasses.fields(cls)}
    # A set of its own: absl's global one also holds the flags of every imported library.
    values = flags.FlagValues()
    flags.DEFINE_boolean("help", False, "show this text", flag_values=values, short_name="h")
    for name, field in fields.items():
        define = flags.DEFINE_boolean if kinds[name] is bool else flags.DEFINE_string
        define(name, None, field.metadata["help"], flag_values=values)
    try:
        positional = values(list(argv))[1:]
    except flags.UnrecognizedFlagError as error:
        near = nearest(error.flagname, fields)
        hint = f"; did you mean --{near}?" if near else "."
        raise UsageError(f"--{error.flagname} is not a flag{hint} --help lists all of them.") from error
    except flags.IllegalFlagValueError as error:  # only booleans are read by absl itself
        shown = re.sub(r"^flag --|: \(.*$", "", str(error), flags=re.DOTALL)
        raise UsageError(f"{shown}: wanted true or false.") from error
    except flags.Error as error:
        raise UsageError(f"{str(error).rstrip('.')}. --help shows what every flag takes.") from error
    if values.help:
        print(help_text(cls, tables=tables, usage=usage, task_defaults=task_defaults))
        sys.exit(0)
    if positional:
        hint = f"; did you mean --{next(iter(fields))}={positional[0]}?" if len(positional) == 1 else "."
        raise UsageError(f"{' '.join(positional)!r} is not a flag: every argument starts with --{hint}")
    given = {name: values[name].value for name in fields if values[name].present}
    given |= {name: os.path.expanduser(given[name]) for name in _FOLDERS if name in given}
    return {name: read_value(name, text, kinds[name]) for name, text in given.items()}


def read_value(name: str, text: Any, kind: Any) -> Any:
    """Convert the text of a flag to the type of its field; `none` stands for None where the field allows it."""
    if not isinstance(text, str):
        return text
    options = typing.get_args(kind)
    if types.NoneType in options:
        if text.lower() == "none":
            return None
        kind = next(option for option in options if option is not types.NoneType)
    try:
        if kind is int:
            if not re.fullmatch(r"[+-]?[0-9]+", text.strip(), re.ASCII):
                raise ValueError
            return int(text)
        if kind is float:
            return float(text)
        if typing.get_origin(kind) is tuple:
            return tuple(float(part) for part in text.split(","))
    except ValueError:
        raise UsageError(f"{name}={text}: wanted {kind_words(kind)}.") from None
    return text


def check_values(config: Any) -> None:
    """Check types, ranges and fixed choices of every field, and turn whole numbers into floats where floats belong.

    Raises:
        UsageError: names the field, what came and what was wanted.
    """
    kinds = typing.get_type_hints(type(config))
    for field in dataclasses.fields(config):
        value, kind = getattr(config, field.name), kinds[field.name]
        options = typing.get_args(kind)
        optional = types.NoneType in options
        if optional:
            kind = next(option for option in options if option is not types.NoneType)
        if value is None and optional:
            continue
        if kind is float or typing.get_origin(kind) is tuple:
            value = _as_floats(value, kind)
            object.__setattr__(config, field.name, value)
        if not _is_kind(value, kind):
            raise UsageError(f"{field.name}={value!r}: wanted {kind_words(kind)}.")
        if kind is int and abs(value) > _LARGEST:
            raise UsageError(f"{field.name}={value}: wanted {kind_words(kind)} of at most {_LARGEST:,}.")
        limits = field.metadata
        for number in value if isinstance(value, tuple) else [value]:
            if limits["at_least"] is not None and number < limits["at_least"]:
                raise UsageError(f"{field.name}={number}: wanted {kind_words(kind)} of at least {limits['at_least']}.")
            if limits["above"] is not None and number <= limits["above"]:
                raise UsageError(f"{field.name}={number}: wanted {kind_words(kind)} above {limits['above']}.")
            if limits["below"] is not None and number >= limits["below"]:
                raise UsageError(f"{field.name}={number}: wanted {kind_words(kind)} below {limits['below']}.")


def check_names(values: Mapping[str, Any], cls: type, *, tables: Tables) -> None:
    """Check that every value whose field has a table is one of its names (or of the field's other form).

    Raises:
        UsageError: names the known ones and the nearest.
    """
    forms = {field.name: field.metadata["other_form"] for field in dataclasses.fields(cls)}
    for field, table in tables.items():
        value = values.get(field)
        if field not in values or value in table:
            continue
        pattern, words = forms[field] or (None, "")
        if pattern and re.fullmatch(pattern, str(value)):
            continue
        near = nearest(str(value), table)
        hint = f"; did you mean {near}?" if near else "."
        known = ", ".join(table) + (f", or {words}" if words else "")
        raise UsageError(f"{field}={value}: not known{hint} Known: {known}.")


def nearest(name: str, known: Collection[str]) -> str | None:
    """Return the known name that `name` was probably meant to be."""
    found = difflib.get_close_matches(name.replace("-", "_"), list(known), n=1, cutoff=0.6)
    return found[0] if found else None


def help_text(cls: type, *, tables: Tables, usage: str, task_defaults: bool = True, width: int = 100) -> str:
    """Return the text of `--help`: every flag with its meaning, its choices and its default (also each task's own)."""
    kinds = typing.get_type_hints(cls)
    lines = [usage, ""]
    for field in dataclasses.fields(cls):
        name, kind = field.name, kinds[field.name]
        flag = f"--[no]{name}" if kind is bool else f"--{name}"
        parts = [field.metadata["help"].rstrip(".") + "."]
        choices = list(tables.get(name, _literal_names(kind)))
        if choices:
            other = field.metadata["other_form"]
            parts.append("One of " + ", ".join(map(_shown, choices)) + (f", or {other[1]}" if other else "") + ".")
        required = field.default is dataclasses.MISSING
        of_tasks = _task_defaults(name, tables) if task_defaults else ""
        parts.append("Required." if required else f"Default: {_shown(field.default)}{of_tasks}.")
        lines += [f"  {flag}"]
        lines += textwrap.wrap(" ".join(parts), width, initial_indent=" " * 6, subsequent_indent=" " * 6)
        rows = tables[name].items() if isinstance(tables.get(name), Mapping) else ()
        for choice, row in rows:
            if summary := getattr(row, "summary", ""):
                text = f"{choice}: {summary}"
                lines += textwrap.wrap(text, width, initial_indent=" " * 8, subsequent_indent=" " * 10)
    return "\n".join([*lines, "  --help, -h", "      Show this text and exit."])


def kind_words(kind: Any) -> str:
    """Say in words what a field of this type takes."""
    if typing.get_origin(kind) is typing.Literal:
        return "one of " + ", ".join(map(_shown, _literal_names(kind)))
    if typing.get_origin(kind) is tuple:
        return "finite numbers (commas between several)"
    return {int: "a whole number", float: "a finite number", bool: "true or false", str: "a text"}[kind]


def _is_kind(value: Any, kind: Any) -> bool:
    if typing.get_origin(kind) is typing.Literal:
        return value in typing.get_args(kind)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, tuple) and len(value) > 0 and all(_is_kind(number, float) for number in value)
    if isinstance(value, bool) or kind is bool:
        return isinstance(value, bool) and kind is bool
    return isinstance(value, kind) and (kind is not float or math.isfinite(value))


def _as_floats(value: Any, kind: Any) -> Any:
    if isinstance(value, int | float) and not isinstance(value, bool):
        return float(value) if kind is float else (float(value),)
    if isinstance(value, list | tuple) and kind is not float:
        return tuple(_as_floats(number, float) for number in value)
    return value


def _literal_names(kind: Any) -> tuple[str, ...]:
    return typing.get_args(kind) if typing.get_origin(kind) is typing.Literal else ()


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(f"{number:g}" for number in value)
    return "(empty)" if value == "" else str(value).lower() if isinstance(value, bool) or value is None else str(value)


def _task_defaults(name: str, tables: Tables) -> str:
    tasks = tables.get("task")
    if not isinstance(tasks, Mapping):
        return ""
    own = []
    for kind, words in (("defaults", ""), ("pretrained_defaults", " with pretrained weights")):
        rows = {task: getattr(row, kind, {}) for task, row in tasks.items()}
        own += [f"{task}{words} {_shown(row[name])}" for task, row in rows.items() if name in row]
    return f" ({', '.join(own)})" if own else ""
