"""The trainer's checkpoints, when it saves them, and what remains if it cannot."""

from __future__ import annotations

import errno
import json
import math
import os
import shutil
from pathlib import Path

import pytest

from mlxtune.config import InstructTrainingConfig
from mlxtune.core.run.metrics import StepRecord
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import NonFiniteLossError, OutputError, TrainingInterrupted
from tests.core.training.fake_pipeline import (
    CORPUS,
    FakePipeline,
    log_of,
    metadata,
    names_in,
    options,
    train,
    without_times,
)


@pytest.mark.parametrize(
    ("epochs", "save_every", "saved"),
    [
        (1, 1, [1]),
        (4, 1, [3, 4]),
        (4, 2, [2, 4]),
        (5, 2, [2, 4]),
        (3, 3, [2, 3]),
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


@pytest.mark.parametrize("earlier", [False, True])
def test_interrupt_before_the_first_step_leaves_earlier_runs_alone(
    tmp_path: Path, earlier: bool
) -> None:
    if earlier:
        train(tmp_path, FakePipeline())
    trainer = InstructTrainer(FakePipeline(), CORPUS, options(tmp_path), should_stop=lambda: True)
    with pytest.raises(TrainingInterrupted):
        trainer.train({"run.json": {}})

    assert names_in(tmp_path) == ({"previous-1"} if earlier else set())
    assert (tmp_path / ".mlxtune").exists() is earlier


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
    said = metadata(tmp_path / "best")
    assert said.pop("total_time_ms") >= metrics.epoch_time_ms
    assert said == {
        "task": "instruct",
        "epoch": 1,
        "step": 3,
        "total_steps": 3,
        "best_epoch": 1,
        "best_step": 3,
        "best_val_loss": metrics.val_loss,
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
        "validation_hash": trainer.data_hash(),
        "seed": 7,
        "config": run_config,
    }


def test_metadata_has_the_trainers_options_when_no_run_config_is_given(tmp_path: Path) -> None:
    train(tmp_path, FakePipeline(), epochs=1, seed=7)

    config = metadata(tmp_path / "best")["config"]
    assert InstructTrainingConfig(**config) == options(tmp_path, epochs=1, seed=7)


class Told(TrainingObserver):
    """Records reported problems."""

    def __init__(self) -> None:
        self.problems: list[str] = []

    def on_problem(self, message: str) -> None:
        self.problems.append(message)


@pytest.mark.parametrize("name", ["epoch-1", "best", "epoch-2"])
def test_run_continues_after_an_unwritable_checkpoint(tmp_path: Path, name: str) -> None:
    failed: list[int] = []

    def full_once(folder: Path, step: int) -> bool:
        if f"-{name}." not in folder.name or failed:
            return False
        failed.append(step)
        return True

    pipeline, told = FakePipeline(full=full_once, val_loss=lambda v: 3.0 - v), Told()
    train(tmp_path, pipeline, observer=told)

    (problem,) = told.problems
    assert str(tmp_path / name) in problem
    assert os.strerror(errno.ENOSPC) in problem
    assert len(pipeline.batches) == 6
    # The best checkpoint is still written, before later ones.
    numbered = {"epoch-1", "epoch-2"} - {name}
    assert names_in(tmp_path) == {"metrics.jsonl", "best", *numbered}
    assert metadata(tmp_path / "best")["epoch"] == 2
    assert find_resume_point(tmp_path) is not None


def test_best_checkpoint_is_kept_in_memory_until_the_disk_takes_it(tmp_path: Path) -> None:
    # The disk is full at the end of the second epoch, the best of three; the third is worse.
    pipeline = FakePipeline(
        full=lambda folder, step: "-best." in folder.name and len(pipeline.batches) == 6,
        val_loss=lambda v: [4.0, 3.0, 1.0, 2.0][v],
    )
    train(tmp_path, pipeline, epochs=3, observer=Told())

    assert metadata(tmp_path / "best")["epoch"] == 2
    assert (tmp_path / "best" / "adapters.safetensors").read_text() == "6"


def test_unwritable_best_checkpoint_is_an_error_and_keeps_the_previous_one(
    tmp_path: Path,
) -> None:
    pipeline = FakePipeline(
        full=lambda folder, step: step > 3 and "-best." in folder.name, val_loss=lambda v: 3.0 - v
    )
    with pytest.raises(OutputError, match=r"best.*; the last good checkpoint is .*epoch-1"):
        train(tmp_path, pipeline)

    assert metadata(tmp_path / "best")["epoch"] == 1
    assert (tmp_path / "best" / "adapters.safetensors").read_text() == "3"
    found = find_resume_point(tmp_path)
    assert found is not None
    assert found.checkpoint.step == 3


def test_unwritten_metrics_are_written_later(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    train(whole, FakePipeline())

    class LosesItsFolder(Told):
        """Removes the folder and puts another file in its place for two steps."""

        def on_step(self, record: StepRecord) -> None:
            if record.step == 2:
                shutil.rmtree(broken)
                broken.write_text("")
            if record.step == 4:
                broken.unlink()

    told = LosesItsFolder()
    train(broken, FakePipeline(), observer=told)

    assert any(str(broken) in problem for problem in told.problems)
    assert without_times(log_of(broken)) == without_times(log_of(whole))
    assert names_in(broken) == {"metrics.jsonl", "best", "epoch-2"}


def test_folder_that_cannot_be_made_is_an_error_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    pipeline = FakePipeline()

    with pytest.raises(OutputError, match="cannot be written"):
        train(tmp_path / "file" / "checkpoints", pipeline)
    assert (pipeline.batches, pipeline.validations) == ([], [])


def test_records_are_next_to_the_checkpoints_from_the_start(tmp_path: Path) -> None:
    pipeline = FakePipeline(val_loss=lambda v: math.nan)
    trainer = InstructTrainer(pipeline, CORPUS, options(tmp_path))

    with pytest.raises(NonFiniteLossError):
        trainer.train({"ledger.json": {"rows_read": 10}})
    assert json.loads((tmp_path / "ledger.json").read_text()) == {"rows_read": 10}


def test_earlier_run_in_the_same_folder_is_set_aside_and_reported(tmp_path: Path) -> None:
    told: list[Path | None] = []

    class Observer(TrainingObserver):
        def on_start(self, run: RunStart, previous: Path | None) -> None:
            told.append(previous)

    train(tmp_path, FakePipeline(), epochs=3, observer=Observer())
    train(tmp_path, FakePipeline(), epochs=1, observer=Observer())

    assert told == [None, tmp_path / "previous-1"]
    assert names_in(tmp_path) == {"best", "epoch-1", "metrics.jsonl", "previous-1"}
    earlier = {"best", "epoch-2", "epoch-3", "metrics.jsonl"}
    assert names_in(tmp_path / "previous-1") == earlier
    assert sum(line["kind"] == "step" for line in log_of(tmp_path)) == 3
