"""Measure the cost of each format: the loss of a model, and the time of products on the CPU.

    python -m tests.long.check_quantized_products --model FOLDER --text FILE

The loss is the mean over the text's tokens, in windows of 256 tokens. Products have a layer's width
and 256 rows, forward and for the gradient; their times are the shortest processor times of
alternating runs, printed as ratios.

Results: docs/quantization.md.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: split
import mlx.core as mx
import mlx.nn as nn
from mlx_lm.utils import load_tokenizer

from mlxtune.backend.models.layers import DequantizedLinear
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.models.quantize import FORMATS
from mlxtune.config.base_options import BaseOptions

_WINDOW, _ROWS, _WIDTHS, _RUNS = 256, 256, (1024, 3072), 3
_MODES = {"4": ("affine", 4), "8": ("affine", 8), "mxfp4": ("mxfp4", 4), "nvfp4": ("nvfp4", 4)}
_MODES |= {"mxfp8": ("mxfp8", 8)}


def loss_of(folder: Path, text: str, name: str | None, *, double_quant: bool = False) -> float:
    """Return a text's loss in nats per token."""
    model = load_base(
        folder, "float32", BaseOptions(quantize=name, double_quant=double_quant)
    ).model
    tokens = load_tokenizer(folder).encode(text)
    windows = [tokens[i : i + _WINDOW] for i in range(0, len(tokens) - 1, _WINDOW)]
    total = 0.0
    for window in windows:
        logits = model(mx.array([window[:-1]]))
        total += nn.losses.cross_entropy(logits, mx.array([window[1:]])).sum().item()
    return total / sum(len(window) - 1 for window in windows)


def seconds(layer: nn.Module, x: mx.array) -> float:
    """Return the processor time of a product and its gradient."""
    began = time.process_time()
    mx.eval(mx.value_and_grad(lambda x: layer(x).sum())(x))
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--text", type=Path, required=True)
    given = parser.parse_args()
    text = given.text.read_text(encoding="utf-8")
    plain = loss_of(given.model, text, None)
    print(f"loss without     {plain:.4f}")
    for name in FORMATS:
        found = loss_of(given.model, text, name)
        print(f"loss {name:<8}    {found:.4f}  {found - plain:+.4f}", flush=True)
    found = loss_of(given.model, text, "nf4", double_quant=True)
    print(f"loss nf4, double {found:.4f}  {found - plain:+.4f}")
    x = mx.random.normal((_ROWS, _WIDTHS[0]))
    for name, (mode, bits) in _MODES.items():
        native = nn.QuantizedLinear(*_WIDTHS, bias=False, bits=bits, mode=mode)
        unpacked = DequantizedLinear(native)
        mx.eval(native.parameters(), unpacked.parameters(), x)
        runs = [(seconds(native, x), seconds(unpacked, x)) for _ in range(_RUNS)]
        ratio = min(run[0] for run in runs) / min(run[1] for run in runs)
        print(
            f"products {name:<6} quantized takes {ratio:.1f} times dequantized's time", flush=True
        )


if __name__ == "__main__":
    main()
