"""The protocol of `mlxtune serve`: wrong requests, access, other sites, and strange values."""

from __future__ import annotations

import http.client
import json
import socket
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.serve.served import CHAT, ask, messages, server_of, write_adapter
from tests.waiting import SECONDS

if TYPE_CHECKING:
    from mlxtune.serve.api_server import ApiServer

ASKED = messages("A table for two, Sunday at noon. Ida Park")
JSON = {"Content-Type": "application/json"}
GOOD = json.dumps({"model": "base", "messages": ASKED, "max_tokens": 2}).encode()


def send(
    server: ApiServer,
    body: Any = GOOD,
    path: str = CHAT,
    method: str = "POST",
    **headers: str,
) -> tuple[int, dict[str, str], Any]:
    """Send bytes and headers as they are; return the status, the headers and the JSON."""
    named = JSON | {name.replace("_", "-"): value for name, value in headers.items()}
    connection = http.client.HTTPConnection(*server.server_address[:2], timeout=SECONDS)
    connection.request(method, path, body, named)
    response = connection.getresponse()
    content = response.read()
    connection.close()
    found = {name.lower(): value for name, value in response.getheaders()}
    return response.status, found, json.loads(content) if content else None


def body(**changes: Any) -> bytes:
    return json.dumps(json.loads(GOOD) | changes).encode()


WRONG: dict[str, tuple[int, dict[str, Any]]] = {
    "unknown model": (404, {"body": body(model="gpt-4")}),
    "no model": (400, {"body": body(model=None)}),
    "model that is no text": (404, {"body": body(model=["base"])}),
    "path as model": (404, {"body": body(model="../../etc/passwd")}),
    "no messages": (400, {"body": body(messages=[])}),
    "messages that are no list": (400, {"body": body(messages="Hi")}),
    "message that is no object": (400, {"body": body(messages=["Hi"])}),
    "unknown role": (400, {"body": body(messages=[{"role": "wizard", "content": "Hi"}])}),
    "answer at the end": (400, {"body": body(messages=[{"role": "assistant", "content": "Hi"}])}),
    "image by address": (
        400,
        {
            "body": body(
                messages=[
                    {
                        "role": "user",
                        "content": [
                            {"type": "image_url", "image_url": {"url": "http://127.0.0.1:1/a.png"}}
                        ],
                    }
                ]
            )
        },
    ),
    "longer than the model reads": (400, {"body": body(messages=messages("table " * 9000))}),
    "10 MB": (413, {"body": body(messages=messages("a" * 10_000_000))}),
    "many values": (413, {"body": body(stop=["a"] * 200_000)}),
    "deep nesting": (413, {"body": b"[" * 100_000}),
    "broken JSON": (400, {"body": b'{"model": "base", '}),
    "no JSON": (400, {"body": b"\xff\xfe"}),
    "NaN": (400, {"body": GOOD.replace(b": 2", b": NaN")}),
    "list": (400, {"body": b"[]"}),
    "other content type": (415, {"Content_Type": "text/plain"}),
    "no length": (411, {"body": iter([GOOD])}),
    "length that is no number": (400, {"Content_Length": "0x10"}),
    "two lengths": (400, {"Content_Length": str(len(GOOD)), "content_Length": "5"}),
    "chunks and a length": (
        400,
        {"Content_Length": str(len(GOOD)), "Transfer_Encoding": "chunked"},
    ),
    "unknown encoding": (400, {"Content_Length": str(len(GOOD)), "Transfer_Encoding": "xchunked"}),
    "wrong address": (404, {"path": "/v1/embeddings"}),
    "other method": (501, {"method": "DELETE"}),
    "another Host": (421, {"Host": "evil.example"}),
    "another site": (403, {"Origin": "https://evil.example"}),
    "site without a name": (403, {"Origin": "null"}),
    "several answers": (400, {"body": body(n=2)}),
    "response format": (400, {"body": body(response_format={"type": "json_object"})}),
    "forced tool": (400, {"body": body(tools=[], tool_choice="required")}),
    "tools that are no list": (400, {"body": body(tools={"a": 1})}),
    "text as temperature": (400, {"body": body(temperature="hot")}),
    "negative temperature": (400, {"body": body(temperature=-1)}),
    "huge temperature": (400, {"body": body(temperature=1e300)}),
    "zero tokens": (400, {"body": body(max_tokens=0)}),
    "bias of a token that does not exist": (400, {"body": body(logit_bias={"99999999": 5})}),
    "infinite bias": (400, {"body": body(logit_bias={"5": 1e300})}),
    "empty stop": (400, {"body": body(stop=[""])}),
    "many stops": (400, {"body": body(stop=["a"] * 100)}),
    "options that are no object": (400, {"body": body(chat_template_kwargs="thinking")}),
    "usage that is no object": (400, {"body": body(stream=True, stream_options=1)}),
}


