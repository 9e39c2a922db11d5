"""The trainer's laws, with a pipeline that only writes down what it is asked to do."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import mlxtune
from mlxtune.config import InstructTrainingConfig
from mlxtune.core.batch import data_hash, group_rows
from mlxtune.core.encode import Example
from mlxtune.core.metrics import (
    InstructBatchResult,
    InstructEpochMetrics,
    StepRecord,
    perplexity,
)
from mlxtune.core.trainer import InstructTrainer, InstructTrainResult, TrainingObserver
from mlxtune.errors import NonFiniteLossError, OutputError, TrainingInterrupted

Losses = Callable[[int], float]


class FakePipeline:
    """Writes down each call. The loss of a step is `train_loss(step)`; that of a row's token on
    validation number v, from 0, is `val_loss(v)` plus a little for the row.
    """

    learning_rate = 1e-3

    def __init__(
        self, *, train_loss: Losses = lambda step: 4.0 / step, val_loss: Losses = lambda v: 3.0
    ) -> None:
        self._train_loss = train_loss
        self._val_loss = val_loss
        self.batches: list[list[int]] = []
        self.learning_rates: list[float] = []
        # The rows of each validation, and after how many steps it was.
        self.validations: list[tuple[int, list[int]]] = []
        self.saves: list[tuple[str, int]] = []
        self.loads = 0

    def train_batch(
        self, examples: Sequence[Example], *, step: int, learning_rate: float
    ) -> InstructBatchResult:
        self.batches.append([example.row for example in examples])
        self.learning_rates.append(learning_rate)
        assert step == len(self.batches)
        return result(self._train_loss(step), examples, grad_norm=0.5 * step)

    def evaluate(self, examples: Sequence[Example]) -> InstructBatchResult:
        step = len(self.batches)
        if not self.validations or self.validations[-1][0] != step:
            self.validations.append((step, []))
        self.validations[-1][1].extend(example.row for example in examples)
        base = self._val_loss(len(self.validations) - 1)
        total = sum((base + row_loss(example)) * example.supervised for example in examples)
        return result(total / sum(example.supervised for example in examples), examples)

    def save(self, folder: Path) -> None:
        self.saves.append((folder.name, len(self.batches)))
        (folder / "adapters.safetensors").write_text(str(len(self.batches)))

    def load(self, folder: Path) -> None:
        self.loads += 1

    def describe(self) -> Mapping[str, Any]:
        return {
            "lora_rank": 8,
            "lora_alpha": 16.0,
            "targets": ["q_proj"],
            "versions": {"mlx": "0.32.4"},
        }


def row_loss(example: Example) -> float:
    return example.row % 7 / 100


def result(
    loss: float, examples: Sequence[Example], grad_norm: float | None = None
) -> InstructBatchResult:
    return InstructBatchResult(
        avg_loss=loss,
        total_response_tokens=sum(example.supervised for example in examples),
        perplexity=perplexity(loss),
        grad_norm=grad_norm,
        total_tokens=sum(map(len, examples)),
    )


def rows(*numbers: int) -> list[Example]:
    """Examples of 2 to 6 tokens, of which 1 to 5 are supervised."""
    return [
        Example(
            i,
            np.arange(2 + i % 5, dtype=np.int32),
            np.array([0] + [1] * (1 + i % 5), dtype=np.uint8),
        )
        for i in numbers
    ]


CORPUS = rows(*range(1, 11))


def options(folder: Path, **changes: Any) -> InstructTrainingConfig:
    defaults = {"checkpoint_dir": str(folder), "batch_size": 3, "epochs": 2}
    return InstructTrainingConfig(**defaults | changes)


def train(
    folder: Path,
    pipeline: FakePipeline,
    corpus: Sequence[Example] = CORPUS,
    *,
    validation: Sequence[Example] | None = None,
    observer: TrainingObserver | None = None,
    should_stop: Callable[[], bool] = lambda: False,
    **changes: Any,
) -> InstructTrainResult:
    trainer = InstructTrainer(
        pipeline,
        corpus,
        options(folder, **changes),
        validation=validation,
        observer=observer,
        should_stop=should_stop,
    )
    return trainer.train()


def metadata(folder: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((folder / "metadata.json").read_text())
    return content


def log_of(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def average(losses: Sequence[tuple[float, int]]) -> float:
    total = sum((Fraction(loss) * tokens for loss, tokens in losses), Fraction())
    return float(total / sum(tokens for _, tokens in losses))


# Corpus and split


def test_empty_corpus_and_a_row_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the corpus is empty"):
        InstructTrainer(FakePipeline(), [], options(tmp_path))
    with pytest.raises(ValueError, match="at least two rows"):
        InstructTrainer(FakePipeline(), rows(1), options(tmp_path))
    assert names_in(tmp_path) == set()


@pytest.mark.parametrize(("count", "share", "held_out"), [(2, 0.5, 1), (10, 0.25, 3), (9, 0.5, 5)])
def test_split_rows_are_evaluated_and_the_others_train(
    tmp_path: Path, count: int, share: float, held_out: int
) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(*range(1, count + 1)), val_split=share, epochs=1)

    trained = [row for batch in pipeline.batches for row in batch]
    validated = set(pipeline.validations[0][1])
    assert len(validated) == held_out
    assert sorted([*trained, *validated]) == list(range(1, count + 1))


def test_validation_rows_given_replace_the_split(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, CORPUS, validation=rows(21, 22), epochs=1)

    assert sorted(row for batch in pipeline.batches for row in batch) == list(range(1, 11))
    assert [sorted(found) for _, found in pipeline.validations] == [[21, 22], [21, 22]]


def test_without_validation_rows_nothing_is_evaluated_and_no_epoch_is_the_best(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    found = train(tmp_path, pipeline, rows(1), validation=[], epochs=3, early_stopping_patience=1)

    assert pipeline.validations == []
    assert len(pipeline.batches) == 3
    assert (found.best_epoch, found.best_val_loss, found.initial_val_loss) == (None, None, None)
    assert not found.stopped_early
    assert [(one.val_loss, one.val_perplexity) for one in found.epoch_metrics] == [(None, None)] * 3
    assert names_in(tmp_path) == {"epoch-1", "epoch-2", "epoch-3", "metrics.jsonl"}
    assert metadata(tmp_path / "epoch-3")["val_loss"] is None


def test_data_hash_is_of_the_whole_corpus_whatever_the_split(tmp_path: Path) -> None:
    hashes = {
        InstructTrainer(FakePipeline(), CORPUS, options(tmp_path, seed=seed)).data_hash()
        for seed in range(3)
    }

    assert hashes == {data_hash(group_rows(CORPUS))}


# Steps


def test_each_step_takes_batch_size_rows_and_the_last_of_an_epoch_what_is_left(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(*range(1, 9)), validation=[], epochs=2)

    assert [len(batch) for batch in pipeline.batches] == [3, 3, 2, 3, 3, 2]
    for epoch in (pipeline.batches[:3], pipeline.batches[3:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(1, 9))


def test_fewer_rows_than_a_batch_train_all_the_same(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(1, 2), validation=[], batch_size=8, epochs=1)

    assert [sorted(batch) for batch in pipeline.batches] == [[1, 2]]


def test_all_examples_of_a_row_stand_in_the_same_step(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    corpus = rows(*(row for row in range(1, 8) for _ in range(row % 3 + 1)))
    train(tmp_path, pipeline, corpus, validation=[], batch_size=2, epochs=2)

    for batch in pipeline.batches:
        assert len(set(batch)) <= 2
        for row in set(batch):
            assert batch.count(row) == row % 3 + 1


def test_training_order_differs_by_epoch_and_validation_never_does(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(*range(1, 41)), batch_size=32, epochs=3)

    orders = [tuple(batch) for batch in pipeline.batches]
    assert len(set(orders)) == 3
    assert len({tuple(sorted(order)) for order in orders}) == 1
    assert [step for step, _ in pipeline.validations] == [0, 1, 2, 3]
    assert len({tuple(found) for _, found in pipeline.validations}) == 1


def test_order_and_split_are_functions_of_the_seed(tmp_path: Path) -> None:
    runs = []
    for seed in (7, 7, 8):
        pipeline = FakePipeline()
        train(tmp_path, pipeline, seed=seed)
        runs.append((pipeline.batches, pipeline.validations))

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_learning_rate_of_each_step_follows_the_schedule_over_the_whole_run(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, validation=[], epochs=2, warmup_fraction=0.25, lr_min=1e-4)

    # 10 rows in batches of 3 are 4 steps an epoch: 2 of 8 warm up, 6 fall along the cosine.
    expected = [0.5e-3, 1e-3]
    expected += [1e-4 + 9e-4 * (1 + math.cos(math.pi * i / 6)) / 2 for i in range(1, 7)]
    assert pipeline.learning_rates == pytest.approx(expected, rel=1e-12)


def test_max_steps_ends_the_run_in_the_middle_of_an_epoch(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    found = train(
        tmp_path, pipeline, epochs=5, max_steps=5, val_split=0.2, schedule="warmup-cosine"
    )

    # 8 rows train, in 3 steps an epoch.
    assert [len(batch) for batch in pipeline.batches] == [3, 3, 2, 3, 3]
    assert [step for step, _ in pipeline.validations] == [0, 3, 5]
    assert [one.epoch for one in found.epoch_metrics] == [1, 2]
    assert not found.stopped_early
    assert metadata(tmp_path / "epoch-2")["step"] == 5
    # The schedule knows how many steps there will be.
    assert pipeline.learning_rates[-1] == pytest.approx(1e-6)


@pytest.mark.parametrize(("max_steps", "steps"), [(1, 1), (3, 3), (6, 6), (100, 6)])
def test_run_has_max_steps_or_all_of_its_epochs(tmp_path: Path, max_steps: int, steps: int) -> None:
    pipeline = FakePipeline()
    trainer = InstructTrainer(pipeline, CORPUS, options(tmp_path, max_steps=max_steps))
    found = trainer.train()

    assert trainer.total_steps == len(pipeline.batches) == len(found.steps) == steps
    assert trainer.metrics.is_complete()


# Losses


def test_training_loss_of_an_epoch_is_per_supervised_token(tmp_path: Path) -> None:
    pipeline = FakePipeline(
        train_loss=lambda step: [1.0, 7.0, 2.0, 5.0, 3.0, 11.0, 4.0, 6.0][step - 1]
    )
    found = train(tmp_path, pipeline, validation=[], epochs=2)

    for epoch, metrics in enumerate(found.epoch_metrics, start=1):
        steps = [record for record in found.steps if record.epoch == epoch]
        # As many supervised tokens as `rows` gives them.
        batches = pipeline.batches[4 * epoch - 4 : 4 * epoch]
        tokens = [sum(1 + row % 5 for row in batch) for batch in batches]
        assert [record.supervised_tokens for record in steps] == tokens
        expected = average([(r.loss, n) for r, n in zip(steps, tokens, strict=True)])
        assert metrics.train_loss == pytest.approx(expected, rel=1e-12)
        assert metrics.train_perplexity == pytest.approx(math.exp(expected), rel=1e-12)
        assert metrics.learning_rate == steps[-1].learning_rate


def test_validation_loss_is_per_supervised_token_over_the_whole_set(tmp_path: Path) -> None:
    pipeline = FakePipeline(val_loss=lambda v: 3.0 - v)
    held_out = rows(*range(100, 250))
    found = train(tmp_path, pipeline, validation=held_out, epochs=2)

    rows_part = average([(row_loss(example), example.supervised) for example in held_out])
    for _, seen in pipeline.validations:
        assert sorted(seen) == list(range(100, 250))
    assert found.initial_val_loss == pytest.approx(3.0 + rows_part, rel=1e-12)
    losses = [one.val_loss for one in found.epoch_metrics]
    assert losses == pytest.approx([2.0 + rows_part, 1.0 + rows_part], rel=1e-12)
    perplexities = [one.val_perplexity for one in found.epoch_metrics]
    assert perplexities == pytest.approx([math.exp(loss) for loss in losses if loss], rel=1e-12)


@pytest.mark.parametrize("loss", [math.inf, math.nan])
@pytest.mark.parametrize("validation", [0, 1, 2])
def test_validation_loss_that_is_not_finite_stops_the_run_and_keeps_what_was_saved(
    tmp_path: Path, loss: float, validation: int
) -> None:
    pipeline = FakePipeline(val_loss=lambda v: loss if v == validation else 3.0 - v)

    with pytest.raises(NonFiniteLossError, match=f"after step {3 * validation} ") as raised:
        train(tmp_path, pipeline, epochs=5)

    assert "--lr" in str(raised.value)
    if validation:
        assert f"at learning rate {pipeline.learning_rates[-1]:g}" in str(raised.value)
    kept = f"last good checkpoint is {tmp_path / 'best'}" if validation == 2 else "no checkpoint"
    assert kept in str(raised.value)
    assert len(pipeline.batches) == 3 * validation
    expected = {0: set(), 1: {"metrics.jsonl"}, 2: {"best", "epoch-1", "metrics.jsonl"}}
    assert names_in(tmp_path) == expected[validation]


def test_step_whose_loss_is_not_finite_stops_the_run_and_keeps_what_was_saved(
    tmp_path: Path,
) -> None:
    class Diverging(FakePipeline):
        def train_batch(self, examples: Sequence[Example], **kwargs: Any) -> InstructBatchResult:
            if kwargs["step"] == 5:
                raise NonFiniteLossError("step 5: the loss is nan")
            return super().train_batch(examples, **kwargs)

    with pytest.raises(NonFiniteLossError, match="step 5") as raised:
        train(tmp_path, Diverging(), epochs=5)

    assert f"last good checkpoint is {tmp_path / 'best'}" in str(raised.value)
    assert names_in(tmp_path) == {"best", "epoch-1", "metrics.jsonl"}
    assert metadata(tmp_path / "best")["step"] == 3
    assert [line["step"] for line in log_of(tmp_path) if line["kind"] == "step"] == [1, 2, 3, 4]


# Best epoch and early stopping


@settings(deadline=None, max_examples=40)
@given(
    losses=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.5]), min_size=1, max_size=8),
    patience=st.integers(1, 9),
)
def test_best_epoch_and_early_stopping_follow_the_validation_losses(
    losses: list[float], patience: int
) -> None:
    # What the issue says, without the trainer's bookkeeping.
    ended = len(losses)
    for epoch in range(1, len(losses) + 1):
        best = losses.index(min(losses[:epoch])) + 1
        if epoch - best == patience:
            ended = epoch
            break
    best = losses.index(min(losses[:ended])) + 1

    with tempfile.TemporaryDirectory() as folder:
        # Rows 7 and 14 add nothing to the loss of a validation; the first is before training.
        pipeline = FakePipeline(val_loss=lambda v: [9.0, *losses][v])
        found = train(
            Path(folder),
            pipeline,
            rows(1, 2, 3),
            validation=rows(7, 14),
            epochs=len(losses),
            early_stopping_patience=patience,
        )

        assert [one.val_loss for one in found.epoch_metrics] == losses[:ended]
        assert (found.best_epoch, found.best_val_loss) == (best, losses[best - 1])
        assert found.stopped_early == (ended < len(losses))
        assert metadata(Path(folder) / "best")["epoch"] == best
        assert metadata(Path(folder) / "best")["val_loss"] == losses[best - 1]
        assert (Path(folder) / "best" / "adapters.safetensors").read_text() == str(best)


def test_run_that_max_steps_ends_has_not_stopped_early(tmp_path: Path) -> None:
    pipeline = FakePipeline(val_loss=lambda v: 1.0 + v)
    # 3 steps an epoch; patience and steps run out together, after epoch 2.
    found = train(tmp_path, pipeline, epochs=9, max_steps=6, early_stopping_patience=1)

    assert len(found.epoch_metrics) == 2
    assert not found.stopped_early


def test_first_epoch_is_the_best_even_when_it_is_worse_than_no_training(tmp_path: Path) -> None:
    pipeline = FakePipeline(val_loss=lambda v: 1.0 + v)
    found = train(tmp_path, pipeline, epochs=3)

    assert found.best_epoch == 1
    assert found.initial_val_loss is not None
    assert found.best_val_loss is not None
    assert found.best_val_loss > found.initial_val_loss


# Checkpoints


@pytest.mark.parametrize(
    ("epochs", "save_every", "saved"),
    [
        (1, 1, [1]),
        (4, 1, [1, 2, 3, 4]),
        (4, 2, [2, 4]),
        (5, 2, [2, 4]),
        (3, 3, [1, 2, 3]),
        (2, 5, [1, 2]),
    ],
)
def test_epoch_is_saved_every_save_every_or_each_when_there_are_no_more(
    tmp_path: Path, epochs: int, save_every: int, saved: list[int]
) -> None:
    pipeline = FakePipeline(val_loss=lambda v: 1.0 + v)
    train(tmp_path, pipeline, epochs=epochs, save_every=save_every)

    folders = {f"epoch-{epoch}" for epoch in saved}
    assert names_in(tmp_path) == {"best", "metrics.jsonl", *folders}
    for epoch in saved:
        # 8 rows train, in 3 steps an epoch.
        folder = tmp_path / f"epoch-{epoch}"
        assert (folder / "adapters.safetensors").read_text() == str(3 * epoch)
        assert metadata(folder)["epoch"] == epoch


def test_metadata_says_what_was_trained_on_what_and_how_well(tmp_path: Path) -> None:
    run_config = {"model_path": "data/demo", "lr": 1e-3}
    trainer = InstructTrainer(
        FakePipeline(),
        CORPUS,
        options(tmp_path, seed=7, epochs=1, schedule="constant"),
        run_config=run_config,
    )
    (metrics,) = trainer.train().epoch_metrics

    assert metadata(tmp_path / "best") == metadata(tmp_path / "epoch-1")
    assert metadata(tmp_path / "best") == {
        "task": "instruct",
        "epoch": 1,
        "step": 3,
        "train_loss": metrics.train_loss,
        "train_perplexity": metrics.train_perplexity,
        "val_loss": metrics.val_loss,
        "val_perplexity": metrics.val_perplexity,
        "learning_rate": 1e-3,
        "epoch_time_ms": metrics.epoch_time_ms,
        "samples_per_sec": metrics.samples_per_sec,
        "lora_rank": 8,
        "lora_alpha": 16.0,
        "targets": ["q_proj"],
        "versions": {"mlx": "0.32.4"},
        "data_hash": trainer.data_hash(),
        "seed": 7,
        "config": run_config,
    }


def test_metadata_has_the_trainers_options_when_no_run_config_is_given(tmp_path: Path) -> None:
    train(tmp_path, FakePipeline(), epochs=1, seed=7)

    config = metadata(tmp_path / "best")["config"]
    assert InstructTrainingConfig(**config) == options(tmp_path, epochs=1, seed=7)


@pytest.mark.parametrize("name", ["epoch-1", "best", "epoch-2"])
def test_checkpoint_that_cannot_be_written_is_an_error_and_not_a_shrug(
    tmp_path: Path, name: str
) -> None:
    class FullDisk(FakePipeline):
        def save(self, folder: Path) -> None:
            super().save(folder)
            if f".{name}." in folder.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match=os.strerror(errno.ENOSPC)) as raised:
        train(tmp_path, FullDisk())

    assert str(tmp_path / name) in str(raised.value)
    kept = {"epoch-1": set(), "best": {"epoch-1"}, "epoch-2": {"epoch-1", "best"}}[name]
    assert names_in(tmp_path) == {"metrics.jsonl", *kept}
    for folder in kept:
        assert metadata(tmp_path / folder)["epoch"] == 1


def test_worse_checkpoint_disk_full_keeps_the_best_of_before(tmp_path: Path) -> None:
    class FullDisk(FakePipeline):
        def save(self, folder: Path) -> None:
            super().save(folder)
            if len(self.batches) > 3 and ".best." in folder.name:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError):
        train(tmp_path, FullDisk(val_loss=lambda v: 3.0 - v))

    assert metadata(tmp_path / "best")["epoch"] == 1
    assert (tmp_path / "best" / "adapters.safetensors").read_text() == "3"


def test_folder_that_cannot_be_made_is_an_error_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    pipeline = FakePipeline()

    with pytest.raises(OutputError, match="cannot be written"):
        train(tmp_path / "file" / "checkpoints", pipeline)
    assert (pipeline.batches, pipeline.validations) == ([], [])


def test_records_stand_beside_the_checkpoints_from_the_start(tmp_path: Path) -> None:
    pipeline = FakePipeline(val_loss=lambda v: math.nan)
    trainer = InstructTrainer(pipeline, CORPUS, options(tmp_path))

    with pytest.raises(NonFiniteLossError):
        trainer.train({"ledger.json": {"rows_read": 10}})
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"rows_read": 10}


def test_earlier_run_in_the_same_folder_is_set_aside_and_told(tmp_path: Path) -> None:
    told: list[Path | None] = []

    class Observer(TrainingObserver):
        def on_start(self, trainer: InstructTrainer, previous: Path | None) -> None:
            told.append(previous)

    train(tmp_path, FakePipeline(), epochs=3, observer=Observer())
    train(tmp_path, FakePipeline(), epochs=1, observer=Observer())

    assert told == [None, tmp_path / "previous"]
    assert names_in(tmp_path) == {"best", "epoch-1", "metrics.jsonl", "previous"}
    earlier = {"best", "epoch-1", "epoch-2", "epoch-3", "metrics.jsonl"}
    assert names_in(tmp_path / "previous") == earlier
    assert sum(line["kind"] == "step" for line in log_of(tmp_path)) == 3


# Records and observers


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
        assert {"kind": "step"} | vars(record) == line
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


class Listener(TrainingObserver):
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def on_start(self, trainer: InstructTrainer, previous: Path | None) -> None:
        self.heard.append(("start", trainer.total_steps))

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
        *(("validation", 3), ("epoch", 1, True), ("checkpoint", "epoch-1"), ("checkpoint", "best")),
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


# Interrupts


def test_interrupt_at_any_moment_saves_the_last_step_and_goes_no_further(tmp_path: Path) -> None:
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

    # 10 rows are 4 steps an epoch: 8 steps, and 3 validations of more than one look each.
    assert stop_at - 1 == asked >= 8 + 3 * 2
    assert len(pipeline.batches) == 8


def supervised_by_step(pipeline: FakePipeline, epoch: int) -> list[tuple[int, int]]:
    counts = [sum(1 + row % 5 for row in batch) for batch in pipeline.batches]
    steps = list(enumerate(counts, start=1))
    return steps[:4] if epoch == 1 else steps[4:]


def test_interrupt_whose_checkpoint_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    class FullDisk(FakePipeline):
        def save(self, folder: Path) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with pytest.raises(OutputError, match="step-1"):
        train(tmp_path, FullDisk(), validation=[], should_stop=lambda: True)


# The result


def test_result_is_the_history_of_the_run(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    found = train(tmp_path, pipeline, epochs=3)

    assert [one.epoch for one in found.epoch_metrics] == [1, 2, 3]
    assert [record.step for record in found.steps] == list(range(1, 10))
    assert found.total_time_ms >= sum(one.epoch_time_ms for one in found.epoch_metrics) - 3
    assert all(one.samples_per_sec > 0 for one in found.epoch_metrics)
    assert pipeline.loads == 0


# Imports

BLOCKED = """
import importlib, pkgutil, sys

