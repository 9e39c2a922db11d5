"""The trainer's laws: the inputs of each step and validation, and the use of their losses."""

from __future__ import annotations

import json
import math
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlxtune.config import InstructTrainingConfig
from mlxtune.config.objective_config import LossConfig
from mlxtune.core.data.corpus import Corpus, CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import ExampleArrays
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.objectives.policy import objective_of
from mlxtune.core.run.checkpoint import METRICS
from mlxtune.core.run.cross_checks import check_metrics_agree
from mlxtune.core.run.metrics import InstructBatchResult
from mlxtune.core.run.progress import Progress
from mlxtune.core.training.observer import TrainingObserver
from mlxtune.core.training.pipeline import OnProgress, RowSource, Step, StepData
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import NonFiniteLossError
from tests.core.training.fake_pipeline import (
    CORPUS,
    FakePipeline,
    average,
    log_of,
    metadata,
    names_in,
    options,
    row_loss,
    rows,
    train,
)

# Corpus and split


def test_empty_corpus_and_a_row_that_cannot_be_split_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the corpus is empty"):
        InstructTrainer(FakePipeline(), [], options(tmp_path))
    with pytest.raises(ValueError, match="at least two rows"):
        InstructTrainer(FakePipeline(), rows(1), options(tmp_path))
    assert names_in(tmp_path) == set()


def test_chosen_rows_are_used_unchanged(tmp_path: Path) -> None:
    corpus = Corpus.of(rows(*range(1, 9)))
    chosen = RunRows(corpus.select([0, 2, 3, 6, 7]), corpus.select([1, 4, 5]))
    pipeline = FakePipeline()
    trainer = InstructTrainer(pipeline, chosen, options(tmp_path, val_split=0.5, epochs=1))

    trainer.train()

    assert (trainer.train_rows, trainer.val_rows) == (chosen.train, chosen.validation)
    assert sorted(row for batch in pipeline.batches for row in batch) == [1, 3, 4, 7, 8]
    assert pipeline.validations[0][1] == [2, 5, 6]
    assert trainer.data_hash() == trainer.validation_hash() == corpus.data_hash()


@pytest.mark.parametrize(
    ("count", "fraction", "held_out"), [(2, 0.5, 1), (10, 0.25, 3), (9, 0.5, 5)]
)
def test_split_rows_are_evaluated_and_the_others_train(
    tmp_path: Path, count: int, fraction: float, held_out: int
) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(*range(1, count + 1)), val_split=fraction, epochs=1)

    trained = [row for batch in pipeline.batches for row in batch]
    validated = set(pipeline.validations[0][1])
    assert len(validated) == held_out
    assert sorted([*trained, *validated]) == list(range(1, count + 1))


def test_two_uses_of_a_row_in_a_step_are_separate(tmp_path: Path) -> None:
    keys = []

    class Pipeline(FakePipeline):
        def train_batch(self, examples: Sequence[Example], **options: Any) -> InstructBatchResult:
            keys.extend(example.key for example in examples)
            return super().train_batch(examples, **options)

    corpus = Corpus([ExampleArrays.of(rows(1, 2)).truncate()], weights=[3.0])
    train(tmp_path, Pipeline(), corpus, validation=[], epochs=1, batch_size=6)
    assert len(set(keys)) == len(keys) == 6


@pytest.mark.parametrize("has_metrics", [False, True])
@pytest.mark.parametrize("name", ["sft", "grpo"])
def test_objective_decides_whether_a_mean_loss_is_over_tokens_or_rows(
    tmp_path: Path, name: str, has_metrics: bool
) -> None:
    class Pipeline(FakePipeline):
        def train_batch(self, examples: Sequence[Example], **options: Any) -> InstructBatchResult:
            found = super().train_batch(examples, **options)
            return replace(found, metrics={"entropy": 1.0} if has_metrics else {})

    pipeline, given = Pipeline(), rows(1, 2, 3, 4)
    trainer = InstructTrainer(
        pipeline,
        given,
        options(tmp_path, batch_size=3, epochs=1),
        validation=[],
        objective=objective_of(LossConfig(objective=name)),
    )
    found = trainer.train()
    taken = [[given[row - 1] for row in batch] for batch in pipeline.batches]
    weights = [
        len(batch) if name == "grpo" else sum(each.supervised for each in batch) for batch in taken
    ]
    expected = (4.0 * weights[0] + 2.0 * weights[1]) / sum(weights)
    assert found.epoch_metrics[0].train_loss == pytest.approx(expected)
    assert trainer.metrics.average_loss() == pytest.approx(expected)
    read = Progress.from_jsonl((tmp_path / METRICS).read_bytes())
    assert list(read.steps) == found.steps
    check_metrics_agree(read)


