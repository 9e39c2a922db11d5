"""`train` and `inspect` with a model that is broken, missing or in conflict with the options."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.command import Cli, Outcome, files_in, finish, start
from tests.models import write_tokenizer

# The model folder


@pytest.fixture(scope="session")
def model(deep_model: Path) -> Path:
    return deep_model


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def truncate(size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / "model.safetensors", size)


def set_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_config(folder, **changes)


def to_garbled_sentencepiece(folder: Path) -> None:
    remove("tokenizer.json")(folder)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 8)


def to_pipe(name: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).parent.mkdir(exist_ok=True)
        os.mkfifo(folder / name)

    return damage


def to_link(name: str, target: str) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(target)

    return damage


def to_sparse(name: str, size: int) -> Callable[[Path], object]:
    def damage(folder: Path) -> None:
        with (folder / name).open("ab") as file:
            file.truncate(size)

    return damage


def change_header(old: bytes, new: bytes) -> Callable[[Path], object]:
    """Return a function that replaces bytes in the weights' header, but not the header's length."""

    def damage(folder: Path) -> None:
        path = folder / "model.safetensors"
        content = path.read_bytes()
        assert old in content[:4000]
        path.write_bytes(content.replace(old, new, 1))

    return damage


DAMAGE = {
    "no config": (remove("config.json"), "has no config.json"),
    "config cut short": (write_text("config.json", "{"), "config.json"),
    "config is a list": (write_text("config.json", "[1]"), "config.json"),
    "config is nested without end": (write_text("config.json", "[" * 100_000), "config.json"),
    "type is no text": (set_config(model_type=3), "model_type"),
    "type is unknown": (
        set_config(model_type="qwen99"),
        "mlx-lm does not support model type 'qwen99'",
    ),
    "type is a path": (set_config(model_type="../x"), "mlx-lm does not support model type '../x'"),
    "config lacks keys": (write_text("config.json", '{"model_type": "qwen3"}'), "hidden_size"),
    "size is text": (set_config(hidden_size="64"), "config.json"),
    "size is null": (set_config(vocab_size=None), "config.json"),
    "no heads": (set_config(num_attention_heads=0), "config.json"),
    "other size": (set_config(hidden_size=32), "embed_tokens"),
    "a layer too many": (set_config(num_hidden_layers=3), "model.layers.2"),
    "a layer too few": (set_config(num_hidden_layers=1), "model.layers.1"),
    "size is a fraction": (set_config(hidden_size=64.5), "config.json"),
    "size is below zero": (set_config(intermediate_size=-96), "config.json"),
    "size is absurd": (set_config(hidden_size=10**12), "config.json"),
    "layers are absurd": (set_config(num_hidden_layers=10**9), "num_hidden_layers"),
    "layers are more than the weights have": (set_config(num_hidden_layers=99), "tensors"),
    "experts are text, which mlx-lm does not ask for": (
        set_config(num_experts_per_tok="a"),
        "num_experts",
    ),
    "experts would take all memory": (set_config(num_experts=10**8), "num_experts is more than"),
    "kinds of too few layers": (
        set_config(layer_types=["full_attention"]),
        "config.json: layer_types has 1 entries, but num_hidden_layers is 2",
    ),
    "heads of another number": (
        set_config(num_attention_heads=8),
        "config.json: does not fit the weights: it gives model.layers.0.self_attn.q_proj.weight "
        "the shape (128, 64), but the weights have the shape (64, 64): check head_dim, "
        "num_attention_heads, num_key_value_heads, or",
    ),
    "base is a list, used when it computes": (set_config(rope_theta=[10000]), "cannot be loaded"),
    "text_config is a list": (set_config(text_config=[1]), "text_config is not an object"),
    "config is a pipe": (to_pipe("config.json"), "config.json is not a regular file"),
    "config is endless": (
        to_link("config.json", "/dev/zero"),
        "config.json is not a regular file",
    ),
    "config leads to itself": (to_link("config.json", "config.json"), "has no config.json"),
    "config is huge": (to_sparse("config.json", 2**27), "config.json is far larger"),
    "tokenizer is huge": (to_sparse("tokenizer.json", 2**31), "tokenizer.json is far larger"),
    "generation_config is a list": (
        write_text("generation_config.json", "[1]"),
        "generation_config.json",
    ),
    "generation_config is a pipe": (to_pipe("generation_config.json"), "generation_config.json"),
    "template is a pipe": (to_pipe("chat_template.jinja"), "chat_template.jinja"),
    "template for tools is a pipe": (
        to_pipe("additional_chat_templates/tool_use.jinja"),
        "tool_use.jinja is not a regular file",
    ),
    "template is no text": (
        lambda folder: (folder / "chat_template.jinja").write_bytes(b"\xff\xfe\0"),
        "chat_template.jinja",
    ),
    "tokenizer_config is a list": (write_text("tokenizer_config.json", "[1]"), "tokenizer"),
    "weights are a pipe": (
        to_pipe("model.safetensors"),
        "model.safetensors is not a regular file",
    ),
    "weights lead to themselves": (to_link("model.safetensors", "model.safetensors"), "safetensor"),
    "weights have another shape": (change_header(b"[320,64]", b"[320,65]"), "model.safetensors"),
    "weights lie elsewhere": (
        change_header(b'data_offsets":[', b'data_offsets":[9'),
        "safetensors",
    ),
    "weights are of no type": (change_header(b'"F32"', b'"F99"'), "model.safetensors"),
    **{
        f"quantised by {method}": (
            lambda folder, method=method: (
                edit_config(folder, quantization_config={"quant_method": method, "bits": 4}),
                change_header(b"q_proj.weight", b"q_proj.absmax")(folder),
            ),
            f"is quantised with {method}, and mlx-lm cannot load it",
        )
        for method in ("bitsandbytes", "gptq", "awq", "hqq")
    },
    "quantised, says only the config": (
        set_config(quantization_config={"quant_method": "gptq", "bits": 4}),
        "is quantised with gptq, and mlx-lm cannot load it: download the unquantised model",
    ),
    "shard is missing": (
        lambda folder: (
            change_header(b"layers.1.", b"layers.9.")(folder),
            write_text(
                "model.safetensors.index.json",
                '{"weight_map": {"a": "model.safetensors", "b": "model-2.safetensors"}}',
            )(folder),
        ),
        "lacks 'model-2.safetensors', which its index lists: download the rest",
    ),
    "no weights": (remove("model.safetensors"), "has no weights"),
    "weights are empty": (truncate(0), "download it again"),
    "weights cut in the header": (truncate(1000), "download it again"),
    "weights cut in the data": (truncate(100_000), "download it again"),
    "weights are garbage": (write_text("model.safetensors", "x" * 5000), "download it again"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "no tokenizer.json": (remove("tokenizer.json"), "tokenizer"),
    "tokenizer cut short": (write_text("tokenizer.json", "{"), "tokenizer.json"),
    "tokenizer is an empty object": (write_text("tokenizer.json", "{}"), "tokenizer.json"),
    "tokenizer_config cut short": (write_text("tokenizer_config.json", "["), "tokenizer"),
    "sentencepiece is garbage": (to_garbled_sentencepiece, "tokenizer.model"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_model_gives_a_one_line_error_with_a_remedy(
    train: Cli, broken: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(broken)
    before = files_in(tmp_path)
    outcome = train("--model-path", broken, "--max-steps", 1)
    assert outcome.code == 1
    assert str(broken) in outcome.error
    assert said in outcome.error
    assert re.search("download|upgrade|is this a .*model", outcome.error)
    assert files_in(tmp_path) == before


_DATA = ("--data", "chat.jsonl")
_OUTGOING = ("--adapter", "adapter", "--output", "new")


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        ("bench", (*_DATA, "--no-cache")),
        ("chat", ()),
        ("eval", (*_DATA, "--no-cache")),
        ("export", (*_OUTGOING, "--format", "gguf")),
        ("export", (*_OUTGOING, "--format", "peft")),
        ("fuse", _OUTGOING),
        ("generate", ("--prompt", "Hi")),
        ("import", ("adapter", "--output", "new")),
        ("inspect", (*_DATA, "--no-cache")),
        ("plan", ()),
        ("plan", (*_DATA, "--no-cache")),
        ("train", (*_DATA, "--output", "new/adapters.safetensors")),
    ],
)
def test_every_command_refuses_a_config_that_contradicts_itself(
    cli: Cli,
    broken: Path,
    chat: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
    arguments: tuple[str, ...],
) -> None:
    monkeypatch.chdir(tmp_path)
    write_adapter(tmp_path / "adapter")
    before = files_in(tmp_path)
    for changes, said in (
        ({"num_experts": 10**8}, "num_experts is more than 10,000"),
        (
            {"num_key_value_heads": 3},
            "num_attention_heads is 4, which is not a multiple of num_key",
        ),
    ):
        edit_config(broken, **changes)
        outcome = cli(command, "--model-path", broken, *arguments)
        assert outcome.code == 1
        assert outcome.error.startswith(f"{broken / 'config.json'}: {said}")
        assert files_in(tmp_path) == before
        edit_config(broken, num_experts=0)


def write_adapter(folder: Path) -> None:
    """Write an adapter of the tiny model in mlx-lm's format."""
    import mlx.core as mx

    folder.mkdir()
    name = "model.layers.0.self_attn.q_proj"
    tensors = {f"{name}.lora_a": mx.ones((64, 2)), f"{name}.lora_b": mx.ones((2, 64))}
    mx.save_safetensors(str(folder / "adapters.safetensors"), tensors)
    parameters = {"rank": 2, "scale": 1.0, "dropout": 0.0, "keys": ["self_attn.q_proj"]}
    config = {"fine_tune_type": "lora", "num_layers": 2, "lora_parameters": parameters}
    (folder / "adapter_config.json").write_text(json.dumps(config))


