"""Measure the memory and time of long examples on the shape of Qwen3 0.6B.

    python -m tests.long.long_texts [--tokens 8192] [--layers 28] [--limit GB] [--supervised 2048]

Trains on one example of `--tokens` tokens, the last `--supervised` of which carry loss, within a
memory limit. Prints the predicted and measured peaks, and the second step's seconds per token.
Needs ../shared and some gigabytes of memory; takes minutes.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from unittest.mock import patch

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from tests.long import bench_table
from tests.models import write_chat
from tests.paths import SHARED


def write_example(path: Path, tokens: int, supervised: int) -> Path:
    """Write two equal rows of at least `tokens` tokens; over `supervised` of these carry loss."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(SHARED / "tokenizers" / "qwen3" / "tokenizer.json"))
    text = (SHARED / "chat" / "lf_alpaca_en_demo.jsonl").read_text(encoding="utf-8")
    ids = tokenizer.encode(text).ids
    ids *= tokens // len(ids) + 1
    context, answer = ids[: tokens - supervised], ids[: supervised + 100]
    turns = [("user", tokenizer.decode(context)), ("assistant", tokenizer.decode(answer))]
    return write_chat(path, [turns] * 2)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--limit", type=float, default=24.0)
    parser.add_argument("--supervised", type=int, default=2048)
    parser.add_argument("--steps", type=int, default=1)
    given = parser.parse_args()
    given.supervised = min(given.supervised, given.tokens // 4)
    with tempfile.TemporaryDirectory(prefix="mlxtune-long-") as scratch:
        model, run = Path(scratch) / "model", Path(scratch) / "run"
        shape = bench_table.SHAPES["qwen3-0.6b"] | {"num_hidden_layers": given.layers}
        with patch.dict(bench_table.SHAPES, {"cut": shape}):
            bench_table.write_model(model, "cut")
        data = write_example(Path(scratch) / "data.jsonl", given.tokens, given.supervised)
        options = {
            "model-path": model,
            "data": data,
            "output": run / "adapters.safetensors",
            "max-seq-len": given.tokens,
            "memory-limit": given.limit,
            "max-steps": given.steps,
            "epochs": given.steps,
            "batch-size": 1,
            "val-split": 0,
            "dtype": "float32",
        }
        flags = [str(part) for name, value in options.items() for part in (f"--{name}", value)]
        subprocess.run([sys.executable, "-m", "mlxtune", "train", *flags, "--no-cache"], check=True)
        lines = (run / "checkpoints" / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
        steps = [each for line in lines if (each := json.loads(line))["kind"] == "step"]
        for step in steps:
            rate = 1000 * step["seconds"] / step["tokens"]
            print(f"step {step['step']}: {step['tokens']:,} tokens, {rate:.2f} ms a token")
        shutil.rmtree(run)


if __name__ == "__main__":
    main()
