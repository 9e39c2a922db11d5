"""Keys of config.json: renamed for mlx-lm's classes, harmless, or an error that names them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

from mlxtune.backend.models.config_keys import unread_config_keys, with_known_keys
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.model_folder import read_config
from mlxtune.errors import ModelError
from tests.long.architectures import ARCHITECTURES
from tests.models import SHAPE, write_model

LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
# The settings of RoPE under the older keys, and as transformers 5 saves them.
ROPE: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "theta": ("llama", {"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    "scaling": (
        "llama",
        {"rope_theta": 500.0, "rope_scaling": LLAMA3},
        LLAMA3 | {"rope_theta": 500.0},
    ),
    "linear": (
        "qwen2",
        {"rope_theta": 500.0, "rope_scaling": {"rope_type": "linear", "factor": 4.0}},
        {"rope_type": "linear", "factor": 4.0, "rope_theta": 500.0},
    ),
    "part": (
        "phi3",
        {"rope_theta": 500.0, "partial_rotary_factor": 0.5},
        {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "olmo2": ("olmo2", {"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    "qwen3": ("qwen3", {"rope_theta": 500.0}, {"rope_type": "default", "rope_theta": 500.0}),
    "older names": (
        "gpt_neox",
        {"rotary_emb_base": 500.0, "rotary_pct": 0.5},
        {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5},
    ),
    "kinds of layers": (
        "gemma3_text",
        {"rope_theta": 500.0, "rope_local_base_freq": 50.0},
        {
            "full_attention": {"rope_type": "default", "rope_theta": 500.0},
            "sliding_attention": {"rope_type": "default", "rope_theta": 50.0},
        },
    ),
}


def logits(folder: Path) -> mx.array:
    return load_base(folder, "float32").model(mx.arange(48)[None] % 300)


def rewrite(folder: Path, remove: Any = (), **keys: Any) -> None:
    path = folder / "config.json"
    config = {
        key: value for key, value in json.loads(path.read_text()).items() if key not in remove
    }
    path.write_text(json.dumps(config | keys))


@pytest.mark.parametrize("name", ROPE)
def test_rope_parameters_give_the_same_model_as_the_older_keys(tmp_path: Path, name: str) -> None:
    kind, old, new = ROPE[name]
    folder = write_model(tmp_path / "model", kind, **ARCHITECTURES.get(kind, {}) | old)
    before = logits(folder)

    rewrite(folder, remove=old, rope_parameters=new)
    assert mx.array_equal(logits(folder), before).item()

    other = json.loads(json.dumps(new).replace("500.0", "7.0"))
    rewrite(folder, rope_parameters=other)
    assert not mx.array_equal(logits(folder), before).item()


def test_rope_parameters_of_a_language_part_are_renamed_too() -> None:
    text = {"model_type": "llama", "rope_parameters": {"rope_type": "default", "rope_theta": 5.0}}
    renamed = with_known_keys({"model_type": "mistral3", "text_config": text}, "mistral3")
    assert renamed["text_config"]["rope_theta"] == 5.0


def test_unread_rope_entry_is_named_with_shortened_value() -> None:
    rope = {"rope_type": "default", "rope_theta": 5.0, "partial_rotary_factor": 0.5}
    config = {"model_type": "llama", **SHAPE, "rope_parameters": rope}
    assert unread_config_keys(with_known_keys(config, "llama"), "llama") == [
        "rope_parameters.partial_rotary_factor (0.5)"
    ]
    config = {"model_type": "llama", **SHAPE, "zithers": [f"word{i}" for i in range(99)]}
    (found,) = unread_config_keys(config, "llama")
    assert found.endswith("'word5', …)")


def test_config_of_every_architecture_is_read() -> None:
    unread = {}
    for name, changes in ARCHITECTURES.items():
        kind = name.split()[0]
        config = {"model_type": kind, **SHAPE, **changes}
        unread[name] = unread_config_keys(with_known_keys(config, kind), kind)
    assert {name: keys for name, keys in unread.items() if keys} == {}


def test_unknown_key_of_every_architecture_is_named() -> None:
    unread, expected = {}, {}
    for name, changes in ARCHITECTURES.items():
        kind, prefix, unknown = name.split()[0], "", {"zither_softcapping": 30.0}
        config = {"model_type": kind, **SHAPE, **changes}
        if "text_config" in config:
            config["text_config"] = config["text_config"] | unknown
            prefix = "text_config."
        else:
            config |= unknown
        unread[name] = unread_config_keys(config, kind)
        expected[name] = [f"{prefix}zither_softcapping (30.0)"]
    assert unread == expected


# Keys of published models that change nothing.
HARMLESS: dict[str, tuple[str, dict[str, Any]]] = {
    "Llama": (
        "llama",
        {
            **{"architectures": ["LlamaForCausalLM"], "attention_dropout": 0.0, "use_cache": True},
            **{"hidden_act": "silu", "initializer_range": 0.02, "pretraining_tp": 1},
            **{"torch_dtype": "bfloat16", "transformers_version": "4.45.0", "bos_token_id": 1},
            **{
                "eos_token_id": [1, 2],
                "pad_token_id": 0,
                "unsloth_fixed": True,
                "_name_or_path": "x",
            },
            **{
                "is_llama_config": True,
                "rope_interleaved": False,
                "transformers.js_config": {"a": 1},
            },
        },
    ),
    "Qwen2.5": (
        "qwen2",
        {
            **{"max_window_layers": 21, "sliding_window": 128, "use_sliding_window": False},
            **{"hidden_act": "silu", "use_mrope": False},
        },
    ),
    "Gemma 2": (
        "gemma2",
        {
            **{"hidden_activation": "gelu_pytorch_tanh", "hidden_act": "gelu_pytorch_tanh"},
            **{"cache_implementation": "hybrid", "sliding_window": 4096, "head_dim": 16},
            "layer_types": ["sliding_attention", "full_attention"] * 21,
        },
    ),
    "Phi-4-mini": (
        "phi3",
        {
            **{"embd_pdrop": 0.0, "resid_pdrop": 0.0, "full_attn_mod": 1, "interpolate_factor": 1},
            **{"sliding_window": 262144, "lm_head_bias": False},
            "auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"},
        },
    ),
    "Phi-3-mini-4k": ("phi3", {"sliding_window": 2047, "max_position_embeddings": 4096}),
    "Command R7B": (
        "cohere2",
        {
            **{"rotary_pct": 1.0, "use_parallel_block": True, "use_gated_activation": True},
            **{
                "use_embedding_sharing": True,
                "layer_switch": 4,
                "order_of_interleaved_layers": "x",
            },
        },
    ),
    "gpt-oss": ("gpt_oss", {"experts_per_token": 4, "initial_context_length": 4096}),
    "DeepSeek-V2": (
        "deepseek_v2",
        {"aux_loss_alpha": 0.001, "ep_size": 1, "seq_aux": True, "pretraining_tp": 1},
    ),
}


@pytest.mark.parametrize("name", HARMLESS)
def test_keys_of_published_models_are_harmless(name: str) -> None:
    kind, keys = HARMLESS[name]
    config = {"model_type": kind, **SHAPE, **ARCHITECTURES.get(kind, {}), **keys}
    assert unread_config_keys(config, kind) == []


@pytest.mark.parametrize(
    ("kind", "keys"),
    [
        ("llama", {"final_logit_softcapping": 30.0}),
        ("llama", {"hidden_act": "gelu"}),
        ("qwen2", {"use_sliding_window": True, "sliding_window": 4}),
        ("qwen3", {"attention_multiplier": 0.25}),
        ("phi3", {"sliding_window": 4}),
        ("gemma2", {"hidden_activation": "silu"}),
        ("gemma2", {"layer_types": ["full_attention", "sliding_attention"]}),
        ("qwen2_moe", {"norm_topk_prob": True}),
        ("llama", {"clip_qkv": 8.0}),
        ("llama", {"rope_parameters": {"rope_theta": 500.0, "partial_rotary_factor": 0.5}}),
        (
            "llama",
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 500.0},
                    "sliding_attention": {"rope_theta": 50.0},
                }
            },
        ),
    ],
)
def test_key_that_changes_the_model_is_an_error_that_names_it(
    tmp_path: Path, kind: str, keys: dict[str, Any]
) -> None:
    folder = write_model(tmp_path / "model", kind, **ARCHITECTURES.get(kind, {}))
    read_config(folder)
    rewrite(folder, **keys)

    with pytest.raises(ModelError) as raised:
        read_config(folder)

    assert list(keys)[-1] in str(raised.value)
    assert f"mlx-lm's {kind} does not read" in str(raised.value)