def test_folder_of_model_folders_error_names_one(train: Cli, tmp_path: Path) -> None:
    for name in ("b", "a"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").touch()
    said = f"{tmp_path} has no config.json: name a folder in it, such as {tmp_path / 'a'}"
    assert train("--model-path", tmp_path).error == said


def test_hub_cache_folder_names_its_revision(train: Cli, tmp_path: Path) -> None:
    revision = tmp_path / "cached" / "snapshots" / "abc"
    revision.mkdir(parents=True)
    (revision / "config.json").touch()
    error = train("--model-path", tmp_path / "cached").error
    assert error.endswith(f"has no config.json: name a folder in it, such as {revision}")


@pytest.mark.parametrize(
    ("config", "said"),
    [
        ({"fine_tune_type": "lora"}, "is an adapter, not a model: name its base model as"),
        ({"peft_type": "LORA"}, "is a PEFT adapter, not a model: convert it with mlxtune import"),
    ],
)
def test_adapter_in_place_of_a_model_is_named_as_such(
    train: Cli, tmp_path: Path, config: dict[str, Any], said: str
) -> None:
    folder = tmp_path / "adapter"
    folder.mkdir()
    (folder / "adapter_config.json").write_text(json.dumps(config))
    assert said in train("--model-path", folder).error


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", ": no such folder: check --model-path"),
        ("chat.jsonl", " is a file: --model-path takes the folder"),
    ],
)
def test_non_folder_model_path_is_reported(
    train: Cli, tmp_path: Path, name: str, said: str
) -> None:
    assert train("--model-path", tmp_path / name).error == f"{tmp_path / name}{said}" + (
        " that contains it" if name == "chat.jsonl" else ""
    )


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("~nobody-at-all/model", ": no such folder"),
        ("a" * 5000, " cannot be read: File name too long"),
    ],
)
def test_invalid_path_is_reported(train: Cli, path: str, said: str) -> None:
    assert train("--model-path", path).error == f"{path}{said}: check --model-path"


