"""Detects lost workers by heartbeats, and ends this process: collectives would wait forever."""

import errno
import hmac
import json
import os
import secrets
import selectors
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from mlxtune.backend.workers.workers import Workers
from mlxtune.core.files.reading import read_text
from mlxtune.core.machine.facts import machine_id
from mlxtune.errors import (
    MlxTuneError,
    TrainingInterrupted,
    WorkerError,
    one_line,
    printable,
)

# Seconds between heartbeats, and seconds of silence after which a worker is lost.
INTERVAL, PATIENCE_SECONDS = 2.0, 16.0
# Sizes in bytes of the token that a connecting worker sends, and of the worker number after it.
TOKEN_SIZE, _WORKER_SIZE = 32, 4
# The maximum number of connections that have sent no token yet: an attacker may open many.
_MAX_WAITING_CONNECTIONS = 256
_ALIVE, _BYE, _FAILED = b".", b"q", b"x"
# Seconds in which all workers must exchange their addresses.
_MEETING_SECONDS = 60.0
# Seconds within which the main thread may report an error after another worker has failed.
_GRACE_SECONDS = 3.0
# Seconds within which the end of another worker's connection is detected.
_DETECTION_SECONDS = 0.5


@dataclass
class _Peer:
    """A connection to another worker; `said_bye` is set once that worker has ended properly."""

    worker: int
    connection: socket.socket
    heard: float = field(default_factory=time.monotonic)
    said_bye: bool = False


