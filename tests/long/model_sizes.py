"""The architectures of docs/models.md at about 100M parameters, with the models' vocabularies.

Their configs come from `architectures`, with real sizes instead of tiny ones. Weights are random.
The tokenizer is Qwen3's, without its last merges if the vocabulary is smaller.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.long.architectures import ARCHITECTURES
from tests.models import MODEL_TYPES, SHAPE, write_model

# The real size for each key that an architecture's tiny config has.
_REAL: dict[str, Any] = {
    **{"hidden_size": 512, "intermediate_size": 1536, "num_hidden_layers": 8, "head_dim": 64},
    **{"num_attention_heads": 8, "num_key_value_heads": 4, "max_position_embeddings": 4096},
    **{"original_max_position_embeddings": 2048, "rope_theta": 1e6, "block_multiple_of": 256},
    **{"block_dim": 512, "block_ff_dim": 1536, "sliding_window": 512, "attention_chunk_size": 512},
    **{"query_pre_attn_scalar": 64, "sliding_window_pattern": 6, "global_head_dim": 64},
    **{"hidden_size_per_layer_input": 64, "laurel_rank": 64, "num_kv_shared_layers": 4},
    **{"num_experts": 16, "num_local_experts": 16, "n_routed_experts": 16, "moe_num_experts": 16},
    **{"num_experts_per_tok": 4, "num_experts_per_token": 4, "top_k_experts": 4, "moe_k": 4},
    **{"moe_intermediate_size": 384, "shared_expert_intermediate_size": 384},
    **{"shared_intermediate_size": 384, "intermediate_size_mlp": 1536, "rotary_dim": 32},
    **{"kv_lora_rank": 128, "q_lora_rank": 256, "qk_nope_head_dim": 64, "qk_rope_head_dim": 32},
    **{"v_head_dim": 64, "linear_num_value_heads": 8, "linear_num_key_heads": 8},
    **{"linear_key_head_dim": 64, "linear_value_head_dim": 64, "full_attention_interval": 4},
    **{"mamba_n_heads": 16, "mamba_d_head": 64, "mamba_d_state": 128, "mamba_d_ssm": 1024},
    **{"mamba_num_heads": 16, "mamba_head_dim": 64, "ssm_state_size": 128, "state_size": 128},
    **{"num_heads": 16, "chunk_size": 256, "decay_low_rank_dim": 64, "a_low_rank_dim": 64},
    **{"gate_low_rank_dim": 64, "v_low_rank_dim": 64, "model_max_length": 4096},
}
# Multi-head latent attention has equal numbers of key and query heads.
_LATENT = {"num_key_value_heads": 8}


@dataclass(frozen=True)
class Listed:
    """An architecture of the table.

    `real` overrides numbers of `_REAL`. `short` is the number of layers for the long example, set
    where mlx-lm loops over tokens and keeps every value. `templates` are the models' templates with
    golden renders.
    """

    title: str
    vocabulary: int
    real: Mapping[str, Any] = field(default_factory=dict)
    short: int | None = None
    templates: tuple[str, ...] = ()


_QWEN3 = ("qwen3", "qwen3_instruct_2507")
_QWEN3_5 = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 128}
_GEMMA4 = ("gemma4_canonical_diffusion_gemma",)
LISTED: dict[str, Listed] = {
    "qwen2": Listed("Qwen2", 151_936, templates=("qwen2_5",)),
    "qwen3": Listed("Qwen3", 151_936, {"tie_word_embeddings": True}, templates=_QWEN3),
    "qwen3_moe": Listed("Qwen3-MoE", 151_936, {"tie_word_embeddings": True}, templates=_QWEN3[1:]),
    "qwen3_next": Listed("Qwen3-Next", 151_936, _QWEN3_5, short=4),
    "qwen3_5": Listed("Qwen3.5", 151_936, _QWEN3_5, short=4, templates=("qwen3_5_think",)),
    "qwen3_5_moe": Listed(
        "Qwen3.5, experts", 248_320, _QWEN3_5, short=4, templates=("qwen3_5_think",)
    ),
    "gemma2": Listed("Gemma 2", 256_000, templates=("gemma2",)),
    "gemma3_text": Listed("Gemma 3", 151_936, templates=("gemma3",)),
    "gemma3n": Listed("Gemma 3n", 262_400),
    "gemma4_text (dense)": Listed("Gemma 4", 262_144, templates=_GEMMA4),
    "gemma4_text (experts)": Listed("Gemma 4, experts", 262_144, templates=_GEMMA4),
    "gemma4_text": Listed("Gemma 4, per-layer inputs", 262_144, templates=_GEMMA4),
    "llama": Listed("Llama 3", 128_256),
    "llama4": Listed("Llama 4", 202_048, {"num_experts_per_tok": 1, "intermediate_size": 384}),
    "mistral3": Listed("Mistral 3", 131_072),
    "ministral3": Listed("Ministral 3", 131_072),
    "mixtral": Listed(
        "Mixtral",
        32_000,
        {"num_local_experts": 8, "num_experts_per_tok": 2, "intermediate_size": 512},
    ),
    "phi3": Listed("Phi 3, Phi 4", 100_352),
    "gpt_oss": Listed(
        "gpt-oss",
        151_936,
        {
            "num_local_experts": 8,
            "num_experts_per_tok": 2,
            "intermediate_size": 512,
            "sliding_window": 128,
        },
    ),
    "glm4": Listed("GLM 4", 151_552),
    "glm4_moe": Listed("GLM 4, experts", 151_552),
    "glm4_moe_lite": Listed("GLM 4, lite", 154_880, _LATENT),
    "deepseek_v2": Listed("DeepSeek V2", 102_400, _LATENT),
    "deepseek_v3": Listed("DeepSeek V3", 129_280, _LATENT),
    "lfm2": Listed("LFM2", 151_936),
    "lfm2_moe": Listed("LFM2, experts", 65_536),
    "smollm3": Listed("SmolLM3", 128_256),
    "olmo2": Listed("OLMo 2", 100_352),
    "olmo3": Listed("OLMo 3", 100_278),
    "olmoe": Listed("OLMoE", 50_304, {"intermediate_size": 384}),
    "olmo_hybrid": Listed("OLMo Hybrid", 100_352, short=4),
    "granitemoehybrid": Listed("Granite 4 hybrid", 100_352, {"intermediate_size": 384}),
    "nemotron_h": Listed("Nemotron-H", 131_072),
    "falcon_h1": Listed("Falcon-H1", 65_537),
    "mamba2": Listed("Mamba 2", 50_288),
    "rwkv7": Listed("RWKV 7", 65_536, short=2),
    "seed_oss": Listed("Seed-OSS", 155_136),
    "exaone4": Listed("EXAONE 4", 102_400, {"sliding_window_pattern": "LLLG"}),
    "ernie4_5": Listed("ERNIE 4.5", 103_424),
    "ernie4_5_moe": Listed("ERNIE 4.5, experts", 103_424),
    "hunyuan_v1_dense": Listed("Hunyuan", 120_818),
    "hunyuan": Listed("Hunyuan, experts", 128_167, {"moe_topk": 4, "intermediate_size": 384}),
    "minimax": Listed("MiniMax", 200_064, {"intermediate_size": 384}),
    "kimi_linear": Listed(
        "Kimi Linear",
        163_840,
        {
            **_LATENT,
            "kda_layers": [1, 2, 3, 5, 6, 7],
            "full_attn_layers": [4, 8],
            "num_heads": 8,
        },
        short=4,
    ),
    "cohere2": Listed("Cohere 2", 256_000, {"sliding_window_pattern": 4}),
    "starcoder2": Listed("StarCoder 2", 49_152),
}


def config_of(name: str, layers: int | None = None) -> dict[str, Any]:
    """Return the config of a listed architecture, without its model_type."""
    listed, model_type = LISTED[name], name.split()[0]
    vocabulary = {
        "vocab_size": listed.vocabulary,
        "vocab_size_per_layer_input": listed.vocabulary,
    }
    real = {**_REAL, **vocabulary, **listed.real}
    if layers is not None:
        real["num_hidden_layers"] = layers
        for lists in ("kda_layers", "full_attn_layers"):
            if lists in real:
                real[lists] = [number for number in real[lists] if number <= layers]
    return _enlarged({**SHAPE, **MODEL_TYPES.get(model_type, {}), **ARCHITECTURES[name]}, real)


def _enlarged(tiny: Mapping[str, Any], real: Mapping[str, Any]) -> dict[str, Any]:
    """Return a config with real sizes; lists with an entry for each layer are repeated.

    Parts that an architecture disables with 0 or null stay disabled.
    """
    found: dict[str, Any] = {}
    layers = tiny.get("num_hidden_layers")
    for name, value in tiny.items():
        if isinstance(value, dict):
            found[name] = _enlarged(value, real)
        elif isinstance(value, list) and len(value) == layers and name != "time_step_limit":
            count = real["num_hidden_layers"]
            found[name] = (value * count)[:count]
        else:
            off = value is None or (type(value) is int and value == 0)
            found[name] = value if off else real.get(name, value)
    return found


def write_sized(folder: Path, name: str, shared: Path, layers: int | None = None) -> Path:
    """Write an architecture's folder: random weights in bfloat16, and Qwen3's tokenizer."""
    write_model(folder, name.split()[0], dtype="bfloat16", **config_of(name, layers))
    _write_tokenizer(folder, shared / "tokenizers" / "qwen3", LISTED[name].vocabulary)
    return folder


def _write_tokenizer(folder: Path, source: Path, vocabulary: int) -> None:
    """Write a tokenizer with its last merges dropped, so that every token fits a vocabulary."""
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    config = json.loads((source / "tokenizer_config.json").read_text(encoding="utf-8"))
    model, added = tokenizer["model"], tokenizer["added_tokens"]
    # The first 256 tokens are bytes; token 256 + i comes from merge i.
    kept = min(len(model["vocab"]), vocabulary - len(added))
    dropped = len(model["vocab"]) - kept
    model["vocab"] = {token: i for token, i in model["vocab"].items() if i < kept}
    model["merges"] = model["merges"][: kept - 256]
    for token in added:
        token["id"] -= dropped
    config["added_tokens_decoder"] = {
        str(int(i) - dropped): token for i, token in config["added_tokens_decoder"].items()
    }
    for path, content in (("tokenizer.json", tokenizer), ("tokenizer_config.json", config)):
        (folder / path).write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
