"""Say where the time of a step goes, on the Qwen3-0.6B shape and Alpaca rows, on the CPU.

    python -m tests.long.profile_step [--out docs/measured]

Takes three minutes. The profiler lengthens calls of Python, not what they compute; the shares of
work done between them (`everything else`) are a little too large.

Results: docs/performance.md.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import tempfile
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from mlxtune.backend.model.loading import load_base
from mlxtune.backend.step.operations import best_execution
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InspectConfig, InstructConfig
from mlxtune.core.steps.order import shuffled_steps
from mlxtune.setup.dataset import Reader, load_dataset
from tests.long.bench_table import CASES, write_data, write_model

# What each function of ours does by itself, by file and name; what is called takes its own time.
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
    """Return what a function belongs to."""
    for part, (name, functions) in PARTS.items():
        if Path(file).name == name and (not functions or function in functions):
            return part.partition(",")[0] if part.startswith(("head", "att", "LoRA")) else part
    return "everything else"


def main() -> None:
    """Profile the steps after the first, which finds out how the model may be run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path("docs/measured"))
    out = parser.parse_args().out
    case = CASES["alpaca"]
    with tempfile.TemporaryDirectory(prefix="mlxtune-profile-") as name:
        folder, data = Path(name) / case.shape, Path(name) / "alpaca.jsonl"
        write_model(folder, case.shape)
        write_data(data, case)
        options = InspectConfig(str(folder), str(data), max_seq_len=512, val_split=0, no_cache=True)
        corpus = load_dataset(options, Reader(options, folder)).corpus
        config = InstructConfig(lora_rank=8, targets=("q_proj", "v_proj"))
        base = load_base(folder, "float32")
        execution = replace(best_execution(base.parameters), micro_batch_tokens=1024)
        model = base.model
        pipeline = InstructPipeline(model, config, execution=execution)
        profile = cProfile.Profile()
        tokens = 0
        for step, rows in enumerate(shuffled_steps(corpus.num_rows, 4, 42, 1)[:5]):
            examples = [example for row in rows for example in corpus.row(row)]
            if step:
                profile.enable()
                tokens += sum(map(len, examples))
            pipeline.train_batch(examples)
            profile.disable()
    seconds: dict[str, float] = defaultdict(float)
    for (file, _, function), (_, _, own, *_) in pstats.Stats(profile).stats.items():  # type: ignore[attr-defined]
        seconds[part_of(file, function)] += own
    found = {"tokens": tokens, "seconds": dict(sorted(seconds.items(), key=lambda kv: -kv[1]))}
    out.mkdir(parents=True, exist_ok=True)
    (out / "step.json").write_text(json.dumps(found, indent=1) + "\n")
    total = sum(seconds.values())
    for part, took in found["seconds"].items():  # type: ignore[attr-defined]
        print(f"{part:<30}{took:7.2f} s {took / total:6.1%}")


if __name__ == "__main__":
    main()
