"""Nulls in the objects of rows: keys that are absent, or values that a template writes.

Arrow gives all objects of a list the same keys, and fills them with null. So a row that went
through Arrow, as JSON too, shows nulls that nobody writes, in messages or as a tool's property:

    {"role": "user", "content": "Hi", "tool_calls": null}
    {"properties": {"city": {"type": "string"}, "amount": null}}

In other rows, a null in arguments or tools is a value: templates write it.
"""

import math
from collections.abc import Iterator, Mapping
from typing import Any

# The keys whose values templates write as JSON.
_JSON_KEYS = frozenset(["arguments", "args", "tools", "functions"])


def without_nulls(row: Mapping[str, Any], *, from_arrow: bool = False) -> dict[str, Any]:
    """Return a row whose objects lack their nulls, but for values that a template writes.

    The row's own nulls name its empty fields. NaN, which pandas writes for an empty cell, is null.
    """
    keeps = not from_arrow and writes_nulls(row) and not (_is_even(row) and _is_filled(row))
    return {
        key: None if _is_null(value) else _present(value, keeps, keeps and key in _JSON_KEYS)
        for key, value in row.items()
    }


def writes_nulls(row: Any) -> bool:
    """Return whether a template writes nulls of a row, in arguments or tools."""
    return any(
        None in each.values() for objects, written in _objects(row) if written for each in objects
    )


def may_be_filled(row: Mapping[str, Any]) -> bool:
    """Return whether a row without Arrow's signs may have nulls from Arrow all the same."""
    return writes_nulls(row) and _is_even(row)


def _is_null(value: Any) -> bool:
    return value is None or _is_nan(value)


def _is_nan(value: Any) -> bool:
    return isinstance(value, float) and math.isnan(value)


def _present(value: Any, keeps: bool, written: bool) -> Any:
    """Return a value without the nulls in its objects; `keeps` those in `written` values."""
    if isinstance(value, dict):
        is_absent = _is_nan if written else _is_null
        return {
            key: _present(item, keeps, written or (keeps and key in _JSON_KEYS))
            for key, item in value.items()
            if not is_absent(item)
        }
    if isinstance(value, list):
        return [_present(item, keeps, written) for item in value]
    return value


def _is_even(row: Any) -> bool:
    """Return whether all objects of each list in a row have the same keys."""
    return all(each.keys() == objects[0].keys() for objects, _ in _objects(row) for each in objects)


def _is_filled(row: Mapping[str, Any]) -> bool:
    """Return whether a row has nulls that only Arrow writes.

    Anyone may write null for the content of an answer with calls, or in a lone message.
    """
    for objects, written in _objects(row):
        for each in objects:
            properties = each.get("properties") if written else None
            if isinstance(properties, dict) and None in properties.values():
                return True
            nulls = {key for key, value in each.items() if value is None}
            if not written and len(objects) > 1 and nulls - {"content"}:
                return True
    return False


def _objects(value: Any, written: bool = False) -> Iterator[tuple[list[dict[str, Any]], bool]]:
    """Yield the objects of each list in a value, or one object that is in none.

    Each comes with whether a template writes it, as a part of arguments or tools.
    """
    siblings = value if isinstance(value, list) else [value]
    objects = [each for each in siblings if isinstance(each, dict)]
    if objects:
        yield objects, written
    for each in siblings:
        if isinstance(each, list):
            yield from _objects(each, written)
    for each in objects:
        for key, item in each.items():
            if isinstance(item, dict | list):
                yield from _objects(item, written or key in _JSON_KEYS)
