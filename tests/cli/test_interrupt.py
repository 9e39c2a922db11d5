"""Runs that are interrupted once, twice, or before they train."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.command import Cli, Outcome, files_in, finish, read_until, start
from tests.models import sums, write_chat
from tests.slow import slow
from tests.waiting import SECONDS, wait_until


@pytest.fixture
def long_run(model: Path, chat: Path, output: Path) -> list[object]:
    paths = ["--model-path", model, "--data", chat, "--output", output]
    return ["train", *paths, "--epochs", 10_000, "--patience", 10_000, "--log-every", 1]


def signalled(run: list[object], heard: str, number: signal.Signals) -> Outcome:
    """Send a signal to a run once it prints `heard`, and wait for its end."""
    process = start(*run)
    read = read_until(process, heard)
    process.send_signal(number)
    return finish(process, read)


def signalled_twice(model: Path, output: Path, number: signal.Signals) -> Outcome:
    """Signal a run twice, the second time once it reports that it is stopping; wait for its end."""
    # Long steps, so that the second signal still arrives within a step.
    rows = write_chat(output.parents[1] / "many.jsonl", sums(6000))
    paths = ["--model-path", model, "--data", rows, "--output", output, "--val-split", 0]
    process = start("train", *paths, "--batch-size", 6000)
    read = read_until(process, "Plan")
    # This file is written before the first step.
    wait_until((output.parent / "checkpoints" / "run.json").exists)
    process.send_signal(number)
    read += read_until(process, "stopping")
    process.send_signal(number)
    return finish(process, read)


def test_interrupt_finishes_the_step_saves_and_says_where(
    long_run: list[object], model: Path, output: Path
) -> None:
    from mlx_lm.utils import load

    outcome = signalled(long_run, "step 3/", signal.SIGINT)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    lines = outcome.err.splitlines()
    assert len(set(lines)) == len(lines)  # the handler may print within another line
    said = re.fullmatch(
        r"mlxtune: interrupted after step (\d+); saved to (.+); "
        r"resume with mlxtune train --resume (.+)",
        lines[-1],
    )
    assert said, outcome.err
    step, folder = int(said[1]), Path(said[2])
    assert step >= 3
    assert folder == output.parent / "checkpoints" / f"step-{step}"
    assert said[3] == str(output.parent)
    assert json.loads((folder / "metadata.json").read_text())["step"] == step
    load(str(model), adapter_path=str(folder))
    assert not output.exists()


@pytest.mark.parametrize(
    ("number", "code"), [slow(signal.SIGINT, 130), (signal.SIGTERM, 143), (signal.SIGHUP, 129)]
)
def test_signal_in_a_step_lets_the_step_end(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch, number: signal.Signals, code: int
) -> None:
    from mlxtune.backend.step.pipeline import InstructPipeline

    whole = InstructPipeline.start_batch

    def interrupted(self: Any, examples: Any, *, step: int, **options: Any) -> Any:
        if step == 2:
            signal.raise_signal(number)
        return whole(self, examples, step=step, **options)

    monkeypatch.setattr(InstructPipeline, "start_batch", interrupted)
    outcome = train("--epochs", 2)
    folder = output.parent / "checkpoints" / "step-2"
    assert outcome.code == code
    *warnings, last = outcome.err.splitlines()
    # After SIGHUP, the terminal is closed and shows no warning.
    assert len(warnings) == (number != signal.SIGHUP)
    assert all(warning.startswith("warning: stopping after this step") for warning in warnings)
    assert last == (
        f"mlxtune: interrupted after step 2; saved to {folder}; "
        f"resume with mlxtune train --resume {output.parent}"
    )
    assert (folder / "adapters.safetensors").is_file()


def test_second_interrupt_ends_at_once(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any, **__: Any) -> None:
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("mlxtune.backend.step.pipeline.InstructPipeline.start_batch", interrupted)
    outcome = train()
    assert outcome.code == 130
    assert "mlxtune: interrupted; no checkpoint was written" in outcome.err.splitlines()
    assert "saved" not in outcome.err
    assert not output.parent.exists()


def test_second_interrupt_names_the_last_checkpoint(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.step.pipeline import InstructPipeline

    original = InstructPipeline.start_batch

    def interrupted(self: Any, examples: Any, *, step: int, **options: Any) -> Any:
        if step == 3:
            signal.raise_signal(signal.SIGINT)
            signal.raise_signal(signal.SIGINT)
        return original(self, examples, step=step, **options)

    monkeypatch.setattr(InstructPipeline, "start_batch", interrupted)
    outcome = train("--save-steps", "1")
    assert outcome.code == 130
    folder = output.parent / "checkpoints" / "step-2"
    assert outcome.err.splitlines()[-1] == (
        f"mlxtune: interrupted; the last checkpoint is {folder}; "
        f"resume with mlxtune train --resume {output.parent}"
    )
    assert (folder / "adapters.safetensors").is_file()


def test_interrupt_within_a_locks_own_code_is_still_an_interrupt(
    train: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Lock:
        """A lock whose `__enter__` is interrupted."""

        def __enter__(self) -> None:
            try:
                raise KeyboardInterrupt
            finally:
                threading.Lock().release()

        def __exit__(self, *_: object) -> None: ...

    def locked(*_: Any, **__: Any) -> None:
        with Lock():
            pass

    monkeypatch.setattr("mlxtune.backend.step.pipeline.InstructPipeline.start_batch", locked)
    outcome = train()
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "mlxtune: interrupted"


@pytest.mark.parametrize("stage", ["Memory", slow("Model"), "LoRA"])
def test_interrupt_while_loading_ends_without_a_traceback(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    from mlxtune.views.console import RunConsole

    say = RunConsole.say

    def interrupted(self: RunConsole, said: str, message: str) -> None:
        say(self, said, message)
        if said == stage:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunConsole, "say", interrupted)
    assert train() == Outcome(130, "", "mlxtune: interrupted\n")
    assert files_in(output.parent) == []


def test_interrupt_while_encoding_leaves_nothing(
    train: Cli, output: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(*_: Any) -> None:
        signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr("mlxtune.views.console.RunConsole.on_encoding", interrupted)
    assert train("--cache-dir", tmp_path / "cache") == Outcome(130, "", "mlxtune: interrupted\n")
    assert not output.parent.exists()
    assert not [path for path in tmp_path.rglob("*") if path.name.startswith(".")]


def test_interrupt_within_exec_is_an_exit_and_no_signal(tmp_path: Path) -> None:
    """An interrupt in `exec`, which dataclasses call, ends `python -m`, even if it is caught."""
    script = """
