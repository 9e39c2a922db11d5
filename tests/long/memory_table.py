"""Write docs/guide.md's table of memory, as the planner predicts it for models of real shapes.

    python -m tests.long.memory_table

No weights are downloaded or read: planning reads only shapes, which are written from public configs
into the headers of empty files. Plans as for a GPU on any machine. These are predictions, not
measurements.
"""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm import utils

from mlxtune.backend.forward import operations
from mlxtune.backend.memory import shapes
from mlxtune.backend.models import loading
from mlxtune.config import PlanConfig
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import least
from mlxtune.core.steps.memory_terms import BatchLoad
from tests.paths import DOCS

GUIDE = DOCS / "guide.md"
BEGIN, END = "<!-- memory: tests/long/memory_table.py -->", "<!-- end of memory -->"
LENGTHS = (512, 2048, 4096)
# The memory that macOS grants the GPU by default: about two thirds, three quarters from 36 GiB on.
MACS = {gb: gb * 2**30 * (3 / 4 if gb >= 36 else 2 / 3) for gb in (8, 16, 24, 32, 48, 64, 96, 128)}
SPARE = 1.15
GB = 1e9

QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
    "tie_word_embeddings": True,
}
LLAMA = {
    "model_type": "llama",
    "vocab_size": 128256,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-5,
    "rope_theta": 5e5,
    "max_position_embeddings": 131072,
    "tie_word_embeddings": True,
}
GEMMA3 = {
    "model_type": "gemma3_text",
    "vocab_size": 262144,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "max_position_embeddings": 32768,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "num_key_value_heads": 1,
}


def _sizes(hidden: int, layers: int, inner: int, heads: int) -> dict[str, int]:
    return {
        "hidden_size": hidden,
        "num_hidden_layers": layers,
        "intermediate_size": inner,
        "num_attention_heads": heads,
    }


# From each model's config.json.
MODELS: dict[str, dict[str, Any]] = {
    "Qwen3 0.6B": QWEN3 | _sizes(1024, 28, 3072, 16),
    "Gemma 3 1B": GEMMA3 | _sizes(1152, 26, 6912, 4),
    "Llama 3.2 1B": LLAMA | _sizes(2048, 16, 8192, 32),
    "Qwen3 1.7B": QWEN3 | _sizes(2048, 28, 6144, 16),
    "Llama 3.2 3B": LLAMA | _sizes(3072, 28, 8192, 24),
    "Qwen3 4B": QWEN3 | _sizes(2560, 36, 9728, 32),
    "Llama 3.1 8B": LLAMA | _sizes(4096, 32, 14336, 32) | {"tie_word_embeddings": False},
    "Qwen3 8B": QWEN3 | _sizes(4096, 36, 12288, 32) | {"tie_word_embeddings": False},
    "Qwen3 14B": QWEN3 | _sizes(5120, 40, 17408, 40) | {"tie_word_embeddings": False},
    "Qwen3 32B": QWEN3 | _sizes(5120, 64, 25600, 64) | {"tie_word_embeddings": False},
}
QUANTIZED = {"group_size": 64, "bits": 4}


@dataclass(frozen=True)
class Row:
    """The bytes of a model's weights, and the lowest possible peak by length of the example."""

    name: str
    bits: int
    parameters: int
    weights: int
    peaks: Mapping[int, int]

    def cells(self) -> str:
        """Return the row of the table as text."""
        needed = SPARE * self.peaks[2048]
        mac = next((f"{gb} GB" for gb, usable in MACS.items() if usable >= needed), "more")
        peaks = [f"{peak / GB:.1f}" for peak in self.peaks.values()]
        return " | ".join([self.name, f"{self.bits} bits", f"{self.weights / GB:.1f}", *peaks, mac])


def write_headers(folder: Path, config: dict[str, Any], bits: int) -> None:
    """Write a model folder whose weight file has shapes but no content."""
    chosen = config | ({"quantization": QUANTIZED} if bits == 4 else {})
    (folder / "config.json").write_text(json.dumps(chosen))
    kind, arguments = utils._get_classes(config)
    made = kind(arguments.from_dict(config))
    made.set_dtype(mx.bfloat16)
    if bits == 4:
        nn.quantize(made, **QUANTIZED)
    header: dict[str, Any] = {}
    end = 0
    # The weights are never computed: only their shapes are read.
    for name, value in tree_flatten(made.parameters()):
        if name.startswith("lm_head") and config.get("tie_word_embeddings", True):
            continue  # Gemma 3 makes a head that its files lack
        dtype = {mx.bfloat16: "BF16", mx.uint32: "U32"}[value.dtype]
        offsets = [end, end + value.nbytes]
        header[name] = {"dtype": dtype, "shape": list(value.shape), "data_offsets": offsets}
        end += value.nbytes
    text = json.dumps(header | {"__metadata__": {"format": "mlx"}}).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)  # a sparse file, which takes no disk space


def predicted(name: str, bits: int) -> Row:
    """Return the memory of training a model with the default options, one example at a time."""
    with tempfile.TemporaryDirectory() as scratch, holes_allowed():
        folder = Path(scratch)
        write_headers(folder, MODELS[name], bits)
        base = loading.open_base(folder, "auto")
        config = PlanConfig(model_path=scratch)
        execution = Execution(operations.MLX, recompute=True)
        found = shapes.model_shapes(base, config.pipeline_config(), execution.operations.memory)
        # The table is for Macs, wherever it is made.
        found = replace(found, graphs=None)
        peaks = {n: least(found, execution, BatchLoad.single(n, n)).total for n in LENGTHS}
        return Row(name, bits, base.parameters, found.weights, peaks)


def table() -> str:
    lengths = " | ".join(f"{length:,} tokens" for length in LENGTHS)
    head = f"model | stored in | weights | {lengths} | a Mac with"
    lines = [f"| {head} |", f"|{' --- |' * (4 + len(LENGTHS))}"]
    with on_a_gpu():
        lines += [f"| {predicted(name, bits).cells()} |" for name in MODELS for bits in (4, 16)]
    return "\n".join(lines)


@contextmanager
def on_a_gpu() -> Iterator[None]:
    """Make the backend plan as if MLX computed on a GPU."""
    rooms = [name for name, room in sys.modules.items() if hasattr(room, "on_cpu")]
    with ExitStack() as patched:
        for name in rooms:
            patched.enter_context(patch(f"{name}.on_cpu", return_value=False))
        yield


def holes_allowed() -> AbstractContextManager[Any]:
    """Allow sparse weight files, which are refused otherwise."""
    return patch("mlxtune.core.files.tensor_files.check_open")


def guide(text: str) -> str:
    """Return the guide with a new table."""
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n\n{table()}\n\n{END}{after}"


if __name__ == "__main__":
    GUIDE.write_text(guide(GUIDE.read_text(encoding="utf-8")), encoding="utf-8")
