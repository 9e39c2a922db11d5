"""Markers for cases that do not run by default, or not on every machine."""

from __future__ import annotations

import os
from collections.abc import Iterable
from typing import Any

import pytest

# tests/long/simulated.py lets MLX compile nothing.
compiled = pytest.mark.skipif("MLX_DISABLE_COMPILE" in os.environ, reason="MLX compiles nothing")


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
