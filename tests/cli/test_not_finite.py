"""Runs in which a loss or a weight becomes infinite or NaN."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.command import Cli


def test_loss_that_is_not_finite_stops_and_names_step_and_learning_rate(
    train: Cli, output: Path
) -> None:
    options = ["--lr", "1e30", "--max-grad-norm", 0, "--schedule", "constant"]
    outcome = train(*options, "--on-nonfinite", "stop")
    assert outcome.code == 1
    assert re.match(r"step \d: the (loss|gradient norm) is (nan|inf)", outcome.error)
    assert "learning rate 1e+30" in outcome.error
    assert "--lr" in outcome.error
    assert not output.exists()


def test_last_good_checkpoint_is_named_if_loss_is_not_finite(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.forward.forward import Forward

    sound = Forward.scaled_loss
    calls = SimpleNamespace(training=0)

    def fails_in_the_third_epoch(self: Forward, *args: Any) -> Any:
        calls.training += 1
        (loss,) = sound(self, *args)
        return (loss * (float("nan") if calls.training > 9 else 1.0),)

    monkeypatch.setattr(Forward, "scaled_loss", fails_in_the_third_epoch)
    error = train("--epochs", 4, "--on-nonfinite", "stop").error
    checkpoints = output.parent / "checkpoints"
    assert re.match(r"step 10: the loss is nan at learning rate \S+", error)
    assert f"the last good checkpoint is {checkpoints / 'epoch-2'}" in error
    kept = {path.parent.name for path in checkpoints.glob("*/adapters.safetensors")}
    assert kept == {"best", "epoch-1", "epoch-2"}
    assert not output.exists()


def test_validation_loss_that_is_not_finite_names_step_and_learning_rate(
    train: Cli, output: Path
) -> None:
    options = ["--lr", "1e39", "--schedule", "constant", "--max-steps", 1]
    error = train(*options, "--on-nonfinite", "stop").error
    assert "step 1" in error
    assert "1e+39" in error
    assert not output.exists()


def test_adapter_that_is_not_finite_is_never_written(train: Cli, output: Path) -> None:
    # Without validation, nothing reads the weights after the last step.
    arguments = ["--lr", "1e39", "--schedule", "constant", "--val-split", 0, "--max-steps", 1]
    error = train(*arguments, "--on-nonfinite", "stop").error
    assert "step 1" in error
    assert "1e+39" in error
    assert not list(output.parent.rglob("adapters.safetensors"))


def test_non_finite_step_is_skipped_with_warning_naming_rows(
    train: Cli, chat: Path, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.forward.forward import Forward

    sound = Forward.scaled_loss
    calls = SimpleNamespace(training=0)

    def fails_once(self: Forward, *args: Any) -> Any:
        calls.training += 1
        (loss,) = sound(self, *args)
        return (loss * (float("nan") if calls.training == 2 else 1.0),)

    monkeypatch.setattr(Forward, "scaled_loss", fails_once)
    outcome = train()
    assert outcome.code == 0
    (warning,) = outcome.err.splitlines()
    assert re.search(
        rf"step 2: the loss is nan .*; its rows: {re.escape(str(chat))}:\d+, ", warning
    )
    assert output.exists()
    lines = (output.parent / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    assert [line for line in lines if '"kind": "skipped", "step": 2' in line]


def test_steps_that_are_not_finite_end_the_run_after_three_in_a_row(
    train: Cli, output: Path
) -> None:
    outcome = train("--lr", "1e30", "--max-grad-norm", 0, "--schedule", "constant")
    assert outcome.code == 1
    *warnings, error = outcome.err.splitlines()
    assert len(warnings) == 2
    assert "3 steps in a row" in error
    assert not output.exists()
