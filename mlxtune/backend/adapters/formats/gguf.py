"""A LoRA adapter as GGUF, for llama.cpp and tools built on it.

Names, shapes and keys are those of llama.cpp's convert_lora_to_gguf.py:
`blk.N.attn_q.weight.lora_a` (rank, in) and `.lora_b` (out, rank) in numpy's order, scaled by
`adapter.lora.alpha / rank`. The rows of q_proj and k_proj of Llama models are permuted like the
base model's: llama.cpp's rotary embedding pairs neighbours instead of halves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.adapters.formats.adapter import (
    Adapter,
    Matrix,
    Update,
    path_in_layer,
)
from mlxtune.core.machine.files import as_output_error
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError, one_line

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
    if model_type not in ARCHITECTURES:
        raise ModelError(
            f"--format gguf supports {', '.join(ARCHITECTURES)}, not {model_type}: "
            "use --format peft and llama.cpp's convert_lora_to_gguf.py"
        )
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "--format gguf needs the gguf package: pip install 'mlxtune[gguf]'"
        ) from error
    adapter.check_plain("GGUF")
    if adapter.is_dora:
        raise ModelError(
            "GGUF cannot hold DoRA's magnitudes: use mlxtune fuse, and convert the fused model"
        )
    architecture = ARCHITECTURES[model_type]
    names = _gguf_names(adapter.modules, architecture, num_layers)
    if unknown := adapter.modules.keys() - names.keys():
        raise ModelError(
            f"llama.cpp has no name for {join_few(sorted(unknown))} of {architecture} models"
        )
    heads = _heads(architecture, text_config)
    writer = gguf.GGUFWriter(folder / WEIGHTS, architecture)
    with as_output_error(folder / WEIGHTS, "--output"), closing(writer):
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.scale * adapter.rank)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for path, name in names.items():
            update = adapter.modules[path]
            b = update.b.T
            if (projection := path.rsplit(".", 1)[-1]) in heads:
                b = _permuted(b, heads[projection], 2)
            writer.add_tensor(f"{name}.weight.lora_a", np.ascontiguousarray(update.a.T))
            writer.add_tensor(f"{name}.weight.lora_b", np.ascontiguousarray(b))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


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
    names = _gguf_names(modules, architecture, num_layers)
    by_name = {name: module for module, name in names.items()}
    heads = _heads(architecture, text_config)
    updates = {}
    for name in sorted({each.rsplit(".weight.", 1)[0] for each in tensors}):
        try:
            a, b = (tensors.pop(f"{name}.weight.lora_{part}") for part in "ab")
            module = by_name[name]
        except KeyError as error:
            raise ModelError(f"{path}: {name} is incomplete, or not in the model") from error
        if (projection := module.rsplit(".", 1)[-1]) in heads:
            b = _permuted(b, heads[projection], b.shape[0] // heads[projection] // 2)
        updates[module] = Update(a.T, b.T)
    if tensors or not updates:
        raise ModelError(f"{path}: has tensors other than LoRA's: {join_few(tensors)}")
    rank = next(iter(updates.values())).a.shape[1]
    return Adapter(alpha / rank, updates)


def _permuted(rows: Matrix, heads: int, parts: int) -> Matrix:
    """Return rows (out, n) with the parts of each head interleaved: for two, 0, d/2, 1, d/2 + 1, …

    As many parts as half the head's size undo that.

    Source: LlamaModel.permute in llama.cpp's conversion/llama.py.
    """
    size = len(rows) // heads
    return rows.reshape(heads, parts, size // parts, -1).swapaxes(1, 2).reshape(rows.shape)


def _heads(architecture: str, text_config: Mapping[str, Any]) -> dict[str, int]:
    """Return the number of heads of each projection whose rows llama.cpp permutes."""
    if architecture != "llama":
        return {}
    heads = text_config["num_attention_heads"]
    return {"q_proj": heads, "k_proj": text_config.get("num_key_value_heads") or heads}


def _gguf_names(modules: Iterable[str], architecture: str, num_layers: int) -> dict[str, str]:
    """Return llama.cpp's name of each module that has one there."""
    import gguf

    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(by_name[architecture], num_layers)
    names = {}
    for module in modules:
        layer, inside = path_in_layer(module)
        if name := table.get_name(f"model.layers.{layer}.{inside}"):
            names[module] = name
    return names