def test_validation_rows_given_replace_the_split(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, CORPUS, validation=rows(21, 22), epochs=1)

    assert sorted(row for batch in pipeline.batches for row in batch) == list(range(1, 11))
    assert [sorted(found) for _, found in pipeline.validations] == [[21, 22], [21, 22]]


def test_no_validation_rows_means_no_best_epoch(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    found = train(tmp_path, pipeline, rows(1), validation=[], epochs=3, early_stopping_patience=1)

    assert pipeline.validations == []
    assert len(pipeline.batches) == 3
    assert (found.best_epoch, found.best_val_loss, found.initial_val_loss) == (None, None, None)
    assert not found.stopped_early
    assert [(one.val_loss, one.val_perplexity) for one in found.epoch_metrics] == [(None, None)] * 3
    assert names_in(tmp_path) == {"epoch-2", "epoch-3", "metrics.jsonl"}
    assert metadata(tmp_path / "epoch-3")["val_loss"] is None


def test_data_hash_covers_the_whole_corpus_for_any_split(tmp_path: Path) -> None:
    hashes = {
        InstructTrainer(FakePipeline(), CORPUS, options(tmp_path, seed=seed)).data_hash()
        for seed in range(3)
    }

    assert hashes == {Corpus.of(CORPUS).data_hash()}


# Steps


def test_last_step_of_an_epoch_takes_the_remaining_rows(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(*range(1, 9)), validation=[], epochs=2)

    assert [len(batch) for batch in pipeline.batches] == [3, 3, 2, 3, 3, 2]
    for epoch in (pipeline.batches[:3], pipeline.batches[3:]):
        assert sorted(row for batch in epoch for row in batch) == list(range(1, 9))


def test_fewer_rows_than_a_batch_still_train(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(1, 2), validation=[], batch_size=8, epochs=1)

    assert [sorted(batch) for batch in pipeline.batches] == [[1, 2]]


def test_all_examples_of_a_row_are_in_the_same_step(tmp_path: Path) -> None:
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


def test_rows_are_shuffled_by_default(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, rows(*range(1, 11)), validation=[], batch_size=4, seed=42, epochs=1)

    # The same order as in earlier versions; rows count from 1 here.
    assert pipeline.batches == [[1, 2, 5, 8], [4, 3, 10, 9], [7, 6]]


@pytest.mark.parametrize("val_split", [0.0, 0.2])
def test_steps_by_length_hold_rows_of_one_length_and_each_row_once(
    tmp_path: Path, val_split: float
) -> None:
    pipeline = FakePipeline()
    # Depending on its number, a row has 1 to 3 examples of 2 to 6 tokens each.
    corpus = rows(*(row for row in range(1, 61) for _ in range(row % 3 + 1)))
    split: dict[str, Any] = {"val_split": val_split} if val_split else {"validation": []}
    train(tmp_path, pipeline, corpus, batch_size=3, epochs=2, order="length", **split)

    half = len(pipeline.batches) // 2
    first, second = ([set(step) for step in pipeline.batches[at:][:half]] for at in (0, half))
    assert sorted(map(len, first)) == sorted(map(len, second)) == [3] * half
    assert set.union(*first) == set.union(*second)
    assert len(set.union(*first)) == 60 * (1 - val_split)
    assert first != second
    for steps in (first, second):
        lengths = [[(row % 3 + 1) * (2 + row % 5) for row in step] for step in steps]
        for shorter, longer in pairwise(sorted(lengths, key=sum)):
            assert max(shorter) <= 1.1 * min(longer)


def test_order_and_split_are_functions_of_the_seed(tmp_path: Path) -> None:
    runs = []
    for seed in (7, 7, 8):
        pipeline = FakePipeline()
        train(tmp_path, pipeline, seed=seed)
        runs.append((pipeline.batches, pipeline.validations))

    assert runs[0] == runs[1]
    assert runs[0] != runs[2]


def test_learning_rates_follow_the_schedule(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    train(tmp_path, pipeline, validation=[], epochs=2, warmup_fraction=0.25, lr_min=1e-4)

    # 10 rows in batches of 3 are 4 steps an epoch: in 2 of 8 the rate rises, in 6 it falls along
    # the cosine.
    expected = [0.5e-3, 1e-3]
    expected += [1e-4 + 9e-4 * (1 + math.cos(math.pi * i / 6)) / 2 for i in range(1, 7)]
    assert pipeline.learning_rates == pytest.approx(expected, rel=1e-12)


def test_trainer_without_a_learning_rate_takes_the_pipelines(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline()
    config = InstructTrainingConfig(
        checkpoint_dir=str(tmp_path), epochs=1, batch_size=3, schedule="constant"
    )
    InstructTrainer(pipeline, CORPUS, config, validation=[]).train()

    assert pipeline.learning_rates == [3e-4] * 4


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
    # The schedule knows the number of steps.
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
        # The numbers of supervised tokens that `rows` gives.
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
def test_non_finite_validation_loss_stops_but_keeps_checkpoint(
    tmp_path: Path, loss: float, validation: int
) -> None:
    pipeline = FakePipeline(val_loss=lambda v: loss if v == validation else 3.0 - v)

    with pytest.raises(NonFiniteLossError, match=f"after step {3 * validation} ") as raised:
        train(tmp_path, pipeline, epochs=5)

    # Before the first step, no learning rate has had an effect.
    assert ("--lr" if validation else "--alpha") in str(raised.value)
    if validation:
        assert f"at learning rate {pipeline.learning_rates[-1]:g}" in str(raised.value)
    kept = f"last good checkpoint is {tmp_path / 'epoch-1'}" if validation == 2 else "no checkpoint"
    assert kept in str(raised.value)
    assert len(pipeline.batches) == 3 * validation
    expected = {0: set(), 1: {"metrics.jsonl"}, 2: {"best", "epoch-1", "metrics.jsonl"}}
    assert names_in(tmp_path) == expected[validation]


def test_non_finite_step_loss_stops_but_keeps_checkpoint(
    tmp_path: Path,
) -> None:
    class Diverging(FakePipeline):
        def train_batch(self, examples: Sequence[Example], **kwargs: Any) -> InstructBatchResult:
            if kwargs["step"] == 5:
                raise NonFiniteLossError("step 5: the loss is nan")
            return super().train_batch(examples, **kwargs)

    with pytest.raises(NonFiniteLossError, match="step 5") as raised:
        train(tmp_path, Diverging(), epochs=5, on_nonfinite="stop")

    assert f"last good checkpoint is {tmp_path / 'epoch-1'}" in str(raised.value)
    assert names_in(tmp_path) == {"best", "epoch-1", "metrics.jsonl"}
    assert metadata(tmp_path / "best")["step"] == 3
    assert [line["step"] for line in log_of(tmp_path) if line["kind"] == "step"] == [1, 2, 3, 4]


# Best epoch and early stopping


@given(
    losses=st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.5]), min_size=1, max_size=8),
    patience=st.integers(1, 9),
)
def test_best_epoch_and_early_stopping_follow_the_validation_losses(
    losses: list[float], patience: int
) -> None:
    # The rule itself, without the trainer's bookkeeping.
    ended = len(losses)
    for epoch in range(1, len(losses) + 1):
        best = losses.index(min(losses[:epoch])) + 1
        if epoch - best == patience:
            ended = epoch
            break
    best = losses.index(min(losses[:ended])) + 1

    with tempfile.TemporaryDirectory() as folder:
        # Rows 7 and 14 add nothing to a validation's loss; the first validation precedes training.
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


