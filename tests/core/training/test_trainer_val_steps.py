"""Validation within epochs, every --val-steps: its times, checkpoints and patience."""

from __future__ import annotations

import math
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.run.metrics import InstructTrainResult
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import TrainingInterrupted
from tests.core.training.fake_pipeline import (
    FakePipeline,
    log_of,
    metadata,
    names_in,
    options,
    rows,
    train,
    without_times,
)
from tests.faults import CRASH, Crash, FaultyDisk
from tests.slow import long, slow

# Rows 7 and 14 add nothing to the loss of a validation.
HELD_OUT = rows(7, 14)


def validated_after(per_epoch: int, epochs: int, max_steps: int | None, every: int) -> list[int]:
    """Return the steps after which a run validates, without the trainer's bookkeeping."""
    total = min(per_epoch * epochs, max_steps or math.inf)
    found = {0, *range(0, int(total) + 1, every), *range(0, int(total) + 1, per_epoch), total}
    return sorted(map(int, found))


@given(
    per_epoch=st.integers(1, 7),
    epochs=st.integers(1, 3),
    max_steps=st.none() | st.integers(1, 20),
    every=st.integers(1, 25),
    save_steps=st.none() | st.integers(1, 5),
)
def test_run_validates_every_val_steps_and_at_epoch_ends(
    per_epoch: int, epochs: int, max_steps: int | None, every: int, save_steps: int | None
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        made = FakePipeline(val_loss=lambda v: 9.0 - v / 100)
        changes = {"epochs": epochs, "max_steps": max_steps, "save_steps": save_steps}
        changes |= {"early_stopping_patience": 99}
        corpus = rows(*range(1, per_epoch + 1))
        whole = {"batch_size": 1, "validation": HELD_OUT, "val_steps": every, **changes}
        found = train(Path(folder), made, corpus, **whole)

        steps = validated_after(per_epoch, epochs, max_steps, every)
        assert made.validations == [(step, [7, 14]) for step in steps]
        log = log_of(Path(folder))
        assert [line["step"] for line in log if line["kind"] == "validation"] == steps
        assert len(found.epoch_metrics) == math.ceil(steps[-1] / per_epoch)
        # Each validation is saved, and no step is saved twice.
        saved = [step for name, step in made.saves if name.startswith(".mlxtune-step-")]
        within = [step for step in steps[1:-1] if step % per_epoch]
        assert len(saved) == len(set(saved))
        assert set(within) <= set(saved)
        if save_steps is None:
            assert saved == within
        assert [step for name, step in made.saves if name.startswith(".mlxtune-best.")] == steps[1:]
        # Validation does not affect the training.
        with tempfile.TemporaryDirectory() as other:
            plain = FakePipeline(val_loss=lambda v: 9.0)
            train(Path(other), plain, corpus, **whole | {"val_steps": None})
        assert made.batches == plain.batches
        assert made.learning_rates == plain.learning_rates


def stepwise(losses: Sequence[float]) -> FakePipeline:
    """Return a pipeline whose validation loss depends only on the step."""
    made = FakePipeline()
    made._val_loss = lambda v: losses[len(made.batches)]
    return made


LOSSES = st.lists(st.sampled_from([0.5, 1.0, 1.5, 2.0, 2.5]), min_size=13, max_size=13)


@given(losses=LOSSES, patience=st.integers(1, 6), every=st.integers(1, 6))
def test_best_step_and_patience_follow_all_validations(
    losses: list[float], patience: int, every: int
) -> None:
    # Three epochs of four steps.
    steps = validated_after(4, 3, None, every)[1:]
    for ended in range(1, len(steps) + 1):
        best = min(steps[:ended], key=lambda step: (losses[step], step))
        if ended - 1 - steps.index(best) == patience:
            break
    last = steps[ended - 1]

    with tempfile.TemporaryDirectory() as name:
        folder, made = Path(name), stepwise(losses)
        found = train(
            folder,
            made,
            rows(1, 2, 3, 4),
            validation=HELD_OUT,
            batch_size=1,
            epochs=3,
            val_steps=every,
            early_stopping_patience=patience,
        )

        assert len(made.batches) == last
        assert found.stopped_early == (last < 12)
        assert (found.best_step, found.best_val_loss) == (best, losses[best])
        assert found.best_epoch == math.ceil(best / 4)
        assert found.epoch_metrics[-1].val_loss == losses[last]
        saved = metadata(folder / "best")
        assert (saved["step"], saved["val_loss"]) == (best, losses[best])
        assert (folder / "best" / "adapters.safetensors").read_text() == str(best)


def test_checkpoint_within_an_epoch_holds_its_validation(tmp_path: Path) -> None:
    made = stepwise([4.0, 3.0, 2.0, 3.0, 3.5])
    changes = {"batch_size": 1, "epochs": 1, "val_steps": 2, "save_steps": 1}
    train(tmp_path, made, rows(1, 2, 3, 4), validation=HELD_OUT, keep=4, **changes)

    assert names_in(tmp_path) == {"best", "metrics.jsonl", "epoch-1", "step-2", "step-3", "step-4"}
    lines = log_of(tmp_path / "step-2")
    assert [line["kind"] for line in lines] == ["validation", "step", "step", "validation"]
    saved = metadata(tmp_path / "step-2")
    assert (saved["step"], saved["epoch"], saved["val_loss"]) == (2, 1, 2.0)
    assert saved == metadata(tmp_path / "best") | {
        name: saved[name] for name in ("total_time_ms", "epoch_time_ms", "samples_per_sec")
    }
    assert metadata(tmp_path / "step-3")["val_loss"] is None


def test_no_validation_rows_no_validation(tmp_path: Path) -> None:
    made = FakePipeline()
    train(tmp_path, made, validation=[], val_steps=1)
    assert made.validations == []
    assert names_in(tmp_path) == {"metrics.jsonl", "epoch-1", "epoch-2"}


# Resumed


def run(
    folder: Path, losses: Sequence[float], *, stop_at: int = 0, resume: bool = False, **changes: int
) -> tuple[InstructTrainResult, FakePipeline]:
    made, asked = stepwise(losses), 0

    def should_stop() -> bool:
        nonlocal asked
        asked += 1
        return asked == stop_at

    config = options(folder, batch_size=1, epochs=3, **changes)
    corpus = rows(1, 2, 3, 4)
    trainer = InstructTrainer(made, corpus, config, validation=HELD_OUT, should_stop=should_stop)
    return trainer.train(resume=find_resume_point(folder) if resume else None), made


def all_of(found: InstructTrainResult, made: FakePipeline, folder: Path) -> list[object]:
    best = (
        found.best_step,
        found.best_epoch,
        found.best_val_loss,
        metadata(folder / "best")["step"],
    )
    adapter = (folder / "best" / "adapters.safetensors").read_text()
    log = without_times(log_of(folder))
    return [made.batches, made.learning_rates, found.stopped_early, best, adapter, log]


@given(
    losses=LOSSES,
    patience=st.integers(1, 6),
    every=st.integers(1, 6),
    save_steps=st.integers(1, 6),
    keep=st.integers(1, 3),
    stops=st.lists(st.integers(3, 24), min_size=1, max_size=2),
)
@settings(max_examples=settings().max_examples // 2)
def test_run_stopped_anywhere_and_resumed_is_the_whole_run(
    losses: list[float], patience: int, every: int, save_steps: int, keep: int, stops: list[int]
) -> None:
    changes = {"early_stopping_patience": patience, "val_steps": every}
    changes |= {"save_steps": save_steps, "keep": keep}
    with tempfile.TemporaryDirectory() as name:
        whole, folder = Path(name) / "whole", Path(name) / "stopped"
        expected = all_of(*run(whole, losses, **changes), whole)
        # Each step asks once, each validation twice; the first validation precedes training.
        for stop_at in stops:
            with suppress(TrainingInterrupted):
                run(folder, losses, stop_at=stop_at, resume=True, **changes)
        # A finished run does not change.
        assert all_of(*run(folder, losses, resume=True, **changes), folder) == expected


@pytest.mark.parametrize("every", [53, slow(11), long(1)])
def test_run_killed_at_any_write_and_resumed_is_the_whole_run(tmp_path: Path, every: int) -> None:
    losses = [4.0, *[3.0, 2.0, 1.0, 2.0, 1.5, 0.5] * 2]
    changes = {"early_stopping_patience": 4, "val_steps": 2, "save_steps": 3}
    expected = all_of(*run(tmp_path / "whole", losses, **changes), tmp_path / "whole")
    for fails_at in range(1, 2000, every):
        folder = tmp_path / str(fails_at)
        with pytest.MonkeyPatch.context() as monkeypatch, suppress(Crash):
            disk = FaultyDisk(monkeypatch, fails_at, CRASH)
            run(folder, losses, **changes)
        found = all_of(*run(folder, losses, resume=True, **changes), folder)
        assert found == expected, f"operation {fails_at}"
        shutil.rmtree(folder)
        if not disk.failed:
            break
    assert fails_at > 200


def test_longer_run_keeps_a_validation_that_it_makes_too(tmp_path: Path) -> None:
    losses = [4.0, *[3.0, 2.0, 1.0] * 4]
    whole, grown = tmp_path / "whole", tmp_path / "grown"
    for max_steps, every in ((6, 2), (6, 3), (5, 3)):
        changes = {"val_steps": every, "early_stopping_patience": 9}
        schedule: dict[str, str] = {"schedule": "constant"}
        name = f"{max_steps}-{every}"
        expected = all_of(*run(whole / name, losses, **changes, **schedule), whole / name)
        run(grown / name, losses, max_steps=max_steps, **changes, **schedule)
        found = run(grown / name, losses, resume=True, **changes, **schedule)
        assert all_of(*found, grown / name) == expected
