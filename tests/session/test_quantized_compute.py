"""The form of quantised products that several workers share."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mlxtune.backend.models import layers, loading
from mlxtune.backend.models.layers import TimedProducts
from mlxtune.backend.workers.group import Workers
from mlxtune.config import TrainConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import DataSample
from mlxtune.core.steps.memory_terms import BatchLoad
from mlxtune.session.quantized_compute import settle_products
from tests.models import write_model


class Worker(Workers):
    """One of two workers; `said` is the list of both workers' messages."""

    said: list[str]

    def __init__(self, index: int, said: list[str]) -> None:
        super().__init__()
        self.index, self.size, self.said = index, 2, said

    def texts(self, own: str) -> list[str]:
        self.said.append(own)
        return self.said


def plan(tokens: int) -> Any:
    return SimpleNamespace(execution=Execution(None, tokens))


def work(*lengths: list[int]) -> DataSample:
    steps = [
        [Example(0, np.zeros(n, np.int32), np.ones(n, np.uint8)) for n in step] for step in lengths
    ]
    return DataSample(steps=steps, alone=(BatchLoad.single(70, 70),))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The token counts of timed products, on a fake GPU where the dequantised form is faster."""
    tokens: list[int] = []

    def time_products(model: Any, dtype: Any, count: int) -> TimedProducts:
        tokens.append(count)
        return TimedProducts("mlp.up_proj", count, 2.0, 1.0)

    for module in (layers, loading):
        monkeypatch.setattr(module, "on_cpu", lambda: False)
    monkeypatch.setattr(loading, "time_products", time_products)
    return tokens


def opened(tmp_path: Path) -> loading.BaseModel:
    return loading.open_base(write_model(tmp_path / "model", "llama", quantize=4), "float32")


CONFIG = TrainConfig(model_path="m", data=("d",))


def test_worker_0_decides_for_all(tmp_path: Path, timed: list[int]) -> None:
    said: list[str] = []
    lines = set()
    for index in range(2):
        base = opened(tmp_path)
        found, line = settle_products(CONFIG, base, work([8]), plan(1), workers=Worker(index, said))
        assert found.quantized_compute == "dequantized"
        lines.add(line)
    assert len(timed) == len(lines) == 1


def test_choice_of_the_options_is_not_timed(tmp_path: Path, timed: list[int]) -> None:
    base = opened(tmp_path)
    given = replace(CONFIG, quantized_compute="quantized")
    assert settle_products(given, base, work([8]), plan(1)) == (base, "")
    assert timed == []


@pytest.mark.parametrize("form", ["quantized", "dequantized"])
def test_resumed_run_is_not_timed(tmp_path: Path, timed: list[int], form: str) -> None:
    resume: Any = SimpleNamespace(checkpoint=SimpleNamespace(metadata={"quantized_compute": form}))
    found, line = settle_products(CONFIG, opened(tmp_path), work([8]), plan(1), resume)
    assert (found.quantized_compute, line, timed) == (form, "", [])


@pytest.mark.parametrize(
    ("micro_batch", "steps", "tokens"),
    [
        (1, [[8, 20], [5]], 20),  # a micro-batch is one example
        (24, [[8, 20], [5]], 24),
        (1000, [[8, 20], [5]], 28),  # no step has more tokens
        (1000, [], 1000),
        (1, [], 70),  # without data, the longest possible example
    ],
)
def test_tokens_are_those_of_a_large_micro_batch(
    tmp_path: Path, timed: list[int], micro_batch: int, steps: list[list[int]], tokens: int
) -> None:
    settle_products(CONFIG, opened(tmp_path), work(*steps), plan(micro_batch))
    assert timed == [tokens]


def test_cpu_keeps_its_form(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (layers, loading):
        monkeypatch.setattr(module, "on_cpu", lambda: True)
    base = opened(tmp_path)
    resume: Any = SimpleNamespace(
        checkpoint=SimpleNamespace(metadata={"quantized_compute": "quantized"})
    )
    for each in (None, resume):
        assert settle_products(CONFIG, base, work([8]), plan(1), each) == (base, "")
