"""Measure how a step's time divides into parts, for Qwen3-0.6B's shape and Alpaca rows on the CPU.

    python -m tests.long.profile_step [--execution gpu] [--shape small] [--out docs/measured]

Takes three minutes. The profiler slows Python's calls but not the kernels, so the share of the work
between kernels (`everything else`) is slightly too large.

With `--execution gpu`, MLX computes a step in one evaluation, which a Python profiler cannot
divide: the parts are timed alone in the step's shapes (`step_parts.py`), and `everything else` is
the rest of the step's time. This takes ten minutes.

Results: docs/performance.md.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InspectConfig, InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.order import shuffled_steps
from mlxtune.session.dataset import Reader, load_dataset
from tests.long.bench_table import CASES, SHAPES, write_data, write_model
from tests.long.step_parts import StepParts

Steps = Sequence[Sequence[Example]]

# The functions of each part, by file and name. The time of a function excludes the functions that
# it calls.
PARTS = {
    "projections": ("products.py", ("forward", "backward")),
    "head": ("products.py", ("_loss_and_gradient",)),
    "head, softmax": ("kernels.py", ("online_softmax_",)),
    "attention": ("attention.py", ()),
    "attention, softmax": ("kernels.py", ("softmax_", "softmax_gradient_")),
    "LoRA": ("products.py", ("update_gradients", "add_update")),
    "LoRA, added": ("kernels.py", ("add_product_",)),
    "widening stored weights": ("kernels.py", ("widen",)),
    "norms, activations, rotary": ("kernels.py", ()),
    "new arrays": ("arrays.py", ("empty",)),
    "MLX's operations": ("~", ("<built-in method numpy.array>",)),
    "waiting for the other thread": ("~", ("<method 'acquire' of '_thread.lock' objects>",)),
}


def part_of(file: str, function: str) -> str:
    """Return the part that a function belongs to."""
    for part, (name, functions) in PARTS.items():
        if Path(file).name == name and (not functions or function in functions):
            return part.partition(",")[0] if part.startswith(("head", "att", "LoRA")) else part
    return "everything else"


def profiled(pipeline: InstructPipeline, steps: Steps) -> dict[str, float]:
    """Return the seconds of each part of the steps, from Python's profiler."""
    profile = cProfile.Profile()
    for examples in steps:
        profile.enable()
        pipeline.train_batch(examples)
        profile.disable()
    seconds: dict[str, float] = defaultdict(float)
    for (file, _, function), (_, _, own, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        seconds[part_of(file, function)] += own
    return seconds


def timed_alone(pipeline: InstructPipeline, steps: Steps) -> dict[str, float]:
    """Return the seconds of each part of the steps, timed alone, and the remaining seconds."""
    parts, total = StepParts(pipeline), 0.0
    for examples in steps:
        started = time.perf_counter()
        pipeline.train_batch(examples)
        total += time.perf_counter() - started
        parts.add(examples)
    return {**parts.seconds, "everything else": max(total - parts.seconds.total(), 0)}


def main() -> None:
    """Profile the steps after the first, which does one-time work."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/measured"))
    parser.add_argument("--execution", choices=("auto", "gpu"), default="auto")
    parser.add_argument("--shape", choices=SHAPES, default=CASES["alpaca"].shape)
    parser.add_argument("--steps", type=int, default=4)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxtune-profile-") as name:
        folder, data = Path(name) / given.shape, Path(name) / "alpaca.jsonl"
        write_model(folder, given.shape)
        write_data(data, CASES["alpaca"])
        options = InspectConfig(str(folder), str(data), max_seq_len=512, val_split=0, no_cache=True)
        corpus = load_dataset(options, Reader(options, folder)).corpus
        config = InstructConfig(lora_rank=8, targets=("q_proj", "v_proj"))
        base = load_base(folder, "float32")
        execution = best_execution(base.parameters, kind=given.execution)
        execution = replace(execution, micro_batch_tokens=1024)
        pipeline = InstructPipeline(base.model, config, execution=execution)
        order = shuffled_steps(corpus.num_rows, 4, 42, 1)[: given.steps + 1]
        first, *steps = [[each for row in rows for each in corpus.row(row)] for rows in order]
        pipeline.train_batch(first)
        measure = timed_alone if given.execution == "gpu" else profiled
        seconds = measure(pipeline, steps)
    tokens = sum(len(example) for examples in steps for example in examples)
    parts = dict(sorted(seconds.items(), key=lambda kv: -kv[1]))
    given.out.mkdir(parents=True, exist_ok=True)
    name = "step-gpu.json" if given.execution == "gpu" else "step.json"
    (given.out / name).write_text(json.dumps({"tokens": tokens, "seconds": parts}, indent=1) + "\n")
    total = sum(seconds.values())
    print(f"{tokens:,} tokens in {len(steps)} steps, {total:.1f} s")
    for part, took in parts.items():
        print(f"{part:<45}{took:7.2f} s {took / total:6.1%}")


if __name__ == "__main__":
    main()
