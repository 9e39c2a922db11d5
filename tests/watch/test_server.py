"""The server of the live page: access, limits on requests, and time limits."""

from __future__ import annotations

import http.client
import json
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from typing import Any

import pytest

from mlxtune.errors import OutputError
from mlxtune.watch import server as module
from mlxtune.watch.server import PageServer
from tests.waiting import SECONDS, wait_until

TOKEN = "t" * 32


class FakeSite:
    """Records the requests to a site with a fixed page and two events."""

    def __init__(self) -> None:
        self.followed: list[tuple[str, str]] = []
        self.acted: list[tuple[str, Mapping[str, Any]]] = []
        self.done = threading.Event()

    def page(self) -> str:
        return "<p>the page</p>"

    def follow(self, view: str, last: str) -> Iterator[tuple[str, str] | None]:
        self.followed.append((view, last))
        yield "id-1", '{"head": "one"}'
        yield None
        yield "id-2", '{"head": "two"}'
        self.done.wait(SECONDS)

    def act(self, action: str, values: Mapping[str, Any]) -> bool:
        if action == "fail":
            raise OutputError("it cannot be done")
        self.acted.append((action, values))
        return action == "stop"


@pytest.fixture
def site() -> Iterator[FakeSite]:
    site = FakeSite()
    yield site
    site.done.set()


@pytest.fixture
def server(site: FakeSite) -> Iterator[PageServer]:
    server = PageServer(site, TOKEN)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    yield server
    server.shutdown()
    server.server_close()


def port(server: PageServer) -> int:
    return int(server.server_address[1])


def ask(
    server: PageServer,
    path: str = f"/{TOKEN}/",
    method: str = "GET",
    body: bytes | None = None,
    **headers: str | None,
) -> tuple[int, str, Mapping[str, str]]:
    """Return the status, text and headers of an answer; a header that is None is not sent."""
    given = {"Host": f"127.0.0.1:{port(server)}"}
    if method == "POST":
        given |= {"Origin": f"http://127.0.0.1:{port(server)}", "Content-Type": "application/json"}
    given |= {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection("127.0.0.1", port(server), timeout=SECONDS)
    connection.putrequest(method, path, skip_host=True, skip_accept_encoding=True)
    if body is not None and "Content_Length" not in headers:
        given["Content-Length"] = str(len(body))
    for name, value in given.items():
        if value is not None:
            connection.putheader(name, value)
    connection.endheaders(body)
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    return answer.status, text, dict(answer.headers)


def send(server: PageServer, content: bytes) -> bytes:
    """Send bytes, which need not be a valid request, and return the whole answer."""
    with socket.create_connection(("127.0.0.1", port(server)), timeout=SECONDS) as connection:
        connection.sendall(content)
        answer = b""
        while piece := connection.recv(4096):
            answer += piece
    return answer


def test_page_comes_by_its_token_with_headers_that_keep_others_out(server: PageServer) -> None:
    status, text, headers = ask(server)
    assert (status, text) == (200, "<p>the page</p>")
    assert server.address == f"http://127.0.0.1:{port(server)}/{TOKEN}/"
    assert headers["Content-Security-Policy"] == "frame-ancestors 'none'"
    assert headers["Referrer-Policy"] == "no-referrer"
    assert headers["X-Content-Type-Options"] == "nosniff"
    assert headers["Cross-Origin-Resource-Policy"] == "same-origin"
    assert headers["Cache-Control"] == "no-store"
    assert "Python" not in headers["Server"]
    assert "Access-Control-Allow-Origin" not in headers


def test_server_listens_on_this_machine_alone(server: PageServer) -> None:
    assert server.server_address[0] == "127.0.0.1"


@pytest.mark.parametrize(
    "path",
    [
        *("/", "", f"/{TOKEN}", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", "//"),
        *(f"/{TOKEN}/../../etc/passwd", f"/{TOKEN}/%2e%2e/run.json", f"/{TOKEN}/run.json"),
        *("/../etc/passwd", f"/{TOKEN}/events/", "/é/", f"http://evil.example/{TOKEN}/", "*"),
        *(f"/{TOKEN}//etc/passwd", "/?token=" + TOKEN, f"@[evil/{TOKEN}/"),
    ],
)
def test_other_path_and_other_token_find_nothing(server: PageServer, path: str) -> None:
    request = f"GET {path or '/'} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode("latin-1")
    answer = send(server, request)
    assert answer.startswith(b"HTTP/1.0 404 ")
    assert b"root:" not in answer


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:80", "127.0.0.1@evil.example", "", "[::1]", None],
)
def test_name_that_leads_here_by_rebinding_is_refused(server: PageServer, host: str | None) -> None:
    assert ask(server, Host=host)[0] == 421
    assert ask(server, f"/{TOKEN}/stop", "POST", b"{}", Host=host)[0] == 421


def test_two_hosts_are_refused(server: PageServer) -> None:
    hosts = b"Host: 127.0.0.1\r\nHost: evil.example\r\n"
    answer = send(server, b"GET /%s/ HTTP/1.1\r\n%s\r\n" % (TOKEN.encode(), hosts))
    assert answer.startswith(b"HTTP/1.0 421 ")


def test_localhost_and_a_tunnels_port_are_this_machine(server: PageServer) -> None:
    assert ask(server, Host="localhost:1234")[0] == 200


def test_page_acts_by_a_post_of_its_own_origin(server: PageServer, site: FakeSite) -> None:
    body = json.dumps({"run": "a"}).encode()
    assert ask(server, f"/{TOKEN}/stop", "POST", body)[:2] == (200, "")
    assert site.acted == [("stop", {"run": "a"})]


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "https://127.0.0.1", "http://127.0.0.1:1"]
)
def test_post_of_another_origin_does_nothing(
    server: PageServer, site: FakeSite, origin: str | None
) -> None:
    assert ask(server, f"/{TOKEN}/stop", "POST", b"{}", Origin=origin)[0] == 403
    assert site.acted == []


