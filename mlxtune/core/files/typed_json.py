"""Reads our JSON into dataclasses: every value has its field's type, and every number is finite."""

from collections import Counter
from dataclasses import is_dataclass
from functools import cache
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

# A run's records hold integers in 64 bits, and float32 arithmetic yields no larger floats.
_MAX_INT, _MAX_FLOAT = 2**63, 1e40

_hints = cache(get_type_hints)


def from_json(kind: Any, value: Any) -> Any:
    """Return a JSON value as a `kind`: a dataclass, a collection, an optional or plain value.

    Whole numbers are at least 0. Raises ValueError, which names the field, for any other value.
    """
    if kind is int or kind is float:
        if type(value) is int:
            fits = 0 <= value < _MAX_INT
        else:  # false for NaN and infinity
            fits = kind is float and type(value) is float and abs(value) < _MAX_FLOAT
        if fits:
            return value
    elif kind is str or kind is bool:
        if isinstance(value, kind):
            return value
    elif is_dataclass(kind):
        return _dataclass(kind, value)
    elif isinstance(kind, UnionType):
        return None if value is None else from_json(get_args(kind)[0], value)
    elif get_origin(kind) in (list, tuple) and isinstance(value, list):
        return get_origin(kind)(from_json(get_args(kind)[0], each) for each in value)
    elif get_origin(kind) is dict and isinstance(value, dict):
        return {name: from_json(get_args(kind)[1], each) for name, each in value.items()}
    elif get_origin(kind) is Counter and isinstance(value, dict):
        return Counter({name: from_json(int, each) for name, each in value.items()})
    raise ValueError(f"it is {value!r:.40}")


def _dataclass(kind: Any, value: Any) -> Any:
    fields, hints = {}, _hints(kind)
    if not isinstance(value, dict) or not value.keys() <= hints.keys():
        raise ValueError("it has missing or unknown fields")
    for name, each in value.items():
        try:
            fields[name] = from_json(hints[name], each)
        except ValueError as error:
            raise ValueError(f"its {name} is {each!r:.40}") from error
    try:
        return kind(**fields)
    except TypeError as error:
        raise ValueError("it has missing or unknown fields") from error
