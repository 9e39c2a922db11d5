"""What tests of the commands share."""

import pytest


@pytest.fixture(autouse=True)
def _short_checks(short_checks: None) -> None:
    """Shorten the checks of every run, also those that Python starts."""
