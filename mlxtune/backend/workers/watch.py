"""Watches the other workers of a launch, and ends this process if one is lost."""

import json
import os
import secrets
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mlxtune.backend.workers.group import Workers
from mlxtune.backend.workers.heartbeat import TOKEN_SIZE, Heartbeat
from mlxtune.core.files.sizes import read_text
from mlxtune.core.machine.facts import machine_id
from mlxtune.errors import (
    MlxTuneError,
    TrainingInterrupted,
    WorkerError,
    one_line,
    printable,
)

# Seconds in which all workers must exchange their addresses.
_MEETING_SECONDS = 60.0
# Seconds within which the main thread may report an error after another worker has failed.
_GRACE = 3.0
# Seconds within which the end of another worker's connection is detected.
_MOMENT = 0.5


class Watch:
    """Ends this process if another worker is gone: a collective would wait for it forever.

    `began` describes the command, and must be the same on all workers. `describe`, given the lost
    worker, continues the message "worker 1 is gone". `machines` identifies each worker's machine.
    Raises WorkerError if the workers do not find each other, or if `began` differs.
    """

    def __init__(self, workers: Workers, began: str, describe: Callable[[int | None], str]) -> None:
        self._workers, self._describe = workers, describe
        self.found = threading.Event()
        silent = f"worker {1 - workers.index}" if workers.size == 2 else "another worker"
        problem = (
            f"{silent} does not answer, or has ended: start all workers again, on ports that "
            "nothing else uses (mlx.launch --starting-port), and allow connections between the "
            "machines"
        )
        timer = threading.Timer(_MEETING_SECONDS, self._exit, [problem])
        timer.daemon = True
        timer.start()
        try:
            begun = self._meet(began)
        except Exception as error:
            # After a loss, MLX's ring returns arbitrary data, which may cause any error.
            raise WorkerError(f"{problem} ({one_line(error)})") from error
        finally:
            timer.cancel()
        for worker, how in enumerate(begun):
            if how != begun[0]:
                self.heartbeat.close()
                if workers.index:
                    # Worker 0 prints the error.
                    raise SystemExit(1)
                raise WorkerError(
                    f"worker {worker} began with {how}, worker 0 with {begun[0]}: "
                    "start all workers with one command"
                )

    def _meet(self, began: str) -> tuple[str, ...]:
        """Start the heartbeat, and return each worker's `began`."""
        workers = self._workers
        # MLX's connections, over which the token goes, are private to the workers.
        token = workers.bytes_from_first(secrets.token_bytes(TOKEN_SIZE))
        self.heartbeat = Heartbeat(self._end, token)
        server = None if workers.index else Heartbeat.listen(_address())
        port = 0 if server is None else server.getsockname()[1]
        met = workers.texts(json.dumps([_address(), port, began, machine_id()]))
        places, ports, begun, self.machines = zip(*map(json.loads, met), strict=True)
        if server is not None:
            self.heartbeat.accept(server, workers.size - 1)
        else:
            self.heartbeat.connect(places[0], ports[0], workers.index)
        return begun

    def loss_behind(self, error: Exception) -> str | None:
        """Return the message for an error caused by a lost worker; None for other errors."""
        self.found.set()
        # After a loss, arbitrary data from MLX's ring may have caused any error.
        of_ring = "[ring]" in str(error)
        self.heartbeat.wait_for_loss(_GRACE if of_ring else _MOMENT)
        # If the other worker failed too, any error but WorkerError explains more than the loss.
        if of_ring or (self.heartbeat.failed and isinstance(error, WorkerError)):
            return self._line()
        return None

    def _line(self) -> str:
        lost = self.heartbeat.lost
        who = "another worker" if lost is None else f"worker {lost}"
        return f"{who} is gone{self._describe(lost)}"

    def _end(self, lost: int) -> None:
        # Exits before mlx.launch ends this process. A failed worker has printed its error.
        if not self.heartbeat.failed or not self.found.wait(_GRACE):
            self._exit(self._line())

    def _exit(self, line: str) -> None:
        name = f"worker {self._workers.index}: " if self._workers.index else ""
        sys.stderr.write(printable(f"mlxtune: error: {name}{line}") + "\n")
        sys.stderr.flush()
        os._exit(1)


@contextmanager
def watched(
    workers: Workers,
    began: str,
    describe: Callable[[int | None], str] = lambda lost: ": run the same command again",
) -> Iterator[tuple[str, ...]]:
    """Watch the other workers inside the block; yield the machines of all workers. See `Watch`.

    Raises WorkerError instead of an error that the loss of another worker has caused.
    """
    watch = Watch(workers, began, describe)
    failed = True
    try:
        yield watch.machines
        failed = False
    except (SystemExit, TrainingInterrupted):
        failed = False
        raise
    except Exception as error:
        if (line := watch.loss_behind(error)) is not None:
            raise WorkerError(line) from error
        if workers.index and isinstance(error, MlxTuneError):
            error.args = (f"worker {workers.index}: {error}",)
        raise
    finally:
        watch.found.set()
        # Tells the other workers about an error, because they may be waiting for this worker.
        watch.heartbeat.close(failed=failed)


def _address() -> str:
    """Return the address at which other machines reach this one, from MLX's launch settings."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        hosts = json.loads(read_text(Path(os.environ["MLX_HOSTFILE"])))
        return str(hosts[0][0]).rpartition(":")[0].strip("[]")
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        if host := os.environ.get(name, "").rpartition(":")[0] or os.environ.get(name):
            return host
    return "127.0.0.1"
