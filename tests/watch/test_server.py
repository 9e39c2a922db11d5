"""`mlxtune watch`: access to the server, limits on requests, its address, and its end."""

from __future__ import annotations

import http.client
import json
import signal
import socket
import stat
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import user_cache
from mlxtune.core.run.progress import Progress
from mlxtune.core.training.observer import RunStart
from mlxtune.errors import OutputError
from mlxtune.watch import server as module
from mlxtune.watch.asking import Asker
from mlxtune.watch.live import LiveSite
from mlxtune.watch.server import PageOpener, PageServer, has_browser, main, start_server
from tests.command import Cli, start
from tests.runs import write_run
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


def test_token_opens_the_page_on_the_loopback_interface_alone(server: PageServer) -> None:
    status, text, headers = ask(server)
    assert (status, text) == (200, "<p>the page</p>")
    assert server.server_address[0] == "127.0.0.1"
    assert server.address == f"http://127.0.0.1:{port(server)}/{TOKEN}/"
    assert ask(server, Host="localhost:1234")[0] == 200, "as through a tunnel"
    assert (
        headers.items()
        >= {
            "Content-Security-Policy": "frame-ancestors 'none'",
            "Referrer-Policy": "no-referrer",
            "X-Content-Type-Options": "nosniff",
            "Cross-Origin-Resource-Policy": "same-origin",
            "Cache-Control": "no-store",
        }.items()
    )
    assert "Python" not in headers["Server"]
    assert "Access-Control-Allow-Origin" not in headers


@pytest.mark.parametrize(
    "path",
    [
        *("/", "", f"/{TOKEN}", f"/{TOKEN[:-1]}/", f"/{TOKEN}x/", "//"),
        *(f"/{TOKEN}/../../etc/passwd", f"/{TOKEN}/%2e%2e/run.json", f"/{TOKEN}/run.json"),
        *("/../etc/passwd", f"/{TOKEN}/events/", "/é/", f"http://evil.example/{TOKEN}/", "*"),
        *(f"/{TOKEN}//etc/passwd", "/?token=" + TOKEN, f"@[evil/{TOKEN}/"),
    ],
)
def test_other_paths_and_tokens_are_not_found(server: PageServer, path: str) -> None:
    request = f"GET {path or '/'} HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n".encode("latin-1")
    answer = send(server, request)
    assert answer.startswith(b"HTTP/1.0 404 ")
    assert b"root:" not in answer


@pytest.mark.parametrize(
    "host",
    ["evil.example", "127.0.0.1.evil.example:80", "127.0.0.1@evil.example", "", "[::1]", None],
)
def test_rebound_host_is_refused(server: PageServer, host: str | None) -> None:
    assert ask(server, Host=host)[0] == 421
    assert ask(server, f"/{TOKEN}/stop", "POST", b"{}", Host=host)[0] == 421
    hosts = f"Host: 127.0.0.1\r\nHost: {host or ''}\r\n"
    answer = send(server, f"GET /{TOKEN}/ HTTP/1.1\r\n{hosts}\r\n".encode())
    assert answer.startswith(b"HTTP/1.0 421 ")


def test_post_of_the_same_origin_acts(server: PageServer, site: FakeSite) -> None:
    body = json.dumps({"run": "a"}).encode()
    assert ask(server, f"/{TOKEN}/stop", "POST", body)[:2] == (200, "")
    assert site.acted == [("stop", {"run": "a"})]


@pytest.mark.parametrize(
    "origin", [None, "null", "http://evil.example", "https://127.0.0.1", "http://127.0.0.1:1"]
)
def test_post_of_another_origin_is_refused(
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
        ({"path": f"/{TOKEN}/fail"}, (409, "it cannot be done")),
    ],
)
def test_bad_post_has_its_status(
    server: PageServer, changes: dict[str, Any], status: int | tuple[int, str]
) -> None:
    given = {"path": f"/{TOKEN}/stop", "body": b"{}"} | changes
    answer = ask(server, given.pop("path"), "POST", given.pop("body"), **given)
    assert status in (answer[0], answer[:2])


@pytest.mark.parametrize("method", ["HEAD", "PUT", "DELETE", "OPTIONS", "TRACE", "CONNECT"])
def test_other_methods_are_not_implemented(server: PageServer, site: FakeSite, method: str) -> None:
    assert ask(server, f"/{TOKEN}/stop", method)[0] == 501
    assert ask(server, f"/{TOKEN}/stop")[0] == 404, "nothing changes by GET"
    assert site.acted == []


def test_events_stream_and_resume_after_the_last_id(server: PageServer, site: FakeSite) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", port(server), timeout=SECONDS)
    headers = {"Host": "127.0.0.1", "Last-Event-ID": "id-0"}
    connection.request("GET", f"/{TOKEN}/events?view=a%20run", headers=headers)
    answer = connection.getresponse()
    assert answer.headers["Content-Type"] == "text/event-stream"
    expected = 'retry: 1000\n\nid: id-1\ndata: {"head": "one"}\n\n:\n\nid: id-2\n'
    assert answer.read(len(expected)).decode() == expected
    assert site.followed == [("a run", "id-0")]
    connection.close()