@pytest.mark.parametrize(
    ("changes", "status"),
    [
        ({"Content_Type": "text/plain"}, 415),
        ({"Content_Type": "application/x-www-form-urlencoded"}, 415),
        ({"Content_Length": "9999999"}, 413),
        ({"Content_Length": "70000"}, 413),
        ({"Content_Length": "-1"}, 413),
        ({"Content_Length": None}, 413),
        ({"body": b"not json"}, 400),
        ({"body": b"[" * 10_000}, 400),
        ({"body": b"[]"}, 404),
        ({"path": f"/{'x' * 32}/stop"}, 404),
        ({"path": f"/{TOKEN}/unknown"}, 404),
        ({"path": f"/{TOKEN}/fail"}, 409),
    ],
)
def test_post_that_is_wrong_ends_with_its_reason(
    server: PageServer, changes: dict[str, Any], status: int
) -> None:
    given = {"path": f"/{TOKEN}/stop", "body": b"{}"} | changes
    assert ask(server, given.pop("path"), "POST", given.pop("body"), **given)[0] == status


def test_problem_of_an_action_is_told_to_the_page(server: PageServer) -> None:
    assert ask(server, f"/{TOKEN}/fail", "POST", b"{}")[1] == "it cannot be done"


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_unknown(server: PageServer, site: FakeSite, method: str) -> None:
    assert ask(server, f"/{TOKEN}/stop", method)[0] == 501
    assert ask(server, f"/{TOKEN}/stop")[0] == 404, "nothing changes by GET"
    assert site.acted == []


def test_events_come_as_a_stream_and_go_on_after_the_last_one(
    server: PageServer, site: FakeSite
) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port(server), timeout=SECONDS)
    headers = {"Host": "127.0.0.1", "Last-Event-ID": "id-0"}
    connection.request("GET", f"/{TOKEN}/events?view=a%20run", headers=headers)
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    expected = 'retry: 1000\n\nid: id-1\ndata: {"head": "one"}\n\n:\n\nid: id-2\n'
    assert answer.read(len(expected)).decode() == expected
    assert site.followed == [("a run", "id-0")]
    connection.close()


@pytest.mark.parametrize(
    ("request_line", "status"),
    [
        (b"GET /%s HTTP/1.1\r\n\r\n" % (b"x" * 70_000), b" 414 "),
        (b"GET / HTTP/1.1\r\n" + b"A: " + b"x" * 70_000 + b"\r\n\r\n", b" 431 "),
        (b"GET / HTTP/1.1\r\n" + b"A: x\r\n" * 1000 + b"\r\n", b" 431 "),
        (b"\x16\x03\x01 \x00 \xff\r\n\r\n", b""),
        (b"nonsense\r\n\r\n", b""),
    ],
)
def test_request_that_is_huge_or_none_ends_at_once(
    server: PageServer, request_line: bytes, status: bytes
) -> None:
    try:
        answer = send(server, request_line)
    except ConnectionError:  # the server closed with content unread
        return
    assert status in answer.partition(b"\n")[0] + b"  "


def test_request_that_never_ends_is_dropped_by_its_size(server: PageServer) -> None:
    place = ("127.0.0.1", port(server))
    with socket.create_connection(place, timeout=SECONDS) as slow, pytest.raises(ConnectionError):
        for _ in range(100_000):
            slow.sendall(b"GET / HTTP/1.1\r\nA: " + b"x" * 60_000)


def test_slow_request_is_dropped_after_its_time_however_often_it_sends(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    place = ("127.0.0.1", port(server))
    with socket.create_connection(place, timeout=SECONDS) as slow, pytest.raises(ConnectionError):
        for _ in range(20 * SECONDS):
            slow.sendall(b"G")
            time.sleep(0.05)


def test_silent_connection_is_closed_after_its_time(
    server: PageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port(server)), timeout=SECONDS) as silent:
        assert silent.recv(1) == b""


def opened_stream(server: PageServer) -> socket.socket:
    """Return a connection that holds a slot, as its first bytes have come."""
    connection = socket.create_connection(("127.0.0.1", port(server)), timeout=SECONDS)
    connection.sendall(b"GET /%s/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % TOKEN.encode())
    assert connection.recv(16)
    return connection


def test_more_connections_than_slots_are_closed_and_free_ones_serve_again(
    server: PageServer, site: FakeSite
) -> None:
    held = [opened_stream(server) for _ in range(module._CONNECTIONS)]
    with socket.create_connection(("127.0.0.1", port(server)), timeout=SECONDS) as refused:
        assert refused.recv(1) == b""
    for connection in held:
        connection.close()
    site.done.set()

    def serves() -> bool:
        try:
            return ask(server)[0] == 200
        except (ConnectionError, http.client.HTTPException):
            return False

    wait_until(serves)


def test_page_that_is_closed_gives_its_slot_back(server: PageServer, site: FakeSite) -> None:
    for _ in range(3):
        opened_stream(server).close()
    site.done.set()
    assert ask(server)[0] == 200
