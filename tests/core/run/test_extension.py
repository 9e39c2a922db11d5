"""The stretches of a run that was resumed with more steps."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtune.core.run.extension import Extension, extended, extensions_of

METADATA: dict[str, Any] = {"step": 6, "total_steps": 8, "config": {"epochs": 2, "max_steps": None}}


def test_each_extension_keeps_the_options_until_then() -> None:
    first = extended(METADATA, 12)
    again = METADATA | first | {"step": 12, "total_steps": 12, "config": {"epochs": 3}}
    assert extensions_of(extended(again, 20)) == [
        Extension(6, 8, 2, None),
        Extension(12, 12, 3, None),
    ]


def test_run_of_the_same_length_is_not_extended() -> None:
    assert extended(METADATA, 8) == {}
    kept = extended(METADATA, 12)
    assert extended(METADATA | kept | {"total_steps": 12}, 12) == kept


@pytest.mark.parametrize("damaged", [3, [3], [{"step": -1}], {"step": 1}])
def test_damaged_extensions_count_as_absent(damaged: Any) -> None:
    assert extensions_of({"extensions": damaged}) == []
    assert extended(METADATA | {"extensions": damaged}, 8) == {}
