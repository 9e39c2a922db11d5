"""Several observers of one run."""

from __future__ import annotations

import inspect
from typing import Any

import pytest

from mlxtune.core.training.observer import Observers, TrainingObserver

CALLS = [name for name in vars(TrainingObserver) if name.startswith("on_")]


class Listener(TrainingObserver):
    """Records every call."""

    def __init__(self, name: str, heard: list[tuple[Any, ...]]) -> None:
        for call in CALLS:
            setattr(self, call, lambda *args, call=call: heard.append((name, call, *args)))


@pytest.mark.parametrize("call", CALLS)
def test_each_observer_hears_of_everything_in_their_order(call: str) -> None:
    heard: list[tuple[Any, ...]] = []
    both = Observers([Listener("first", heard), Listener("second", heard)])
    count = len(inspect.signature(getattr(TrainingObserver, call)).parameters) - 1
    arguments = [object() for _ in range(count)]
    getattr(both, call)(*arguments)
    assert heard == [("first", call, *arguments), ("second", call, *arguments)]
