"""Model folders that transformers writes with random weights, and adapters of these models."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune import TrainConfig, train
from mlxtune.backend.adapters.adapter_file import AdapterFile
from tests.models import CHATML, VOCAB_SIZE, sums, write_chat, write_tokenizer

TOKENS = np.random.default_rng(5).integers(3, VOCAB_SIZE, (2, 24))
_SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
}


def write_hf_model(folder: Path, kind: str, dtype: str = "float32") -> Path:
    """Write a model folder with transformers' save_pretrained, and return it."""
    import torch
    import transformers

    torch.manual_seed(3)
    configs = {
        "llama": lambda: transformers.LlamaConfig(**_SHAPE, rope_theta=10000.0),
        "qwen2": lambda: transformers.Qwen2Config(**_SHAPE, rope_theta=1e6),
        "qwen3": lambda: transformers.Qwen3Config(**_SHAPE, tie_word_embeddings=True),
        "gemma2": lambda: transformers.Gemma2Config(
            **_SHAPE, query_pre_attn_scalar=16, sliding_window=512
        ),
        "gemma3": lambda: transformers.Gemma3TextConfig(
            **_SHAPE, query_pre_attn_scalar=16, sliding_window=8, sliding_window_pattern=2
        ),
        "mixtral": lambda: transformers.MixtralConfig(
            **_SHAPE, num_local_experts=4, num_experts_per_tok=2
        ),
        "olmoe": lambda: transformers.OlmoeConfig(**_SHAPE, num_experts=4, num_experts_per_tok=2),
        "gpt_oss": lambda: transformers.GptOssConfig(
            **_SHAPE,
            num_local_experts=4,
            num_experts_per_tok=2,
            sliding_window=8,
            rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        ),
        "qwen3_moe": lambda: transformers.Qwen3MoeConfig(
            **_SHAPE, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32
        ),
    }
    config = configs[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:  # the default weights give almost zero logits
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    if kind in ("gpt_oss", "olmoe", "qwen3_moe"):  # mlx-lm needs the keys of transformers 4
        path = folder / "config.json"
        older = {"num_experts": 4, "rope_theta": 10000.0}
        path.write_text(json.dumps(json.loads(path.read_text()) | older))
    end = "<end_of_turn>" if kind.startswith("gemma") else "<|im_end|>"
    write_tokenizer(folder, bos=not kind.startswith("qwen"), eos_token=end)
    if kind == "qwen2":
        (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def write_split_experts(model: Path, folder: Path) -> Path:
    """Write a gpt-oss folder in mlx-lm's layout; mlx-lm's own converter supports only mxfp4."""
    import safetensors.numpy

    shutil.copytree(model, folder)
    tensors = safetensors.numpy.load_file(folder / "model.safetensors")
    for name in [name for name in tensors if ".experts." in name]:
        experts, _, leaf = name.rpartition(".")
        value, kind = tensors.pop(name), "bias" if leaf.endswith("_bias") else "weight"
        value = value if kind == "bias" else value.swapaxes(1, 2)
        parts = {"down": value}
        if "gate_up" in leaf:
            parts = {"gate": value[:, ::2], "up": value[:, 1::2]}
        for part, each in parts.items():
            tensors[f"{experts}.{part}_proj.{kind}"] = np.ascontiguousarray(each)
    safetensors.numpy.save_file(tensors, folder / "model.safetensors", {"format": "mlx"})
    return folder


def train_on(model: Path, output: Path, **options: Any) -> Path:
    """Train an adapter for a few steps, and return its folder."""
    rows = write_chat(output / "chat.jsonl", sums(20))
    config = {"targets": ("all",), "lr": 2e-2, "rank": 4, "alpha": 6.0, "samples": 0, "quiet": True}
    if not (model / "chat_template.jinja").exists():
        config["template"] = "chatml"
    adapter = str(output / "adapters.safetensors")
    train(TrainConfig(str(model), (str(rows),), output=adapter, **config | options))
    return output


def trained_logits(model: Path, adapter: Path) -> np.ndarray[Any, Any]:
    """Return the trained model's logits for TOKENS, (B, T, V) in float32."""
    import mlx.core as mx

    from mlxtune.backend.adapters.attach import load_adapted
    from mlxtune.backend.models.loading import load_base

    adapted = load_adapted(load_base(model, "float32"), AdapterFile.find(str(adapter)))
    return np.array(adapted.model(mx.array(TOKENS)).astype(mx.float32))


def torch_logits(model: Any) -> np.ndarray[Any, Any]:
    """Return a torch model's logits for TOKENS, (B, T, V)."""
    import torch

    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(TOKENS)).logits.float().numpy())