# The result


def test_result_is_the_history_of_the_run(tmp_path: Path) -> None:
    pipeline = FakePipeline()
    found = train(tmp_path, pipeline, epochs=3)

    assert [one.epoch for one in found.epoch_metrics] == [1, 2, 3]
    assert [record.step for record in found.steps] == list(range(1, 10))
    assert found.total_time_ms >= sum(one.epoch_time_ms for one in found.epoch_metrics) - 3
    assert all(one.samples_per_sec > 0 for one in found.epoch_metrics)
    assert pipeline.loads == 0


def test_metrics_are_a_view_of_the_record_of_the_run(tmp_path: Path) -> None:
    trainer = InstructTrainer(FakePipeline(), CORPUS, options(tmp_path))
    before = trainer.metrics
    assert (before.average_loss(), before.is_complete()) == (None, False)

    trainer.train()

    metrics = trainer.metrics
    assert list(metrics.history) == list(trainer.progress.steps)
    assert metrics.max_steps == len(metrics.history) == trainer.total_steps
    assert metrics.is_complete()
    # The loss of step n is 4 / n.
    assert metrics.convergence_rate() == pytest.approx(1 - 1 / trainer.total_steps)


def test_validation_rows_of_several_files_have_a_loss_each(tmp_path: Path) -> None:
    """The total loss is the mean over tokens, and does not depend on the files."""

    def losses_of(examples: list[Example]) -> float:
        return average([(3.0 + row_loss(one), one.supervised) for one in examples])

    apart = [replace(one, file=int(one.row > 21)) for one in rows(21, 22, 23)]
    found = train(tmp_path / "two", FakePipeline(), CORPUS, validation=apart, epochs=1)
    whole = train(tmp_path / "one", FakePipeline(), CORPUS, validation=rows(21, 22, 23), epochs=1)

    for record, other in zip(found.validations, whole.validations, strict=True):
        assert record.val_loss == pytest.approx(other.val_loss)
        assert [file.path for file in record.files] == ["file 1", "file 2"]
        assert record.files[0].val_loss == pytest.approx(losses_of(apart[:1]))
        assert record.files[1].val_loss == pytest.approx(losses_of(apart[1:]))
        assert other.files == []
    text = (tmp_path / "two" / "metrics.jsonl").read_text()
    lines = [json.loads(line) for line in text.splitlines()]
    assert [len(each["files"]) for each in lines if each["kind"] == "validation"] == [2, 2]
    assert '"files"' not in (tmp_path / "one" / "metrics.jsonl").read_text()


