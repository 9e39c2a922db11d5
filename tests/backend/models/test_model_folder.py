"""Weights that would crash MLX, or that it cannot hold, are refused by their headers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.model_folder import read_config, weight_names, weight_problems
from mlxtune.backend.text.tokenizer import load_tokenizer
from mlxtune.core.files.tensor_files import TensorInfo
from mlxtune.errors import ModelError
from tests.models import write_model

CONFIG: dict[str, Any] = {"quantization": {"group_size": 64, "bits": 4}}


def packed(weight: Any = (8, 16), scales: Any = (8, 2), biases: Any = (8, 2)) -> dict[str, Any]:
    return {
        "q.weight": TensorInfo("U32", weight),
        "q.scales": TensorInfo("F16", scales),
        "q.biases": TensorInfo("F16", biases),
    }


def write_pointer(path: Path) -> None:
    oid = "0" * 64
    path.write_text(f"version https://git-lfs.github.com/spec/v1\noid sha256:{oid}\nsize 9\n")


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_quantized_weights_are_sound(bits: int) -> None:
    arrays = mx.quantize(mx.ones((3, 8, 128)), group_size=32, bits=bits)
    found = packed(*(array.shape for array in arrays))
    assert list(weight_problems(found, CONFIG)) == []


@pytest.mark.parametrize(
    ("tensors", "problem"),
    [
        (packed(scales=(1, 2)), "q.scales has shape (1, 2), which does not fit"),
        (packed(scales=(2,)), "q.scales has shape (2,), which does not fit"),
        (packed(scales=(8, 3)), "q.scales has shape (8, 3): no group size fits"),
        (packed(scales=(8, 0)), "q.scales has shape (8, 0): no group size fits"),
        (packed(biases=(1, 2)), "q.biases has shape (1, 2), but the scales have"),
        ({"a.weight": TensorInfo("F8_E4M3", (2, 2))}, "a.weight is F8_E4M3, not"),
        ({"a.bias": TensorInfo("I64", (2,))}, "a.bias is I64, not"),
        ({"a.weight": TensorInfo("C64", (2,))}, "a.weight is C64, not"),
        ({"a.scales": TensorInfo("U16", (2,))}, "a.scales is U16, not"),
    ],
)
def test_broken_weight_is_named(tensors: dict[str, TensorInfo], problem: str) -> None:
    assert [
        weight_problem[: len(problem)] for weight_problem in weight_problems(tensors, CONFIG)
    ] == [problem]


@pytest.mark.parametrize(
    "config",
    [
        {"quantization_config": {"quant_method": "mxfp4"}},
        {"text_config": {"quantization_config": {"quant_method": "modelopt"}}},
    ],
)
def test_weights_that_only_quantization_config_describes_are_looked_at(
    config: dict[str, Any],
) -> None:
    arrays = mx.quantize(mx.ones((8, 128)), group_size=32, bits=4, mode="mxfp4")
    weight, scales = (array.shape for array in arrays)
    tensors = {"q.weight": TensorInfo("U32", weight), "q.scales": TensorInfo("U8", scales)}
    assert list(weight_problems(tensors, config)) == []
    tensors["q.scales"] = TensorInfo("U8", (1, *scales[1:]))
    (problem,) = weight_problems(tensors, config)
    assert problem == "q.scales has shape (1, 4), which does not fit the weight's (8, 16)"


def test_buffers_and_weights_that_mlx_lm_converts_are_sound() -> None:
    tensors = {
        "a.weight": TensorInfo("F8_E4M3", (128, 128)),
        "a.weight_scale_inv": TensorInfo("F32", (1, 1)),
        "h.0.attn.bias": TensorInfo("BOOL", (1, 1, 4, 4)),
        "position_ids": TensorInfo("I64", (4,)),
        "vision.weight": TensorInfo("I64", (4,)),
    }
    assert list(weight_problems(tensors, {})) == []


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_pointer_of_git_lfs_in_a_model_folder_is_named(tmp_path: Path, name: str) -> None:
    write_model(tmp_path, "llama")
    write_pointer(tmp_path / name)
    with pytest.raises(ModelError, match=rf"{name} is a Git LFS pointer: run git lfs pull"):
        read_config(tmp_path)


def test_git_lfs_pointer_as_adapter_is_named(tmp_path: Path) -> None:
    write_pointer(tmp_path / "adapters.safetensors")
    with pytest.raises(ModelError, match=r"is a Git LFS pointer: run git lfs pull in its folder"):
        AdapterFile.find(str(tmp_path))


def test_tensor_in_two_files_is_refused(tmp_path: Path) -> None:
    for name in ("model-1.safetensors", "model-2.safetensors"):
        mx.save_safetensors(str(tmp_path / name), {"a.weight": mx.ones(2)})
    with pytest.raises(ModelError, match=r"another weight file both have a\.weight"):
        weight_names(tmp_path)


@pytest.mark.parametrize(
    ("name", "kind"), [("model-Q4_K_M.gguf", "llama.cpp's"), ("pytorch_model.bin", "PyTorch's")]
)
@pytest.mark.parametrize("gone", ["model.safetensors", "config.json"])
def test_weights_in_another_format_are_named(
    tmp_path: Path, name: str, kind: str, gone: str
) -> None:
    folder = write_model(tmp_path / "model", "llama")
    (folder / gone).unlink()
    (folder / name).touch()
    (folder / "optimizer.bin").touch()
    said = f"{name} has weights in {kind} format, which cannot be trained: download"
    with pytest.raises(ModelError, match=said):
        load_base(folder, "float32")


@pytest.mark.parametrize("name", ["config.json", "tokenizer_config.json"])
def test_null_auto_map_is_named(tmp_path: Path, name: str) -> None:
    file = write_model(tmp_path / "model", "llama") / name
    file.write_text(json.dumps(json.loads(file.read_text()) | {"auto_map": None}))
    with pytest.raises(ModelError, match=rf"{name}: 'auto_map' is null: remove this key"):
        load_tokenizer(file.parent)
