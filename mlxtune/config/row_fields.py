"""The names of a row's fields, and --field, which reads a field from another key."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from mlxtune.errors import shorten

ROW_NAMES = (
    *("messages", "tools", "prompt", "completion", "instruction", "input", "output"),
    *("system", "history", "conversations", "text"),
)
MESSAGE_NAMES = ("role", "content", "from", "value")
FIELD_NAMES = (*ROW_NAMES, *MESSAGE_NAMES)


def parse_fields(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `name=key` pairs: a field's name, and the key that the file uses for it.

    Raises ValueError with one sentence for the first wrong pair.
    """
    fields: dict[str, str] = {}
    for pair in pairs:
        name, equals, key = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{shorten(pair)} is not a pair such as prompt=question")
        if name not in FIELD_NAMES:
            close = difflib.get_close_matches(name, FIELD_NAMES, 1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"{shorten(name)} is not a field{hint} (known: {', '.join(FIELD_NAMES)})"
            )
        if name in fields:
            raise ValueError(
                f"{name} is given twice, as {shorten(fields[name])} and {shorten(key)}"
            )
        fields[name] = key
    return fields
