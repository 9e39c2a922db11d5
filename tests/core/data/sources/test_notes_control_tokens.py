"""Control tokens that are written as text in the data."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.core.data.sources.notes import ControlTokens
from tests.slow import slow_except

TEXTS = st.text("ab<|", max_size=12)


@given(st.lists(st.text("ab<|", min_size=1, max_size=4), max_size=8), TEXTS)
def test_tokens_are_found_where_a_regular_expression_finds_them(
    tokens: list[str], text: str
) -> None:
    found = ControlTokens(tokens).search(text)
    expected = re.search("|".join(map(re.escape, sorted(tokens, key=len))) or "(?!)", text)
    assert found == (expected and expected.group())


MANY = {
    "one prefix": [f"<|{'a' * 40}{n:05}|>" for n in range(60_000)],
    "each starts the next": ["<" + "a" * n for n in range(1, 3000)],
    "each in the next": ["a" * n + "b" for n in range(1, 3000)],
    "all two characters": [chr(0x4E00 + n // 250) + chr(0x4E00 + n % 250) for n in range(60_000)],
    "long": ["<" + "a" * 50_000 + str(n) for n in range(100)],
}


@pytest.mark.parametrize("name", slow_except(MANY, "one prefix", "each in the next", "long"))
def test_many_tokens_take_little_time(name: str) -> None:
    before = time.process_time()
    control = ControlTokens(MANY[name])
    for text in ("<|" + "a" * 40 + "x ", "a", "<", "一 "):
        assert control.search(text * 2_000) in (None, "<a")
    assert time.process_time() - before < 10
    assert control.search("x" + MANY[name][0]) == (None if name == "long" else MANY[name][0])
