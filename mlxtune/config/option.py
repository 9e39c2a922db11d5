"""An option: its meaning, its valid values, and how a value is read."""

import dataclasses
import math
import operator
import os
import re
import reprlib
import typing
from collections.abc import Mapping
from enum import Enum, auto
from types import UnionType
from typing import Any

# Computations use 64-bit integers.
_INT_BOUND = 2**63


class Effect(Enum):
    """What an option of a run affects, and so whether a resumed run may change the option."""

    RESULT = auto()  # what is learned: must stay the same
    LENGTH = auto()  # how long the run trains: may only grow
    INPUT = auto()  # which files are read: may move, but their content is compared
    EXECUTION = auto()  # time, memory, or which files of the run are kept: may change
    PLACES = auto()  # where files are, or how much is printed: may change; not compared in reports
    COMMAND = auto()  # a command other than train


class Section(Enum):
    """The sections of --help, in their order."""

    FILES = "Files"
    DATA = "Data"
    INSPECT = "Inspect"
    BENCH = "Bench"
    PLAN = "Plan"
    GENERATION = "Generation"
    EXPORT = "Export"
    LORA = "LoRA"
    TRAINING = "Training"
    RUN = "Run"

    def option(self, default: Any, help: str, affects: Effect, **meaning: Any) -> Any:
        """Define an option as a field of a config; `meaning` has further fields of Option."""
        option = Option(help, affects, self, **meaning)
        return dataclasses.field(default=default, metadata={"option": option})


RESULT, LENGTH, INPUT, EXECUTION, PLACES, COMMAND = Effect
FILES, DATA, INSPECT, BENCH, PLAN, GENERATION, EXPORT, LORA, TRAINING, RUN = Section


@dataclasses.dataclass(frozen=True)
class Option:
    """The meaning of an option, and the restrictions on its values beyond the type."""

    help: str
    # No default, so that each new option must state what it affects.
    affects: Effect
    section: Section
    # The option changes the examples of a data file, so the key of cached files includes it.
    encodes: bool = False
    # A file or folder: a relative path starts in the folder where the run was started.
    path: bool = False
    # False: never taken from a checkpoint, which another user may have written.
    inherited: bool = True
    at_least: float | None = None
    at_most: float | None = None
    above: float | None = None
    below: float | None = None
    choices: tuple[str, ...] = ()
    # Other names of choices, for the hint in an error.
    meant: tuple[tuple[str, str], ...] = ()
    metavar: str | None = None
    required: bool = False
    # The noun, with an example, of an option that is its command's argument and has no flag.
    argument: str = ""
    # The flag may be repeated.
    several: bool = False

    @property
    def default_text(self) -> str:
        """The meaning of None, as the help gives it."""
        _, separator, text = self.help.partition("default: ")
        return text.removesuffix(".") if separator else "none"

    @property
    def missing(self) -> str:
        """The end of the error message if a required option is not given."""
        return "is required" + (f": {_one_of(self.choices)}" if self.choices else "")

    def read(self, value: Any, annotation: Any) -> Any:
        """Return a value converted to `annotation`.

        Raises ValueError with the problem, which starts with a verb: the caller prefixes the
        option's name.
        """
        if isinstance(value, bool) and annotation is str and {"on", "off"} <= {*self.choices}:
            value = "on" if value else "off"  # as YAML reads `thinking: on`
        elif isinstance(value, int) and not isinstance(value, bool) and self.choices:
            value = str(value)  # as in `quantize: 4`
        if isinstance(annotation, UnionType):
            if value is None:
                return None
            annotation = next(arg for arg in typing.get_args(annotation) if arg is not type(None))
        value = self._spelt(self._convert(value, annotation))
        self._check(value)
        return value

    def _convert(self, value: Any, annotation: Any) -> Any:
        if typing.get_origin(annotation) is tuple:
            if self.metavar == "REWARD":
                _check_no_function(value)
            return _read_items(value, self.path) if self.several else _read_names(value)
        if annotation is str:
            if isinstance(value, str | os.PathLike):
                return os.fspath(value)
            raise ValueError(f"must be text, {_not(value)}")
        if annotation is bool:
            if isinstance(value, bool):
                return value
            raise ValueError(f"must be true or false, {_not(value)}")
        return _read_number(value, annotation)

    def _spelt(self, value: Any) -> Any:
        """Return a choice in its defined case: `DPO` becomes dpo."""
        spelling = {choice.lower(): choice for choice in self.choices}
        if isinstance(value, tuple):
            return tuple(spelling.get(each.lower(), each) for each in value)
        return spelling.get(value.lower(), value) if isinstance(value, str) else value

    def _check(self, value: Any) -> None:
        empty = value == () and (self.required or not self.several)
        if empty or (isinstance(value, str) and not value.strip()):
            empty_text = "is empty: pass a value, or leave it out"
            raise ValueError(self.missing if self.required else empty_text)
        for item in value if isinstance(value, tuple) else (value,):
            self._check_item(item)

    def _check_item(self, value: Any) -> None:
        # File names in another encoding give lone surrogates. MLX and tokenizers take only UTF-8.
        if isinstance(value, str) and any("\ud800" <= c <= "\udfff" for c in value):
            rename = ": rename it" if self.path else ""
            raise ValueError(f"must be text in UTF-8, {_not(value)}{rename}")
        if self.choices and value not in self.choices:
            ours = dict(self.meant).get(value.lower())
            hint = f": use {ours}" if ours else ""
            raise ValueError(f"must be {_one_of(self.choices)}, {_not(value)}{hint}")
        if self.path and "\0" in value:
            raise ValueError(f"must be a path without null characters, {_not(value)}")
        limits = (
            (self.at_least, "at least", operator.ge),
            (self.at_most, "at most", operator.le),
            (self.above, "above", operator.gt),
            (self.below, "below", operator.lt),
        )
        for limit, name, holds in limits:
            if limit is not None and not holds(value, limit):
                percent = ""
                if name == "at most" and limit <= 1 and 2 <= value <= 100:
                    percent = f": {value:g}% is {value / 100:g}"
                raise ValueError(f"must be {name} {limit:g}, not {value}{percent}")


