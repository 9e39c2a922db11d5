"""Exports of adapters for models with images: PEFT finds every module, and no other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="needs torch, which runs transformers' models")
peft = pytest.importorskip("peft", reason="needs peft, which loads what is exported")

import safetensors.torch  # noqa: E402
import transformers  # noqa: E402

from mlxtune.backend.adapters.file_formats.adapter import Adapter, WeightUpdate  # noqa: E402
from mlxtune.backend.adapters.file_formats.peft import write_peft  # noqa: E402
from tests.slow import slow_except  # noqa: E402

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning")
VISION = {
    **{"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1},
    **{"num_attention_heads": 2, "image_size": 16, "patch_size": 8},
}
QWEN_VISION = {
    **{"depth": 1, "embed_dim": 16, "hidden_size": 32, "num_heads": 2, "patch_size": 8},
    **{"out_hidden_size": 32, "intermediate_size": 32, "num_position_embeddings": 16},
    "deepstack_visual_indexes": [0],
}
TEXT = {
    **{"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": 64},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8},
    **{"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
}
ROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "gemma3": ({"model_type": "gemma3_text"}, {"model_type": "siglip_vision_model", **VISION}),
    "mistral3": ({"model_type": "mistral"}, {"model_type": "pixtral", **VISION}),
    "llama4": (
        {"model_type": "llama4_text", "num_local_experts": 2, "interleave_moe_layer_step": 5}
        | {"intermediate_size_mlp": 64},
        {**VISION, "intermediate_size": 64, "vision_output_dim": 16}
        | {"projector_input_dim": 16, "projector_output_dim": 16},
    ),
    "qwen2_vl": ({"rope_parameters": ROPE}, QWEN_VISION),
    "qwen3_vl": ({"rope_parameters": ROPE}, QWEN_VISION | {"hidden_size": 16}),
    "qwen3_5": (
        {"rope_parameters": ROPE | {"partial_rotary_factor": 1.0}}
        | {"layer_types": ["full_attention"] * 2},
        QWEN_VISION | {"hidden_size": 16},
    ),
    "lfm2_vl": (
        {"model_type": "lfm2", "layer_types": ["full_attention"] * 2},
        {"model_type": "siglip2_vision_model", **VISION},
    ),
}


def model_of(kind: str) -> Any:
    text, vision = KINDS[kind]
    config = transformers.AutoConfig.for_model(
        kind, text_config={**TEXT, **text}, vision_config=vision
    )
    return transformers.AutoModelForImageTextToText.from_config(config)


def adapter_of(model: Any) -> Adapter:
    """Return an adapter of queries in all layers and outputs in the last, by their names in mlx."""
    random = np.random.default_rng(0)
    sizes = {
        name.partition("layers.")[2]: module.weight.shape
        for name, module in model.named_modules()
        if "language_model" in name and name.endswith(("0.self_attn.q_proj", "1.self_attn.q_proj"))
    }
    modules = {
        f"language_model.model.layers.{tail}": WeightUpdate(
            random.standard_normal((columns, 4), dtype=np.float32),
            random.standard_normal((4, rows), dtype=np.float32),
        )
        for tail, (rows, columns) in sizes.items()
    }
    assert len(modules) == 2
    return Adapter(scale=2.0, modules=modules, dropout=0.0, model="base")


@pytest.mark.parametrize("stored", ["as saved", "by mlx-lm", "text alone"])
@pytest.mark.parametrize("kind", slow_except(KINDS, "gemma3", "llama4", "qwen2_vl"))
def test_peft_finds_the_modules_of_a_model_with_images(
    tmp_path: Path, kind: str, stored: str
) -> None:
    model = model_of(kind)
    adapter = adapter_of(model)
    base, output = tmp_path / "base", tmp_path / "peft"
    model.save_pretrained(base)
    if stored != "as saved":
        weights = safetensors.torch.load_file(base / "model.safetensors")
        named = {
            name.replace("model.language_model.", "language_model.model."): value
            for name, value in weights.items()
            if stored != "text alone" or "language_model" in name
        }
        if any("language_model" in name for name in named):
            safetensors.torch.save_file(named, base / "model.safetensors")
    output.mkdir()
    write_peft(adapter, base, output)

    loaded = peft.PeftModel.from_pretrained(model, output)

    found = {
        name.partition("layers.")[2]: module.get_delta_weight("default").detach().numpy()
        for name, module in loaded.named_modules()
        if hasattr(module, "get_delta_weight")
    }
    expected = {
        name.partition("layers.")[2]: 2.0 * (each.a @ each.b).T
        for name, each in adapter.modules.items()
    }
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-5)
