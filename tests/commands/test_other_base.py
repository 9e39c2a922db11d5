"""An adapter on a base model other than its own, and next to another adapter."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import mlx.core as mx
import pytest

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.commands.train import train
from mlxtune.config import TrainConfig
from tests.command import Cli
from tests.models import CHATML, sums, write_adapter_config, write_chat, write_model
from tests.slow import slow


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model, three changed copies, chat data, and an adapter of the model in `out`.

    The copies have all weights scaled, the signs of a part of each matrix turned, and another base
    of the rotary embedding.
    """
    home = tmp_path_factory.mktemp("home")
    base = write_model(home / "base", "qwen3")
    tune = Path(shutil.copytree(base, home / "tune"))
    file = tune / "model.safetensors"
    weights = mx.load(str(file))
    assert isinstance(weights, dict)
    weights = {name: value * 1.01 for name, value in weights.items()}
    mx.save_safetensors(str(file), weights, {"format": "mlx"})
    signs = Path(shutil.copytree(base, home / "signs")) / "model.safetensors"
    weights = {name: turned(value) for name, value in mx.load(str(signs)).items()}  # type: ignore[union-attr]
    mx.save_safetensors(str(signs), weights, {"format": "mlx"})
    settings = Path(shutil.copytree(base, home / "config")) / "config.json"
    settings.write_text(json.dumps(json.loads(settings.read_text()) | {"rope_theta": 50.0}))
    write_chat(home / "chat.jsonl", sums(12))
    train(config(home, "out/adapters.safetensors"))
    return home


