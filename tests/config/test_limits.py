"""The table of limits, and JSON that is counted before it is read."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import pytest

from mlxtune.config import limits
from mlxtune.config.limits import Limits, TooLargeError, check_value, limits_of, parse_json

SMALL = Limits(1000, values=10, entries=4, text=20, digits=5, items=3, depth=3)


@pytest.mark.parametrize(
    ("value", "said"),
    [
        ([1, 2, 3], None),
        ([1, 2, 3, 4], "has a list or object of 4 values, more than 3"),
        ({"a": 1, "b": 2, "c": 3, "d": 4}, None),
        ({"a": 1, "b": 2, "c": 3, "d": 4, "e": 5}, "has a list or object of 5 values, more than 4"),
        ("x" * 20, None),
        ("x" * 21, "has text of 21 characters"),
        ({"x" * 21: 1}, "has text of 21 characters"),
        (99_999, None),
        (-999_999, "has a number of more than 5 digits"),
        ([[[1]]], None),
        ([[[[1]]]], "is nested too deep"),
        ([[1, 2, 3], [1, 2, 3], [1, 2, 3]], "has more than 10 values"),
        ("," * 20, None),
        ('[{\\",[' * 2, None),
    ],
)
def test_value_beyond_a_limit_is_refused(value: Any, said: str | None) -> None:
    content = json.dumps(value).encode()
    if said is None:
        assert parse_json(content, SMALL, "a.json") == value
    else:
        with pytest.raises(TooLargeError) as raised:
            parse_json(content, SMALL, "a.json")
        assert str(raised.value).startswith(f"a.json {said}")


def test_millions_of_values_are_counted_before_one_is_made() -> None:
    content = b"[" + b"[]," * 1_000_000 + b"[]]"
    tracemalloc.start()
    try:
        with pytest.raises(TooLargeError, match="more than 500,000 values"):
            parse_json(content, limits.OWN_JSON_LIMITS, "run.json")
        assert tracemalloc.get_traced_memory()[1] < 10_000_000
    finally:
        tracemalloc.stop()


def test_text_full_of_brackets_is_one_value() -> None:
    content = json.dumps({"chat_template": '{% if x["y"] %}[,' * 20_000}).encode()
    assert not limits.has_more_values(content, 1)
    assert limits.has_more_values(content + b"[1, 2]", 2)


def test_string_without_an_end_is_read_once() -> None:
    assert not limits.has_more_values(b'{"a": "' + b'\\",' * 200_000, 100_000)


def test_cyclic_value_is_visited_once() -> None:
    value: list[Any] = []
    value.append(value)
    for _ in range(40):
        value = [value, value]
    check_value(value, limits.OPTIONS_LIMITS, "options.yaml")


def test_constants_are_json_of_models_only() -> None:
    content = b'{"time_step_limit": [0.0, Infinity]}'
    assert parse_json(content, limits.CONFIG_LIMITS, "config.json")
    with pytest.raises(ValueError, match=r"run\.json is not valid JSON"):
        parse_json(content, limits.OWN_JSON_LIMITS, "run.json", constants=False)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("config.json", limits.CONFIG_LIMITS),
        ("merges.txt", limits.MERGES_LIMITS),
        ("tokenizer.json", limits.TOKENIZER_LIMITS),
        ("model.safetensors.index.json", limits.INDEX_LIMITS),
        ("processor_config.json", limits.OTHER_JSON_LIMITS),
        ("tools.jinja", limits.TEMPLATE_LIMITS),
        ("LICENSE", limits.OTHER_LIMITS),
        ("a.tiktoken", limits.OTHER_LIMITS),
    ],
)
def test_kind_of_a_file_is_known_by_its_name(name: str, kind: Limits) -> None:
    assert limits_of(name) is kind


@pytest.mark.parametrize("digits", ["1e999", "-1e999", "1" * 99 + "e300"])
def test_number_that_overflows_to_infinity_is_refused(digits: str) -> None:
    with pytest.raises(ValueError, match="not valid JSON"):
        parse_json(f"[{digits}]".encode(), limits.OWN_JSON_LIMITS, "run.json", constants=False)
