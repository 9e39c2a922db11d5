"""Markers for the cases of a matrix that do not run by default."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest


def slow(*values: Any, id: str | None = None) -> Any:
    """Return a parameter set that runs only with `pytest -m slow`."""
    return pytest.param(*values, marks=pytest.mark.slow, id=id)


def long(*values: Any, id: str | None = None) -> Any:
    """Return a parameter set that runs only with `pytest -m long`, and not in CI."""
    return pytest.param(*values, marks=pytest.mark.long, id=id)


def slow_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all values of a parameter, marked slow except for the quick ones."""
    return [value if value in quick else slow(value) for value in _all(values, quick)]


def long_except(values: Iterable[Any], *quick: Any) -> list[Any]:
    """Return all values of a parameter, marked long except for the quick ones."""
    return [value if value in quick else long(value) for value in _all(values, quick)]


def _all(values: Iterable[Any], quick: tuple[Any, ...]) -> list[Any]:
    values = list(values)
    missing = [value for value in quick if value not in values]
    assert not missing, f"{missing} are none of {values}"
    return values
