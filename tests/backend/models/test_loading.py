"""Loading a base model: dtypes, quantisation, and folders that are not models."""

from __future__ import annotations

import json
from pathlib import Path

import mlx.core as mx
import pytest
from mlx.utils import tree_flatten
from mlx_lm import utils as mlx_lm_utils

from mlxtune.backend.lora.apply import adapted_modules, apply_lora
from mlxtune.backend.models import loading, model_folder
from mlxtune.backend.models.loading import load_base
from mlxtune.config import InstructConfig
from mlxtune.errors import ModelError
from tests.experts import EXPERTS
from tests.models import MODEL_TYPES, SHAPE, write_model

# Language models within models for text and images, by the whole model's type.
LANGUAGE_PARTS = {
    "gemma3": {"model_type": "gemma3_text", **MODEL_TYPES["gemma3_text"]},
    "gemma4": {"model_type": "gemma4_text", **EXPERTS["gemma4_text"]},
    "mistral3": {"model_type": "llama", "tie_word_embeddings": False},
    "qwen3_5": {"model_type": "qwen3_5_text", **EXPERTS["qwen3_5_moe"], "num_experts": 0},
    "llama4": EXPERTS["llama4"]["text_config"],
}


def dtypes(base: loading.BaseModel) -> set[mx.Dtype]:
    return {value.dtype for _, value in tree_flatten(base.model.parameters())}


def test_auto_is_float32_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: True)
    base = load_base(write_model(tmp_path, "qwen3", dtype="bfloat16"), "auto")
    assert base.dtype == "float32"
    assert base.model(mx.array([[1, 2, 3]])).dtype == mx.float32
    # Matrices keep the file's dtype, which halves their memory, and are widened for each use.
    stored = {name for name, value in tree_flatten(base.model.parameters()) if value.ndim == 2}
    parameters = dict(tree_flatten(base.model.parameters()))
    assert {parameters[name].dtype for name in stored} == {mx.bfloat16}
    assert {parameters[name].dtype for name in parameters.keys() - stored} == {mx.float32}


def test_auto_dtype_is_the_models_on_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    base = load_base(write_model(tmp_path, "qwen3", dtype="bfloat16"), "auto")
    assert dtypes(base) == {mx.bfloat16}


def test_named_dtype_is_used(tmp_path: Path) -> None:
    base = load_base(write_model(tmp_path, "llama"), "float16")
    assert dtypes(base) == {mx.float16}


def test_quantized_weights_are_unchanged(tmp_path: Path) -> None:
    base = load_base(write_model(tmp_path, "llama", quantize=4), "auto")
    parameters = dict(tree_flatten(base.model.parameters()))
    weight = parameters["model.layers.0.self_attn.q_proj.weight"]
    assert weight.dtype == mx.uint32
    assert base.quantization == "4-bit affine, group 32"
    assert "quantised (4-bit" in base.describe()


def test_per_layer_vocabulary_is_not_read_as_a_layer_count(tmp_path: Path) -> None:
    """Gemma 3n and the small Gemma 4 have this key, with 262,144 entries."""
    folder = write_model(tmp_path, "llama", vocab_size_per_layer_input=262_144)
    assert load_base(folder, "float32").num_layers == 2


def test_model_is_described(tmp_path: Path) -> None:
    base = load_base(write_model(tmp_path, "gemma3_text"), "float32")
    assert (base.model_type, base.num_layers, base.vocab_size) == ("gemma3_text", 3, 320)
    size = sum(value.size for _, value in tree_flatten(base.model.parameters()))
    assert base.parameters == size


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ('{"vocab_size": 7}', 7),
        ('{"vocab_size": 9, "text_config": {"vocab_size": 7}}', 7),
        ('{"vocab_size": 7, "text_config": {"hidden_size": 3}}', 7),
        ('{"vocab_size": null, "text_config": null}', 0),
        ('{"vocab_size": "7"}', 0),
        *(("[7]", 0), ("{", 0), ("[" * 100_000, 0)),
    ],
)
def test_size_of_the_vocabulary_is_read_without_the_model(
    tmp_path: Path, text: str, size: int
) -> None:
    assert model_folder.vocab_size(tmp_path) == 0
    (tmp_path / "config.json").write_text(text)
    assert model_folder.vocab_size(tmp_path) == size


@pytest.mark.parametrize(
    "config",
    [
        *({"model_type": name} for name in ("llama", *mlx_lm_utils.MODEL_REMAPPING)),
        *(
            {"model_type": name, "architectures": [architecture]}
            for name, architecture in mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING
        ),
    ],
    ids=str,
)
def test_model_types_of_mlx_lm_are_supported_under_all_their_names(
    tmp_path: Path, config: dict[str, object]
) -> None:
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert model_folder.read_config(tmp_path) == config


def test_repository_name_is_downloaded_with_or_without_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    name = "mlx-community/Qwen3-0.6B-bf16"
    asked: list[tuple[str, bool]] = []

    def download(name: str, allow_patterns: list[str]) -> Path:
        asked.append(
            (name, any("safetensors" in allow_pattern for allow_pattern in allow_patterns))
        )
        return tmp_path

    monkeypatch.setattr(mlx_lm_utils, "snapshot_download", download)
    assert model_folder.find_folder(name) == tmp_path
    assert model_folder.find_folder(name, weights=False) == tmp_path
    assert asked == [(name, True), (name, False)]


@pytest.mark.parametrize("name", ["missing", "./owner/name", "a/b/c", "/owner"])
def test_invalid_repository_name_is_not_downloaded(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlx_lm_utils, "snapshot_download", lambda *_, **__: pytest.fail("asked"))
    with pytest.raises(ModelError, match="no such folder: check --model-path"):
        model_folder.find_folder(name)


def test_truncated_weights_are_an_error_that_names_the_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1000])
    with pytest.raises(ModelError, match=r"model.safetensors cannot be read"):
        load_base(folder, "auto")


@pytest.mark.parametrize("kind", LANGUAGE_PARTS)
def test_only_the_language_part_of_a_multimodal_model_trains(tmp_path: Path, kind: str) -> None:
    write_model(tmp_path, kind, text_config={**SHAPE, **LANGUAGE_PARTS[kind]}, vision_config={})
    assert "passed over" not in loading.open_base(tmp_path, "auto").describe()
    file = str(tmp_path / "model.safetensors")
    weights = mx.load(file)
    tower = {"llama4": "vision_model", "qwen3_5": "model.visual"}.get(kind, "vision_tower")
    names = (f"{tower}.layers.0.self_attn.q_proj.weight", f"{tower}.layers.0.norm.weight")
    mx.save_safetensors(file, {**weights, **{name: mx.zeros((8, 8)) for name in names}})
    base = load_base(tmp_path, "auto")
    assert base.describe().endswith(
        "; only its language part is used: 2 tensors for images or sound passed over"
    )
    assert apply_lora(base.model, InstructConfig(targets=("all",))).layers == base.num_layers
    assert all("language_model" in name for name in adapted_modules(base.model))
