"""A LoRA adapter as GGUF, for llama.cpp and tools built on it.

Names, shapes and keys are those of llama.cpp's convert_lora_to_gguf.py:
`blk.N.attn_q.weight.lora_a` (rank, in) and `.lora_b` (out, rank) in numpy's order, scaled by
`adapter.lora.alpha / rank`. The rows of q_proj and k_proj of Llama models are permuted like the
base model's: llama.cpp's rotary embedding pairs neighbours instead of halves.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.adapters.formats.adapter import (
    Adapter,
    Matrix,
    Update,
    layers_from,
    path_in_layer,
)
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError, OutputError, one_line

WEIGHTS = "adapter.gguf"
# llama.cpp's names for model types of mlx-lm.
ARCHITECTURES = {
    "llama": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "gemma2": "gemma2",
    "gemma3": "gemma3",
    "gemma3_text": "gemma3",
}


def check_gguf(model_type: str) -> None:
    """Raise ModelError for a model type that is not supported, or without the gguf package."""
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"--format gguf supports {', '.join(ARCHITECTURES)}, not {model_type}: "
            "use --format peft and llama.cpp's convert_lora_to_gguf.py"
        )
    if importlib.util.find_spec("gguf") is None:
        raise ModelError("--format gguf needs the gguf package: pip install 'mlxtune[gguf]'")


def write_gguf(
    adapter: Adapter,
    model_type: str,
    text_config: Mapping[str, Any],
    num_layers: int,
    folder: Path,
) -> None:
    """Write an adapter as GGUF. `text_config` is the language model's part of config.json.

    Raises ModelError for what llama.cpp cannot hold, and OutputError.
    """
    check_gguf(model_type)
    import gguf

    adapter.check_plain("GGUF")
    if adapter.is_dora:
        raise ModelError(
            "GGUF cannot hold DoRA's magnitudes: use mlxtune fuse, and convert the fused model"
        )
    architecture = ARCHITECTURES[model_type]
    writer = gguf.GGUFWriter(folder / WEIGHTS, architecture)
    try:
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.scale * adapter.rank)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        heads = _heads(architecture, text_config)
        for path, name in _gguf_names(adapter.modules, architecture, num_layers).items():
            update = adapter.modules[path]
            b = update.b.T
            if (projection := path.rsplit(".", 1)[-1]) in heads:
                b = permuted(b, heads[projection])
            writer.add_tensor(f"{name}.weight.lora_a", np.ascontiguousarray(update.a.T))
            writer.add_tensor(f"{name}.weight.lora_b", np.ascontiguousarray(b))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
    except OSError as error:
        raise OutputError(
            f"{folder / WEIGHTS}: cannot be written: {error.strerror or error}: "
            "free some disk space"
        ) from error
    finally:
        writer.close()


def read_gguf(
    folder: Path,
    modules: Iterable[str],
    model_type: str,
    text_config: Mapping[str, Any],
    num_layers: int,
) -> Adapter:
    """Return the adapter of a GGUF file for a base model with these modules. Raises ModelError."""
    import gguf

    path, architecture = folder / WEIGHTS, ARCHITECTURES[model_type]
    try:
        reader = gguf.GGUFReader(path)
        alpha = float(reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
        kind = reader.fields[gguf.Keys.General.TYPE].contents()
        written_for = reader.fields[gguf.Keys.General.ARCHITECTURE].contents()
        tensors = {each.name: np.array(each.data, np.float32) for each in reader.tensors}
    except (OSError, ValueError, KeyError, AttributeError) as error:
        raise ModelError(f"{path}: cannot be read: {one_line(error)}") from error
    if (kind, written_for) != ("adapter", architecture):
        raise ModelError(
            f"{path}: is of type {kind} for {written_for}, not an adapter for {architecture}"
        )
    by_name = {
        name: module
        for module, name in _gguf_names(modules, architecture, num_layers, False).items()
    }
    heads = _heads(architecture, text_config)
    updates = {}
    for name in sorted({each.rsplit(".weight.", 1)[0] for each in tensors}):
        try:
            a, b = (tensors.pop(f"{name}.weight.lora_{part}") for part in "ab")
            module = by_name[name]
        except KeyError as error:
            raise ModelError(f"{path}: {name} is incomplete, or not in the model") from error
        if (projection := module.rsplit(".", 1)[-1]) in heads:
            b = unpermuted(b, heads[projection])
        updates[module] = Update(a.T, b.T)
    if tensors or not updates:
        raise ModelError(f"{path}: has tensors other than LoRA's: {join_few(tensors)}")
    rank = next(iter(updates.values())).a.shape[1]
    layers = layers_from(updates, num_layers)
    return Adapter(scale=alpha / rank, num_layers=layers, modules=updates)


def permuted(rows: Matrix, heads: int) -> Matrix:
    """Return rows (out, n) with the halves of each head interleaved: 0, d/2, 1, d/2 + 1, …

    Source: LlamaModel.permute in llama.cpp's conversion/llama.py.
    """
    size = len(rows) // heads
    return rows.reshape(heads, 2, size // 2, -1).swapaxes(1, 2).reshape(rows.shape)


def unpermuted(rows: Matrix, heads: int) -> Matrix:
    """Undo `permuted`."""
    size = len(rows) // heads
    return rows.reshape(heads, size // 2, 2, -1).swapaxes(1, 2).reshape(rows.shape)


def _heads(architecture: str, text_config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of heads of each projection whose rows llama.cpp permutes."""
    if architecture != "llama":
        return {}
    heads = text_config["num_attention_heads"]
    return {"q_proj": heads, "k_proj": text_config.get("num_key_value_heads") or heads}


def _gguf_names(
    modules: Iterable[str], architecture: str, num_layers: int, all_known: bool = True
) -> dict[str, str]:
    """Return llama.cpp's name of each module. Raises ModelError if one has none."""
    import gguf

    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(by_name[architecture], num_layers)
    names, unknown = {}, []
    for module in modules:
        layer, inside = path_in_layer(module)
        name = table.get_name(f"model.layers.{layer}.{inside}")
        if name is None:
            unknown.append(module)
        else:
            names[module] = name
    if unknown and all_known:
        raise ModelError(f"llama.cpp has no name for {join_few(unknown)} of {architecture} models")
    return names
