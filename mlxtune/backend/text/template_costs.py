"""The cost of each operation that a chat template may use, known before it runs.

A single operation of Python cannot be interrupted, so operations of unknown cost are forbidden.
"""

from __future__ import annotations

import re
import sys
import time
from dataclasses import dataclass
from typing import Any

from jinja2.utils import Namespace

# The cost of a value, a call or an iteration of a loop, in characters.
_EACH = 16
# How often a template may go through a long conversation, and the number of characters that extend
# the time limit once more.
_LOOKS, _SECONDS_AGAIN = 256, 2**22
# The longest numbers, in bits, and widths of a format.
_MAX_BITS = 2**14
_MAX_WIDTH = 10_000
# Limit of searches from the end, whose cost is the product of both lengths.
_MAX_COMPARED = 2**31
_SEVERAL: tuple[type[Any], ...] = (
    list,
    tuple,
    type({}.keys()),
    type({}.values()),
    type({}.items()),
)
_TEXTS = (str, bytes)
_SIZED: tuple[type[Any], ...] = (*_TEXTS, dict, *_SEVERAL)


def names(text: str) -> frozenset[str]:
    """Return the words of a text as a set."""
    return frozenset(text.split())


class Harmful(Exception):
    """A template does something that no template needs; the message names it."""


class TooLarge(Harmful):
    """A template produces too much text, or too many values."""

    def __init__(self) -> None:
        super().__init__("produces more text or values than any conversation needs")


class TookTooLong(Harmful):
    """A template runs for too long."""

    def __init__(self, seconds: float) -> None:
        super().__init__(f"takes more than {seconds:g} s for a conversation")


class Forbidden(Harmful):
    """A template uses something that is not allowed, as its cost is unknown."""

    def __init__(self, what: str) -> None:
        super().__init__(f"uses {what}, which is not allowed")


@dataclass(frozen=True)
class Limits:
    """The budget of rendering a conversation. `size` counts all characters produced on the way."""

    seconds: float = 10.0
    size: int = 2**25

    def of(self, conversation: Any) -> Limits:
        """Return the limits for a conversation: longer ones have more."""
        weight = Meter(Limits(size=sys.maxsize)).weigh(conversation)
        seconds = self.seconds * (1 + weight / _SECONDS_AGAIN)
        return Limits(seconds, max(self.size, weight * _LOOKS))


class Meter:
    """The remaining budget of a rendering."""

    def __init__(self, limits: Limits) -> None:
        self.start(limits)

    def start(self, limits: Limits) -> None:
        """Reset the budget."""
        self._seconds, self._left = limits.seconds, limits.size
        self._until = time.perf_counter() + limits.seconds

    def spend(self, size: int = 0) -> None:
        """Charge for this many characters. Raises TooLarge or TookTooLong."""
        self._left -= size + _EACH
        if self._left < 0:
            raise TooLarge
        if time.perf_counter() > self._until:
            raise TookTooLong(self._seconds)

    def spend_on(self, value: Any) -> None:
        """Charge for going through all of a value, as when it is printed."""
        self.spend(len(value) if type(value) is str else self.weigh(value))

    def weigh(self, value: Any, per_level: int = 0) -> int:
        """Return the size of a value with its contents, repeated ones counted each time.

        `per_level` is added to each value for each level of nesting.
        """
        if isinstance(value, str):
            return len(value)
        total, level, each = 0, [value], 0
        while level:
            below: list[Any] = []
            for one in level:
                if isinstance(one, str):
                    total += len(one)
                elif isinstance(one, dict):
                    below += one.keys()
                    below += one.values()
                elif isinstance(one, _SEVERAL):
                    below += one
                elif isinstance(one, int):
                    total += one.bit_length()
                elif isinstance(one, Namespace):
                    raise Forbidden("a namespace as a value")
                if total + len(below) * _EACH > self._left:
                    raise TooLarge
            total += len(level) * (_EACH + each)
            level, each = below, each + per_level
        return total


def operator_cost(meter: Meter, operator: str, left: Any, right: Any) -> None:
    """Charge for `left + right` and the like."""
    if isinstance(left, int) and isinstance(right, int):
        bits, times = left.bit_length() + right.bit_length(), abs(right)
        check_bits(max(1, left.bit_length()) * times if operator == "**" else bits)
    elif operator == "+":
        meter.spend(length(left) + length(right))
    elif operator == "*":
        meter.spend(max(length(left) * _number(right), length(right) * _number(left)))
    elif operator == "%" and isinstance(left, _TEXTS):
        _format_cost(meter, left, right)


# Methods

_FROM_THE_END = names("strip lstrip rstrip rfind rindex rsplit rpartition")
TEXT_METHODS = _FROM_THE_END | names(
    "upper lower title capitalize swapcase casefold splitlines isalnum isalpha isascii "
    "isdecimal isdigit isidentifier islower isnumeric isprintable isspace istitle "
    "isupper startswith endswith removeprefix removesuffix find index count split "
    "partition"
)
_WIDENING = names("center ljust rjust zfill")
_OF_SEVERAL = names("get items keys values copy index count")


