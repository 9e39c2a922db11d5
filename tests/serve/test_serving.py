"""`mlxtune serve` as a command: its options, its address and its end."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import threading
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from mlxtune.errors import ConfigError
from tests.command import Cli, finish, start
from tests.serve.served import DEMO, messages, server_of, write_adapter
from tests.waiting import SECONDS

OPEN = ("0.0.0.0", "::", "192.168.0.1", "example.org")


def test_nothing_to_serve_is_an_error(cli: Cli) -> None:
    assert "name a run, or a base model" in cli("serve").error
    assert "must be NAME=PATH" in cli("serve", "--name", "out").error


@pytest.mark.parametrize("host", OPEN)
def test_other_machines_need_a_key(monkeypatch: pytest.MonkeyPatch, cli: Cli, host: str) -> None:
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)
    problem = cli("serve", "--model-path", DEMO, "--host", host).error
    assert "set OPENAI_API_KEY, or pass --api-key" in problem


def test_key_of_clients_is_the_key_for_other_machines(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "from the environment")
    for options, key in (
        ({"host": "0.0.0.0"}, "from the environment"),
        ({"host": "0.0.0.0", "api_key": "given"}, "given"),
        ({"api_key": "given"}, "given"),
        ({}, None),
    ):
        with server_of(model_path=str(DEMO), **options) as server:
            assert server.key == key
            assert server.is_local == ("host" not in options)


def test_port_in_use_is_an_error() -> None:
    with server_of(model_path=str(DEMO)) as server:
        from mlxtune.config import ServeConfig
        from mlxtune.serve.serving import serving
        from mlxtune.views.console import RunConsole

        config = ServeConfig(model_path=str(DEMO), port=server.server_address[1])
        problem = pytest.raises(ConfigError, match="choose another --port")
        with problem, serving(config, RunConsole(quiet=True)):
            pass


def _started(*arguments: object) -> tuple[subprocess.Popen[str], str]:
    """Start the command; return its process and the address that it prints."""
    process = start("serve", *arguments, "--port", 0)
    assert process.stderr is not None
    for line in process.stderr:
        if found := re.search(r"http://\S+/v1", line):
            return process, found[0]
    raise AssertionError("the command ended")


@pytest.mark.slow
def test_ctrl_c_finishes_the_answers_that_have_begun(tmp_path: Path) -> None:
    # A bias against the end tokens makes the answer as long as it may be.
    process, address = _started(write_adapter(tmp_path / "run", 1))
    config = json.loads((DEMO / "config.json").read_text())
    ends = config["eos_token_id"]
    ends = ends if isinstance(ends, list) else [ends]
    body: dict[str, Any] = {"model": "run", "messages": messages("Hi"), "max_tokens": 300}
    body |= {"stream": True, "logit_bias": {str(end): -100 for end in ends}}
    request = urllib.request.Request(
        f"{address}/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    with urllib.request.urlopen(request, timeout=SECONDS) as response:
        first = response.readline()
        process.send_signal(signal.SIGINT)
        rest = response.read().decode()
    assert first.startswith(b"data:") or first.startswith(b":")
    assert rest.endswith("data: [DONE]\n\n")
    assert '"finish_reason": "length"' in rest
    assert finish(process, timeout=SECONDS).code == 0


def test_answers_in_progress_are_counted_and_awaited() -> None:
    with server_of(model_path=str(DEMO)) as server:
        done = threading.Event()
        with server.answering():
            thread = threading.Thread(target=lambda: (server.finish(lambda: True), done.set()))
            thread.start()
            assert not done.wait(0.5)
        assert done.wait(SECONDS)
        thread.join()
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(server.server_address[:2], timeout=SECONDS)
