"""The models of `mlxtune serve`: names, prompts, memory, refusals, and files that change."""

from __future__ import annotations

import json
import logging
import os
import shutil
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from mlxtune.config import ServeConfig
from mlxtune.errors import ConfigError, DataError, ModelError
from mlxtune.views.console import RunConsole
from tests.models import THINKING, write_model
from tests.serve.served import (
    DEMO,
    TOOL,
    answer_of,
    ask,
    generated,
    messages,
    server_of,
    write_adapter,
)
from tests.slow import slow
from tests.waiting import SECONDS

if TYPE_CHECKING:
    from mlxtune.serve.served_models import ServedModel, ServedModels

ASKED = "A table for two, Sunday at noon. Ida Park"


def test_adapters_are_named_after_their_folders_or_by_name(tmp_path: Path) -> None:
    first = write_adapter(tmp_path / "first", 1)
    second = write_adapter(tmp_path / "second" / "checkpoints" / "best", 2)
    named = [f"other={second}", f"file={first / 'adapters.safetensors'}"]
    with server_of(first, tmp_path / "second", name=named) as server:
        assert [each.name for each in server.models] == ["base", "first", "second", "other", "file"]
        answers = {
            each.name: answer_of(server, each.name, messages(ASKED)) for each in server.models
        }
    assert answers["second"] == answers["other"] == generated(ASKED, second)
    assert answers["first"] == answers["file"] == generated(ASKED, first)


def test_two_models_cannot_have_one_name(tmp_path: Path) -> None:
    paths = [write_adapter(tmp_path / each, 1) for each in ("a/out", "b/out", "a/base")]
    with pytest.raises(ConfigError, match="two models are named out"), server_of(*paths[:2]):
        pass
    for runs, names in (([paths[2]], []), ([], [f"base={paths[0]}"])):
        reserved = pytest.raises(ConfigError, match=r"name base is the base model's own.*OTHER=/")
        with reserved, server_of(*runs, name=names):
            pass


def test_base_model_is_served_alone() -> None:
    with server_of(model_path=str(DEMO)) as server:
        assert [each.name for each in server.models] == ["base"]
        assert answer_of(server, "base", messages(ASKED)) == generated(ASKED, None)


@pytest.mark.parametrize("model_type", ["qwen3", "llama"])
def test_adapter_of_another_base_is_refused_by_name(tmp_path: Path, model_type: str) -> None:
    adapter = write_adapter(tmp_path / "ours", 1)
    model = write_model(tmp_path / "model", model_type)
    stranger = write_adapter(tmp_path / "stranger", 1, base=model)
    problem = pytest.raises(ModelError, match=r"stranger.* was trained on another base model")
    with problem, server_of(adapter, stranger):
        pass


def test_adapter_of_a_quantized_base_is_refused_beside_others(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "plain", 1)
    quantized = write_adapter(tmp_path / "quantised", 1, quantize="nf4")
    problem = pytest.raises(ModelError, match=r"quantised.* the base quantised to nf4.* apart")
    with problem, server_of(adapter, quantized):
        pass


def test_changed_adapter_is_loaded_by_the_next_request(tmp_path: Path) -> None:
    run = write_adapter(tmp_path / "run", 1)
    with server_of(run) as server:
        before = answer_of(server, "run", messages(ASKED))
        write_adapter(run, 2)
        after = answer_of(server, "run", messages(ASKED))
        assert before != after == generated(ASKED, run)
        # A broken file is an error of its requests alone.
        good = (run / "adapters.safetensors").read_bytes()
        (run / "adapters.safetensors").write_bytes(b"broken")
        status, response = ask(server, model="run", messages=messages(ASKED))
        assert status == 503
        assert "adapters.safetensors" in response["error"]["message"]
        assert answer_of(server, "base", messages(ASKED)) == generated(ASKED, None)
        (run / "adapters.safetensors").write_bytes(good)
        assert answer_of(server, "run", messages(ASKED)) == after
        shutil.rmtree(run)
        assert ask(server, model="run", messages=messages(ASKED))[0] == 503


def test_run_without_a_validation_answers_with_its_newest_checkpoint(tmp_path: Path) -> None:
    checkpoints = tmp_path / "run" / "checkpoints"
    for step in (9, 10):
        write_adapter(checkpoints / f"step-{step}", step)
        (checkpoints / f"step-{step}" / "manifest.json").write_text("{}")
        os.utime(checkpoints / f"step-{step}" / "manifest.json", (step, step))
    with server_of(tmp_path / "run") as server:
        answer = answer_of(server, "run", messages(ASKED))
        assert answer == generated(ASKED, checkpoints / "step-10")
        write_adapter(checkpoints / "best", 1)
        answer = answer_of(server, "run", messages(ASKED))
        assert answer == generated(ASKED, checkpoints / "best")


