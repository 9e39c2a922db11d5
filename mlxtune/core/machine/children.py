"""Processes started for a check: kept apart from this one, and ended with it."""

import importlib.metadata
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.files.files import make_folder, open_to_write
from mlxtune.core.files.reading import read_bytes
from mlxtune.core.machine.facts import Device
from mlxtune.errors import MlxTuneError, one_line

_PACKAGE = Path(__file__).resolve().parents[3]
_POLL_SECONDS = 0.005
# MLX starts within a second; the first time after an update perhaps within a few.
_MLX_SECONDS = 30.0


class ChildError(MlxTuneError):
    """A process ended otherwise than it should."""


class ChildTimeoutError(ChildError):
    """A process did not end in time."""


@dataclass(frozen=True)
class Children:
    """Starts Python with this package; all temporary files go to `scratch`.

    A process that runs longer than `limit` seconds is killed.
    """

    scratch: Path
    limit: float = 300.0

    def run(
        self,
        arguments: Sequence[str],
        folder: Path,
        *,
        variables: Mapping[str, str] | None = None,
        until: Callable[[], bool] = lambda: False,
        stop: signal.Signals = signal.SIGKILL,
    ) -> int:
        """Run in a new folder; return the exit status. The output goes to files there.

        Once `until` returns true, the process gets the signal `stop`. Raises ChildTimeoutError
        if it takes too long. Whatever ends this call also ends the process and those it started.
        """
        make_folder(folder)
        with (
            open_to_write(folder / "stdout") as out,
            open_to_write(folder / "stderr") as errors,
        ):
            process = subprocess.Popen(
                [sys.executable, *arguments],
                cwd=folder,
                env=_environment(
                    TMPDIR=str(self.scratch),
                    MLX_PTX_CACHE_DIR=kernel_cache(),
                    **(variables or {}),
                ),
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=errors,
                # Ctrl-C reaches this process only, which ends the other.
                start_new_session=True,
            )
            deadline, stopped = time.monotonic() + self.limit, False
            try:
                while process.poll() is None:
                    if not stopped and until():
                        process.send_signal(stop)
                        stopped = True
                    if time.monotonic() > deadline:
                        raise ChildTimeoutError(f"no end within {self.limit:.0f} seconds")
                    time.sleep(_POLL_SECONDS)
                return process.returncode
            finally:
                _end_group(process)


def kernel_cache() -> str:
    """Return where MLX keeps the CUDA kernels that it compiles.

    By default that is in the temporary folder, so that a process with its own would compile all of
    them again: for seconds each.
    """
    kept = Path(tempfile.gettempdir()) / "mlx" / importlib.metadata.version("mlx") / "ptx"
    return os.environ.get("MLX_PTX_CACHE_DIR") or str(kept)


def probe_device() -> tuple[Device | None, str]:
    """Return what MLX computes on; or None, and why it does not start."""
    # A separate process survives a crash of MLX. It imports this very package.
    try:
        process = subprocess.run(
            [sys.executable, "-m", "mlxtune.backend.models.probe"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MLX_SECONDS,
            env=_environment(),
            # Files in the current folder could shadow libraries.
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_MLX_SECONDS:.0f} seconds"
    if process.returncode < 0:
        return None, f"it was killed by signal {-process.returncode}"
    if process.returncode:
        lines = process.stderr.split("\n\n")[-1].strip().splitlines()
        return None, one_line(RuntimeError(lines[-1] if lines else "it failed without a message"))
    return Device(**json.loads(process.stdout)), ""


def _environment(**variables: str) -> dict[str, str]:
    """Return the environment of a process that imports this very package."""
    paths = (str(_PACKAGE), os.environ.get("PYTHONPATH"))
    path = os.pathsep.join(path for path in paths if path)
    return {**os.environ, "PYTHONPATH": path, **variables}


def _end_group(process: subprocess.Popen[bytes]) -> None:
    """Kill a process and those it started, whatever is left of them."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except (ProcessLookupError, PermissionError):
        # macOS refuses for a group of zombies.
        process.kill()
    process.wait()


def describe_end(status: int, folder: Path) -> str:
    """Return how a process ended and its last message."""
    how = f"killed by signal {-status}" if status < 0 else f"exit code {status}"
    lines = read_bytes(folder / "stderr").decode(errors="replace").splitlines()
    last = next((line.strip() for line in reversed(lines) if line.strip()), "")
    return f"{how}: {last}" if last else how
