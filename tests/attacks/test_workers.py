"""If a worker ends, hangs or starts differently, the others name it and the way to continue."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxtune.core.files.lock import Lock
from mlxtune.core.run.run_folder import LOCK
from tests.cli.test_workers import arguments, patched
from tests.launch import free_port, needs_ring, run
from tests.slow import long
from tests.waiting import SECONDS

pytestmark = [needs_ring, pytest.mark.slow]

WRAP = """import signal, time
{module}
real = {owner}.{name}
def acting(*arguments, **options):
    found = real(*arguments, **options)
    {act}
    return found
{owner}.{name} = acting"""
PLACES = {
    "joined": ("import mlxtune.backend.workers.launch as launch", "launch.Workers", "launched"),
    "encoding": ("import mlxtune.session.session as session", "session", "load_dataset"),
    "loading": ("import mlxtune.backend.models.loading as loading", "loading", "read_weights"),
    "first step": (
        "from mlxtune.backend.step.pipeline import InstructPipeline as pipeline",
        "pipeline",
        "start_batch",
    ),
}
KILLED = "os.kill(os.getpid(), signal.SIGKILL)"


def lines(said: str) -> list[str]:
    assert "Traceback" not in said
    return [line for line in said.splitlines() if line.startswith("mlxtune: ")]


def attacked(folder: Path, worker: int, place: str, act: str, command: list[object]) -> list[str]:
    """Run two workers, one of which executes `act` at `place`; return the last lines of output."""
    module, owner, name = PLACES[place]
    patch = WRAP.format(module=module, owner=owner, name=name, act=act)
    script = Path(str(patched(folder, worker, patch)[0]))
    shorter = "from mlxtune.backend.workers import heartbeat\nheartbeat._MEETING_SECONDS = 3.0\n"
    script.write_text(shorter + script.read_text())
    return lines(run(2, [script, *command[2:]], folder / "log", timeout=SECONDS))


def started_apart(folder: Path, first: list[object], second: list[object]) -> list[str]:
    """Start workers 0 and 1 with different commands; return the last lines of output."""
    script = folder / "start.sh"
    commands = (" ".join(map(str, [sys.executable, *each])) for each in (second, first))
    script.write_text('if [ "$MLX_RANK" = 1 ]; then exec {}; else exec {}; fi\n'.format(*commands))
    return lines(run(2, ["bash", script], folder / "log", timeout=SECONDS))


@pytest.mark.parametrize("place", [long("encoding"), long("loading"), "first step"])
@pytest.mark.parametrize("worker", [long(0), 1])
def test_worker_killed_before_the_first_save_is_named(
    tmp_path: Path, worker: int, place: str
) -> None:
    (line,) = attacked(tmp_path, worker, place, KILLED, arguments(tmp_path))
    # The other worker may have recorded the first step.
    assert re.search(rf"worker {worker} is gone after step [01]\b", line)
    # No checkpoint exists from which to resume.
    assert line.endswith("; nothing was saved: run the same command again")


@pytest.mark.parametrize("act", [KILLED, long("time.sleep(600)")])
@pytest.mark.parametrize("worker", [long(0), 1])
# These cases run only with `long`: on a busy machine, the other worker may end before it says why.
@pytest.mark.parametrize("command", [long("train"), long("resume"), long("doctor")])
def test_silent_worker_times_out(tmp_path: Path, worker: int, act: str, command: str) -> None:
    options = {
        "train": arguments(tmp_path),
        "resume": ["-m", "mlxtune", "train", "--resume", tmp_path],
        "doctor": ["-m", "mlxtune", "doctor"],
    }
    (line,) = attacked(tmp_path, worker, "joined", act, options[command])
    assert f"worker {worker} does not answer, or has ended: start all workers again" in line


@pytest.mark.parametrize("change", ["--resume", long("--parallel tensor")])
@pytest.mark.parametrize("worker", [long(0), 1])
def test_workers_with_different_starts_are_detected_immediately(
    tmp_path: Path, worker: int, change: str
) -> None:
    plain = arguments(tmp_path)
    other = ["-m", "mlxtune", "train", "--resume", tmp_path] if change == "--resume" else plain
    other = [*plain, *change.split()] if change != "--resume" else other
    (line,) = started_apart(tmp_path, *([other, plain] if worker == 0 else [plain, other]))
    assert "worker 1 began with --" in line
    assert "start all workers with one command" in line


@pytest.mark.parametrize("worker", [long(0), long(1)])
def test_worker_error_line_is_shown(tmp_path: Path, worker: int) -> None:
    plain, nothing = arguments(tmp_path), arguments(tmp_path, model_path=tmp_path / "nothing")
    said = started_apart(tmp_path, *([nothing, plain] if worker == 0 else [plain, nothing]))
    assert f"{tmp_path / 'nothing'}: no such folder" in said[0]
    assert ("worker 1: " in said[0]) == bool(worker)


@pytest.mark.parametrize("command", [long("train"), long("resume")])
def test_worker_without_room_for_temporary_files_ends_all(tmp_path: Path, command: str) -> None:
    options = arguments(tmp_path, max_steps=4, save_steps=2)
    if command == "resume":
        run(2, options, tmp_path / "log")
        elsewhere = ["-m", "mlxtune", "train", "--resume", tmp_path / "checkpoints"]
        options = [*elsewhere, "--max-steps", 6]
    patch = """import tempfile
