"""Signs of life between ranks."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest

from mlxtune.core.machine import heartbeat
from mlxtune.core.machine.heartbeat import Heartbeat
from tests.waiting import wait_until


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.1)
    monkeypatch.setattr(heartbeat, "PATIENCE", 1.0)


@pytest.fixture
def closing() -> Iterator[list[Callable[[], None]]]:
    calls: list[Callable[[], None]] = []
    yield calls
    for call in calls:
        call()


def connected(lost: list[int]) -> tuple[Heartbeat, socket.socket]:
    """Return rank 0's heartbeat, and the connection that rank 3 has to it."""
    first = Heartbeat(lost.append)
    server = Heartbeat.listen()
    other = socket.create_connection(("127.0.0.1", server.getsockname()[1]))
    other.sendall((3).to_bytes(4, "big"))
    first.accept(server, 1)
    return first, other


def test_a_rank_whose_connection_ends_is_lost(closing: list[Callable[[], None]]) -> None:
    lost: list[int] = []
    first, other = connected(lost)
    closing.append(first.close)
    other.close()
    first.wait_for_loss(60)
    assert (lost, first.lost) == ([3], 3)


def test_a_rank_that_is_silent_is_lost(closing: list[Callable[[], None]]) -> None:
    lost: list[int] = []
    started = time.monotonic()
    first, other = connected(lost)
    closing += [first.close, other.close]
    first.wait_for_loss(60)
    assert lost == [3]
    assert time.monotonic() - started > heartbeat.PATIENCE


def test_ranks_that_run_hear_each_other_and_part_in_peace(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, readers = SimpleNamespace(now=0.0), set()

    def monotonic() -> float:
        now: float = clock.now
        readers.add(threading.get_ident())
        return now

    monkeypatch.setattr(heartbeat, "time", SimpleNamespace(monotonic=monotonic))
    lost: list[int] = []
    first, second = Heartbeat(lost.append), Heartbeat(lost.append)
    server = Heartbeat.listen()
    port = server.getsockname()[1]
    joining = threading.Thread(target=second.connect, args=("127.0.0.1", port, 1))
    joining.start()
    first.accept(server, 1)
    joining.join()
    peers = [*first._peers, *second._peers]
    wait_until(lambda: len(readers) == 2)
    # For longer than without a sign of life.
    while clock.now < 2 * heartbeat.PATIENCE:
        clock.now += 2 * heartbeat.INTERVAL
        wait_until(lambda: all(peer.heard == clock.now for peer in peers))
    assert not lost
    second.close()
    wait_until(lambda: first._peers[0].said_bye)
    first.close()
    assert not lost


def test_a_goodbye_is_not_overtaken_by_a_reset(monkeypatch: pytest.MonkeyPatch) -> None:
    first, other = connected([])
    other.settimeout(60)
    # Nothing reads this one any more.
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
