"""The limits of connections: their number, and the time and size of a request."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler

import pytest

from mlxtune.watch.connections import LimitedReader, LimitedServer
from tests.waiting import SECONDS


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.wfile.write(b"answered")


class Server(LimitedServer):
    most_connections = 2


@pytest.fixture
def server() -> Iterator[Server]:
    with Server(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_connections_beyond_the_limit_are_closed(server: Server) -> None:
    held = [socket.create_connection(server.server_address[:2], SECONDS) for _ in range(3)]
    assert held[2].recv(10) == b""
    for each in held[:2]:
        each.sendall(b"GET / HTTP/1.0\r\n\r\n")
        assert each.recv(10) == b"answered"
    for each in held:
        each.close()


@pytest.mark.parametrize(("seconds", "most_bytes"), [(0.0, 100), (0.05, 100), (SECONDS, 3)])
def test_reader_stops_at_the_limits_of_time_and_size(seconds: float, most_bytes: int) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        theirs.sendall(b"abc")
        reader, content = LimitedReader(ours, seconds, most_bytes), b""
        with pytest.raises(TimeoutError):
            while part := reader.read(2):
                content += part
        assert b"abc".startswith(content)
        assert content or seconds == 0