def full(*arguments, **options):
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
tempfile.mkdtemp = full"""
    script, *_ = patched(tmp_path, 1, patch)
    said = lines(run(2, [script, *options[2:]], tmp_path / "log", timeout=SECONDS))
    assert "worker 1: " in said[0]
    assert "cannot be written: No space left on device: " in said[0]
    assert "choose another TMPDIR" in said[0]


@pytest.mark.long
def test_second_launch_into_a_folder_ends(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    lock = Lock(tmp_path / "checkpoints" / LOCK)
    try:
        said = lines(run(2, arguments(tmp_path), tmp_path / "log", timeout=SECONDS))
    finally:
        lock.release()
    assert said[0].endswith("wait until it ends, or choose another --checkpoint-dir")


HOSTS = '[["127.0.0.1:PORT"],["127.0.0.1:NEXT"]]'


@pytest.mark.parametrize(
    "rank, hosts, problem",
    [
        ("x", HOSTS, "MLX_RANK: 'x' is not the number of a worker"),
        long("-1", HOSTS, "MLX_RANK: '-1' is no number"),
        long("", HOSTS, "MLX_RANK: '' is no number"),
        long("9" * 20, HOSTS, "is not the number of a worker"),
        long("5", HOSTS, "the other workers cannot be reached: "),
        ("0", "x", "the other workers cannot be reached: "),
        long("0", "[1, 2]", "the other workers cannot be reached: "),
        long("0", "1", "the other workers cannot be reached: "),
        long("0", '{"a": ["127.0.0.1:PORT"]}', "the other workers cannot be reached: "),
        long("0", "[[], []]", "the other workers cannot be reached: "),
        long("0", '[["127.0.0.1"], ["127.0.0.1:1"]]', "the other workers cannot be reached"),
        # Without hosts, this process is alone.
        long("0", "[]", "no such folder"),
        long("0", "{}", "no such folder"),
    ],
)
def test_ranks_and_hosts_that_lie_end_in_a_line(
    tmp_path: Path, rank: str, hosts: str, problem: str
) -> None:
    first = free_port(2)
    file = tmp_path / "hosts.json"
    file.write_text(hosts.replace("PORT", str(first)).replace("NEXT", str(first + 1)))
    environment = {**os.environ, "MLX_RANK": rank, "MLX_HOSTFILE": str(file)}
    command = [sys.executable, *arguments(tmp_path, model_path=tmp_path / "none")]
    ended = subprocess.run(
        [*map(str, command)], env=environment, capture_output=True, text=True, timeout=SECONDS
    )
    assert ended.returncode in (1, 2)
    (line,) = lines(ended.stderr)
    assert problem in line
