"""Runs that are killed at random moments and resumed end like an undisturbed run."""

from __future__ import annotations

import json
import os
import random
import signal
import time
from pathlib import Path

import pytest

from mlxtune.config.trial_config import MODEL, demo_file
from mlxtune.core.run.checkpoint import checkpoint_folders
from mlxtune.core.run.run_folder import SAMPLE_RECORDS
from tests.test_faults import result_of

RUNS, KILLS = 40, 3
# Many saves that a kill can hit: one every second step, and two at the end of each epoch.
OPTIONS = (
    *("--epochs", "2", "--batch-size", "4", "--save-steps", "2", "--max-seq-len", "224"),
    *("--dropout", "0.1", "--lr", "1e-3", "--targets", "all", "--val-rows", "8", "--quiet"),
)

SAMPLING = (
    *("--reward", "length:40", "--max-new-tokens", "12", "--group-size", "4", "--updates", "2"),
    *("--kl", "0.1"),
)


def samples_of(folder: Path) -> bytes:
    """Return the record of samples of a run that learns from rewards."""
    record = folder / "checkpoints" / SAMPLE_RECORDS
    return record.read_bytes() if record.exists() else b""


def start(folder: Path, arguments: list[str]) -> int:
    """Fork a process that runs the command, with all modules loaded; return the process id."""
    process = os.fork()
    if process:
        return process
    code = 70
    try:
        os.chdir(folder)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from mlxtune.cli import main

        main(arguments)
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    finally:
        os._exit(code)


def run_to_end(folder: Path, arguments: list[str]) -> float:
    """Run the command; return its duration in seconds."""
    folder.mkdir(exist_ok=True)
    began = time.monotonic()
    _, status = os.waitpid(start(folder, arguments), 0)
    assert status == 0, (folder / "log.txt").read_text()
    return time.monotonic() - began


def killed_within(process: int, seconds: float) -> bool:
    """Kill a process after some seconds; return whether it was still running."""
    time.sleep(seconds)
    os.kill(process, signal.SIGKILL)
    return os.WIFSIGNALED(os.waitpid(process, 0)[1])


@pytest.mark.long
@pytest.mark.parametrize(
    "more",
    [
        [],
        ["--objective", "dpo", "--max-seq-len", "448"],
        ["--init", "pissa", "--target-rank", "q_proj=4"],
        ["--objective", "grpo", *SAMPLING],
    ],
    ids=str,
)
def test_killed_run_is_resumed_to_the_same_result(
    shared: Path, tmp_path: Path, more: list[str]
) -> None:
    import mlxtune.commands.train  # noqa: F401

    rows = (shared / "chat" / "wikisql_train.jsonl").read_text().splitlines()[:24]
    if "dpo" in more:
        rows = list(map(as_pair, rows))
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(rows) + "\n")
    # Answers must end with a token, which the small model's tokenizer has for no template.
    model = demo_file(MODEL) if "grpo" in more else shared / "models" / "stories260k"
    template = [] if "grpo" in more else ["--template", "gemma"]
    train = ["train", "--model-path", str(model), "--data", str(data), *OPTIONS, *template, *more]
    # The first run fills the caches of encoded data and hashes.
    _, length = (run_to_end(tmp_path / name, train) for name in ("whole", "again"))
    expected, kills = result_of(tmp_path / "whole"), 0
    samples = samples_of(tmp_path / "whole")
    assert bool(samples) == ("grpo" in more)
    for number in range(RUNS):
        draw, folder = random.Random(number), tmp_path / f"run-{number}"
        folder.mkdir()
        command = train
        for _ in range(draw.randint(1, KILLS)):
            kills += killed_within(start(folder, command), draw.uniform(0, length))
            if checkpoint_folders(folder / "checkpoints"):
                command = ["train", "--resume", "--quiet"]
        run_to_end(folder, command)
        assert result_of(folder) == expected, folder
        assert samples_of(folder) == samples, folder
    assert kills > RUNS


def as_pair(row: str) -> str:
    """Return a row of chat data as a pair; the rejected answer is the right one reversed."""
    *prompt, answer = json.loads(row)["messages"]
    right = answer["content"]
    return json.dumps({"prompt": prompt, "chosen": right, "rejected": right[::-1]})
