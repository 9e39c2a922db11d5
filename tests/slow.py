"""Which cases of a matrix run by default; the others carry the marker `slow`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """Return a set of parameters that is run with `pytest -m slow` only."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all values of a parameter, slow but for the quick ones."""
    values = list(values)
    missing = [value for value in quick if value not in values]
    assert not missing, f"{missing} are none of {values}"
    return [value if value in quick else slow(value) for value in values]