def test_old_stream_ends_and_the_page_connects_again(
    server: PageServer, site: FakeSite, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "_STREAM_SECONDS", 0.0)
    answer = send(server, b"GET /%s/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % TOKEN.encode())
    assert answer.endswith(b'\n\nid: id-1\ndata: {"head": "one"}\n\nretry: 100\n\n')
    assert not site.done.is_set()


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
def test_huge_or_malformed_request_is_refused(
    server: PageServer, request_line: bytes, status: bytes
) -> None:
    try:
        answer = send(server, request_line)
    except ConnectionError:  # the server closed with content unread
        return
    assert status in answer.partition(b"\n")[0] + b"  "


def test_endless_request_is_dropped_at_its_limit(server: PageServer) -> None:
    place = ("127.0.0.1", port(server))
    with socket.create_connection(place, timeout=SECONDS) as slow, pytest.raises(ConnectionError):
        for _ in range(100_000):
            slow.sendall(b"GET / HTTP/1.1\r\nA: " + b"x" * 60_000)


def test_slow_request_times_out(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.3)
    place = ("127.0.0.1", port(server))
    with socket.create_connection(place, timeout=SECONDS) as slow, pytest.raises(ConnectionError):
        for _ in range(20 * SECONDS):
            slow.sendall(b"G")
            time.sleep(0.05)


def test_silent_connection_times_out(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_SECONDS", 0.2)
    with socket.create_connection(("127.0.0.1", port(server)), timeout=SECONDS) as silent:
        assert silent.recv(1) == b""


def opened_stream(server: PageServer) -> socket.socket:
    """Return a connection that holds a slot, as its first bytes have come."""
    connection = socket.create_connection(("127.0.0.1", port(server)), timeout=SECONDS)
    connection.sendall(b"GET /%s/events HTTP/1.1\r\nHost: 127.0.0.1\r\n\r\n" % TOKEN.encode())
    assert connection.recv(16)
    return connection


def test_connections_beyond_the_limit_are_closed_until_one_is_free(
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


def test_closed_page_frees_its_connection(server: PageServer, site: FakeSite) -> None:
    for _ in range(3):
        opened_stream(server).close()
    site.done.set()
    assert ask(server)[0] == 200


# The command


def test_next_server_of_a_folder_keeps_its_address(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out")
    addresses = []
    for path in (run, tmp_path / "out", tmp_path / "out" / "adapters.safetensors"):
        live = LiveSite(path, Asker())
        server = start_server(live, live.folder)
        addresses.append(server.address)
        server.server_close()
    assert len(set(addresses)) == 1
    mode = (user_cache() / "watch.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600, "the token is the user's"


def test_second_server_of_a_folder_has_another_port_and_token(tmp_path: Path) -> None:
    live = LiveSite(write_run(tmp_path), Asker())
    first, second = (start_server(live, live.folder) for _ in range(2))
    assert first.server_address[1] != second.server_address[1]
    assert first.token != second.token
    assert len(first.token) >= 32
    first.server_close()
    second.server_close()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"KEY": 7}', '{"KEY": [70000, "t"]}', '{"KEY": []}']
)
def test_damaged_address_is_replaced(tmp_path: Path, content: str) -> None:
    live = LiveSite(write_run(tmp_path), Asker())
    place = user_cache() / "watch.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content.replace("KEY", str(live.folder.resolve())))
    server = start_server(live, live.folder)
    assert len(server.token) >= 32
    server.server_close()


def test_command_prints_and_opens_the_address_and_ends_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(module, "has_browser", lambda: True)
    monkeypatch.setattr(module.webbrowser, "open", opened.append)
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.0)
    main(str(write_run(tmp_path)))
    assert capsys.readouterr().out == f"page: {opened[0]}\n"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(opened[0])


def test_browser_needs_a_display(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSH_CONNECTION", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_browser()
    monkeypatch.setenv("SSH_CONNECTION", "elsewhere")
    assert not has_browser()


def test_folder_without_a_run_is_an_error(cli: Cli, tmp_path: Path) -> None:
    assert "holds no run: name the folder of a run" in cli("watch", tmp_path).error


def test_train_opens_the_page_in_a_separate_process(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    run, started = write_run(tmp_path), []

    def recorded(*args: object, **options: object) -> object:
        started.append(start_process(*args, **options))  # type: ignore[arg-type]
        return started[-1]

    start_process = module.start
    monkeypatch.setattr(module, "start", recorded)
    monkeypatch.delenv("DISPLAY", raising=False)
    PageOpener(run).on_start(RunStart(1, 1, 1, 1, 1, Progress()), None)
    line = capfd.readouterr().err.strip()
    (process,) = started
    try:
        with urllib.request.urlopen(line.removeprefix("page: ")) as page:
            assert b"mlxtune watch" in page.read()
    finally:
        process.send_signal(signal.SIGINT)
        process.wait(SECONDS)


def test_page_that_cannot_be_opened_is_a_warning(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    PageOpener(tmp_path / "none").on_start(RunStart(1, 1, 1, 1, 1, Progress()), None)
    assert capfd.readouterr().err == "warning: the page could not be opened\n"


def test_ctrl_c_ends_the_server(tmp_path: Path) -> None:
    process = start("watch", write_run(tmp_path))
    assert process.stdout is not None
    address = process.stdout.readline().strip().removeprefix("page: ")
    # The server ends even while a page is open.
    host, port = address.split("/")[2].split(":")
    with socket.create_connection((host, int(port))) as page:
        token = address.split("/")[3]
        page.sendall(f"GET /{token}/events HTTP/1.1\r\nHost: {host}\r\n\r\n".encode())
        assert page.recv(10)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=SECONDS)
    assert process.returncode == 130
    assert err == "mlxtune: interrupted\n"