def _not(value: Any) -> str:
    # Bounded, because YAML aliases turn a few lines into a list of billions of items.
    short = _Short()
    short.maxstring = short.maxother = short.maxlong = 200
    return f"not {short.repr(value)}"


class _Short(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Return an integer as text, in hexadecimal if Python may refuse to write it in decimal."""
        return hex(x)[:20] + "…" if x.bit_length() > 1000 else super().repr_int(x, level)


def _read_names(value: Any) -> tuple[str, ...]:
    names = value.split(",") if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise ValueError(f"must be names separated by commas, {_not(value)}")
    return tuple(dict.fromkeys(name.strip() for name in names if name.strip()))


def _check_no_function(value: Any) -> None:
    """Raise ValueError for a reward function instead of its name, as other tools take it."""
    for each in value if isinstance(value, list | tuple) else (value,):
        if callable(each):
            name = str(getattr(each, "__name__", ""))
            name = name if name.isidentifier() else "FUNCTION"
            raise ValueError(f"takes no function: put it into a file, and name it: FILE.py:{name}")


def _read_items(value: Any, are_paths: bool) -> tuple[str, ...]:
    if isinstance(value, Mapping):  # as `data: {a.jsonl: 2}` in a config file
        if any(isinstance(each, list | tuple) for each in value.values()):
            raise ValueError("must be rows, not columns: pass a list of objects, one for each row")
        if not all(map(_is_short, value.values())):
            raise ValueError(f"must have text or a number for each name, {_not(value)}")
        value = [f"{name}={each}" for name, each in value.items()]
    items = value if isinstance(value, list | tuple) else [value]
    if are_paths and any(isinstance(item, Mapping) for item in items):
        raise ValueError("must be paths: pass rows as train(data=rows), not in a config")
    if not all(isinstance(item, str | os.PathLike) for item in items):
        raise ValueError(f"must be text or a list of texts, {_not(value)}")
    texts = map(os.fspath, items)
    return tuple(text for text in texts if (text.strip() if are_paths else text))


def _is_short(value: Any) -> bool:
    """Return whether a value is safe to convert to text.

    Other values can be huge, or numbers that Python refuses to convert.
    """
    return isinstance(value, str) or (isinstance(value, int | float) and abs(value) < _INT_BOUND)


# A number with a unit, such as 12GB or 20%.
_QUANTITY = re.compile(r"(\d{1,15}(?:\.\d{1,15})?|\.\d{1,15}) ?([A-Za-z%]{1,8})")
# The powers of 1,024 or 1,000 of suffixes of numbers of tokens, rows and steps.
_SUFFIXES = {"k": 1, "m": 2}
# The gigabytes in other units of memory, whose options are in GB.
_GB_PER_UNIT = {"t": 1000, "tb": 1000, "tib": 1024, "m": 1e-3, "mb": 1e-3, "mib": 1e-3}


def _without_unit(number: str, unit: str, kind: type[int] | type[float]) -> str:
    """Return how to write a number with a unit; `kind` is the type of the option."""
    value, power = float(number), _SUFFIXES.get(unit.lower())
    if kind is int and power is not None:
        binary, decimal = (round(value * base**power) for base in (1024, 1000))
        return f"use {binary} or {decimal}"
    if kind is float and unit == "%":
        return f"use {value / 100:g}"
    if kind is float and unit.lower() in _GB_PER_UNIT:
        return f"use {value * _GB_PER_UNIT[unit.lower()]:g}"
    return f"leave out {unit}"


def _read_number(value: Any, kind: type[int] | type[float]) -> int | float:
    problem = f"must be a {'whole number' if kind is int else 'number'}, {_not(value)}"
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError(problem)
    try:
        number = kind(value)
    except (ValueError, OverflowError):
        if isinstance(value, str) and (unit := _QUANTITY.fullmatch(value)):
            problem += f": {_without_unit(unit[1], unit[2], kind)}"
        raise ValueError(problem) from None
    if not isinstance(value, str) and kind is int and number != value:
        raise ValueError(problem)
    if kind is int and abs(number) >= _INT_BOUND:
        raise ValueError("must be a whole number between -2^63 and 2^63")
    if not math.isfinite(number):
        raise ValueError(f"must be a finite number, not {number}")
    return number


def _one_of(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"one of {', '.join(choices)}"
