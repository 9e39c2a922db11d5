"""Exchanged messages are checked, in case MLX returns uninitialised memory."""

from __future__ import annotations

from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.backend.workers.workers import Workers
from mlxtune.errors import WorkerError


class Group:
    """A group of two workers, as seen by worker 0."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2


@pytest.fixture
def other(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """A fake worker 1, which repeats worker 0's messages until the test changes its answers."""
    state: dict[str, Any] = {"gone": None, "last": {}}

    def all_gather(own: mx.array, group: Any) -> mx.array:
        answer = own if state["gone"] is None else state["gone"](own)
        state["last"][own.size] = own
        return mx.concatenate([own, answer])

    monkeypatch.setattr(mx.distributed, "all_gather", all_gather)
    return state


def test_workers_exchange_texts(other: dict[str, Any]) -> None:
    workers = Workers(Group())
    assert workers.all_gather_text("naïve") == ["naïve", "naïve"]
    assert workers.all_gather_text("") == ["", ""]


@pytest.mark.parametrize("held", ["noise", "zeros", "the answer before"])
def test_garbage_from_a_lost_worker_is_rejected(other: dict[str, Any], held: str) -> None:
    workers = Workers(Group())
    workers.all_gather_text("before")
    generator = np.random.default_rng(0)
    other["gone"] = {
        "noise": lambda own: mx.array(generator.integers(0, 256, own.shape, np.uint8)),
        "zeros": mx.zeros_like,
        "the answer before": lambda own: other["last"][own.size],
    }[held]
    with pytest.raises(WorkerError, match="another worker is gone"):
        workers.all_gather_text("before")
