"""Writing and reading adapters in mlx-lm's format."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import numpy as np
import pytest
import safetensors.numpy
from mlx.utils import tree_flatten
from mlx_lm.utils import load

from mlxtune.backend.adapters.checkpoint_tensors import read_optimizer
from mlxtune.errors import ModelError, OutputError
from tests.backend.conftest import MakePipeline, fill_lora_b

TOKENS = [[5, 17, 3, 99, 250, 31, 8, 77, 120, 6, 14]]


@pytest.mark.parametrize("architecture", ["qwen3", "llama", "gemma2", "gemma3_text"])
def test_mlx_lm_loads_the_folder_and_gives_the_same_logits(
    make_pipeline: MakePipeline, tmp_path: Path, architecture: str
) -> None:
    pipeline = make_pipeline(architecture, targets=("q_proj", "mlp.up_proj"), num_layers=1)
    folder = tmp_path / "adapter"
    folder.mkdir()

    pipeline.snapshot()(folder)

    model, _ = load(str(tmp_path / f"{architecture}-None"), adapter_path=str(folder))
    mine, theirs = pipeline.model(mx.array(TOKENS)), model(mx.array(TOKENS))
    base, _ = load(str(tmp_path / f"{architecture}-None"))
    assert mx.abs(mine - theirs).max() < 1e-5
    assert mx.abs(base(mx.array(TOKENS)) - theirs).max() > 1e-2


def test_file_holds_float32_tensors_named_as_mlx_lm_names_them(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    pipeline = make_pipeline("llama", dtype="bfloat16")
    pipeline.snapshot()(tmp_path)
    tensors = safetensors.numpy.load_file(tmp_path / "adapters.safetensors")
    assert {(v.dtype.name, v.shape) for k, v in tensors.items() if k.endswith("q_proj.lora_a")} == {
        ("float32", (64, 4))
    }
    assert {v.shape for k, v in tensors.items() if k.endswith("v_proj.lora_b")} == {(4, 32)}
    assert "model.layers.0.self_attn.q_proj.lora_a" in tensors
    config = json.loads((tmp_path / "adapter_config.json").read_text())
    assert config["fine_tune_type"] == "lora"
    assert config["num_layers"] == 2
    assert config["lora_parameters"] == {
        "rank": 4,
        "scale": 2.0,
        "dropout": 0.0,
        "keys": ["self_attn.q_proj", "self_attn.v_proj"],
    }


_OPTIMIZER = """
import sys
from pathlib import Path
import mlxtune.backend
import mlx.core as mx
from mlxtune.backend.adapters.checkpoint_tensors import optimizer_writer

settings = {name: i for i, name in enumerate(["step", "factor", "rows", "tokens", "seed", "é"])}
write = optimizer_writer({"v": {"b": mx.ones(3)}, "m": {"a": mx.zeros((2, 5))}}, settings)
write(Path(sys.argv[1]))
"""


@pytest.mark.slow
def test_state_of_an_optimizer_is_the_same_bytes_in_every_process(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [tmp_path / f"{i}.safetensors" for i in range(2)]
    monkeypatch.setattr(sys, "argv", ["-c", str(files[0])])
    exec(_OPTIMIZER, {})
    env = {**os.environ, "PYTHONHASHSEED": "7"}
    subprocess.run([sys.executable, "-c", _OPTIMIZER, str(files[1])], env=env, check=True)
    assert len({path.read_bytes() for path in files}) == 1
    state = {"v": {"b": mx.zeros(3)}, "m": {"a": mx.ones((2, 5))}}
    found, settings = read_optimizer(files[0], state)
    assert mx.array_equal(found["v"]["b"], mx.ones(3))
    assert mx.array_equal(found["m"]["a"], mx.zeros((2, 5)))
    assert (settings["seed"], settings["é"]) == (4, 5)


def test_equal_adapters_are_equal_bytes(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    for name in "ab":
        make_pipeline("llama", targets=("all",)).write(tmp_path / f"{name}.safetensors")
    assert (tmp_path / "a.safetensors").read_bytes() == (tmp_path / "b.safetensors").read_bytes()


def test_saved_state_is_read_back_bit_for_bit(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    pipeline = make_pipeline("qwen3")
    saved = dict(tree_flatten(pipeline.model.trainable_parameters()))
    pipeline.snapshot()(tmp_path)
    fill_lora_b(pipeline, seed=2)

    pipeline.load(tmp_path)

    for name, value in tree_flatten(pipeline.model.trainable_parameters()):
        assert np.array_equal(np.array(value), np.array(saved[name])), name


def test_adapter_that_does_not_fit_is_an_error_that_names_a_tensor(
    make_pipeline: MakePipeline, tmp_path: Path
) -> None:
    make_pipeline("qwen3", lora_rank=8, targets=("q_proj",)).snapshot()(tmp_path)
    pipeline = make_pipeline("qwen3", targets=("q_proj", "k_proj"))
    before = dict(tree_flatten(pipeline.model.trainable_parameters()))
    with pytest.raises(ModelError) as caught:
        pipeline.load(tmp_path)
    missing = "layers.0.self_attn.k_proj.lora_a is missing, but the model needs (64, 4), and 7 more"
    assert missing in str(caught.value)
    for name, value in tree_flatten(pipeline.model.trainable_parameters()):
        assert mx.array_equal(value, before[name])


def test_broken_adapter_file_is_an_error(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    pipeline = make_pipeline("qwen3")
    (tmp_path / "adapters.safetensors").write_bytes(b"\x10" + b"\0" * 20)
    with pytest.raises(ModelError, match="cannot be read"):
        pipeline.load(tmp_path)


def test_failed_adapter_write_leaves_no_files(make_pipeline: MakePipeline, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(OutputError, match="cannot be written"):
        make_pipeline("qwen3").write(tmp_path / "file" / "adapters.safetensors")
    assert (tmp_path / "file").read_text() == ""