class Heartbeat:
    """A thread that sends heartbeats, and calls `on_lost(worker)` if a worker is lost.

    Worker 0 listens and hears all others; the others hear only worker 0. A worker is lost if its
    connection ends without a goodbye, or if it sends nothing for PATIENCE_SECONDS. A connecting
    worker sends the `token`, which the workers exchange by other means.
    """

    def __init__(self, on_lost: Callable[[int], None], token: bytes) -> None:
        assert len(token) == TOKEN_SIZE
        self._on_lost, self._token = on_lost, token
        self._peers: list[_Peer] = []
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, name="heartbeat", daemon=True)
        # The lost worker, if any, and whether it reported its failure.
        self.lost: int | None = None
        self.failed = False

    @staticmethod
    def listen(host: str) -> socket.socket:
        """Return worker 0's listening socket, on a free port of the shared address."""
        try:
            family = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)[0][0]
            return socket.create_server((host, 0), family=family, backlog=256)
        except OSError:
            # The others may reach this machine through the address of a gateway.
            return socket.create_server(("", 0), backlog=256)

    def accept(self, server: socket.socket, others: int) -> None:
        """Accept connections until `others` workers are connected, then start the thread.

        A connection that is silent, or sends a wrong token, delays no worker. Raises OSError.
        """
        deadline = time.monotonic() + PATIENCE_SECONDS
        with server, selectors.DefaultSelector() as selector:
            server.setblocking(False)
            selector.register(server, selectors.EVENT_READ)
            waiting: dict[socket.socket, bytes] = {}
            try:
                while len(self._peers) < others:
                    left = deadline - time.monotonic()
                    if left <= 0:
                        raise TimeoutError(errno.ETIMEDOUT, "not all workers connected")
                    for key, _ in selector.select(left):
                        if key.fileobj is server:
                            _let_in(server, selector, waiting)
                        elif key.fileobj in waiting:
                            self._greet(key.fileobj, selector, waiting)
            finally:
                for connection in waiting:
                    connection.close()
        self._thread.start()

    def _greet(
        self,
        connection: socket.socket,
        selector: selectors.BaseSelector,
        waiting: dict[socket.socket, bytes],
    ) -> None:
        """Read more of a handshake; once it is complete, keep or close its connection."""
        size = TOKEN_SIZE + _WORKER_SIZE
        try:
            more = connection.recv(size - len(waiting[connection]))
        except BlockingIOError:
            return
        except OSError:
            more = b""
        received = waiting[connection] = waiting[connection] + more
        if more and len(received) < size:
            return
        selector.unregister(connection)
        del waiting[connection]
        worker = int.from_bytes(received[TOKEN_SIZE:], "big")
        authentic = hmac.compare_digest(received[:TOKEN_SIZE], self._token)
        new = worker > 0 and all(worker != peer.worker for peer in self._peers)
        if authentic and new and len(received) == size:
            self._peers.append(_Peer(worker, connection))
        else:
            connection.close()

    def connect(self, host: str, port: int, worker: int) -> None:
        """Connect to worker 0, and start the thread. Raises OSError."""
        connection = socket.create_connection((host, port), timeout=PATIENCE_SECONDS)
        connection.sendall(self._token + worker.to_bytes(_WORKER_SIZE, "big"))
        self._peers.append(_Peer(0, connection))
        self._thread.start()

    def wait_for_loss(self, seconds: float) -> None:
        """Wait at most `seconds` for the thread to end, as it does if a worker is lost."""
        self._thread.join(seconds)

    def close(self, *, failed: bool = False) -> None:
        """Tell the other workers that this one ends, and stop the thread.

        With `failed`, they treat this worker as lost, but know that it failed, so that an error on
        all workers is not mistaken for a loss.
        """
        self._ended.set()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(2 * INTERVAL)
        for peer in self._peers:
            with suppress(OSError):
                peer.connection.settimeout(INTERVAL)
                peer.connection.sendall(_FAILED if failed else _BYE)
                peer.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + INTERVAL
        for peer in self._peers:
            # Closing a connection with unread heartbeats resets it, and the reset may overtake the
            # goodbye, so the heartbeats are read first.
            with suppress(OSError), peer.connection:
                while peer.connection.recv(4096) and time.monotonic() < deadline:
                    pass

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            for peer in self._peers:
                peer.connection.setblocking(False)
                selector.register(peer.connection, selectors.EVENT_READ, peer)
            sent = woken = time.monotonic()
            while not self._ended.is_set() and self.lost is None:
                for key, _ in selector.select(INTERVAL / 4):
                    self._hear(key.data, selector)
                now = time.monotonic()
                if now - woken > PATIENCE_SECONDS / 2:
                    # This process was suspended, or the machine slept.
                    for peer in self._peers:
                        peer.heard = now
                woken = now
                if now - sent >= INTERVAL:
                    sent = now
                    self._send()
                for peer in self._peers:
                    if not peer.said_bye and now - peer.heard > PATIENCE_SECONDS:
                        self.lost = peer.worker
        if self.lost is not None and not self._ended.is_set():
            self._on_lost(self.lost)

    def _hear(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        try:
            received = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        peer.heard = time.monotonic()
        peer.said_bye |= _BYE in received
        if _FAILED in received:
            self.lost, self.failed = peer.worker, True
            return
        if not received or peer.said_bye:
            selector.unregister(peer.connection)
            peer.connection.close()
            if not peer.said_bye:
                self.lost = peer.worker

    def _send(self) -> None:
        for peer in self._peers:
            # Ignores errors: `_run` detects a silent worker, and `_hear` a closed connection.
            with suppress(OSError):
                if not peer.said_bye:
                    peer.connection.send(_ALIVE)


def _let_in(
    server: socket.socket,
    selector: selectors.BaseSelector,
    waiting: dict[socket.socket, bytes],
) -> None:
    try:
        connection, _ = server.accept()
    except BlockingIOError:
        return
    if len(waiting) == _MAX_WAITING_CONNECTIONS:
        # Workers send the token immediately, so the connection that has waited longest is not a
        # worker's.
        longest = next(iter(waiting))
        selector.unregister(longest)
        del waiting[longest]
        longest.close()
    connection.setblocking(False)
    waiting[connection] = b""
    selector.register(connection, selectors.EVENT_READ)


class Watch:
    """Ends this process if another worker is gone: a collective would wait for it forever.

    `began` describes the command, and must be the same on all workers. `describe`, given the lost
    worker, continues the message "worker 1 is gone". `machines` identifies each worker's machine.
    Raises WorkerError if the workers do not find each other, or if `began` differs.
    """

    def __init__(self, workers: Workers, began: str, describe: Callable[[int | None], str]) -> None:
        self._workers, self._describe = workers, describe
        self.explained = threading.Event()
        silent = f"worker {1 - workers.rank}" if workers.world_size == 2 else "another worker"
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
                if workers.rank:
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
        token = workers.broadcast_bytes(secrets.token_bytes(TOKEN_SIZE))
        self.heartbeat = Heartbeat(self._end, token)
        server = None if workers.rank else Heartbeat.listen(_address())
        port = 0 if server is None else server.getsockname()[1]
        met = workers.all_gather_text(json.dumps([_address(), port, began, machine_id()]))
        addresses, ports, begun, self.machines = zip(*map(json.loads, met), strict=True)
        if server is not None:
            self.heartbeat.accept(server, workers.world_size - 1)
        else:
            self.heartbeat.connect(addresses[0], ports[0], workers.rank)
        return begun

    def loss_behind(self, error: Exception) -> str | None:
        """Return the message for an error caused by a lost worker; None for other errors."""
        self.explained.set()
        # After a loss, arbitrary data from MLX's ring may have caused any error.
        of_ring = "[ring]" in str(error)
        self.heartbeat.wait_for_loss(_GRACE_SECONDS if of_ring else _DETECTION_SECONDS)
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
        if not self.heartbeat.failed or not self.explained.wait(_GRACE_SECONDS):
            self._exit(self._line())

    def _exit(self, line: str) -> None:
        name = f"worker {self._workers.rank}: " if self._workers.rank else ""
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
        if workers.rank and isinstance(error, MlxTuneError):
            error.args = (f"worker {workers.rank}: {error}",)
        raise
    finally:
        watch.explained.set()
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
