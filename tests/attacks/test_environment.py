"""Commands in broken environments: streams, folders, limits and names."""

from __future__ import annotations

import fcntl
import os
import resource
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.core.files.lock import NoLocksError
from mlxtune.core.run import run_folder
from tests.attacks.attack import Ended, attack, refused
from tests.command import Cli
from tests.runs import EVALUATION, write_run
from tests.slow import long, slow

# Standard streams. The shell redirects them as a user, cron or a daemon would.

SHELL = ["sh", "-c"]
FULL = "stdout cannot be written: No space left on device: redirect it elsewhere"
# Redirections, each with the expected exit code and text on stderr.
REDIRECTED: dict[str, tuple[int, str]] = {
    ">/dev/full": (1, FULL),
    ">&-": (0, ""),
    "2>/dev/full": (0, ""),
    "2>&-": (0, ""),
    "<&-": (0, ""),
    ">/dev/full 2>/dev/full": (1, ""),
    "<&- >&- 2>&-": (0, ""),
    "</dev/zero": (0, ""),
}


def shell(line: str, *arguments: object, **options: object) -> Ended:
    """Run a line of shell in which `"$0" "$@"` runs mlxtune with these arguments."""
    command = [*SHELL, line, sys.executable, "-m", "mlxtune"]
    return attack(*arguments, command=command, **options)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", evaluation=EVALUATION)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize(
    ("redirected", "arguments"),
    [
        (">/dev/full", ["runs", "."]),
        ("<&- >&- 2>&-", ["--help"]),
        *(long(redirected, ["runs", ".", "--json"]) for redirected in REDIRECTED),
    ],
)
def test_streams_of_commands_that_look(run: Path, redirected: str, arguments: list[str]) -> None:
    code, error = REDIRECTED[redirected]
    outcome = shell(f'exec "$0" "$@" {redirected}', *arguments, cwd=run)
    assert outcome.within_limits
    assert (outcome.code, outcome.err) == (code, error and f"mlxtune: error: {error}\n")
    shown = ">" not in redirected.replace("2>", "")
    assert bool(outcome.out) == shown


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full, which Linux has")
@pytest.mark.parametrize(
    ("command", "redirected"),
    [
        slow("inspect", ">/dev/full"),
        long("train", ">/dev/full"),
        slow("train", "<&- >&- 2>&-"),
    ],
)
def test_streams_of_commands_that_work(
    tmp_path: Path, model: Path, chat: Path, train: Cli, output: Path, command: str, redirected: str
) -> None:
    arguments: dict[str, list[object]] = {
        "inspect": ["--data", chat, "--model-path", model],
        "train": ["--data", chat, "--model-path", model, "--output", output, "--max-steps", 2],
    }
    outcome = shell(f'exec "$0" "$@" {redirected}', command, *arguments[command], cwd=tmp_path)
    assert outcome.within_limits
    if ">/dev/full" in redirected.replace("2>", "") and command != "train":
        assert outcome.error == FULL
    else:
        assert outcome.code == 0
        assert "Traceback" not in outcome.err
    if command == "train":
        # No printed text was written into a file.
        assert train("--resume", output.parent).code in (0, 1)
        assert output.stat().st_size > 1000


def test_stdout_that_would_block_is_waited_for(run: Path) -> None:
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    fcntl.fcntl(writing, getattr(fcntl, "F_SETPIPE_SZ", 1031), 4096)
    pid = os.fork()
    if not pid:
        os.close(writing)
        read = 0
        while piece := os.read(reading, 1000):
            read += len(piece)
        os._exit(0 if read > 5000 else 1)
    os.close(reading)
    outcome = attack("report", run, "--json", stdout=writing)
    os.close(writing)
    assert (outcome.code, outcome.err) == (0, "")
    assert os.waitpid(pid, 0)[1] == 0


def test_closed_output_pipe_ends_the_command_silently(run: Path) -> None:
    line = '{ "$0" "$@"; echo $? >&2; } | head -c 1'
    outcome = shell(line, "report", run, "--json", cwd=run)
    assert outcome.err.strip() in ("0", "1")


@pytest.mark.parametrize("command", [long("generate"), slow("chat")])
def test_non_text_prompts(model: Path, tmp_path: Path, command: str) -> None:
    options = ["--model-path", model, "--max-new-tokens", 2, "--quiet"]
    with Path("/dev/zero").open("rb") as file:
        refused(attack(command, *options, stdin=file, cwd=tmp_path))


