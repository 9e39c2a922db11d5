"""A LoRA adapter as GGUF, for llama.cpp and tools built on it.

Names, shapes and keys are as llama.cpp's convert_lora_to_gguf.py writes them:
`blk.N.attn_q.weight.lora_a` (rank, in) and `.lora_b` (out, rank) in numpy's order, scaled by
`adapter.lora.alpha / rank`. Rows and columns are permuted like the base model's (see `orders`). For
a stack of experts, such as `blk.N.ffn_gate_exps`, the first axis of both tensors numbers the
experts.
"""

import re
from collections.abc import Iterable
from contextlib import closing
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters.file_formats.adapter import (
    Adapter,
    WeightUpdate,
    path_in_layer,
    updates_in,
)
from mlxtune.backend.models.loading import BaseModel
from mlxtune.core.files.writing import as_output_error
from mlxtune.core.formatting import join_few
from mlxtune.core.machine.installation import installs_extra, pip_command
from mlxtune.errors import ModelError

WEIGHTS = "adapter.gguf"
# llama.cpp's names for the model types of mlx-lm.
ARCHITECTURES = {
    **{name: name for name in ("llama", "qwen2", "qwen3", "gemma2", "gemma3", "gemma4")},
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "gpt_oss": "gpt-oss",
    "mixtral": "llama",
    "olmoe": "olmoe",
    "qwen2_moe": "qwen2moe",
    "qwen3_moe": "qwen3moe",
    "qwen3_5": "qwen35",
    "qwen3_5_moe": "qwen35moe",
}
# mlx-lm's names for a stack of experts, and the name that the gguf package knows.
_STACK = re.compile(r"(?:mlp|block_sparse_moe)\.(?:switch_mlp|experts)\.")
_GGUF_STACK = "mlp.experts."
Order = npt.NDArray[np.intp]


def write_gguf(adapter: Adapter, base: BaseModel, folder: Path) -> None:
    """Write an adapter as GGUF.

    Raises ModelError if llama.cpp does not support the adapter, and OutputError if writing fails.
    """
    otherwise = "use --format peft and llama.cpp's convert_lora_to_gguf.py"
    check_supported(base.model_type, "--format gguf", otherwise)
    import gguf

    adapter.check_plain("GGUF", experts=True)
    names = gguf_names(adapter.modules, base)
    if unknown := adapter.modules.keys() - names.keys():
        raise ModelError(
            f"llama.cpp has no name for {join_few(sorted(unknown))} of {base.model_type} models"
        )
    writer = gguf.GGUFWriter(folder / WEIGHTS, ARCHITECTURES[base.model_type])
    with as_output_error(folder / WEIGHTS, "--output"), closing(writer):
        writer.add_type(gguf.GGUFType.ADAPTER)
        writer.add_string(gguf.Keys.Adapter.TYPE, "lora")
        writer.add_float32(gguf.Keys.Adapter.LORA_ALPHA, adapter.scale * adapter.rank)
        writer.add_quantization_version(gguf.GGML_QUANT_VERSION)
        for path, name in names.items():
            update = adapter.modules[path]
            a, b = update.a, update.b
            if not update.is_of_experts:
                columns, rows = orders(path, update, base)
                a, b = a[columns].T, b[:, rows].T
            writer.add_tensor(f"{name}.lora_a", np.ascontiguousarray(a))
            writer.add_tensor(f"{name}.lora_b", np.ascontiguousarray(b))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()


def check_supported(model_type: str, option: str, otherwise: str) -> None:
    """Raise ModelError if a model type has no known GGUF names, or if gguf is not installed."""
    if model_type not in ARCHITECTURES:
        architectures = ", ".join(ARCHITECTURES)
        raise ModelError(f"{option} supports {architectures}, not {model_type}: {otherwise}")
    if find_spec("gguf") is None:
        raise ModelError(f"{option} needs the gguf package: {installs_extra('gguf')}")


