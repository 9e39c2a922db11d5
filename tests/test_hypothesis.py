"""Property tests use fixed examples by default, on every machine."""

from __future__ import annotations

from hypothesis import settings


def test_default_run_draws_the_same_examples_and_knows_no_clock() -> None:
    assert settings.default is not None
    assert settings.default.derandomize
    assert settings.default.deadline is None
    assert settings.default.database is None