def method_cost(meter: Meter, owner: Any, name: str, args: tuple[Any, ...], options: Any) -> None:
    """Charge for a method of a str, list, dict or tuple."""
    if isinstance(owner, str):
        _text_method_cost(meter, owner, name, args, options)
    elif name in _OF_SEVERAL:
        meter.spend(meter.weigh(owner) if name in ("index", "count") else 0)
        meter.spend(sum(map(meter.weigh, args)))
    else:
        raise Forbidden(f"{type(owner).__name__}.{name}")


def _text_method_cost(
    meter: Meter, owner: str, name: str, args: tuple[Any, ...], options: Any
) -> None:
    if name in TEXT_METHODS:
        given = 0
        for value in args:
            given += len(value) if type(value) is str else meter.weigh(value)
        size = len(owner) + given
        if name in _FROM_THE_END and len(owner) * given > _MAX_COMPARED:
            raise TooLarge
        # The items of a list take more than their characters.
        pieces = owner.count(args[0]) if name.endswith("split") and args and args[0] else 0
        meter.spend(size + _EACH * pieces)
    elif name in _WIDENING:
        meter.spend(len(owner) + max(map(_number, args), default=0))
    elif name == "replace" and len(args) >= 2:
        _replace_cost(meter, owner, args[0], args[1])
    elif name == "join" and len(args) == 1:
        meter.spend(meter.weigh(args[0]) + len(owner) * length(args[0]))
    elif name in ("format", "format_map"):
        _format_cost(meter, owner, [*args, options])
    else:
        raise Forbidden(f"str.{name}")


# A field of a format, without its name, and a field whose width is a value.
_FIELD = re.compile(r"%(?:\([^)]*\))?([-+ #0.\d]*)|\{([^{}]*)\}")
_COMPUTED = re.compile(r"%(?:\([^)]*\))?[-+ #0]*(?:\*|\d*\.\*)|\{[^{}]*\{")

# Filters

# Filters that cost nothing beyond looping over their result.
_SHALLOW = names(
    "abs attr count d default filesizeformat first items last length list map random "
    "reject rejectattr reverse safe select selectattr sum"
)
_DEEP = names(
    "capitalize dictsort e escape float forceescape groupby int lower max min sort "
    "string title tojson trim unique upper urlencode wordcount"
)
_NUMBERED = names("batch center slice truncate round")
FILTERS = _SHALLOW | _DEEP | _NUMBERED | {"format", "indent", "join", "replace"}
# The most characters produced for each character of a text that is the only argument.
GROWTH = dict.fromkeys(("capitalize", "lower", "string", "title", "trim", "upper"), 3)
GROWTH |= {"tojson": 6, "e": 6, "escape": 6, "forceescape": 6, "urlencode": 12}


def filter_cost(meter: Meter, name: str, value: Any, args: tuple[Any, ...], options: Any) -> None:
    """Charge for `value | name`."""
    given = [*args, *options.values()]
    if name == "format":
        _format_cost(meter, str(value), given)
    elif name == "replace":
        meter.spend(sum(map(meter.weigh, (value, *given))))
        old, new = [*args, *(options.get(each, "") for each in ("old", "new"))][:2]
        _replace_cost(meter, str(value), str(old), str(new))
    elif name in _SHALLOW:
        meter.spend(length(value) * (_EACH if name == "list" else 1))
        if name == "sum" and any(
            isinstance(one, _SIZED) for one in (*args[1:], options.get("start"))
        ):
            raise Forbidden("a sum of values other than numbers")
    else:
        numbers = max(map(_number, given), default=0)
        if (name == "round" and numbers > 100) or (name == "tojson" and numbers > _MAX_WIDTH):
            raise TooLarge
        if name in ("int", "float") and length(value) > _MAX_WIDTH:
            raise TooLarge
        widest = numbers + sum(map(meter.weigh, given))
        # Separators and indents are repeated at each level of nesting.
        weight = meter.weigh(value, per_level=widest)
        lines = value.count("\n") + 2 if isinstance(value, str) else length(value) + 1
        meter.spend(weight * GROWTH.get(name, 1) + widest * lines + _EACH * length(value))


def _replace_cost(meter: Meter, text: str, old: Any, new: Any) -> None:
    if isinstance(old, str) and isinstance(new, str):
        meter.spend(len(text) + text.count(old) * len(new))


def _format_cost(meter: Meter, template: Any, values: Any) -> None:
    """Charge for a format: each field may print all of the values, at its own width."""
    text = template if isinstance(template, str) else ""
    if isinstance(template, bytes) or _COMPUTED.search(text.replace("{{", "").replace("}}", "")):
        raise Forbidden("a format whose widths are computed")
    fields = ["".join(groups) for groups in _FIELD.findall(text)]
    widths = [int(digits[:9]) for field in fields for digits in re.findall(r"\d+", field)]
    if max(widths, default=0) > _MAX_WIDTH:
        raise TooLarge
    meter.spend(len(text) + sum(widths) + len(fields) * meter.weigh(values))


def length(value: Any) -> int:
    """Return the length of a text or container; 0 for other values."""
    return len(value) if isinstance(value, _SIZED) else 0


def _number(value: Any) -> int:
    return abs(value) if isinstance(value, int) else 0


def check_bits(bits: int) -> None:
    """Raise TooLarge for numbers that are slow to compute with."""
    if bits > _MAX_BITS:
        raise TooLarge
