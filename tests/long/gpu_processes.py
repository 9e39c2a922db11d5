"""Runs the processes of `gpu`: modules to their end, and cases of a side one after the other."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mlxtune.core.files import processes
from tests.paths import ROOT

# A process that has less time than this is not started.
MIN_SECONDS = 5.0

Record = Callable[[str, dict[str, Any]], None]


def command(
    arguments: list[str], seconds: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a module with this Python. Raises RuntimeError with its last output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=processes.own_environment(**variables),
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    return done


@dataclass(frozen=True)
class CaseProcesses:
    """Runs a module on cases, in one process as long as none of them ends it.

    `write` writes the named cases to the file that the module is called with.
    """

    module: str
    file: Path
    write: Callable[[Path, Sequence[str]], None]

    def run(self, names: Sequence[str], seconds: float, record: Record, **variables: str) -> None:
        """Call `record` with each case's name and result, as soon as the case ends.

        A result is what the module found, `failed` with the error, or `skipped` with the reason if
        the time is over. A case that ends its process has failed, and the next case starts another.
        """
        left, deadline = list(names), time.monotonic() + seconds
        while left and (remaining := deadline - time.monotonic()) > MIN_SECONDS:
            self._run_once(left, remaining, record, variables)
        for name in left:
            record(name, {"skipped": "no time was left"})

    def _run_once(
        self, left: list[str], seconds: float, record: Record, variables: dict[str, str]
    ) -> None:
        """Run the cases that are left in one process; remove those with a result from the list."""
        self.write(self.file, left)
        arguments = [sys.executable, "-m", self.module, str(self.file)]
        current, phase, heard = left[0], "starting", False
        errors = self.file.with_suffix(".stderr")
        with errors.open("wb") as stream:
            process = processes.start(
                arguments,
                stdout=processes.PIPE,
                stderr=stream,
                folder=ROOT,
                environment=processes.own_environment(**variables),
            )
            timed_out = threading.Event()
            timer = threading.Timer(seconds, _stop, [process, timed_out])
            timer.start()
            case_started = time.monotonic()
            try:
                for line in process.stdout or ():
                    if not line.startswith(b'{"case"'):  # a library's own output
                        continue
                    message, heard = json.loads(line), True
                    current, phase = message.pop("case"), message.pop("phase", phase)
                    if message:
                        left.remove(current)
                        record(current, message.get("found", message))
                        current, phase = left[0] if left else "", "starting"
                        case_started = time.monotonic()
                status = process.wait()
            finally:
                timer.cancel()
                processes.end(process)
        if not left:
            return
        if timed_out.is_set():
            spent = time.monotonic() - case_started
            result = {"skipped": f"stopped after {spent:.0f} s, in {phase}"}
        else:
            last = errors.read_text(errors="replace").strip().splitlines()[-3:]
            result = {"failed": f"exit {status} in {phase}: {' '.join(last)}"[:500]}
        # A process that ends before its first case would end before each.
        for name in [current] if heard or timed_out.is_set() else list(left):
            left.remove(name)
            record(name, result)


def _stop(process: subprocess.Popen[bytes], timed_out: threading.Event) -> None:
    timed_out.set()
    process.kill()
