"""A LoRA adapter as GGUF, for llama.cpp and tools built on it.

Names, shapes and keys are those of llama.cpp's convert_lora_to_gguf.py:
`blk.N.attn_q.weight.lora_a` (rank, in) and `.lora_b` (out, rank) in numpy's order, scaled by
`adapter.lora.alpha / rank`. The rows of q_proj and k_proj of Llama models are permuted like the
base model's: llama.cpp's rotary embedding pairs neighbours instead of halves.
"""

from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np

from mlxtune.backend.adapters.formats.adapter import (
    Adapter,
    Matrix,
    Update,
    path_in_layer,
    updates_in,
)
from mlxtune.backend.model.loading import BaseModel
from mlxtune.core.machine.files import as_output_error
from mlxtune.core.text import join_few
from mlxtune.errors import ModelError

WEIGHTS = "adapter.gguf"
# The model types of mlx-lm for which llama.cpp has the same name, less `_text`.
ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma3_text")


def write_gguf(adapter: Adapter, base: BaseModel, folder: Path) -> None:
    """Write an adapter as GGUF.

    Raises ModelError for what llama.cpp cannot hold, and OutputError.
    """
    if base.model_type not in ARCHITECTURES:
        raise ModelError(
            f"--format gguf supports {', '.join(ARCHITECTURES)}, not {base.model_type}: "
            "use --format peft and llama.cpp's convert_lora_to_gguf.py"
        )
    try:
        import gguf
    except ImportError as error:
        raise ModelError(
            "--format gguf needs the gguf package: pip install 'mlxtune[gguf]'"
        ) from error
    adapter.check_plain("GGUF")
    names, heads = _gguf_names(adapter.modules, base), _heads(base)
    if unknown := adapter.modules.keys() - names.keys():
        raise ModelError(
            f"llama.cpp has no name for {join_few(sorted(unknown))} of {base.model_type} models"
        )
    writer = gguf.GGUFWriter(folder / WEIGHTS, _architecture(base))
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
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(update.a.T))
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def read_gguf(folder: Path, modules: Iterable[str], base: BaseModel) -> Adapter:
    """Return the adapter of a file that `write_gguf` wrote; `modules` are the base model's."""
    import gguf

    reader = gguf.GGUFReader(folder / WEIGHTS)
    alpha = float(reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
    tensors = {each.name: np.array(each.data, np.float32) for each in reader.tensors}
    names, heads = _gguf_names(modules, base), _heads(base)
    updates = updates_in(folder / WEIGHTS, tensors, names)
    for module, update in updates.items():
        if (projection := module.rsplit(".", 1)[-1]) in heads:
            half = update.b.shape[1] // heads[projection] // 2
            updates[module] = Update(update.a, _permuted(update.b.T, heads[projection], half).T)
    adapter = Adapter(1.0, updates)
    return replace(adapter, scale=alpha / adapter.rank)


def _permuted(rows: Matrix, heads: int, parts: int) -> Matrix:
    """Return rows (out, n) with the parts of each head interleaved: for two, 0, d/2, 1, d/2 + 1, …

    As many parts as half the head's size undo that.

    Source: LlamaModel.permute in llama.cpp's conversion/llama.py.
    """
    size = len(rows) // heads
    return rows.reshape(heads, parts, size // parts, -1).swapaxes(1, 2).reshape(rows.shape)


def _architecture(base: BaseModel) -> str:
    return base.model_type.removesuffix("_text")


def _heads(base: BaseModel) -> dict[str, int]:
    """Return the number of heads of each projection whose rows llama.cpp permutes."""
    if base.model_type != "llama":
        return {}
    heads = base.text_config["num_attention_heads"]
    return {"q_proj": heads, "k_proj": base.text_config.get("num_key_value_heads") or heads}


def _gguf_names(modules: Iterable[str], base: BaseModel) -> dict[str, str]:
    """Return llama.cpp's name for the weight of each module that has one there."""
    import gguf

    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    table = gguf.get_tensor_name_map(by_name[_architecture(base)], base.num_layers)
    names = {}
    for module in modules:
        layer, inside = path_in_layer(module)
        if name := table.get_name(f"model.layers.{layer}.{inside}"):
            names[module] = f"{name}.weight"
    return names