# Folders and limits


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("TMPDIR", "missing"),
        slow("TMPDIR", "file"),
        slow("TMPDIR", ""),
        slow("TMP", "missing"),
    ],
)
def test_missing_temporary_folder(
    model: Path, tmp_path: Path, cli: Cli, name: str, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    place = {"missing": str(tmp_path / "missing"), "file": str(tmp_path / "file")}
    monkeypatch.delenv("TMPDIR", raising=False)
    monkeypatch.setenv(name, place.get(folder, folder))
    # Python caches the temporary folder.
    monkeypatch.setattr(tempfile, "tempdir", None)
    monkeypatch.chdir(tmp_path)
    options = ["--model-path", model, "--prompt", "hi", "--max-new-tokens", 2, "--quiet"]
    outcome = cli("generate", *options)
    assert (outcome.code, outcome.err) == (0, "")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


@pytest.mark.parametrize(
    "arguments",
    [
        ["runs"],
        ["train", "--data", "x", "--model-path", "y"],
    ],
)
def test_deleted_current_folder_is_reported(tmp_path: Path, arguments: list[str]) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    outcome = shell('rmdir "$PWD"; exec "$0" "$@"', *arguments, cwd=gone)
    assert "the current folder cannot be read" in refused(outcome)
    assert list(tmp_path.iterdir()) == []


def limited(kind: int, value: int) -> Callable[[], None]:
    return lambda: resource.setrlimit(kind, (value, value))


def test_few_open_files(tmp_path: Path, model: Path, chat: Path, output: Path) -> None:
    arguments = ["train", "--model-path", model, "--data", chat, "--output", output]
    preparation = limited(resource.RLIMIT_NOFILE, 64)
    outcome = attack(*arguments, cwd=tmp_path, preexec_fn=preparation)
    assert "only 64 files may be open" in refused(outcome)
    assert not output.parent.exists()


@pytest.mark.slow
@pytest.mark.parametrize("kilobytes", [long(1), 8])
def test_files_that_may_not_be_large(
    tmp_path: Path, model: Path, chat: Path, output: Path, kilobytes: int
) -> None:
    preparation = limited(resource.RLIMIT_FSIZE, kilobytes * 1024)
    arguments = ["--model-path", model, "--data", chat, "--output", output, "--max-steps", 1]
    outcome = attack(
        *("train", *arguments, "--quiet", "--samples", 0), cwd=tmp_path, preexec_fn=preparation
    )
    lines = outcome.err.splitlines()
    assert outcome.code == 1
    assert "Traceback" not in outcome.err
    assert lines[-1].startswith("mlxtune: error: ")
    assert not output.exists()


@pytest.mark.parametrize(
    "changes",
    [
        long({"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}, id="C locale"),
        slow(
            {
                "PYTHONIOENCODING": "ascii:strict",
                "COLUMNS": "-5",
                "LINES": "x",
                "TERM": "none such",
                "TZ": "/dev/zero",
                "XDG_CACHE_HOME": "/dev/full",
            },
            id="ascii",
        ),
        slow({"HOME": "/none/such", "XDG_CACHE_HOME": "", "COLUMNS": "99999999999"}, id="no home"),
        long({"PYTHONIOENCODING": "latin-1:strict", "XDG_CACHE_HOME": "relative"}, id="latin-1"),
    ],
)
def test_odd_environment(tmp_path: Path, model: Path, chat: Path, changes: dict[str, str]) -> None:
    chat.write_text(chat.read_text() + chat.read_text().splitlines()[0].replace("0", "é→😀") + "\n")
    arguments = ["inspect", "--model-path", model, "--data", chat, "--no-cache"]
    outcome = attack(*arguments, cwd=tmp_path, env=os.environ | changes)
    assert (outcome.code, outcome.err) == (0, "")
    assert outcome.within_limits


# Locks


def test_file_system_without_locks_is_reported_with_a_remedy(
    train: Cli, monkeypatch: pytest.MonkeyPatch, output: Path
) -> None:
    def no_locks(*_: object, **__: object) -> None:
        raise NoLocksError(37, "its file system has no file locks")

    monkeypatch.setattr(run_folder, "Lock", no_locks)
    error = train("--max-steps", 1).error
    assert "no file locks: choose a --checkpoint-dir on a local disk" in error
    assert "free space" not in error
