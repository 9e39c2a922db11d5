"""Measure the memory of each worker that shares a model, against one machine with all of it.

    python -m tests.long.split_memory [--workers 2] [--shape qwen3-0.6b] [--execution gpu|auto]

Takes a step of 4 rows of WikiSQL on a model with random weights. The workers compute as on a GPU,
and so does the one machine unless `--execution` is auto. Needs ../shared.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from mlxtune.backend.device import memory
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.models.loading import open_base, read_weights
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.workers.group import Workers
from mlxtune.backend.workers.split import split_base
from mlxtune.config import DataConfig, InstructConfig
from mlxtune.session.dataset import Reader, load_dataset
from tests.launch import run
from tests.long.bench_table import SHAPES, write_model
from tests.paths import SHARED


def work(folder: Path, kind: str) -> None:
    """Take a step on a model, or on this worker's part of it; print the peaks and the loss."""
    workers = Workers.launched(tensor=True)
    memory.set_limits(100.0)
    base = open_base(folder, "float32")
    if workers.split_model:
        base = split_base(base, workers.group)
    read_weights(base)
    loaded = memory.peak_bytes()
    config = DataConfig(
        str(folder), (str(SHARED / "chat" / "wikisql_train.jsonl"),), no_cache=True, quiet=True
    )
    corpus = load_dataset(config, Reader(config, folder)).corpus
    step = [example for i in range(4) for example in corpus.row(i)]
    execution = best_execution(base.parameters, base.dtype, kind)
    pipeline = InstructPipeline(
        base.model, InstructConfig(lora_rank=8), execution=execution, workers=workers
    )
    memory.release()
    memory.forget_peak()
    result = pipeline.train_batch(step, step=1)
    found = {"loaded": loaded, "step": memory.peak_bytes(), "loss": result.avg_loss}
    print(f"found: {json.dumps(found)}", flush=True)


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--shape", choices=SHAPES, default="qwen3-0.6b")
    parser.add_argument("--execution", choices=("gpu", "auto"), default="gpu")
    parser.add_argument("--model", type=Path, help="internal: the model to take a step on")
    given = parser.parse_args()
    if given.model is not None:
        work(given.model, "gpu" if Workers.launched().size > 1 else given.execution)
        return
    with tempfile.TemporaryDirectory(prefix="mlxtune-split-") as scratch:
        model = Path(scratch) / "model"
        write_model(model, given.shape)
        command = ["-m", "tests.long.split_memory", "--model", model, "--execution"]
        alone = subprocess.run(
            [sys.executable, *map(str, command), given.execution],
            check=True,
            capture_output=True,
            text=True,
        ).stdout
        together = run(given.workers, [*command, "gpu"], Path(scratch) / "log", timeout=1800)
    (one,), parts = _found(alone), _found(together)
    for what in ("loaded", "step"):
        shares = ", ".join(f"{each[what] / 1e9:.2f}" for each in parts)
        largest = max(each[what] for each in parts) / one[what]
        alone_gb = one[what] / 1e9
        print(
            f"{what}: {shares} GB on {given.workers} workers, {alone_gb:.2f} on one: {largest:.2f}"
        )
    print(f"loss: {parts[0]['loss']:.6f} and {one['loss']:.6f}")


def _found(text: str) -> list[dict[str, float]]:
    lines = [line.partition("found: ")[2] for line in text.splitlines() if "found: " in line]
    if not lines:
        raise SystemExit(text)
    return [json.loads(line) for line in lines]


if __name__ == "__main__":
    main()
