"""A base model with random weights, made from the tokenizer and config of another."""

from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlxtune.backend.device.device import on_cpu
from mlxtune.config.limits import CONFIG
from mlxtune.core.files.files import copy_file, make_folder, write_json
from mlxtune.core.files.ours import entries
from mlxtune.core.files.sizes import read_value

_HEAD, _GROUP, _BITS = 64, 64, 4
# Quantised products are some 20 times slower than float32 on the CPU; a GPU needs work to do.
_CPU_WIDTH, _GPU_WIDTH = 256, 1024


def write_base(
    like: Path, folder: Path, width: int | None = None, *, quantized: bool = True
) -> None:
    """Write a folder in Qwen 3's shape with seeded weights, `width` wide, as fits the device.

    Weights are in 4 bits if `quantized`, else in bfloat16.
    """
    width = width or (_CPU_WIDTH if on_cpu() else _GPU_WIDTH)
    make_folder(folder)
    for path in entries(like):
        if path.suffix != ".safetensors" and path.name != "config.json":
            copy_file(path, folder / path.name)
    config = read_value(like / "config.json", CONFIG) | {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": width // _HEAD,
        "num_key_value_heads": width // _HEAD // 2,
        "head_dim": _HEAD,
    }
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if quantized:
        nn.quantize(model, group_size=_GROUP, bits=_BITS)
        config["quantization"] = {"group_size": _GROUP, "bits": _BITS}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
