"""Fixtures for tests of the commands."""

import pytest


@pytest.fixture(autouse=True)
def _short_checks(short_checks: None) -> None:
    """Shorten the checks of every run, also in child processes."""
