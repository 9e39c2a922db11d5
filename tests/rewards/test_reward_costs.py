"""The measurement of a grpo step, on a tiny model."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.backend.models.loading import load_base
from tests.long.reward_costs import TINY, measure
from tests.models import write_model


@pytest.mark.slow
def test_each_contestant_has_its_seconds_and_its_peak(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3")
    figures = measure(load_base(folder, "float32"), folder, TINY, rounds=1)
    contestants = [
        *figures["training"].items(),
        *figures["sampling"]["shared"].items(),
        *figures["sampling"]["own"].items(),
    ]
    assert len(contestants) == 8
    for name, figure in contestants:
        assert len(figure["seconds"]) == 1, name
        assert figure["seconds"][0] > 0, name
        assert figure["peak"] > 0, name