def test_wrong_paths_are_named_without_options_of_other_commands(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    broken = write_adapter(tmp_path / "broken", 1)
    (broken / "adapters.safetensors").write_bytes(b"broken")
    for path in (tmp_path / "none", tmp_path / "empty", broken):
        with pytest.raises(ModelError) as raised, server_of(path):
            pass
        assert str(path) in str(raised.value)
        assert "PATH" in str(raised.value)
        assert "--adapter" not in str(raised.value)


def test_adapter_with_other_shapes_leaves_the_base_unchanged(tmp_path: Path) -> None:
    import mlx.core as mx

    run = write_adapter(tmp_path / "run", 1)
    with server_of(run) as server:
        expected = answer_of(server, "base", messages(ASKED))
        tensors = mx.load(str(run / "adapters.safetensors"))
        name = next(name for name in tensors if name.endswith("lora_b"))
        mx.save_safetensors(str(run / "adapters.safetensors"), tensors | {name: tensors[name].T})
        status, response = ask(server, model="run", messages=messages(ASKED))
        assert (status, response["error"]["type"]) == (500, "server_error")
        message = response["error"]["message"]
        assert "adapters.safetensors is damaged: " in message
        assert "but the model needs" in message
        assert answer_of(server, "base", messages(ASKED)) == expected
        write_adapter(run, 1)
        assert answer_of(server, "run", messages(ASKED)) == generated(ASKED, run)


@pytest.mark.parametrize("streamed", [slow(False), True])
def test_logits_that_are_not_finite_are_an_error(
    tmp_path: Path, streamed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.adapters.adapter_file import AdapterFile

    # An adapter file with such values would be refused.
    read = AdapterFile.read_tensors
    monkeypatch.setattr(
        AdapterFile, "read_tensors", lambda file: {n: 1e37 * t for n, t in read(file).items()}
    )
    with server_of(write_adapter(tmp_path / "run", 1)) as server:
        status, response = ask(server, model="run", messages=messages(ASKED), stream=streamed)
        assert status == (200 if streamed else 500)
        error = response[-1]["error"] if streamed else response["error"]
        assert "the logits of run are not finite" in error["message"]
        assert answer_of(server, "base", messages(ASKED)) == generated(ASKED, None)


def test_eight_adapters_add_little_more_than_their_files(tmp_path: Path) -> None:
    import mlx.core as mx

    from mlxtune.serve.served_models import ServedModels

    runs = [write_adapter(tmp_path / f"run-{seed}", seed) for seed in range(8)]

    def loaded(*paths: Path) -> tuple[ServedModels, int]:
        config = ServeConfig(model_path=str(DEMO), adapters=tuple(map(str, paths)))
        models = ServedModels(config, RunConsole(quiet=True))
        return models, mx.get_active_memory()

    start = mx.get_active_memory()
    alone, with_base = loaded()
    del alone
    models, with_all = loaded(*runs)
    files = sum((run / "adapters.safetensors").stat().st_size for run in runs)
    assert 0.9 * files < with_all - with_base < 1.1 * files
    # Switching allocates nothing that stays.
    for name in ("run-1", "run-7", "base", "run-3"):
        model = models.current(name)
        assert model is not None
        models.switch_to(model)
    assert mx.get_active_memory() - with_all < 0.01 * files
    assert with_base > start


# Prompts


def _models(*runs: Path, **options: Any) -> ServedModels:
    from mlxtune.serve.served_models import ServedModels

    config = ServeConfig(adapters=tuple(map(str, runs)), **options)
    return ServedModels(config, RunConsole(quiet=True))


def _current(models: ServedModels, name: str) -> ServedModel:
    model = models.current(name)
    assert model is not None
    return model


@pytest.fixture
def thinking_model(tmp_path: Path) -> Path:
    """A model whose template reads enable_thinking and shows the tools' names."""
    model = write_model(tmp_path / "model", "qwen3")
    tools = "{% for t in tools or [] %}{{ t.function.name }}{% endfor %}{{ style }}"
    (model / "chat_template.jinja").write_text(tools + THINKING)
    return model


def test_prompts_are_those_of_training_unless_a_request_changes_them(
    thinking_model: Path, tmp_path: Path
) -> None:
    from mlxtune.serve.served_models import ServedModels

    runs = {
        "on": write_adapter(tmp_path / "on", 1, thinking_model, prompt={"thinking": "on"}),
        "off": write_adapter(tmp_path / "off", 1, thinking_model, prompt={"thinking": "off"}),
        "gemma": write_adapter(tmp_path / "gemma", 1, thinking_model, prompt={"template": "gemma"}),
    }
    config = ServeConfig(adapters=tuple(map(str, runs.values())))
    models = ServedModels(config, RunConsole(quiet=True))

    def prompt(name: str, **changes: object) -> str:
        model = models.current(name)
        assert model is not None
        rendered = models.prompt(model, {"messages": messages("Hi"), **changes})
        return b"".join(models.token_bytes(model, token) for token in rendered.ids).decode()

    silent = "<think>\n\n</think>\n\n"
    assert prompt("off").endswith(silent)
    assert prompt("on").endswith("assistant\n")
    for name in ("on", "off"):
        assert prompt(name, chat_template_kwargs={"enable_thinking": False}).endswith(silent)
        asked = prompt(name, chat_template_kwargs={"enable_thinking": True})
        assert asked.endswith("assistant\n")
    assert prompt("gemma") == "<start_of_turn>user\nHi<end_of_turn>\n<start_of_turn>model\n"
    assert prompt("base", chat_template_kwargs={"style": "curt"}).startswith("curt<|im_start|>")
    assert prompt("base", tools=[TOOL]).startswith("book<|im_start|>")
    (thinking_model / "chat_template.jinja").write_text(THINKING)
    models = _models(model_path=str(thinking_model))
    with pytest.raises(DataError, match="chat template of base leaves out tools"):
        prompt("base", tools=[TOOL])


def test_warnings_about_requests_are_not_logged(
    thinking_model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with server_of(model_path=str(thinking_model)) as server:
        asked = {"model": "base", "messages": messages("Hi"), "tools": [TOOL], "max_tokens": 2}
        assert ask(server, **asked)[0] == 200
        logging.getLogger().warning("another warning")
    assert caplog.messages == ["another warning"]


def test_plain_text_is_completed(tmp_path: Path) -> None:
    run = write_adapter(tmp_path / "run", 1, plain_text=True)
    with server_of(run) as server:
        _, response = ask(server, "/v1/completions", model="run", prompt="Sunday at")
        assert response["object"] == "text_completion"
        assert response["choices"][0]["text"] == generated("Sunday at", run)


def test_models_are_listed_with_what_they_were_trained_on(tmp_path: Path) -> None:
    record = {"rows": 800, "hash": "sha256:0"}
    run = write_adapter(tmp_path / "run", 1, trained_rows=record)
    options = {"data": ["/home/me/private/bookings.jsonl"]}
    best = run / "checkpoints" / "best"
    best.mkdir(parents=True)
    shutil.copy(run / "adapters.safetensors", best)
    (best / "metadata.json").write_text(json.dumps({"step": 7, "val_loss": 0.5, "config": options}))
    with server_of(run) as server:
        _, listed = ask(server, "/v1/models")
        base, model = listed["data"]
        assert (base["id"], model["id"], model["object"]) == ("base", "run", "model")
        assert model["trained_on"] == {
            "model": "demo-qwen3",
            "data": ["bookings.jsonl"],
            "rows": 800,
            "steps": 7,
            "val_loss": 0.5,
        }
        _, described = ask(server, "/v1/models/run")
        # The time of the request, which may be a second later.
        assert described | {"created": 0} == model | {"created": 0}
        for step, path in enumerate(("/v1/models/run", "/v1/models")):
            (best / "metadata.json").write_text(json.dumps({"step": step}))
            write_adapter(run, step)
            shutil.copy(run / "adapters.safetensors", best)
            _, changed = ask(server, path)
            changed = changed["data"][1] if "data" in changed else changed
            assert changed["trained_on"]["steps"] == step
        assert ask(server, "/v1/models/r%75n")[1]["id"] == "run"
        assert ask(server, "/v1/models/none")[0] == 404
        (run / "adapters.safetensors").write_bytes(b"broken")
        assert ask(server, "/v1/models")[0] == 200


def test_long_prompts_are_refused_before_they_are_encoded(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.backend.text.tokenizer import FastTokenizer

    encoded = []
    encode = FastTokenizer.encode_batch

    def counting(tokenizer: FastTokenizer, texts: list[str]) -> Any:
        encoded.extend(map(len, texts))
        return encode(tokenizer, texts)

    models = _models(model_path=str(DEMO))
    monkeypatch.setattr(FastTokenizer, "encode_batch", counting)
    text = "ab " * 600_000
    base = _current(models, "base")
    with pytest.raises(DataError, match=r"more tokens than the [0-9,]+ that the model reads"):
        models.prompt(base, {"messages": messages(text)})
    with pytest.raises(DataError, match=r"more tokens than the [0-9,]+ that the model reads"):
        models.text_prompt(base, text)
    assert sum(encoded) < len(text) / 10
    # A long text in few tokens is read.
    assert models.text_prompt(base, f"{' ' * 600}Hi").ids


def test_encoding_a_prompt_delays_no_other_work(monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.backend.text.tokenizer import FastTokenizer

    models = _models(model_path=str(DEMO))
    base = _current(models, "base")
    models.prompt(base, {"messages": messages("Hi")})
    started, may_end = threading.Event(), threading.Event()
    encode = FastTokenizer.encode_batch

    def slow(tokenizer: FastTokenizer, texts: list[str]) -> Any:
        started.set()
        assert may_end.wait(SECONDS)
        return encode(tokenizer, texts)

    monkeypatch.setattr(FastTokenizer, "encode_batch", slow)
    with ThreadPoolExecutor(2) as pool:
        prompt = pool.submit(models.prompt, base, {"messages": messages("Bye")})
        try:
            assert started.wait(SECONDS)
            assert pool.submit(models.current, "base").result(SECONDS) is base
            assert pool.submit(models.token_bytes, base, 5).result(SECONDS)
        finally:
            may_end.set()
        assert prompt.result(SECONDS).ids
