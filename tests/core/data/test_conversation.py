"""The types of rows, and the names and the text of calls."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtune.core.data.conversation import Conversation, Message, Pair, function_name, to_json
from mlxtune.core.data.problems import BadRowError


@pytest.mark.parametrize(
    ("call", "name"),
    [
        ({"type": "function", "function": {"name": "add"}}, "add"),
        ({"name": "add", "arguments": {}}, "add"),
        ({"function": "add"}, None),
        ({"name": 3}, None),
        ({}, None),
    ],
)
def test_call_has_the_name_of_its_function(call: dict[str, Any], name: str | None) -> None:
    assert function_name(call) == name


def test_json_of_a_template_keeps_its_letters() -> None:
    assert to_json({"name": "é", "n": 1}) == '{"name": "é", "n": 1}'
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    with pytest.raises(BadRowError, match="JSON nested too deeply"):
        to_json(nested)


def test_pair_is_in_the_row_of_its_answers() -> None:
    chosen, rejected = (Conversation(7, (Message("assistant", text),)) for text in ("Yes", "No"))
    pair = Pair(chosen, rejected)
    assert (pair.row, pair.answers) == (7, (chosen, rejected))
