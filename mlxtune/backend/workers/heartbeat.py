"""Detects lost workers by heartbeats, because collectives would wait for them forever."""

import contextlib
import errno
import hmac
import selectors
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

# Seconds between heartbeats, and seconds of silence after which a worker is lost.
INTERVAL, PATIENCE = 2.0, 16.0
# Sizes in bytes of the token that a connecting worker sends, and of the worker number after it.
TOKEN_SIZE, _WORKER_SIZE = 32, 4
# The maximum number of connections that have sent no token yet: an attacker may open many.
_MOST_WAITING = 256
_ALIVE, _BYE, _FAILED = b".", b"q", b"x"


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
    connection ends without a goodbye, or if it sends nothing for PATIENCE seconds. A connecting
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
        """Return worker 0's listening socket, on a free port of the address that the others use."""
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
        deadline = time.monotonic() + PATIENCE
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
        said = waiting[connection] = waiting[connection] + more
        if more and len(said) < size:
            return
        selector.unregister(connection)
        del waiting[connection]
        worker = int.from_bytes(said[TOKEN_SIZE:], "big")
        known = hmac.compare_digest(said[:TOKEN_SIZE], self._token)
        new = worker > 0 and all(worker != peer.worker for peer in self._peers)
        if known and new and len(said) == size:
            self._peers.append(_Peer(worker, connection))
        else:
            connection.close()

    def connect(self, host: str, port: int, worker: int) -> None:
        """Connect to worker 0, and start the thread. Raises OSError."""
        connection = socket.create_connection((host, port), timeout=PATIENCE)
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
            with contextlib.suppress(OSError):
                peer.connection.settimeout(INTERVAL)
                peer.connection.sendall(_FAILED if failed else _BYE)
                peer.connection.shutdown(socket.SHUT_WR)
        deadline = time.monotonic() + INTERVAL
        for peer in self._peers:
            # Closing a connection with unread heartbeats resets it, and the reset may overtake the
            # goodbye, so the heartbeats are read first.
            with contextlib.suppress(OSError), peer.connection:
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
                if now - woken > PATIENCE / 2:
                    # This process was suspended, or the machine slept.
                    for peer in self._peers:
                        peer.heard = now
                woken = now
                if now - sent >= INTERVAL:
                    sent = now
                    self._send()
                for peer in self._peers:
                    if not peer.said_bye and now - peer.heard > PATIENCE:
                        self.lost = peer.worker
        if self.lost is not None and not self._ended.is_set():
            self._on_lost(self.lost)

    def _hear(self, peer: _Peer, selector: selectors.BaseSelector) -> None:
        try:
            said = peer.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        peer.heard = time.monotonic()
        peer.said_bye |= _BYE in said
        if _FAILED in said:
            self.lost, self.failed = peer.worker, True
            return
        if not said or peer.said_bye:
            selector.unregister(peer.connection)
            peer.connection.close()
            if not peer.said_bye:
                self.lost = peer.worker

    def _send(self) -> None:
        for peer in self._peers:
            # Ignores errors: `_run` detects a silent worker, and `_hear` a closed connection.
            with contextlib.suppress(OSError):
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
    if len(waiting) == _MOST_WAITING:
        # Workers send the token immediately, so the connection that has waited longest is not a
        # worker's.
        longest = next(iter(waiting))
        selector.unregister(longest)
        del waiting[longest]
        longest.close()
    connection.setblocking(False)
    waiting[connection] = b""
    selector.register(connection, selectors.EVENT_READ)
