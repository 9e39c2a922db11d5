"""Adapters, servers in this process and requests, for tests of `mlxtune serve`."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import safetensors.numpy

from mlxtune import GenerateConfig, generate
from mlxtune.config import ServeConfig
from mlxtune.core.files.hashing import base_fingerprint
from mlxtune.views.console import RunConsole
from tests.models import write_model
from tests.paths import DATA

if TYPE_CHECKING:
    from mlxtune.serve.api_server import ApiServer

DEMO, GEMMA = DATA / "demo-qwen3", DATA / "demo-gemma3"
CHAT = "/v1/chat/completions"
RANK = 4
NEW_TOKENS = 10


def write_adapter(
    folder: Path, seed: int, base: Path = DEMO, strength: float = 0.3, **mlxtune: Any
) -> Path:
    """Write a random adapter that changes the demo model's answers, and return its folder."""
    config = json.loads((base / "config.json").read_text())
    rng, hidden = np.random.default_rng(seed), config["hidden_size"]
    tensors = {}
    for layer in range(config["num_hidden_layers"]):
        name = f"model.layers.{layer}.mlp.gate_proj"
        wide = config["intermediate_size"]
        tensors[f"{name}.lora_a"] = rng.standard_normal((hidden, RANK)).astype(np.float32)
        tensors[f"{name}.lora_b"] = (strength * rng.standard_normal((RANK, wide))).astype(
            np.float32
        )
    folder.mkdir(parents=True, exist_ok=True)
    safetensors.numpy.save_file(tensors, folder / "adapters.safetensors")
    parameters = {"rank": RANK, "scale": 0.5, "dropout": 0.0}
    described = {"base": base_fingerprint(base), **mlxtune}
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "fine_tune_type": "lora",
                "model": str(base),
                "num_layers": config["num_hidden_layers"],
                "lora_parameters": parameters,
                "mlxtune": described,
            }
        )
    )
    return folder


@contextmanager
def server_of(*runs: Path, **options: Any) -> Iterator[ApiServer]:
    """Serve adapters in this process."""
    from mlxtune.serve.serving import serving

    config = ServeConfig(
        adapters=tuple(map(str, runs)), port=0, **{"max_new_tokens": NEW_TOKENS} | options
    )
    with serving(config, RunConsole(quiet=True)) as server:
        yield server


def url_of(server: ApiServer) -> str:
    return f"http://127.0.0.1:{server.server_address[1]}"


def messages(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def ask(
    server: ApiServer, path: str = CHAT, headers: dict[str, str] | None = None, **body: Any
) -> tuple[int, Any]:
    """Send a request; return the status and the JSON, or the list of a stream's events."""
    content = json.dumps(body).encode() if body else None
    known = {"Content-Type": "application/json"} if body else {}
    request = urllib.request.Request(url_of(server) + path, content, known | (headers or {}))
    try:
        with urllib.request.urlopen(request, timeout=60) as response:
            status, text = response.status, response.read().decode()
    except urllib.error.HTTPError as error:
        with error:
            status, text = error.code, error.read().decode()
    if text.startswith(("data:", ":")):
        lines = [line[6:] for line in text.splitlines() if line.startswith("data: ")]
        return status, [json.loads(line) for line in lines if line != "[DONE]"]
    return status, json.loads(text) if text else None


def answer_of(server: ApiServer, model: str, asked: list[Any], **options: Any) -> str:
    """Return the text of an answer, streamed or not."""
    status, response = ask(server, model=model, messages=asked, **options)
    assert status == 200, response
    if isinstance(response, list):
        return "".join(each["choices"][0]["delta"].get("content", "") for each in response)
    return response["choices"][0]["message"]["content"] or ""


def generated(text: str, adapter: Path | None, base: Path = DEMO, **options: Any) -> str:
    """Return the answer of `mlxtune generate`."""
    named = {} if adapter is None else {"adapter": str(adapter)}
    settings = {"max_new_tokens": NEW_TOKENS, "quiet": True} | named | options
    return str(generate(GenerateConfig(model_path=str(base), prompt=text, **settings)))


# A model that calls a tool

TOOL = {
    "type": "function",
    "function": {
        "name": "book",
        "description": "Book a table.",
        "parameters": {"type": "object", "properties": {"people": {"type": "integer"}}},
    },
}
TOOL_PROMPT = "A table for 4"
_TOOL_TEMPLATE = (
    "{% for t in tools or [] %}tool {{ t.function.name }}\n{% endfor %}"
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + (m.content or '') }}"
    "{% for tool_call in m.tool_calls or [] %}"
    "{% if tool_call.function %}{% set tool_call = tool_call.function %}{% endif %}"
    '{{ \'<tool_call>\' }}{"name": "{{ tool_call.name }}", '
    "\"arguments\": {{ tool_call.arguments | tojson }}}{{ '</tool_call>' }}"
    "{% endfor %}{{ '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)


def train_tool_caller(folder: Path) -> Path:
    """Train a tiny model to call a tool, and return the run's folder."""
    from mlxtune import TrainConfig, train

    model = write_model(folder / "model", "qwen3")
    (model / "chat_template.jinja").write_text(_TOOL_TEMPLATE)
    call = {"type": "function", "function": {"name": "book", "arguments": {"people": 4}}}
    answer = {"role": "assistant", "content": "", "tool_calls": [call]}
    row = {"messages": [*messages(TOOL_PROMPT), answer], "tools": [TOOL]}
    (folder / "calls.jsonl").write_text(f"{json.dumps(row)}\n" * 8)
    options = {"max_steps": 240, "lr": 1e-2, "rank": 32, "batch_size": 2, "val_split": 0.0}
    train(
        TrainConfig(
            model_path=str(model),
            data=str(folder / "calls.jsonl"),
            output=str(folder / "caller"),
            epochs=60,
            quiet=True,
            **options,
        )
    )
    return folder / "caller"
