"""The machine is kept awake only while a process lives; commands are fakes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.core.machine.conditions import keep_awake
from tests.core.files.test_processes import alive
from tests.paths import ROOT
from tests.waiting import wait_until

# Like systemd-inhibit, this script runs the command that follows its options, and waits for it.
INHIBIT = """\
while [ "${1#--}" != "$1" ]; do printf '%s\\n' "$1" >> "$0.asked"; shift; done
printf '%s\\n' "$*" >> "$0.asked"
echo $$ > "$0.pid.new"; mv "$0.pid.new" "$0.pid"
"$@"
"""
# Like caffeinate with -w, except that this script does not watch the process.
CAFFEINATE = """\
printf '%s\\n' "$*" > "$0.asked"
echo $$ > "$0.pid.new"; mv "$0.pid.new" "$0.pid"
exec sleep 60
"""
Install = Callable[[str, str], Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """A function that puts a script first on PATH as a command."""
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")

    def write(name: str, script: str) -> Path:
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\n{script}")
        path.chmod(0o755)
        return path

    return write


def pid_of(command: Path) -> int:
    path = command.with_name(f"{command.name}.pid")
    wait_until(path.exists)
    return int(path.read_text())


def asked_of(command: Path) -> list[str]:
    return command.with_name(f"{command.name}.asked").read_text().split("\n")[:-1]


def test_mac_is_kept_from_idle_sleep_but_its_display_is_not(install: Install) -> None:
    command = install("caffeinate", CAFFEINATE)
    with keep_awake("Darwin"):
        process = pid_of(command)
        assert alive(process)
    assert asked_of(command) == [f"-i -w {os.getpid()}"]
    assert not alive(process)


def test_linux_is_kept_from_sleep_until_the_block_ends(install: Install) -> None:
    command = install("systemd-inhibit", INHIBIT)
    with keep_awake("Linux"):
        process = pid_of(command)
        assert alive(process)
    wait_until(lambda: not alive(process))
    *options, started = asked_of(command)
    assert started == "cat"
    assert options[:2] == ["--what=idle:sleep", "--mode=block"]


def test_linux_may_sleep_once_the_process_is_killed(install: Install) -> None:
    command = install("systemd-inhibit", INHIBIT)
    code = (
        "import time; from mlxtune.core.machine.conditions import keep_awake\n"
        "with keep_awake('Linux'): time.sleep(60)"
    )
    with subprocess.Popen([sys.executable, "-c", code], cwd=ROOT) as ours:
        process = pid_of(command)
        assert alive(process)
        ours.send_signal(signal.SIGKILL)
    wait_until(lambda: not alive(process))


@pytest.mark.parametrize("system", ["Darwin", "Linux"])
def test_missing_command_changes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with keep_awake(system):
        pass


def test_command_that_fails_changes_nothing(
    install: Install, capfd: pytest.CaptureFixture[str]
) -> None:
    install("systemd-inhibit", "echo 'Failed to inhibit: Access denied' >&2; exit 1")
    with keep_awake("Linux"):
        pass
    assert capfd.readouterr() == ("", "")