@pytest.mark.parametrize("path", ["./missing", "../missing"])
def test_missing_relative_folder_is_not_searched_on_the_hub(
    train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--model-path", path).error == f"{path}: no such folder: check --model-path"


@pytest.mark.slow
def test_advice_of_transformers_to_the_makers_of_a_model_is_not_shown(
    broken: Path, chat: Path
) -> None:
    path = broken / "tokenizer_config.json"
    path.write_text(
        json.dumps(json.loads(path.read_text()) | {"tokenizer_class": "LlamaTokenizer"})
    )
    arguments = ["--model-path", broken, "--data", chat, "--quiet", "--no-cache"]
    # A separate process, because transformers warns only once per process.
    assert finish(start("inspect", *arguments)) == Outcome(0, "", "")


def test_tokenizer_of_another_model_is_refused(train: Cli, broken: Path, output: Path) -> None:
    # Larger token ids would read past the end of the embeddings.
    write_tokenizer(broken, extra=[f"<extra_{i}>" for i in range(100)])
    outcome = train("--model-path", broken, "--max-steps", 1)
    assert re.search(
        rf"{broken}: its tokenizer gives token \d+, but the model knows only 320", outcome.error
    )
    assert files_in(output.parent) == []


# LoRA


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("q_proj,q_porj", "no projection is named q_porj (did you mean q_proj?)"),
        ("self_attn.qproj", "did you mean self_attn.q_proj?"),
        ("nonsense", "no projection is named nonsense; this model has"),
        ("lm_head", "no projection is named lm_head; this model has"),
    ],
)
def test_target_that_matches_nothing_is_an_error_that_lists_what_there_is(
    train: Cli, output: Path, targets: str, said: str
) -> None:
    outcome = train("--targets", targets, "--max-steps", 1)
    assert outcome.code == 1
    assert outcome.error.startswith("--targets: ")
    assert said in outcome.error
    assert "mlp.down_proj, mlp.gate_proj, mlp.up_proj, self_attn.k_proj" in outcome.error
    assert files_in(output.parent) == []


def test_more_layers_than_the_model_has_are_refused(train: Cli) -> None:
    assert train("--num-layers", 99).error == "--num-layers 99: the model has 2 layers"
