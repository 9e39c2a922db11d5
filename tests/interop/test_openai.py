"""Clients of the OpenAI API ask `mlxtune serve`: the openai package, LangChain and curl."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from tests.serve.served import (
    TOOL,
    TOOL_PROMPT,
    answer_of,
    messages,
    server_of,
    train_tool_caller,
    url_of,
    write_adapter,
)

if TYPE_CHECKING:
    from mlxtune.serve.api_server import ApiServer

KEY = "secret"
ASKED: Any = messages("A table for two, Sunday at noon. Ida Park")


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    run = write_adapter(tmp_path_factory.mktemp("runs") / "run", 1)
    with server_of(run) as server:
        yield server


@pytest.fixture(scope="module")
def tool_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ApiServer]:
    with server_of(train_tool_caller(tmp_path_factory.mktemp("tools")), api_key=KEY) as server:
        yield server


# Of the module, so that a missing package skips a test before a server is made for it.
@pytest.fixture(scope="module")
def openai() -> Any:
    return pytest.importorskip("openai", reason="needs the openai package, a client")


@pytest.fixture(scope="module")
def langchain() -> Any:
    return pytest.importorskip("langchain_openai", reason="needs langchain-openai, a client")


def client_of(openai: Any, server: ApiServer, key: str = KEY) -> Any:
    return openai.OpenAI(base_url=f"{url_of(server)}/v1", api_key=key, max_retries=0)


def test_openai_gets_whole_and_streamed_answers(openai: Any, server: ApiServer) -> None:
    with client_of(openai, server) as client:
        assert [each.id for each in client.models.list()] == ["base", "run"]
        for model in ("base", "run"):
            expected = answer_of(server, model, ASKED)
            whole = client.chat.completions.create(model=model, messages=ASKED)
            assert whole.choices[0].message.content == expected
            assert whole.usage.completion_tokens > 0
            options = {"stream": True, "stream_options": {"include_usage": True}}
            chunks = list(client.chat.completions.create(model=model, messages=ASKED, **options))
            pieces = [each.choices[0].delta.content or "" for each in chunks if each.choices]
            assert "".join(pieces) == expected
            assert chunks[-1].usage.total_tokens == whole.usage.total_tokens


def test_openai_gets_log_probabilities(openai: Any, server: ApiServer) -> None:
    with client_of(openai, server) as client:
        options = {"logprobs": True, "top_logprobs": 3}
        whole = client.chat.completions.create(model="run", messages=ASKED, **options)
        content = whole.choices[0].logprobs.content
        assert "".join(each.token for each in content) == whole.choices[0].message.content
        assert all(len(each.top_logprobs) == 3 for each in content)


def test_openai_raises_its_errors(openai: Any, server: ApiServer, tool_server: ApiServer) -> None:
    with client_of(openai, server) as client:
        with pytest.raises(openai.NotFoundError, match="choose one of base, run"):
            client.chat.completions.create(model="gpt-4", messages=ASKED)
        with pytest.raises(openai.BadRequestError, match="there is no message"):
            client.chat.completions.create(model="run", messages=[])
    with (
        client_of(openai, tool_server, "wrong") as client,
        pytest.raises(openai.AuthenticationError, match="key"),
    ):
        client.models.list()


@pytest.mark.slow
def test_openai_gets_tool_calls(openai: Any, tool_server: ApiServer) -> None:
    with client_of(openai, tool_server) as client:
        options: dict[str, Any] = {"model": "caller", "tools": [TOOL], "max_tokens": 100}
        asked = messages(TOOL_PROMPT)
        whole = client.chat.completions.create(messages=asked, **options)
        (call,) = whole.choices[0].message.tool_calls
        assert json.loads(call.function.arguments) == {"people": 4}
        with client.chat.completions.stream(messages=asked, **options) as stream:
            last = stream.get_final_completion().choices[0]
        assert last.finish_reason == "tool_calls"
        assert last.message.tool_calls[0].function.arguments == call.function.arguments


def test_langchain_gets_answers(langchain: Any, server: ApiServer) -> None:
    options = {"base_url": f"{url_of(server)}/v1", "api_key": KEY, "model": "run"}
    chat = langchain.ChatOpenAI(**options, temperature=0)
    expected, asked = answer_of(server, "run", ASKED), ASKED[0]["content"]
    assert chat.invoke(asked).content == expected
    assert "".join(each.content for each in chat.stream(asked)) == expected
    assert chat.bind(stop=[expected[4:8]]).invoke(asked).content == expected[:4]
    scored = langchain.ChatOpenAI(**options, logprobs=True).invoke(asked)
    tokens = scored.response_metadata["logprobs"]["content"]
    assert "".join(each["token"] for each in tokens) == expected


@pytest.mark.slow
def test_langchain_gets_tool_calls(langchain: Any, tool_server: ApiServer) -> None:
    chat = langchain.ChatOpenAI(
        base_url=f"{url_of(tool_server)}/v1", api_key=KEY, model="caller", max_tokens=100
    )
    (call,) = chat.bind_tools([TOOL]).invoke(TOOL_PROMPT).tool_calls
    assert (call["name"], call["args"]) == ("book", {"people": 4})


def test_curl_gets_an_answer(server: ApiServer, tmp_path: Path) -> None:
    if shutil.which("curl") is None:
        pytest.skip("needs curl, a client")
    body = tmp_path / "body.json"
    # With more than a megabyte, curl asks before it sends the body.
    body.write_text(json.dumps({"model": "run", "messages": ASKED, "user": "u" * 1_100_000}))
    command = ["curl", "-sS", "-H", "Content-Type: application/json", "-d", f"@{body}"]
    asked = [*command, f"{url_of(server)}/v1/chat/completions"]
    done = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=60)
    content = json.loads(done.stdout)["choices"][0]["message"]["content"]
    assert content == answer_of(server, "run", ASKED)
