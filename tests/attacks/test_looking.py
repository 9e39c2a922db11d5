"""Read-only commands change nothing in a run's folder, even while another process writes there."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtune.core.files.lock import Lock
from mlxtune.core.run import run_folder
from tests.attacks.attack import attack, contents
from tests.command import Cli
from tests.slow import long_except

COMMANDS: dict[str, list[str]] = {
    "verify": ["verify", "{run}"],
    "verify --json": ["verify", "{run}", "--json"],
    "verify its adapter": ["verify", "{out}/adapters.safetensors"],
    "verify a checkpoint": ["verify", "{run}/epoch-1"],
    "report --json": ["report", "{run}", "--json"],
    "report --html": ["report", "{run}", "--html", "{elsewhere}/page.html"],
    "report of two": ["report", "{run}", "{run}", "--json"],
    "runs": ["runs", "{out}"],
    "runs --json": ["runs", "{out}", "--json"],
    "eval": ["eval", "--model-path", "{model}", "--adapter", "{out}", "--data", "{chat}"],
    "eval of a checkpoint": [
        *("eval", "--model-path", "{model}", "--adapter", "{run}/epoch-1", "--data", "{chat}")
    ],
    "generate": [
        *("generate", "--model-path", "{model}", "--adapter", "{run}", "--prompt", "hi"),
        *("--max-new-tokens", "2"),
    ],
    "dry run": [
        *("train", "--model-path", "{model}", "--data", "{chat}", "--dry-run"),
        *("--output", "{out}/adapters.safetensors", "--overwrite"),
    ],
}
# Folders left by a killed writer, or in use by an active writer.
STATES = {
    "finished": [],
    "best steps aside": ["aside"],
    "best steps aside while another process writes": ["aside", "locked"],
    "both are there": ["copied", "locked"],
    "a checkpoint is being written": ["temporary", "locked"],
    "an earlier run is being moved": ["moving", "locked"],
    "its lock was left behind": ["stale"],
    "its metrics end in half a line": ["torn", "locked"],
}


@pytest.fixture
def run(own_run: Path) -> Path:
    return own_run


@pytest.fixture
def locks() -> Iterator[list[Lock]]:
    held: list[Lock] = []
    yield held
    for lock in held:
        lock.release()


def prepare(run: Path, state: list[str], locks: list[Lock]) -> None:
    if "aside" in state:
        (run / "best").rename(run / ".best.old")
    if "copied" in state:
        shutil.copytree(run / "best", run / ".best.old")
    if "temporary" in state:
        shutil.copytree(run / "best", run / f".mlxtune-best.{'0' * 16}.tmp")
    if "moving" in state:
        (run / run_folder._MOVING_NAME).mkdir()
        (run / "ledger.json").rename(run / run_folder._MOVING_NAME / "ledger.json")
    if "stale" in state:
        (run / ".mlxtune.lock").write_text('{"pid": 1}')
    if "torn" in state:
        with (run / "metrics.jsonl").open("a") as file:
            file.write('{"kind": "st')
    if "locked" in state:
        locks.append(Lock(run / ".mlxtune.lock"))


# Every command in one state, and the two commands that read the most files in every state.
CASES = [(command, "best steps aside while another process writes") for command in COMMANDS]
CASES += [(command, state) for command in ("verify", "report --json") for state in STATES]


@pytest.mark.parametrize(("command", "state"), dict.fromkeys(CASES))
def test_viewing_a_run_changes_no_file(
    cli: Cli,
    run: Path,
    model: Path,
    chat: Path,
    tmp_path: Path,
    locks: list[Lock],
    command: str,
    state: str,
) -> None:
    prepare(run, STATES[state], locks)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    places = {"run": run, "out": run.parent, "model": model, "chat": chat, "elsewhere": elsewhere}
    # A dry run creates and removes a file to check whether its output can be created.
    folder_times = command != "dry run"
    before = contents(run.parent, folder_times=folder_times)
    outcome = cli(*(each.format(**places) for each in COMMANDS[command]))
    assert outcome.code in (0, 1)
    assert contents(run.parent, folder_times=folder_times) == before


# This drops root's privilege to write everywhere.
UNPRIVILEGED = ["setpriv", "--bounding-set=-dac_override,-dac_read_search"]
READERS = ["runs", "report", "verify", "resume"]


@pytest.mark.skipif(
    os.geteuid() == 0 and shutil.which("setpriv") is None, reason="root may write everywhere"
)
@pytest.mark.parametrize("command", long_except(READERS, "report"))
def test_folder_that_may_only_be_read(
    run: Path, model: Path, chat: Path, tmp_path: Path, command: str
) -> None:
    prepare(run, STATES["best steps aside"], [])
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    places = {"run": run, "out": run.parent, "model": model, "chat": chat, "elsewhere": elsewhere}
    arguments = {"report": ["report", "{run}"], "resume": ["train", "--resume", "{run}"]} | COMMANDS
    folders = [run.parent, *(path for path in run.parent.rglob("*") if path.is_dir())]
    before = contents(run.parent)
    for folder in folders:
        folder.chmod(0o555)
    try:
        outcome = attack(
            *(each.format(**places) for each in arguments[command]),
            command=[*(UNPRIVILEGED if os.geteuid() == 0 else []), sys.executable, "-m", "mlxtune"],
            cwd=tmp_path,
        )
    finally:
        for folder in folders:
            folder.chmod(0o755)
    assert contents(run.parent) == before
    assert "Traceback" not in outcome.err
    if command == "resume":
        assert "fix permissions or choose another --" in outcome.err.splitlines()[-1]
    elif command != "verify":
        assert outcome.code == 0
    if command == "report":
        assert "no page: " in outcome.out
        assert "validation loss" in outcome.out
