"""`mlxtune watch` and `mlxtune train --open`: the address, opening the browser, and Ctrl-C."""

from __future__ import annotations

import signal
import socket
import stat
import sys
import urllib.request
from pathlib import Path

import pytest

from mlxtune.config import user_cache
from mlxtune.core.run.progress import Progress
from mlxtune.core.training.observer import RunStart
from mlxtune.watch import watch as module
from mlxtune.watch.asking import Asker
from mlxtune.watch.live import Live
from mlxtune.watch.watch import PageOpener, has_browser, show, start_server
from tests.command import Cli, start
from tests.runs import write_run
from tests.waiting import SECONDS


def test_next_server_of_a_folder_has_the_same_address_by_whatever_path(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out")
    addresses = []
    for path in (run, tmp_path / "out", tmp_path / "out" / "adapters.safetensors"):
        live = Live(path, Asker())
        server = start_server(live, live.folder)
        addresses.append(server.address)
        server.server_close()
    assert len(set(addresses)) == 1
    mode = (user_cache() / "watch.json").stat().st_mode
    assert stat.S_IMODE(mode) == 0o600, "the token is the user's"


def test_server_beside_another_has_its_own_port_and_token(tmp_path: Path) -> None:
    live = Live(write_run(tmp_path), Asker())
    first, second = (start_server(live, live.folder) for _ in range(2))
    assert first.server_address[1] != second.server_address[1]
    assert first.token != second.token
    assert len(first.token) >= 32
    first.server_close()
    second.server_close()


@pytest.mark.parametrize(
    "content", ["", "[]", '{"KEY": 7}', '{"KEY": [70000, "t"]}', '{"KEY": []}']
)
def test_damaged_address_gives_way_to_a_new_one(tmp_path: Path, content: str) -> None:
    live = Live(write_run(tmp_path), Asker())
    place = user_cache() / "watch.json"
    place.parent.mkdir(parents=True, exist_ok=True)
    place.write_text(content.replace("KEY", str(live.folder.resolve())))
    server = start_server(live, live.folder)
    assert len(server.token) >= 32
    server.server_close()


def test_show_prints_the_address_opens_it_and_ends_when_idle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    opened: list[str] = []
    monkeypatch.setattr(module, "has_browser", lambda: True)
    monkeypatch.setattr(module.webbrowser, "open", opened.append)
    monkeypatch.setattr(module, "_IDLE_SECONDS", 0.0)
    show(str(write_run(tmp_path)))
    assert capsys.readouterr().out == f"page: {opened[0]}\n"
    with pytest.raises(OSError, match="refused"):
        urllib.request.urlopen(opened[0])


def test_browser_opens_where_it_has_a_screen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("SSH_CONNECTION", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(sys, "platform", "linux")
    assert not has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    assert has_browser()
    monkeypatch.setenv("SSH_CONNECTION", "elsewhere")
    assert not has_browser()


def test_folder_without_a_run_ends_in_a_line(cli: Cli, tmp_path: Path) -> None:
    assert "holds no run: name the folder of a run" in cli("watch", tmp_path).error


def test_train_opens_the_page_in_a_process_of_its_own(
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
