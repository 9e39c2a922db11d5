"""Checks tools and tool calls, which are objects, or such objects as JSON text; raises BadRow."""

from typing import Any

from mlxtune.core.data.conversation import function_name
from mlxtune.core.data.problems import BadRow, json_type, parse_json

_OF_BARE_CALL = {"name", "id", "type"}


def parse_tools(tools: Any) -> tuple[dict[str, Any], ...]:
    """Check and convert `tools`: a list of objects, or such a list as JSON text. Raises BadRow."""
    if isinstance(tools, str):
        tools = parsed_text(tools, "tools")
    return objects_in(tools, "tools")


def objects_in(value: Any, key: str) -> tuple[dict[str, Any], ...]:
    """Return a list of objects, () for null."""
    if value is None:
        return ()
    if not isinstance(value, list) or not all(isinstance(item, dict) for item in value):
        raise BadRow(f"'{key}' is not a list of objects")
    return tuple(value)


def parsed_text(text: str, key: str) -> Any:
    """Return the value of JSON text, None for blank text."""
    kind = f"'{key}' is text that is not JSON"
    return parse_json(text, kind, has_constants=False) if text.strip() else None


def calls_in(value: Any, where: str) -> list[dict[str, Any]]:
    """Convert `{"name": …, "arguments": …}` or a list of them, as JSON text or as values."""
    if isinstance(value, str):
        value = parse_json(value, "a function_call is not JSON", has_constants=False)
    calls = value if isinstance(value, list) else [value]
    for call in calls:
        if not isinstance(call, dict) or not isinstance(call.get("name"), str):
            raise BadRow("a function_call has no name", where)
    return [{"type": "function", "function": call} for call in calls]


def plain_call(call: dict[str, Any], where: str) -> dict[str, Any]:
    """Return a call with its arguments parsed from JSON text, if they are text.

    OpenAI's files have JSON text; templates expect an object, and mlx_lm.server parses the text.
    Raises BadRow for arguments that are no object: templates render them in different ways.
    """
    if function_name(call) is None:  # rendering raises BadRow
        return call
    nested = isinstance(call.get("function"), dict)
    function = call["function"] if nested else call
    # A call without arguments has none, unless they are under another key.
    bare = function.keys() <= _OF_BARE_CALL
    arguments = "{}" if bare else function.get("arguments")
    if isinstance(arguments, dict):
        return call
    if not isinstance(arguments, str):
        problem = json_type(arguments) if "arguments" in function else "null or missing"
        raise _bad_arguments(where, problem)
    try:
        parsed = parse_json(arguments, has_constants=False)
    except BadRow as problem:
        raise _bad_arguments(where, str(problem)) from problem
    if not isinstance(parsed, dict):
        raise _bad_arguments(where, f"{json_type(parsed)} as JSON text")
    function = function | {"arguments": parsed}
    return call | {"function": function} if nested else function


def _bad_arguments(where: str, problem: str) -> BadRow:
    kind = "a tool call whose arguments are not an object"
    return BadRow(kind, f"{where}: 'arguments' is {problem}: write an object, {{}} if empty")
