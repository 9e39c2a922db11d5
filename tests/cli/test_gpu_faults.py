"""A GPU fault ends a command with one line, and the run can be resumed."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import Cli
from tests.slow import slow

OPTIONS = ("--epochs", 3, "--lr", "1e-2", "--batch-size", 4)
VICTIM = (
    "[METAL] Command buffer execution failed: Innocent Victim "
    "(00000005:kIOGPUCommandBufferCallbackErrorInnocentVictim)."
)
NO_MEMORY = "[malloc] Unable to allocate 78643200 bytes."


def failing(function: Callable[..., Any], text: str, calls: int = 0) -> Callable[..., Any]:
    """Wrap a function so that it raises RuntimeError(text) after `calls` calls."""
    count = iter(range(10**9))

    def run(*args: Any, **options: Any) -> Any:
        if next(count) >= calls:
            raise RuntimeError(text)
        return function(*args, **options)

    return run


@pytest.mark.parametrize(
    ("text", "meaning"),
    [(VICTIM, "dropped a command .* twice in a row"), slow(NO_MEMORY, "memory ran out with one")],
)
def test_run_that_a_fault_ends_is_resumed_by_the_command_that_it_names(
    cli: Cli, train: Cli, output: Path, tmp_path: Path, text: str, meaning: str
) -> None:
    from mlxtune.backend.forward.forward import Forward

    whole = tmp_path / "whole" / "adapters.safetensors"
    assert train(*OPTIONS, "--output", whole).code == 0
    with pytest.MonkeyPatch.context() as patch:
        # The tenth call is in the third epoch, because an epoch has four steps.
        patch.setattr(Forward, "scaled_loss", failing(Forward.scaled_loss, text, 9))
        outcome = train(*OPTIONS)
    assert (outcome.code, outcome.out) == (1, "")
    *warnings, line = outcome.err.splitlines()
    assert all(warning.startswith("warning: ") for warning in warnings)
    run = output.parent / "checkpoints"
    assert line.startswith("mlxtune: error: ")
    assert f"; the last good checkpoint is {run / 'epoch-2'}" in line
    assert re.search(meaning, line)
    assert line.endswith(f"; resume with mlxtune train --resume {output.parent}")

    assert cli(*line.rpartition("mlxtune ")[2].split()).code == 0
    if text is VICTIM:
        assert output.read_bytes() == whole.read_bytes()


def test_fault_before_the_first_step_is_one_line(
    train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.models import loading

    monkeypatch.setattr(loading, "read_weights", failing(loading.read_weights, VICTIM))
    assert train().error.startswith("the GPU dropped a command")
    with pytest.raises(RuntimeError, match="Innocent Victim"):
        train("--debug")


def test_other_errors_keep_their_traceback(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.backend.models import loading

    monkeypatch.setattr(loading, "read_weights", failing(loading.read_weights, "[matmul] shapes"))
    with pytest.raises(RuntimeError, match="shapes"):
        train()