@dataclass
class DrawingSource(RowSource):
    """Takes 5 s of a clock to draw the samples of every second step, after the running step."""

    clock: list[float]
    pipeline: FakePipeline
    updates = 2

    def __post_init__(self) -> None:
        super().__init__(self.pipeline)

    def examples_of(self, rows: CorpusRows, step: Step, on_progress: OnProgress) -> StepData:
        if step.number % 2:
            on_progress(0, 2)
            self.clock[0] += 5.0
            on_progress(2, 2)
        return super().examples_of(rows, step, on_progress)


@pytest.mark.parametrize("draws", [False, True])
def test_seconds_of_a_step_include_the_drawing_of_its_samples(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, draws: bool
) -> None:
    clock = [0.0]
    monkeypatch.setattr(time, "perf_counter", lambda: clock[0])

    def loss(step: int) -> float:
        clock[0] += 1.0
        return 1.0

    pipeline = FakePipeline(train_loss=loss)
    source = DrawingSource(clock, pipeline) if draws else None
    config = options(tmp_path, max_steps=4)
    result = InstructTrainer(pipeline, CORPUS, config, validation=[], source=source).train()
    seconds = [step.seconds for step in result.steps]
    assert seconds == ([6.0, 1.0, 6.0, 1.0] if draws else [1.0] * 4)
    assert sum(seconds) == clock[0]


class ProgressListener(TrainingObserver):
    """Records the progress of samples and of validations."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int, int]] = []

    def on_sampled(self, done: int, total: int) -> None:
        self.heard.append(("sampled", done, total))

    def on_evaluated(self, done: int, total: int) -> None:
        self.heard.append(("evaluated", done, total))


def test_progress_of_drawing_samples_is_not_a_validation(tmp_path: Path) -> None:
    pipeline, listener = FakePipeline(), ProgressListener()
    source = DrawingSource([0.0], pipeline)
    config = options(tmp_path, max_steps=1)
    trainer = InstructTrainer(
        pipeline, CORPUS, config, validation=rows(7, 8), source=source, observer=listener
    )
    trainer.train()
    validation = [("evaluated", 1, 2), ("evaluated", 2, 2)]
    assert listener.heard == [*validation, ("sampled", 0, 2), ("sampled", 2, 2), *validation]