def read_gguf(folder: Path, modules: Iterable[str], base: BaseModel) -> Adapter:
    """Read a file that `write_gguf` wrote; `modules` are the base model's module paths."""
    import gguf

    reader = gguf.GGUFReader(folder / WEIGHTS)
    alpha = float(reader.fields[gguf.Keys.Adapter.LORA_ALPHA].contents())
    tensors = {tensor.name: np.array(tensor.data, np.float32) for tensor in reader.tensors}
    updates = updates_in(folder / WEIGHTS, tensors, gguf_names(modules, base))
    for module, update in updates.items():
        if update.is_of_experts:
            continue
        columns, rows = map(np.argsort, orders(module, update, base))
        updates[module] = WeightUpdate(update.a[columns], update.b[:, rows])
    adapter = Adapter(1.0, updates)
    return replace(adapter, scale=alpha / adapter.rank)


def orders(module: str, update: WeightUpdate, base: BaseModel) -> tuple[Order, Order]:
    """Return the orders in which llama.cpp stores the columns and rows of a module's weight.

    llama.cpp interleaves the halves of each Llama head, because its rotary embeddings pair
    neighbouring entries. llama.cpp also tiles the value heads of the gated delta rule (k0 k1 k0
    k1), which mlx-lm groups by key head (k0 k0 k1 k1).

    Source: LlamaModel.permute and _LinearAttentionVReorderBase in llama.cpp's conversion/.
    """
    columns, rows = np.arange(len(update.a)), np.arange(update.b.shape[1])
    name = module.rsplit(".", 1)[-1]
    if ARCHITECTURES[base.model_type] == "llama" and name in ("q_proj", "k_proj"):
        heads = _num_heads(module, len(rows), base)
        rows = rows.reshape(heads, 2, -1).swapaxes(1, 2).ravel()
    if ".linear_attn." in module:
        attention = _parent(module, base)
        keys, values = attention.num_k_heads, attention.num_v_heads

        def tiled(order: Order) -> Order:
            return order.reshape(keys, values // keys, -1).swapaxes(0, 1).ravel()

        if name == "out_proj":
            columns = tiled(columns)
        else:
            # Queries and keys come before the values.
            first = 2 * keys * attention.head_k_dim if name == "in_proj_qkv" else 0
            rows[first:] = tiled(rows[first:])
    return columns, rows


def _parent(module: str, base: BaseModel) -> Any:
    return dict(base.model.named_modules())[module.rpartition(".")[0]]


def _num_heads(module: str, rows: int, base: BaseModel) -> int:
    """Return a projection's number of heads, from the head size of its attention module.

    The config may state a different number in a part that mlx-lm does not read.
    """
    head_dim = getattr(_parent(module, base), "head_dim", 0)
    if not isinstance(head_dim, int) or head_dim <= 0 or head_dim % 2 or rows % head_dim:
        raise ModelError(f"{module} has {rows} rows, which are not whole heads of {head_dim}")
    return rows // head_dim


def gguf_names(modules: Iterable[str], base: BaseModel) -> dict[str, str]:
    """Map modules to llama.cpp's names for their weights; omit modules that llama.cpp lacks."""
    import gguf

    by_name = {name: arch for arch, name in gguf.MODEL_ARCH_NAMES.items()}
    architecture = ARCHITECTURES[base.model_type]
    if architecture not in by_name:
        upgrade = pip_command("install", "--upgrade gguf")
        raise ModelError(f"this gguf package lacks {architecture}: {upgrade}")
    table = gguf.get_tensor_name_map(by_name[architecture], base.num_layers)
    names = {}
    for module in modules:
        layer, inside = path_in_layer(module)
        inside = _STACK.sub(_GGUF_STACK, inside)
        if name := table.get_name(f"model.layers.{layer}.{inside}"):
            names[module] = f"{name}.weight"
    return names
