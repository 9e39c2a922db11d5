"""The base model of a command that gets only an adapter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.config import EvalConfig, UseConfig
from mlxtune.errors import ConfigError, ModelError
from mlxtune.session.trained_model import with_recorded_options
from tests.paths import DATA


def write_adapter(folder: Path, model: str, **metadata: Any) -> Path:
    folder.mkdir()
    config = {"model": model, "lora_parameters": {"rank": 8, "scale": 2.0}}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    (folder / "metadata.json").write_text(json.dumps(metadata))
    values = {"layers.0.q_proj.lora_a": np.zeros((2, 8), np.float32)}
    safetensors.numpy.save_file(values, folder / "adapters.safetensors")
    return folder


def test_adapter_names_its_base_model(tmp_path: Path) -> None:
    """The name is relative to the folder in which the run was started, not to the current one."""
    adapter = write_adapter(tmp_path / "out", "demo-qwen3", working_directory=str(DATA))

    file = AdapterFile.find(str(adapter))
    found = with_recorded_options(UseConfig(adapter=str(adapter)), file)

    assert found.model_path == str(DATA / "demo-qwen3")
    given = UseConfig(model_path="other", adapter=str(adapter))
    assert with_recorded_options(given, file) is given


def test_adapter_completes_the_options_of_an_evaluation(tmp_path: Path) -> None:
    adapter = write_adapter(tmp_path / "out", "demo-qwen3", working_directory=str(DATA))
    config = json.loads((adapter / "adapter_config.json").read_text())
    config["mlxtune"] = {
        "prompt": {"template": "chatml"},
        "objective": {"objective": "dpo", "beta": 0.3},
    }
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    asked = EvalConfig(adapter=str(adapter), data=("test.jsonl",))
    file = AdapterFile.find(str(adapter))
    found = with_recorded_options(asked, file, {"adapter", "data", "beta"})
    assert (found.model_path, found.template) == (str(DATA / "demo-qwen3"), "chatml")
    # A given option stays.
    assert (found.objective, found.beta) == ("dpo", None)
    assert with_recorded_options(asked, file, {"objective"}).objective == "sft"


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("gone", "does not exist"),
        ("config.json", "is a file"),
        ("a" * 5000, "cannot be read: File name too long"),
    ],
)
def test_missing_base_model_asks_for_model_path(
    tmp_path: Path, name: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "config.json").touch()
    monkeypatch.chdir(tmp_path)
    adapter = write_adapter(tmp_path / "out", name)

    expected = (
        f"{adapter / 'adapters.safetensors'}: its base model {name} {problem}: pass --model-path"
    )
    with pytest.raises(ModelError) as raised:
        with_recorded_options(UseConfig(adapter=str(adapter)), AdapterFile.find(str(adapter)))
    assert raised.value.with_flags == expected


def test_missing_model_and_adapter_are_one_problem() -> None:
    with pytest.raises(ConfigError) as raised:
        EvalConfig(data=("test.jsonl",))

    assert raised.value.problems == [
        "--model-path is required, or an --adapter, which names its base model"
    ]
