"""What the trainer saves, when, and what is left when it cannot."""

from __future__ import annotations

import errno
import json
import math
import os
from pathlib import Path

import pytest

from mlxtune.config import InstructTrainingConfig
from mlxtune.core.trainer import InstructTrainer, TrainingObserver
from mlxtune.errors import NonFiniteLossError, OutputError
from tests.core.fake_pipeline import (
    CORPUS,
    FakePipeline,
    log_of,
    metadata,
    names_in,
    options,
    train,
)


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