from mlxtune import cli
cli._main = lambda arguments: exec("raise KeyboardInterrupt")
cli.main()
"""
    (tmp_path / "interrupted.py").write_text(script, encoding="utf-8")
    run = [sys.executable, "-m", "interrupted"]
    assert subprocess.run(run, cwd=tmp_path, capture_output=True, check=False).returncode == 130


@pytest.mark.slow
def test_terminating_signal_saves_first_and_sets_exit_code(
    long_run: list[object], output: Path
) -> None:
    outcome = signalled(long_run, "step 3/", signal.SIGTERM)
    assert outcome.code == 143
    said = re.search(r"saved to (\S+);", outcome.err.splitlines()[-1])
    assert said
    assert (Path(said[1]) / "manifest.json").is_file()
    assert not (output.parent / "checkpoints" / ".mlxtune.lock").exists()


@pytest.mark.long
def test_second_signal_to_terminate_ends_at_once(model: Path, output: Path) -> None:
    outcome = signalled_twice(model, output, signal.SIGTERM)
    assert outcome.code in (143, -signal.SIGTERM)
    assert not list(output.parent.rglob("*.safetensors"))


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs terminals")
def test_run_whose_terminal_is_closed_saves_and_ends(long_run: list[object], output: Path) -> None:
    ours, its = os.openpty()
    process = start(*long_run, stdout=its, stderr=its, text=False, start_new_session=True)
    os.close(its)
    seen = b""
    while not re.search(rb"step \d\d+/", seen):  # the bar skips some steps
        seen += os.read(ours, 4096)
    os.close(ours)
    process.send_signal(signal.SIGHUP)
    assert process.wait(SECONDS) == 129
    steps = list((output.parent / "checkpoints").glob("step-*/manifest.json"))
    assert len(steps) == 1
