"""Tiny models with random weights, and the files that a run reads, for tests.

mlx is imported only in functions, through mlxtune.backend, which loads a fast BLAS first.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

VOCAB_SIZE = 320
CONTROL_TOKENS = ("<|im_start|>", "<|im_end|>", "<start_of_turn>", "<end_of_turn>")
# A chat template in Qwen's style.
CHATML = (
    "{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
# A template like Qwen3's: only the last turn gets an empty thinking block.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\\n' }}"
    "{% if m.role == 'assistant' and (loop.last or m.reasoning_content) %}"
    "{{ '<think>\\n' + (m.reasoning_content or '') + '\\n</think>\\n\\n' }}"
    "{% endif %}{{ m.content + '<|im_end|>\\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
    "{% if enable_thinking is false %}{{ '<think>\\n\\n</think>\\n\\n' }}{% endif %}{% endif %}"
)
_MERGED = ("the quick brown fox jumps over the lazy dog", "user assistant model system")

SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "rms_norm_eps": 1e-6,
    "vocab_size": VOCAB_SIZE,
    "max_position_embeddings": 512,
    "rope_theta": 10000.0,
}
MODEL_TYPES: dict[str, dict[str, Any]] = {
    "qwen3": {"tie_word_embeddings": True},
    "llama": {"tie_word_embeddings": False},
    "gemma2": {"query_pre_attn_scalar": 16},
    # Two of three layers have a window, which is shorter than the examples.
    "gemma3_text": {
        "num_hidden_layers": 3,
        "query_pre_attn_scalar": 16,
        "sliding_window": 8,
        "sliding_window_pattern": 2,
    },
}


def write_model(
    folder: Path,
    model_type: str,
    *,
    quantize: int | None = None,
    dtype: str = "float32",
    bos: bool | None = None,
    seed: int = 0,
    **config: Any,
) -> Path:
    """Write a model folder with seeded random weights, and return it.

    `quantize` is a number of bits; `bos` adds a BOS to the tokenizer (by default for all but Qwen);
    `config` overrides entries of config.json.
    """
    import mlxtune.backend  # noqa: F401, I001
    import mlx.core as mx
    import mlx.nn as nn
    from mlx.utils import tree_flatten

    settings = {"model_type": model_type, **SHAPE, **MODEL_TYPES.get(model_type, {}), **config}
    architecture = importlib.import_module(f"mlx_lm.models.{model_type}")
    model = architecture.Model(architecture.ModelArgs.from_dict(settings))
    if model_type == "gemma3_text":
        model.sanitize({})  # ties the head to the embeddings, as all Gemma 3 models do
    rng = np.random.default_rng(seed)
    weights = [
        (name, mx.array(_random(rng, name, value.shape, model_type)).astype(getattr(mx, dtype)))
        for name, value in tree_flatten(model.parameters())
    ]
    model.load_weights(weights)
    if quantize is not None:
        nn.quantize(model, group_size=32, bits=quantize)
        settings["quantization"] = {"group_size": 32, "bits": quantize}
    folder.mkdir(parents=True, exist_ok=True)
    mx.save_safetensors(
        str(folder / "model.safetensors"),
        dict(tree_flatten(model.parameters())),
        metadata={"format": "mlx"},
    )
    (folder / "config.json").write_text(json.dumps(settings, indent=2))
    has_bos = not model_type.startswith("qwen") if bos is None else bos
    end = "<end_of_turn>" if model_type.startswith("gemma") else "<|im_end|>"
    write_tokenizer(folder, bos=has_bos, eos_token=end)
    if not model_type.startswith(("qwen", "gemma")):  # these models have a built-in template
        (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def _random(
    rng: np.random.Generator, name: str, shape: tuple[int, ...], model_type: str
) -> np.ndarray[Any, Any]:
    """Return random weights that keep activations at the same scale; norms are around one."""
    if len(shape) == 1:
        center = 1.0 if "norm" in name and not model_type.startswith("gemma") else 0.0
        return (center + 0.1 * rng.standard_normal(shape)).astype(np.float32)
    return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)


def write_tokenizer(
    folder: Path, *, bos: bool = False, eos_token: str = "<|im_end|>", extra: Iterable[str] = ()
) -> None:
    """Write tokenizer.json and tokenizer_config.json: byte-level BPE of some 300 tokens.

    `extra` are additional control tokens.
    """
    folder.mkdir(parents=True, exist_ok=True)
    special = (*(["<bos>"] if bos else []), *CONTROL_TOKENS, *extra)
    (folder / "tokenizer.json").write_text(_trained_tokenizer(special), encoding="utf-8")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": eos_token,
        "clean_up_tokenization_spaces": False,
        **({"bos_token": "<bos>"} if bos else {}),
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=2))


@cache
def _trained_tokenizer(special: tuple[str, ...]) -> str:
    """Return the tokenizer.json of a BPE trained with these control tokens."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        min_frequency=1,
        special_tokens=list(special),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_MERGED, trainer)
    return str(tokenizer.to_str(pretty=True))


def write_adapter_config(folder: Path, config: dict[str, Any]) -> None:
    """Replace an adapter's config, in its file and in its weights' metadata."""
    (folder / "adapter_config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = folder / "adapters.safetensors"
    safetensors.numpy.save_file(
        safetensors.numpy.load_file(weights), weights, {"adapter_config": json.dumps(config)}
    )


def write_chat(path: Path, rows: Iterable[Any]) -> Path:
    """Write a chat file and return it.

    A row is a list of (role, content) pairs, an object written unchanged, or a line of text.
    """
    lines = []
    for row in rows:
        if isinstance(row, list):
            row = {"messages": [{"role": role, "content": content} for role, content in row]}
        lines.append(row if isinstance(row, str) else json.dumps(row, ensure_ascii=False))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
    return path


def sums(count: int) -> list[list[tuple[str, str]]]:
    """Return conversations of different lengths, each with one question and one answer."""
    return [
        [("user", f"What is {i} + {i * 7}?"), ("assistant", f"It is {i * 8}" + "!" * (i % 5))]
        for i in range(count)
    ]
