"""Requests to stop the trainer, at any moment."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.errors import OutputError, TrainingInterrupted
from tests.core.training.fake_pipeline import (
    FakePipeline,
    average,
    log_of,
    metadata,
    names_in,
    rows,
    train,
)


def test_interrupt_saves_the_last_step_and_stops(tmp_path: Path) -> None:
    held_out = rows(*range(100, 180))
    asked = 0
    for stop_at in range(1, 200):
        folder = tmp_path / str(stop_at)
        pipeline = FakePipeline()
        asked = 0

        def should_stop(stop_at: int = stop_at) -> bool:
            nonlocal asked
            asked += 1
            return asked >= stop_at

        try:
            train(folder, pipeline, validation=held_out, should_stop=should_stop)
        except TrainingInterrupted as interrupt:
            step = len(pipeline.batches)
            assert asked == stop_at, "nothing is asked or done after the answer"
            assert interrupt.step == step
            if step == 0:
                assert interrupt.checkpoint is None
                assert pipeline.saves == []
                continue
            assert interrupt.checkpoint == folder / f"step-{step}"
            assert (interrupt.checkpoint / "adapters.safetensors").read_text() == str(step)
            saved = metadata(interrupt.checkpoint)
            assert (saved["step"], saved["epoch"]) == (step, 1 if step <= 4 else 2)
            assert saved["val_loss"] is None
            losses = [(4.0 / s, n) for s, n in supervised_by_step(pipeline, saved["epoch"])]
            assert saved["train_loss"] == pytest.approx(average(losses), rel=1e-12)
            assert ("epoch-1" in names_in(folder)) == (saved["epoch"] == 2)
            steps = [line["step"] for line in log_of(folder) if line["kind"] == "step"]
            assert steps == list(range(1, step + 1))
        else:
            break

    # 10 rows are 4 steps an epoch: 8 steps, and 3 validations that each ask more than once.
    assert stop_at - 1 == asked >= 8 + 3 * 2
    assert len(pipeline.batches) == 8


def supervised_by_step(pipeline: FakePipeline, epoch: int) -> list[tuple[int, int]]:
    counts = [sum(1 + row % 5 for row in batch) for batch in pipeline.batches]
    steps = list(enumerate(counts, start=1))
    return steps[:4] if epoch == 1 else steps[4:]


def test_interrupt_whose_checkpoint_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    def full(folder: Path, step: int) -> bool:
        return True

    with pytest.raises(OutputError, match=r"step-1.*; no checkpoint was written"):
        train(tmp_path, FakePipeline(full=full), validation=[], should_stop=lambda: True)
