"""Dataclasses that convert and check their fields, and name all problems at once.

Flags, config files and the Python API go through the same conversion.
"""

from __future__ import annotations

import dataclasses
import math
import operator
import os
import reprlib
import typing
from collections.abc import Callable, Mapping
from types import UnionType
from typing import Any

from mlxtune.errors import ConfigError

# What is larger is no number of anything here, and beyond what is computed with.
_LARGEST = 2**63


@dataclasses.dataclass(frozen=True)
class Bounds:
    """What values an option takes, beyond its type.

    `several`: the flag may be given again; `blank`: each may be of spaces or newlines alone.
    """

    help: str
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    metavar: str | None = None
    required: bool = False
    several: bool = False
    blank: bool = False
    if_empty: str = "is empty"

    def problem(self, value: Any) -> str | None:
        """Say what is wrong with a value of the right type, or return None."""
        empty = value == () and (self.required or not self.several)
        if empty or (isinstance(value, str) and not value.strip()):
            return self.if_empty
        if self.choices:
            if value in self.choices:
                return None
            return f"must be one of {', '.join(self.choices)}, not {_bounded(value)}"
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
                return f"must be {name} {limit:g}, not {_shown(value)}"
        if value >= _LARGEST and isinstance(value, int):
            return "must be below 2^63, not such a large number"
        return None


def _bounded(value: Any) -> str:
    """Return a value as Python writes it, but no more of it than one would read.

    Aliases of YAML make a list of billions of items out of a few lines.
    """
    short = reprlib.Repr()
    short.maxstring = short.maxother = short.maxlong = 200
    return short.repr(value)


def _shown(value: float) -> str:
    # Python refuses to print an integer of thousands of digits.
    huge = isinstance(value, int) and value.bit_length() > 64
    return ("a negative number" if value < 0 else "such a large number") if huge else str(value)


def flag(name: str) -> str:
    """Return the command-line flag of a field: `max_seq_len` is `--max-seq-len`."""
    return "--" + name.replace("_", "-")


class Checked:
    """A dataclass that converts and checks its fields, and names all problems at once."""

    def __post_init__(self) -> None:
        problems = []
        types = field_types(type(self))
        for field in dataclasses.fields(self):  # type: ignore[arg-type]
            bounds = field.metadata["bounds"]
            value = as_choice(getattr(self, field.name), bounds)
            several = {"several": bounds.several, "blank": bounds.blank}
            value, problem = convert(value, types[field.name], **several)
            if problem is None and value is not None:
                problem = bounds.problem(value)
            if problem is not None:
                problems.append(f"{flag(field.name)} {problem}")
            else:
                object.__setattr__(self, field.name, value)
        if not problems:
            problems = self.contradictions()
        if problems:
            raise ConfigError(problems)

    def contradictions(self) -> list[str]:
        """Problems between fields that are each right by themselves."""
        return []


def as_choice(value: Any, bounds: Bounds) -> Any:
    """Return a number as the text by which it is among the choices, as in `quantize: 4`."""
    is_number = isinstance(value, int) and not isinstance(value, bool)
    return str(value) if is_number and bounds.choices else value


def field_types(config: type) -> dict[str, Any]:
    """Return the resolved annotation of each field of a config."""
    return typing.get_type_hints(config)


def convert(
    value: Any, annotation: Any, *, several: bool = False, blank: bool = False
) -> tuple[Any, str | None]:
    """Convert a value to a field's annotated type; with `several`, text is one item of a tuple.

    Items of spaces alone are passed over, unless they may be `blank`.

    Returns the converted value and None, or None and what is wrong with it.
    """
    if isinstance(annotation, UnionType):
        if value is None:
            return None, None
        annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
    if typing.get_origin(annotation) is tuple:
        return _convert_items(value, blank) if several else _convert_names(value)
    return _CONVERTERS[annotation](value)


def _convert_names(value: Any) -> tuple[Any, str | None]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return None, f"must be names separated by commas, not {_bounded(value)}"
    stripped = tuple(dict.fromkeys(name.strip() for name in names if name.strip()))
    return stripped, None


def _convert_items(value: Any, blank: bool) -> tuple[Any, str | None]:
    if isinstance(value, Mapping):  # in a config file, as one would write it there
        value = [f"{name}={key}" for name, key in value.items()]
    items = value if isinstance(value, list | tuple) else [value]
    if not all(isinstance(item, str | os.PathLike) for item in items):
        return None, f"must be text, or several texts, not {_bounded(value)}"
    texts = map(os.fspath, items)
    return tuple(text for text in texts if (text if blank else text.strip())), None


def _convert_str(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, str | os.PathLike):
        return os.fspath(value), None
    return None, f"must be text, not {_bounded(value)}"


def _convert_bool(value: Any) -> tuple[Any, str | None]:
    if isinstance(value, bool):
        return value, None
    return None, f"must be true or false, not {_bounded(value)}"


def _convert_int(value: Any) -> tuple[Any, str | None]:
    problem = f"must be a whole number, not {_bounded(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None, problem
    try:
        number = int(value)
        return (number, None) if isinstance(value, str) or number == value else (None, problem)
    except (ValueError, OverflowError):
        return None, problem


def _convert_float(value: Any) -> tuple[Any, str | None]:
    problem = f"must be a number, not {_bounded(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None, problem
    try:
        return float(value), None
    except (ValueError, OverflowError):
        return None, problem


_CONVERTERS: dict[Any, Callable[[Any], tuple[Any, str | None]]] = {
    str: _convert_str,
    bool: _convert_bool,
    int: _convert_int,
    float: _convert_float,
}
