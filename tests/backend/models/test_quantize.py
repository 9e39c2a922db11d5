"""Quantising while loading gives mlx-lm's bytes, and memory never holds the whole model."""

from __future__ import annotations

import gc
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.convert import convert

from mlxtune.backend.models import loading, nf4, quantize
from mlxtune.backend.models.loading import base_record, load_base, open_base, read_weights
from mlxtune.backend.models.nf4 import NF4Linear
from mlxtune.backend.models.quantize import FORMATS
from mlxtune.config.data_config import BaseOptions
from mlxtune.errors import ModelError
from tests.models import write_model
from tests.slow import long, slow, slow_except

EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 64,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "norm_topk_prob": True,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": {"dtype": "bfloat16"},
    # The config's dtype is applied before quantisation.
    "llama": {"torch_dtype": "float16"},
    # A matrix 96 wide stays unquantised, because 96 is not a multiple of 64.
    "gemma3_text": {},
    # mlx-lm's class quantises its router to 8 bits.
    "qwen3_moe": EXPERTS,
}
HOW: dict[str, dict[str, Any]] = {
    "4": {"q_bits": 4},
    "8": {"q_bits": 8},
    "mxfp4": {"q_mode": "mxfp4"},
    "nvfp4": {"q_mode": "nvfp4"},
    "mxfp8": {"q_mode": "mxfp8"},
}


def parameters(model: nn.Module) -> dict[str, mx.array]:
    return dict(tree_flatten(model.parameters()))


@pytest.mark.parametrize("architecture", slow_except(MODELS, "qwen3_moe"))
def test_result_matches_mlx_lm_bit_for_bit(tmp_path: Path, architecture: str) -> None:
    assert_as_mlx_lm(tmp_path, architecture)


def test_gpu_computes_in_the_dtype_that_mlx_lm_would_have_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(loading, "on_cpu", lambda: False)
    assert_as_mlx_lm(tmp_path, "llama")


def assert_as_mlx_lm(tmp_path: Path, architecture: str) -> None:
    folder = write_model(tmp_path / "plain", architecture, **MODELS[architecture])
    for name, how in HOW.items():
        convert(str(folder), str(tmp_path / name), quantize=True, **how)
        converted = load_base(tmp_path / name, "auto")
        theirs = parameters(converted.model)
        base = load_base(folder, "auto", BaseOptions(quantize=name))
        assert base.dtype == converted.dtype
        ours = parameters(base.model)
        assert ours.keys() == theirs.keys()
        assert any("scales" in path for path in ours)
        for path, value in theirs.items():
            assert ours[path].dtype == value.dtype, (name, path)
            assert mx.array_equal(ours[path], value), (name, path)
        assert "quantised while loading" in base.describe()


def test_quantizing_in_parts_equals_quantizing_the_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write_model(tmp_path / "model", "llama")
    for name in ("mxfp4", "nvfp4", "mxfp8", "nf4"):
        whole = parameters(load_base(folder, "auto", BaseOptions(quantize=name)).model)
        with monkeypatch.context() as changed:
            changed.setattr(quantize, "_BLOCK_ENTRIES", 1000)
            changed.setattr(nf4, "_BLOCK_ENTRIES", 1000)
            parts = parameters(load_base(folder, "auto", BaseOptions(quantize=name)).model)
        assert all(mx.array_equal(whole[path], value) for path, value in parts.items())


def test_nf4_is_on_the_linear_layers_but_the_head(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", dtype="bfloat16")
    base = load_base(folder, "bfloat16", BaseOptions(quantize="nf4", double_quant=True))
    kinds = {name: type(module) for name, module in base.model.named_modules()}
    found = {name.rsplit(".", 1)[-1] for name, kind in kinds.items() if kind is NF4Linear}
    # down_proj is not quantised: its input of 96 is not a multiple of 64.
    assert found == {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj"}
    assert kinds["lm_head"] is nn.Linear
    assert base.quantization == "4-bit nf4, group 64, scales in 8 bits"
    record = base_record(base)
    assert (record["quantize"], record["double_quant"]) == ("nf4", True)
    # The compute dtype does not affect the scales.
    nested = parameters(base.model)["model.layers.0.self_attn.q_proj.nested_scales"]
    assert nested.dtype == mx.float32
    plain = load_base(folder, "bfloat16", BaseOptions(quantize="nf4"))
    assert parameters(plain.model)["model.layers.0.self_attn.q_proj.scales"].dtype == mx.float32


def test_nf4_refuses_experts_and_narrow_layers(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="nf4 does not support experts"):
        open_base(
            write_model(tmp_path / "moe", "qwen3_moe", **EXPERTS),
            "auto",
            BaseOptions(quantize="nf4"),
        )
    narrow = {"hidden_size": 48, "intermediate_size": 96, "num_attention_heads": 3}
    folder = write_model(tmp_path / "narrow", "llama", **narrow, num_key_value_heads=1)
    with pytest.raises(ModelError, match="no linear layer whose width is a multiple of 64"):
        open_base(folder, "auto", BaseOptions(quantize="nf4"))


def test_quantized_folder_is_not_quantized_again(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama", quantize=4)
    with pytest.raises(ModelError, match="is already quantised: leave out --quantize 8"):
        open_base(folder, "auto", BaseOptions(quantize="8"))


def test_unknown_format_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="must be one of 4, 8, mxfp4"):
        open_base(write_model(tmp_path / "model", "llama"), "auto", BaseOptions(quantize="3"))


@pytest.mark.parametrize(
    "name", ["nf4", slow("4"), slow("mxfp8"), *map(long, ("8", "mxfp4", "nvfp4"))]
)
def test_full_precision_model_is_never_in_memory(tmp_path: Path, name: str) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024, "num_hidden_layers": 12}
    folder = write_model(tmp_path / "model", "qwen3", dtype="bfloat16", **shape)
    gc.collect()
    mx.clear_cache()
    plain = open_base(folder, "auto")
    sizes = [value.nbytes for value in parameters(plain.model).values()]
    elsewhere = mx.get_active_memory()
    base = open_base(folder, "auto", BaseOptions(quantize=name))
    mx.reset_peak_memory()
    read_weights(base)
    peak = mx.get_peak_memory() - elsewhere
    kept = sum(value.nbytes for value in parameters(base.model).values())
    # Besides the kept weights: one matrix, its intermediates and its quantised form.
    assert kept <= peak < kept + 24 * max(sizes)
    assert mx.get_active_memory() - elsewhere < 1.01 * kept + 10_000
    if name not in ("8", "mxfp8"):
        assert peak < 0.7 * sum(sizes)


def test_bits_of_a_weight(tmp_path: Path) -> None:
    shape = {"hidden_size": 512, "intermediate_size": 1024}
    folder = write_model(tmp_path / "model", "llama", dtype="bfloat16", **shape)

    def bits(name: str, **options: Any) -> float:
        model = open_base(folder, "bfloat16", BaseOptions(quantize=name, **options)).model
        layer = model.layers[0].mlp.gate_proj
        return 8 * sum(value.nbytes for value in parameters(layer).values()) / (512 * 1024)

    found = {name: bits(name) for name in FORMATS}
    assert found == {"4": 4.5, "8": 8.5, "mxfp4": 4.25, "nvfp4": 4.5, "mxfp8": 8.25, "nf4": 4.5}
    double = bits("nf4", double_quant=True)
    assert double == pytest.approx(4 + 8 / 64 + 32 / (64 * 256), abs=1e-3)
    assert np.isclose(double, 4.127, atol=1e-3)