BLOCKED = {"mlx", "mlx_lm", "transformers", "torch"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in BLOCKED:
            raise ModuleNotFoundError(f"{name} is blocked", name=name)

sys.meta_path.insert(0, Blocker())
import mlxtune, mlxtune.config, mlxtune.errors, mlxtune.core
names = [module.name for module in pkgutil.iter_modules(mlxtune.core.__path__)]
for name in names:
    importlib.import_module(f"mlxtune.core.{name}")
mlxtune.TrainConfig, mlxtune.InstructTrainer, mlxtune.Example
loaded = {name.partition(".")[0] for name in sys.modules}
print(*names)
print(*sorted(loaded & (BLOCKED | {"tokenizers", "sentencepiece", "safetensors", "click"})))
print("mlxtune.backend" in sys.modules)
"""


def test_core_is_imported_where_no_mlx_is_installed(tmp_path: Path) -> None:
    package = Path(mlxtune.__file__).parent
    output = subprocess.run(
        [sys.executable, "-c", BLOCKED],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(package.parent)},
        check=True,
        capture_output=True,
        text=True,
    ).stdout

    modules = sorted(path.stem for path in (package / "core").glob("*.py"))
    modules.remove("__init__")
    assert output.split("\n") == [" ".join(modules), "", "False", ""]
