"""Model folders as transformers saves them, with random weights, and adapters trained on them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from mlxtune import TrainConfig, train
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
    """Write a folder by transformers' own save_pretrained, and return it."""
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
    }
    config = configs[kind]()
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim == 2:  # transformers' own are so small that the model says nothing
                parameter.normal_(std=parameter.shape[1] ** -0.5)
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    end = "<end_of_turn>" if kind.startswith("gemma") else "<|im_end|>"
    write_tokenizer(folder, bos=not kind.startswith("qwen"), eos_token=end)
    if kind == "qwen2":
        (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def train_on(model: Path, output: Path, **options: Any) -> Path:
    """Train an adapter for a few steps, and return its folder."""
    rows = write_chat(output / "chat.jsonl", sums(20))
    config = {"targets": ("all",), "lr": 2e-2, "rank": 4, "alpha": 6.0, "samples": 0, "quiet": True}
    adapter = str(output / "adapters.safetensors")
    train(TrainConfig(str(model), (str(rows),), output=adapter, **config | options))
    return output


def trained_logits(model: Path, adapter: Path) -> np.ndarray[Any, Any]:
    """Return what the trained model gives for TOKENS, (B, T, V) in float32."""
    import mlx.core as mx

    from mlxtune.backend.adapters.attach import load_adapted
    from mlxtune.backend.model.loading import load_base

    adapted = load_adapted(load_base(model, "float32"), str(adapter))
    return np.array(adapted.model(mx.array(TOKENS)).astype(mx.float32))


def torch_logits(model: Any) -> np.ndarray[Any, Any]:
    """Return what a torch model gives for TOKENS, (B, T, V)."""
    import torch

    with torch.no_grad():
        return np.asarray(model.eval()(torch.tensor(TOKENS)).logits.float().numpy())