@pytest.mark.parametrize("name", WRONG)
def test_wrong_request_gets_an_error_of_the_protocol(server: ApiServer, name: str) -> None:
    status, request = WRONG[name]
    found, headers, content = send(server, **request)
    assert found == status
    assert headers["content-type"] == "application/json"
    error = content["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["message"]
    assert error["type"] == ("server_error" if status >= 500 else "invalid_request_error")
    assert not {header for header in headers if header.startswith("access-control")}
    assert send(server)[0] == 200


@pytest.mark.parametrize("host", ["localhost", "LOCALHOST:80", "localhost.", "[::1]:1"])
def test_names_of_this_machine_are_accepted(server: ApiServer, host: str) -> None:
    assert send(server, None, "/health", "GET", Host=host)[0] == 200


def test_garbage_gets_a_response_and_the_server_survives(server: ApiServer) -> None:
    for line in (b"\x00\xff\x00\r\n\r\n", b"GET\r\n\r\n", b"GET / HTTP/9.9\r\n\r\n", b"A" * 65_537):
        with socket.create_connection(server.server_address[:2], timeout=SECONDS) as connection:
            connection.sendall(line)
            connection.shutdown(socket.SHUT_WR)
            assert b'"error"' in b"".join(iter(partial(connection.recv, 4096), b""))
    assert send(server)[0] == 200


def test_silent_connections_delay_no_answer(server: ApiServer) -> None:
    sockets = [socket.create_connection(server.server_address[:2]) for _ in range(200)]
    for each in sockets[::2]:
        each.sendall(b"POST /v1/chat/completions HTTP/1.1\r\nHost: local")
    try:
        assert send(server)[0] == 200
    finally:
        for each in sockets:
            each.close()


def test_too_many_answers_at_once_are_refused(
    server: ApiServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.serve import api_server

    monkeypatch.setattr(api_server, "_ANSWERS", 0)
    status, _, content = send(server)
    assert (status, content["error"]["type"]) == (503, "server_error")


def test_client_that_leaves_does_not_stop_other_answers(server: ApiServer) -> None:
    content = body(stream=True, max_tokens=200)
    for _ in range(3):
        with socket.create_connection(server.server_address[:2]) as connection:
            head = f"POST {CHAT} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
            connection.sendall(f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content)
            connection.recv(10)
    assert send(server)[0] == 200


# Values that mlx-lm's thread might not survive

NUMBERS = st.one_of(
    st.integers(-3, 3), st.integers(), st.floats(allow_nan=False, allow_infinity=False)
)
VALUES = st.one_of(NUMBERS, st.none(), st.booleans(), st.text(max_size=3), st.just([]), st.just({}))
PARAMETERS = (
    *("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "repetition_context_size"),
    *("presence_penalty", "presence_context_size", "frequency_penalty", "frequency_context_size"),
    *("xtc_probability", "xtc_threshold", "logit_bias", "logprobs", "top_logprobs", "seed"),
    *("stream", "stream_options", "stop", "n", "draft_model", "adapters", "role_mapping"),
    *("num_draft_tokens", "user", "metadata", "tools", "tool_choice", "chat_template_kwargs"),
)


@settings(max_examples=60)
@given(st.dictionaries(st.sampled_from(PARAMETERS), VALUES, min_size=1, max_size=4))
def test_server_survives_any_parameters(server: ApiServer, parameters: dict[str, Any]) -> None:
    status, _ = ask(server, model="base", messages=ASKED, max_tokens=2, **parameters)
    assert status in (200, 400)
    assert server.answers.is_healthy


@pytest.mark.parametrize(
    "parameters",
    [
        {"temperature": 1e-320},
        {"temperature": 100, "top_k": 10**9},
        {"temperature": 1, "top_k": 2048},
        {"temperature": 1, "top_p": 0},
        {"temperature": 1, "min_p": 1.0},
        {"temperature": 1.0, "xtc_probability": 1.0, "xtc_threshold": 0.0},
        {"temperature": 1, "xtc_probability": 1, "xtc_threshold": 0},
        {"repetition_penalty": 0.01, "repetition_context_size": 10**9},
        {"logit_bias": {"5": 100, "6": -100}},
        {"temperature": 1, "seed": 2**63 - 1},
        {"max_tokens": 10**12, "stop": "e"},
    ],
    ids=str,
)
def test_extreme_parameters_get_a_response(server: ApiServer, parameters: dict[str, Any]) -> None:
    options = {"max_tokens": 3} | parameters
    assert ask(server, model="base", messages=ASKED, **options)[0] == 200
    assert server.answers.is_healthy


# Access


@pytest.fixture(scope="module")
def open_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    """A server with a key, and with a site whose pages may ask."""
    run = write_adapter(tmp_path_factory.mktemp("run") / "run", 1)
    origins = ("https://app.example",)
    with server_of(run, api_key="s3cret-ü", allow_origin=origins) as server:
        yield server


@pytest.mark.parametrize("given", ["", "Bearer ", "Bearer s3cret", "Basic s3cret-ü", "s3cret-ü"])
@pytest.mark.parametrize(("method", "path"), [("POST", CHAT), ("GET", "/v1/models")])
def test_request_without_the_key_is_refused(
    open_server: ApiServer, given: str, method: str, path: str
) -> None:
    key = {"Authorization": given.encode().decode("latin-1")} if given else {}
    status, _, content = send(open_server, path=path, method=method, **key)
    assert (status, content["error"]["code"]) == (401, "invalid_api_key")


@pytest.mark.parametrize("scheme", ["Bearer", "bearer"])
def test_request_with_the_key_is_answered(open_server: ApiServer, scheme: str) -> None:
    key = f"{scheme} s3cret-ü".encode().decode("latin-1")
    assert send(open_server, Authorization=key)[0] == 200


def test_page_of_an_allowed_site_may_ask(open_server: ApiServer) -> None:
    asked = {
        "Origin": "https://app.example",
        "Access_Control_Request_Method": "POST",
        "Access_Control_Request_Headers": "authorization,content-type,x-stainless-lang",
    }
    status, headers, _ = send(open_server, None, method="OPTIONS", **asked)
    assert status == 204
    assert headers["access-control-allow-origin"] == "https://app.example"
    assert headers["access-control-allow-headers"] == asked["Access_Control_Request_Headers"]
    assert "POST" in headers["access-control-allow-methods"]
    key = "Bearer s3cret-ü".encode().decode("latin-1")
    status, headers, _ = send(open_server, Origin="https://app.example", Authorization=key)
    assert (status, headers["access-control-allow-origin"]) == (200, "https://app.example")
    assert headers["vary"] == "Origin"


def test_other_sites_may_not_ask(open_server: ApiServer) -> None:
    for origin in ("https://evil.example", "https://app.example.evil", "http://app.example", "*"):
        for method, content in (("OPTIONS", None), ("POST", GOOD)):
            status, headers, _ = send(open_server, content, method=method, Origin=origin)
            assert status == 403
            assert "access-control-allow-origin" not in headers
