"""A run's records: its metrics, step by step, and the files beside its checkpoints."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.files.remembered import MARK
from mlxtune.core.run.metrics import InstructBatchResult
from mlxtune.core.training.trainer import InstructTrainer
from tests.core.training.fake_pipeline import CORPUS, FakePipeline, log_of, options, train


def test_metrics_file_lists_steps_validations_and_epochs_in_order(
    tmp_path: Path,
) -> None:
    found = train(tmp_path, FakePipeline())

    lines = log_of(tmp_path)
    epoch = ["step"] * 3 + ["validation", "epoch"]
    assert [line["kind"] for line in lines] == ["validation", *epoch, *epoch]
    steps = [line for line in lines if line["kind"] == "step"]
    assert [line["step"] for line in steps] == [1, 2, 3, 4, 5, 6]
    assert [line["epoch"] for line in steps] == [1, 1, 1, 2, 2, 2]
    assert [line["rows"] for line in steps] == [3, 3, 2, 3, 3, 2]
    assert [line["loss"] for line in steps] == [4.0 / step for step in range(1, 7)]
    assert [line["grad_norm"] for line in steps] == [0.5 * step for step in range(1, 7)]
    for line, record in zip(steps, found.steps, strict=True):
        assert {"kind": "step"} | vars(record) == line | {"metrics": {}, "is_of_rows": False}
        assert record.perplexity == pytest.approx(math.exp(record.loss))
        assert record.seconds >= 0
    validations = [line for line in lines if line["kind"] == "validation"]
    assert [line["step"] for line in validations] == [0, 3, 6]
    assert validations[0]["val_loss"] == found.initial_val_loss
    epochs = [line for line in lines if line["kind"] == "epoch"]
    assert epochs == [{"kind": "epoch"} | vars(one) for one in found.epoch_metrics]


def test_tokens_of_a_step_are_all_that_the_model_read(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    found = train(tmp_path, pipeline)

    expected = [sum(2 + row % 5 for row in batch) for batch in pipeline.batches]
    assert [record.tokens for record in found.steps] == expected


def test_step_record_has_its_execution(tmp_path: Path) -> None:
    class MemoryCorrection(FakePipeline):
        def train_batch(self, *given: Any, **options: Any) -> InstructBatchResult:
            found = super().train_batch(*given, **options)
            step = len(self.batches)
            return replace(found, memory=100 + step, micro_batches=2, run_tokens=30, padding=step)

    found = train(tmp_path, MemoryCorrection())
    steps = [line for line in log_of(tmp_path) if line["kind"] == "step"]
    names = ("memory", "micro_batches", "run_tokens", "padding")
    assert [tuple(line[name] for name in names) for line in steps] == [
        (100 + step, 2, 30, step) for step in range(1, 7)
    ]
    assert [record.memory for record in found.steps] == [100 + step for step in range(1, 7)]


def test_run_json_is_written_outside_checkpoints(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text("")
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / name).write_text("of an earlier run")
    trainer = InstructTrainer(FakePipeline(), CORPUS, options(tmp_path))
    trainer.train({"run.json": {"a": 1}})

    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
    assert (tmp_path / "previous-1" / "run.json").read_text() == "of an earlier run"
    assert not (tmp_path / "epoch-1" / "run.json").exists()
