"""Heartbeats between workers, which notice lost workers."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from mlxtune.backend.workers import heartbeat
from mlxtune.backend.workers.heartbeat import Heartbeat
from tests.waiting import wait_until

TOKEN = bytes(range(32))


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.1)
    monkeypatch.setattr(heartbeat, "PATIENCE_SECONDS", 1.0)


@pytest.fixture
def closing() -> Iterator[list[Callable[[], None]]]:
    calls: list[Callable[[], None]] = []
    yield calls
    for call in calls:
        call()


def connected(lost: list[int]) -> tuple[Heartbeat, socket.socket]:
    """Return worker 0's heartbeat, and a connection to it as worker 3."""
    first = Heartbeat(lost.append, TOKEN)
    server = Heartbeat.listen("127.0.0.1")
    other = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
    other.sendall(TOKEN + (3).to_bytes(4, "big"))
    first.accept(server, 1)
    return first, other


def test_disconnected_worker_is_lost(closing: list[Callable[[], None]]) -> None:
    lost: list[int] = []
    first, other = connected(lost)
    closing.append(first.close)
    other.close()
    first.wait_for_loss(60)
    assert (lost, first.lost) == ([3], 3)


def test_worker_that_reports_a_failure_is_lost(closing: list[Callable[[], None]]) -> None:
    lost: list[int] = []
    first, other = connected(lost)
    closing += [first.close, other.close]
    other.sendall(b".x")
    first.wait_for_loss(60)
    assert (lost, first.failed) == ([3], True)


def test_failing_worker_reports_its_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = connected([])
    other.settimeout(60)
    closing = threading.Thread(target=first.close, kwargs={"failed": True})
    closing.start()
    said = b""
    while more := other.recv(64):
        said += more
    other.close()
    closing.join()
    assert said.endswith(b"x")


def test_silent_worker_is_lost(closing: list[Callable[[], None]]) -> None:
    lost: list[int] = []
    started = time.monotonic()
    first, other = connected(lost)
    closing += [first.close, other.close]
    first.wait_for_loss(60)
    assert lost == [3]
    assert time.monotonic() - started > heartbeat.PATIENCE_SECONDS


def test_workers_exchange_heartbeats_and_disconnect_cleanly(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock, readers = SimpleNamespace(now=0.0), set()

    def monotonic() -> float:
        now: float = clock.now
        readers.add(threading.get_ident())
        return now

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=monotonic))
    lost: list[int] = []
    first, second = Heartbeat(lost.append, TOKEN), Heartbeat(lost.append, TOKEN)
    server = Heartbeat.listen("127.0.0.1")
    port = server.getsockname()[1]
    joining = threading.Thread(target=second.connect, args=("127.0.0.1", port, 1))
    joining.start()
    first.accept(server, 1)
    joining.join()
    peers = [*first._peers, *second._peers]
    # Wait until both heartbeats' threads have read the clock, which this thread reads too.
    wait_until(lambda: len(readers - {threading.get_ident()}) == 2)
    # Longer than a worker may be silent.
    while clock.now < 2 * heartbeat.PATIENCE_SECONDS:
        clock.now += 2 * heartbeat.INTERVAL
        wait_until(lambda: all(peer.heard == clock.now for peer in peers))
    assert not lost
    second.close()
    wait_until(lambda: first._peers[0].said_bye)
    first.close()
    assert not lost


def test_closing_message_arrives_before_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = connected([])
    other.settimeout(60)
    # Leave the worker's message unread, so that closing could send a reset.
    monkeypatch.setattr(first, "_hear", lambda *_: None)
    other.sendall(b".")
    closing = threading.Thread(target=first.close)
    closing.start()
    said = b""
    while more := other.recv(64):
        said += more
    other.close()
    closing.join()
    assert said.endswith(b"q")


# Strangers that connect


def answered(said: bytes, *, hang_up: bool = False) -> list[int]:
    """Return the workers that worker 0 knows after a stranger's message and worker 3's arrival."""
    first = Heartbeat([].append, TOKEN)
    server = Heartbeat.listen("127.0.0.1")
    place = server.getsockname()
    stranger = socket.create_connection(place)
    stranger.sendall(said)
    if hang_up:
        stranger.close()
    worker = socket.create_connection(place)
    worker.sendall(TOKEN + (3).to_bytes(4, "big"))
    first.accept(server, 1)
    known = [peer.worker for peer in first._peers]
    for connection in (stranger, worker):
        connection.close()
    first.close()
    return known


@pytest.mark.parametrize("hang_up", [False, True])
@pytest.mark.parametrize(
    "said",
    [
        b"",
        (1).to_bytes(4, "big"),
        bytes(32) + (1).to_bytes(4, "big"),
        TOKEN[:-1] + b"x" + (1).to_bytes(4, "big"),
        TOKEN[:16],
        TOKEN + bytes(4),
        b"GET / HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n",
    ],
    ids=["silent", "worker", "zeros", "one bit", "half", "worker 0", "http"],
)
def test_stranger_cannot_replace_a_worker(said: bytes, hang_up: bool) -> None:
    assert answered(said, hang_up=hang_up) == [3]


def test_many_strangers_keep_no_worker_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "_MAX_WAITING_CONNECTIONS", 8)
    first = Heartbeat([].append, TOKEN)
    server = Heartbeat.listen("127.0.0.1")
    strangers = [socket.create_connection(server.getsockname()) for _ in range(40)]
    worker = socket.create_connection(server.getsockname())
    worker.sendall(TOKEN + (3).to_bytes(4, "big"))
    first.accept(server, 1)
    assert [peer.worker for peer in first._peers] == [3]
    for connection in (*strangers, worker):
        connection.close()
    first.close()


def test_missing_worker_is_not_waited_for() -> None:
    server = Heartbeat.listen("127.0.0.1")
    silent = socket.create_connection(server.getsockname())
    with pytest.raises(OSError, match="not all workers connected"):
        Heartbeat([].append, TOKEN).accept(server, 0.2)
    silent.close()


def test_only_the_address_in_use_is_listened_on() -> None:
    with Heartbeat.listen("127.0.0.1") as server:
        assert server.getsockname()[0] == "127.0.0.1"
    # This machine has no such address, as behind a router.
    with Heartbeat.listen("192.0.2.1") as server:
        assert server.getsockname()[0] == "0.0.0.0"