def turned(weight: mx.array) -> mx.array:
    """Return a weight with the signs of the first 40% turned, if it is a matrix."""
    if weight.ndim < 2:
        return weight
    flat = weight.reshape(-1)
    sign = mx.where(mx.arange(flat.size) < flat.size * 2 // 5, -1, 1).astype(flat.dtype)
    return (flat * sign).reshape(weight.shape)


def config(home: Path, output: str, **changes: object) -> TrainConfig:
    paths = {"model_path": str(home / "base"), "data": str(home / "chat.jsonl")}
    fixed = {"max_steps": 1, "val_split": 0.0, "samples": 0, "quiet": True}
    return TrainConfig(**{**paths, "output": str(home / output), **fixed, **changes})  # type: ignore[arg-type]


def test_commands_that_show_warn_of_another_base(cli: Cli, home: Path) -> None:
    asked = ["--adapter", home / "out", "--data", home / "chat.jsonl", "--json"]
    changed = dict.fromkeys(("tune", "signs"), "weights differ")
    changed["config"] = "rope_theta in config.json differs"
    for name, what in changed.items():
        other = cli("eval", "--model-path", home / name, *asked)
        assert other.code == 0
        assert "was trained on another base model" in other.err
        assert f"{home / name}, whose {what}: answers and losses may differ" in other.err
    assert "another base" not in cli("eval", "--model-path", home / "base", *asked).err


@pytest.mark.parametrize(
    ("base", "command"),
    [
        ("config", ("fuse", "--adapter")),
        ("signs", ("export", "--format", "peft", "--adapter")),
        (
            "tune",
            ("train", "--data", "chat.jsonl", "--max-steps", 1, "--val-split", 0, "--init-adapter"),
        ),
    ],
)
def test_commands_that_write_refuse_another_base(
    cli: Cli, home: Path, tmp_path: Path, base: str, command: tuple[object, ...]
) -> None:
    given = [home / each if each == "chat.jsonl" else each for each in command]
    asked = [*given, home / "out", "--model-path", home / base, "--output", tmp_path / "to" / "a"]
    refused = cli(*asked)
    assert refused.code == 1
    assert "pass the right --model-path, or add --other-base" in refused.error
    assert not (tmp_path / "to" / "a").exists()
    assert cli(*asked, "--other-base").code == 0


@pytest.mark.parametrize(
    "command",
    [
        ("eval", "--data", "chat.jsonl", "--json"),
        slow(("generate", "--prompt", "2 + 2?", "--max-new-tokens", 1)),
        slow(("fuse", "--output", "to")),
    ],
)
def test_commands_warn_of_a_chat_template_that_changed(
    cli: Cli, home: Path, tmp_path: Path, command: tuple[object, ...]
) -> None:
    places = {"chat.jsonl": home / "chat.jsonl", "to": tmp_path / "to"}
    given = [places.get(str(each), each) for each in command]
    base = Path(shutil.copytree(home / "base", tmp_path / "base"))
    asked = [*given, "--adapter", home / "out", "--model-path", base]
    assert "its chat template has changed" not in cli(*asked).err
    shutil.rmtree(tmp_path / "to", ignore_errors=True)
    (base / "chat_template.jinja").write_text(CHATML)
    assert f"{base}: its chat template has changed since " in cli(*asked).err


def test_another_model_is_named_before_its_template(cli: Cli, home: Path, tmp_path: Path) -> None:
    asked = ["eval", "--adapter", home / "out", "--data", home / "chat.jsonl", "--quiet"]
    tune = Path(shutil.copytree(home / "tune", tmp_path / "tune"))
    (tune / "chat_template.jinja").write_text(CHATML)
    warned = cli(*asked, "--model-path", tune).err
    assert "was trained on another base model" in warned
    assert "its chat template has changed" not in warned
    larger = write_model(tmp_path / "larger", "llama")
    (larger / "chat_template.jinja").write_text(CHATML)
    refused = cli(*asked, "--model-path", larger)
    assert refused.code == 1
    assert "was trained on another base model" in refused.err.splitlines()[0]


def test_adapter_of_another_tool_has_no_fingerprint(cli: Cli, home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(home / "out", tmp_path / "out"))
    weights = folder / "adapters.safetensors"
    tensors = mx.load(str(weights))
    assert isinstance(tensors, dict)
    mx.save_safetensors(str(weights), tensors, {"format": "mlx"})
    beside = json.loads((folder / "adapter_config.json").read_text())
    del beside["mlxtune"]
    (folder / "adapter_config.json").write_text(json.dumps(beside))
    asked = ["--adapter", folder, "--data", home / "chat.jsonl", "--json"]
    assert "another base" not in cli("eval", "--model-path", home / "tune", *asked).err


def test_output_beside_an_adapter_with_other_options_needs_its_own_folder(
    cli: Cli, home: Path
) -> None:
    paths = ["--model-path", home / "base", "--data", home / "chat.jsonl", "--max-steps", 1]
    asked = ["train", *paths, "--val-split", 0, "--samples", 0, "--output"]
    refused = cli(*asked, home / "out" / "b.safetensors", "--alpha", 160)
    assert refused.code == 1
    own = home / "out" / "b" / "adapters.safetensors"
    assert f"a folder of its own: --output {own}" in refused.err
    assert cli(*asked, home / "out" / "c.safetensors").code == 0


def test_config_in_the_adapter_wins_over_the_file_beside_it(home: Path, tmp_path: Path) -> None:
    folder = Path(shutil.copytree(home / "out", tmp_path / "out"))
    before = AdapterFile(folder / "adapters.safetensors").info
    beside = json.loads((folder / "adapter_config.json").read_text())
    beside["lora_parameters"]["scale"] = 20.0
    (folder / "adapter_config.json").write_text(json.dumps(beside))
    assert AdapterFile(folder / "adapters.safetensors").info == before
    (folder / "adapter_config.json").unlink()
    assert AdapterFile(folder / "adapters.safetensors").info.scale == before.scale
    assert str(home).encode() not in (folder / "adapters.safetensors").read_bytes()


def test_prompts_are_rendered_as_in_training(cli: Cli, home: Path, tmp_path: Path) -> None:
    output = str(tmp_path / "out" / "adapters.safetensors")
    train(config(home, output, template="gemma"))
    asked = ["--model-path", home / "base", "--prompt", "2 + 2?", "--max-new-tokens", 1]
    trained = cli("generate", *asked, "--adapter", tmp_path / "out")
    assert "gemma" in trained.err
    assert "qwen3" in cli("generate", *asked).err
    chosen = cli("generate", *asked, "--adapter", tmp_path / "out", "--template", "qwen3")
    assert "qwen3" in chosen.err


def test_prompt_options_that_an_adapter_forges_are_its_error(
    cli: Cli, home: Path, tmp_path: Path
) -> None:
    folder = Path(shutil.copytree(home / "out", tmp_path / "out"))
    config = json.loads((folder / "adapter_config.json").read_text())
    config["mlxtune"]["prompt"] = {"template": ["x"]}
    write_adapter_config(folder, config)
    asked = ["--model-path", home / "base", "--prompt", "2 + 2?", "--adapter", folder]
    error = cli("generate", *asked).error
    assert "adapters.safetensors: its config is damaged: --template must be text" in error
    config["mlxtune"]["prompt"] = "qwen3"
    write_adapter_config(folder, config)
    assert "its config is damaged: prompt is not an object" in cli("generate", *asked).error
