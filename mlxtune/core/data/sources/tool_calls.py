"""Checks tools and tool calls, as objects or as their JSON text; raises BadRowError."""

import json
import math
import re
from collections.abc import Iterable
from decimal import Decimal
from typing import Any

from mlxtune.core.data.conversation import function_name
from mlxtune.core.data.problems import BadRowError, json_type, parse_row_json

# Text with a number that may be longer or larger than a float.
_LONG_NUMBER = re.compile(r"[\d.]{17}|\d[eE][+-]?\d{3}")
_BARE_CALL_KEYS = {"name", "id", "type"}


def parse_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Check and convert `tools`: a list of objects, or such a list as JSON text.

    Raises BadRowError.
    """
    if isinstance(tools, str):
        tools = parsed_text(tools, "tools")
    return objects_in(tools, "tools")


def objects_in(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    """Return a list of objects, () for null."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRowError(f"'{key}' is not a list of objects")
    return tuple(value)


def parsed_text(text: str, key: str) -> Any:
    """Return the value of JSON text, None for blank text."""
    kind = f"'{key}' is text that is not JSON"
    return parse_row_json(text, kind, has_constants=False) if text.strip() else None


def calls_in(value: Any, where: str) -> list[dict[str, Any]]:
    """Convert `{"name": …, "arguments": …}` or a list of them, as JSON text or as values."""
    if isinstance(value, str):
        value = parse_row_json(value, "a function_call is not JSON", has_constants=False)
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRowError("a function_call has no name", where)
    return [{"type": "function", "function": call} for call in calls]


def plain_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call with its arguments parsed from JSON text, if they are text.

    OpenAI's files have JSON text; templates expect an object, and mlx_lm.server parses the text.
    Text stays if a number in it is one that no float equals. Raises BadRowError for arguments that
    are not an object: templates render them in different ways.
    """
    if function_name(call) is None:  # rendering raises BadRowError
        return call
    nested = isinstance(call.get("function"), dict)
    function = call["function"] if nested else call
    # A call with no other keys has no arguments.
    bare = function.keys() <= _BARE_CALL_KEYS
    arguments = "{}" if bare else function.get("arguments")
    if isinstance(arguments, dict):
        check_numbers(arguments, where)
        return call
    if not isinstance(arguments, str):
        problem = json_type(arguments) if "arguments" in function else "null or missing"
        raise _bad_arguments(where, problem)
    try:
        parsed = parse_row_json(arguments, has_constants=False)
    except BadRowError as problem:
        raise _bad_arguments(where, str(problem)) from problem
    if not isinstance(parsed, dict):
        raise _bad_arguments(where, f"{json_type(parsed)} as JSON text")
    if _LONG_NUMBER.search(arguments) and _changes_numbers(arguments):
        return call
    function = function | {"arguments": parsed}
    return call | {"function": function} if nested else function


def with_objects(calls: Iterable[dict[str, Any]], where: str) -> list[dict[str, Any]]:
    """Return calls without arguments that stay text, as `plain_call` leaves them.

    Raises BadRowError.
    """
    converted = []
    for call in calls:
        function = call["function"] if isinstance(call.get("function"), dict) else call
        if isinstance(text := function.get("arguments"), str):
            function = function | {"arguments": parse_row_json(text)}
            check_numbers(function["arguments"], where)
            call = function if "arguments" in call else call | {"function": function}
        converted.append(call)
    return converted


def check_numbers(arguments: dict[str, Any], where: str) -> None:
    """Raise BadRowError for a number that JSON cannot write, such as Infinity."""
    try:
        json.dumps(arguments, allow_nan=False)
    except ValueError as error:
        kind = "a tool call with a number that JSON lacks"
        raise BadRowError(kind, f"{where}: Infinity or beyond 1e308: write it as text") from error
    except RecursionError:  # rendering raises BadRowError
        return


def _changes_numbers(text: str) -> bool:
    """Return whether Python's floats change a number of JSON text."""
    changed: list[str] = []

    def read(number: str) -> float:
        value = float(number)
        try:
            if not math.isfinite(value) or Decimal(repr(value)) != Decimal(number):
                changed.append(number)
        except ArithmeticError:  # an exponent beyond Decimal's
            changed.append(number)
        return value

    json.JSONDecoder(parse_float=read).decode(text)
    return bool(changed)


def _bad_arguments(where: str, problem: str) -> BadRowError:
    kind = "a tool call whose arguments are not an object"
    return BadRowError(kind, f"{where}: 'arguments' is {problem}: write an object, {{}} if empty")
