"""The entries of requests that reach mlx-lm's thread; test_api.py sends them to a server."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtune.serve.api_requests import (
    _NUMBERS,
    RefusedRequestError,
    checked_body,
    stops_of,
    tools_of,
)


@pytest.mark.parametrize(
    ("body", "checked"),
    [
        ({"temperature": 1e-320}, {"temperature": 0.0}),
        (
            {"xtc_probability": 1, "xtc_threshold": 0},
            {"xtc_probability": 1.0, "xtc_threshold": 0.0},
        ),
        ({"top_k": 100}, {"top_k": 0}),
        ({"top_k": 99}, {"top_k": 99}),
        ({"max_tokens": 10**12}, {"max_tokens": 512}),
        ({"max_completion_tokens": 7, "max_tokens": 9}, {"max_tokens": 7}),
        ({"stream_options": {"include_usage": 1}}, {"stream_options": {"include_usage": True}}),
        ({"temperature": None, "seed": None, "max_tokens": None}, {}),
        ({"adapters": "/etc", "draft_model": "x", "user": "me"}, {}),
    ],
    ids=str,
)
def test_entries_are_within_the_limits_of_the_model(
    body: dict[str, Any], checked: dict[str, Any]
) -> None:
    found = checked_body(body, 100, 512)
    # mlx-lm refuses some whole numbers.
    assert not any(isinstance(found[name], int) for name in _NUMBERS & found.keys())
    assert found == {"stream_options": {"include_usage": False}} | checked
    assert not body.get("max_tokens") or checked_body(body, 100, None)["max_tokens"] >= 7


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({"temperature": "hot"}, "temperature must be a number"),
        ({"top_p": True}, "top_p must be a number"),
        ({"xtc_threshold": [0.1]}, "xtc_threshold must be a number"),
        ({"max_tokens": 1.5}, "max_tokens must be a whole number"),
        ({"max_completion_tokens": "9"}, "max_completion_tokens must be a whole number"),
        ({"seed": "7"}, "seed must be a whole number"),
        ({"top_p": 10**400}, "top_p must be from 0 to 1"),
        ({"xtc_threshold": 0.7}, "xtc_threshold must be from 0 to 0.5"),
    ],
)
def test_invalid_number_is_named(body: dict[str, Any], problem: str) -> None:
    with pytest.raises(RefusedRequestError) as raised:
        checked_body(body, 100, 512)
    assert str(raised.value) == problem


def test_error_names_the_entry() -> None:
    with pytest.raises(RefusedRequestError, match="logit_bias must have numbers") as raised:
        checked_body({"logit_bias": {"100": 1}}, 100, None)
    assert (raised.value.status, raised.value.content["error"]["param"]) == (400, "logit_bias")


@pytest.mark.parametrize("stop", ["", "a" * 1001, [1]])
def test_error_of_a_stop_text_has_its_limits(stop: object) -> None:
    with pytest.raises(RefusedRequestError, match="stop must be text of 1 to 1,000 characters"):
        stops_of({"stop": stop})


def test_stops_and_tools_are_lists() -> None:
    assert stops_of({"stop": "a"}) == stops_of({"stop": ["a"]}) == ("a",)
    tools = [{"type": "function"}]
    assert tools_of({"tools": tools}) == tools
    assert tools_of({"tools": tools, "tool_choice": "none"}) is None
