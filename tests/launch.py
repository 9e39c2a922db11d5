"""Runs of several workers on this machine, as mlx.launch starts them."""

from __future__ import annotations

import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import mlx.core as mx
import pytest

from tests.paths import ROOT

needs_ring = pytest.mark.skipif(
    not mx.distributed.is_available("ring"), reason="this MLX has no ring"
)

# mlx.launch by its entry point: its script need not be beside this Python.
_LAUNCHER = (
    sys.executable,
    "-c",
    "from importlib.metadata import entry_points as of\n"
    "next(iter(of(group='console_scripts', name='mlx.launch'))).load()()",
)
# More bytes than the pipes of the launcher and a worker hold.
_FULL = 1 << 18


@contextmanager
def launched(
    workers: int, command: Sequence[object], log: Path
) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command on `workers` workers, with their output in a file; kill them at the end.

    `command` starts with the first argument of `python`, or with `bash`.
    """
    port = free_port(workers)
    program = [] if command[0] == "bash" else [sys.executable]
    options = [
        *("-n", workers, "--backend", "ring", "--starting-port", port),
        *("--env", f"PYTHONPATH={ROOT}", "--env", "OMP_NUM_THREADS=1", "--"),
    ]
    with log.open("wb") as file:
        process = subprocess.Popen(
            [*map(str, [*_LAUNCHER, *options, *program, *command])],
            stdin=subprocess.PIPE,
            stdout=file,
            stderr=file,
            start_new_session=True,
            bufsize=0,
        )
        assert process.stdin
        try:
            # Fill the workers' input, because otherwise mlx.launch 0.32 keeps a core busy.
            with suppress(BrokenPipeError):
                process.stdin.write(bytes(_FULL))
            yield process
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            process.stdin.close()


def free_port(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        # This range is below the system's ephemeral ports.
        first = random.SystemRandom().randrange(10_000, 32_000)
        with suppress(OSError), ExitStack() as held:
            for port in range(first, first + count):
                held.enter_context(socket.create_server(("127.0.0.1", port)))
            return first


def free_ports(count: int) -> list[int]:
    """Return `count` free ports."""
    held = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [each.getsockname()[1] for each in held]
    for each in held:
        each.close()
    return ports


def run(workers: int, command: Sequence[object], log: Path, timeout: float = 600) -> str:
    """Run a command on `workers` workers to its end; return their output."""
    with launched(workers, command, log) as process:
        process.wait(timeout)
    return log.read_text()


def pid_of(launch: subprocess.Popen[bytes], worker: int) -> int:
    """Return a worker's process id; skip the test if the system has no /proc."""
    if not Path("/proc/self").is_dir():
        pytest.skip("needs /proc to find the process of a worker")
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            environment = (folder / "environ").read_bytes().split(b"\0")
            of_launch = os.getsid(int(folder.name)) == launch.pid
            if of_launch and f"MLX_RANK={worker}".encode() in environment:
                return int(folder.name)
    raise LookupError(worker)
