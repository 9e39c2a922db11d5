"""The trainer's records of a run, and the events that an observer receives."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.files.remembered import MARK
from mlxtune.core.run.metrics import InstructBatchResult, InstructEpochMetrics, StepRecord
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import NonFiniteLossError
from tests.core.training.fake_pipeline import CORPUS, FakePipeline, log_of, options, rows, train


def test_metrics_file_has_a_line_for_each_step_validation_and_epoch_in_order(
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
        assert {"kind": "step"} | vars(record) == line | {"metrics": {}}
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


def test_step_keeps_how_it_was_run(tmp_path: Path) -> None:
    class Measured(FakePipeline):
        def train_batch(self, *given: Any, **options: Any) -> InstructBatchResult:
            found = super().train_batch(*given, **options)
            step = len(self.batches)
            return replace(found, memory=100 + step, micro_batches=2, run_tokens=30, padding=step)

    found = train(tmp_path, Measured())
    steps = [line for line in log_of(tmp_path) if line["kind"] == "step"]
    names = ("memory", "micro_batches", "run_tokens", "padding")
    assert [tuple(line[name] for name in names) for line in steps] == [
        (100 + step, 2, 30, step) for step in range(1, 7)
    ]
    assert [record.memory for record in found.steps] == [100 + step for step in range(1, 7)]


def test_record_beside_the_checkpoints_is_not_in_them(tmp_path: Path) -> None:
    (tmp_path / MARK).write_text("")
    for name in ("run.json", "metrics.jsonl"):
        (tmp_path / name).write_text("of an earlier run")
    trainer = InstructTrainer(FakePipeline(), CORPUS, options(tmp_path))
    trainer.train({"run.json": {"a": 1}})

    assert json.loads((tmp_path / "run.json").read_text()) == {"a": 1}
    assert (tmp_path / "previous-1" / "run.json").read_text() == "of an earlier run"
    assert not (tmp_path / "epoch-1" / "run.json").exists()


class Listener(TrainingObserver):
    """Records the events."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        self.heard.append(("start", run.total_steps))

    def on_step(self, record: StepRecord) -> None:
        self.heard.append(("step", record.step))

    def on_evaluated(self, done: int, total: int) -> None:
        self.heard.append(("evaluated", done, total))

    def on_validation(self, step: int, loss: float) -> None:
        self.heard.append(("validation", step))

    def on_epoch(self, metrics: InstructEpochMetrics, best: bool) -> None:
        self.heard.append(("epoch", metrics.epoch, best))

    def on_checkpoint(self, folder: Path) -> None:
        self.heard.append(("checkpoint", folder.name))

    def on_end(self) -> None:
        self.heard.append(("end",))


def test_observer_hears_of_everything_in_order(tmp_path: Path) -> None:
    listener = Listener()
    train(tmp_path, FakePipeline(val_loss=lambda v: 1.0 + v), epochs=2, observer=listener)

    assert [event for event in listener.heard if event[0] != "evaluated"] == [
        ("start", 6),
        ("validation", 0),
        *(("step", step) for step in (1, 2, 3)),
        *(("validation", 3), ("epoch", 1, True), ("checkpoint", "best"), ("checkpoint", "epoch-1")),
        *(("step", step) for step in (4, 5, 6)),
        *(("validation", 6), ("epoch", 2, False), ("checkpoint", "epoch-2")),
        ("end",),
    ]


def test_observer_hears_how_many_examples_have_been_evaluated(tmp_path: Path) -> None:
    listener = Listener()
    pipeline = FakePipeline()
    train(tmp_path, pipeline, validation=rows(*range(100, 180)), observer=listener, max_steps=1)

    heard = [event[1:] for event in listener.heard if event[0] == "evaluated"]
    first = heard[: len(heard) // 2]
    assert first == heard[len(heard) // 2 :]
    done = [done for done, _ in first]
    assert done == sorted(set(done))
    assert done[0] > 0
    assert first[-1] == (80, 80)


def test_observer_hears_the_end_however_the_run_ends(tmp_path: Path) -> None:
    listener = Listener()
    with pytest.raises(NonFiniteLossError):
        train(tmp_path, FakePipeline(val_loss=lambda v: math.nan), observer=listener)

    assert listener.heard[-1] == ("end",)
