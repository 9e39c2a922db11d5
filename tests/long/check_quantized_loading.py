"""Measure the memory of loading a model of Qwen3-0.6B's shape, with and without --quantize.

    python -m tests.long.check_quantized_loading [--model FOLDER] [--json FILE]

Random weights in bfloat16 are written to a temporary folder unless a folder is named. Each format
is loaded in a separate process. The printed resident memory is the process's peak, which the kernel
reports, less the peak before the weights are read.

Results: docs/quantization.md.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

from mlxtune.config.base_options import BaseOptions

SHAPE = {
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rope_theta": 1e6,
    "max_position_embeddings": 40960,
}
FORMATS = ("none", "4", "8", "mxfp4", "nvfp4", "mxfp8", "nf4", "nf4+")


def load(folder: str, name: str) -> dict[str, int]:
    """Load a model in this process; return the bytes of the weights, MLX's peak and RSS growth."""
    import mlxtune.backend  # noqa: F401, I001
    import mlx.core as mx
    from mlx.utils import tree_flatten

    from mlxtune.backend.device import memory
    from mlxtune.backend.models import loading

    memory.set_limits(1e3)
    quantize = None if name == "none" else name.removesuffix("+")
    double = name.endswith("+")
    base = loading.open_base(
        Path(folder), "auto", BaseOptions(quantize=quantize, double_quant=double)
    )
    weights = sum(value.nbytes for _, value in tree_flatten(base.model.parameters()))
    before = memory.peak_rss()
    mx.reset_peak_memory()
    loading.read_weights(base)
    return {"weights": weights, "mlx": mx.get_peak_memory(), "resident": memory.peak_rss() - before}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="")
    parser.add_argument("--json", default="")
    parser.add_argument("--one", default="")
    given = parser.parse_args()
    if given.one:
        print(json.dumps(load(given.model, given.one)))
        return
    with tempfile.TemporaryDirectory(prefix="mlxtune-loading-") as scratch:
        folder = given.model
        if not folder:
            from tests.models import write_model

            folder = str(write_model(Path(scratch) / "model", "qwen3", dtype="bfloat16", **SHAPE))
        found = {}
        for name in FORMATS:
            command = [sys.executable, "-m", "tests.long.check_quantized_loading"]
            command += ["--model", folder, "--one", name]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            found[name] = json.loads(done.stdout)
            sizes = "  ".join(f"{what} {size / 1e9:6.3f} GB" for what, size in found[name].items())
            print(f"{name:<6}  {sizes}", flush=True)
    if given.json:
        Path(given.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
