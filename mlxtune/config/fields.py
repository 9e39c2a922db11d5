"""The fields of a config: what an option means, which values it takes, and how they are read.

Flags, config files and the Python API go through the same conversion.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import reprlib
import typing
from collections.abc import Mapping
from enum import Enum, auto
from types import UnionType
from typing import Any, TypeVar

from mlxtune.errors import ConfigError

# Computations use 64-bit integers.
_TOO_LARGE = 2**63


class Affects(Enum):
    """What an option of a run affects, which decides whether a resumed run may change it."""

    RESULT = auto()  # what is learned: must stay the same
    LENGTH = auto()  # how long the run trains: may only grow
    INPUT = auto()  # which files are read: may move, their content is compared
    EXECUTION = auto()  # time, memory, or which files of the run are kept: may change
    PLACES = auto()  # where files are, or how much is printed: may change; not compared in reports
    COMMAND = auto()  # a command other than train


@dataclasses.dataclass(frozen=True)
class Option:
    """What an option means, and the values that it takes beyond its type."""

    help: str
    # Without a default, so that a new option cannot leave it open.
    affects: Affects
    # Decides which examples a data file gives, so encoded files are cached by it.
    encodes: bool = False
    # A file or folder: a relative path starts where the run was started.
    path: bool = False
    # False: never taken from a checkpoint, which someone else may have written.
    inherited: bool = True
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    required: bool = False
    # The flag may be repeated; with `blank`, a value may be whitespace.
    several: bool = False
    blank: bool = False
    if_empty: str = "is empty"

    def read(self, value: Any, annotation: Any) -> tuple[Any, str | None]:
        """Return a value converted to `annotation` and None, or None and what is wrong with it."""
        if isinstance(value, int) and not isinstance(value, bool) and self.choices:
            value = str(value)  # as in `quantize: 4`
        value, problem = self._convert(value, annotation)
        if problem is None and value is not None:
            problem = self._problem(value)
        return (value, None) if problem is None else (None, problem)

    def _convert(self, value: Any, annotation: Any) -> tuple[Any, str | None]:
        if isinstance(annotation, UnionType):
            if value is None:
                return None, None
            annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
        if typing.get_origin(annotation) is tuple:
            return _read_items(value, blank=self.blank) if self.several else _read_names(value)
        if annotation is str:
            is_text = isinstance(value, str | os.PathLike)
            return (os.fspath(value), None) if is_text else (None, f"must be text, {_not(value)}")
        if annotation is bool:
            is_bool = isinstance(value, bool)
            return (value, None) if is_bool else (None, f"must be true or false, {_not(value)}")
        return _read_number(value, annotation)

    def _problem(self, value: Any) -> str | None:
        """Return what is wrong with a value of the right type, or None."""
        empty = value == () and (self.required or not self.several)
        if empty or (isinstance(value, str) and not value.strip()):
            return self.if_empty
        if self.choices:
            known = value in self.choices
            return None if known else f"must be one of {', '.join(self.choices)}, {_not(value)}"
        if isinstance(value, bool) or not isinstance(value, int | float):
            return None
        if isinstance(value, float) and not math.isfinite(value):
            return f"must be a finite number, not {value}"
        limits = (
            (self.at_least, "at least", operator.ge),
            (self.at_most, "at most", operator.le),
            (self.above, "above", operator.gt),
            (self.below, "below", operator.lt),
        )
        for limit, name, holds in limits:
            if limit is not None and not holds(value, limit):
                return f"must be {name} {limit:g}, not {_number_text(value)}"
        if value >= _TOO_LARGE and isinstance(value, int):
            return "must be below 2^63, not such a large number"
        return None


def _not(value: Any) -> str:
    # Bounded, because YAML aliases turn a few lines into a list of billions of items.
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    return f"not {short.repr(value)}"


def _number_text(value: float) -> str:
    # Python refuses to print an integer of thousands of digits.
    huge = isinstance(value, int) and value.bit_length() > 64
    return ("a negative number" if value < 0 else "such a large number") if huge else str(value)


def _read_names(value: Any) -> tuple[Any, str | None]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None, f"must be names separated by commas, {_not(value)}"
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip())), None


def _read_items(value: Any, *, blank: bool) -> tuple[Any, str | None]:
    if isinstance(value, Mapping):  # in a config file, in its natural form
        value = [f"{name}={key}" for name, key in value.items()]
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | os.PathLike) for item in items):
        return None, f"must be text, or several texts, {_not(value)}"
    texts = map(os.fspath, items)
    return tuple(text for text in texts if (text if blank else text.strip())), None


def _read_number(value: Any, kind: type[int] | type[float]) -> tuple[Any, str | None]:
    problem = f"must be a {'whole number' if kind is int else 'number'}, {_not(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None, problem
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        return None, problem
    return (
        (number, None)
        if kind is float or isinstance(value, str) or number == value
        else (
            None,
            problem,
        )
    )


def flag(name: str) -> str:
    """Return the command-line flag of a field: `max_seq_len` is `--max-seq-len`."""
    return "--" + name.replace("_", "-")


def field_types(config: type) -> dict[str, Any]:
    """Return the resolved annotation of each field of a config."""
    return typing.get_type_hints(config)


_Part = TypeVar("_Part")


class Checked:
    """A dataclass that converts and checks its fields, and reports all problems at once."""

    def __post_init__(self) -> None:
        problems = []
        types = field_types(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            option: Option = field.metadata["option"]
            value, problem = option.read(getattr(self, field.name), types[field.name])
            if problem is not None:
                problems.append(f"{flag(field.name)} {problem}")
            else:
                object.__setattr__(self, field.name, value)
        if not problems:
            problems = self.contradictions()
        if problems:
            raise ConfigError(problems)

    def contradictions(self) -> list[str]:
        """Return the problems between fields that are each valid alone."""
        return []

    def part(self, kind: type[_Part], **changes: Any) -> _Part:
        """Return the options that `kind` shares with this config, with `changes`.

        Where this config has None, `kind` keeps its default.
        """
        names = {field.name for field in dataclasses.fields(kind)}  # type: ignore[arg-type]
        given = {name: value for name, value in vars(self).items() if value is not None}
        shared = {name: value for name, value in given.items() if name in names}
        return kind(**shared | changes)
