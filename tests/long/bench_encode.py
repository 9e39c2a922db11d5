"""Measure the speed and memory of encoding data, against mlx-lm in the same process.

    python -m tests.long.bench_encode [--memory-rows 1000000]

Speed: both sides encode ../shared/chat/gsm8k_train.jsonl in Qwen3's template, with masks, in turn;
then mlxtune reads its cache. Prints medians. Memory: `mlxtune train` on `--memory-rows` short
generated rows, against a thousand rows.

Results: docs/encoding.md.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import mlxtune.backend  # noqa: F401
from tests.paths import ROOT, SHARED

DATA = SHARED / "chat" / "gsm8k_train.jsonl"
MODEL = SHARED / "tokenizers" / "qwen3"
REPEATS = 3


def seconds(work: Callable[[], object]) -> float:
    started = time.perf_counter()
    work()
    return time.perf_counter() - started


def compare_speed() -> None:
    from mlx_lm.tuner.datasets import ChatDataset
    from mlx_lm.utils import load_tokenizer

    from mlxtune.config import InspectConfig
    from mlxtune.session.dataset import Reader

    tokenizer = load_tokenizer(MODEL)
    rows = [json.loads(line) for line in DATA.read_bytes().splitlines()]

    def by_mlx_lm() -> None:
        dataset = ChatDataset(rows, tokenizer, mask_prompt=True)
        for row in rows:
            dataset.process(row)

    with tempfile.TemporaryDirectory() as folder:
        options = {"model_path": str(MODEL), "data": str(DATA), "cache_dir": folder}

        def reader(**further: object) -> Reader:
            made = Reader(InspectConfig(**options, **further), MODEL)  # type: ignore[arg-type]
            _ = made.encoder  # neither time includes loading the tokenizer
            return made

        theirs, ours = [], []
        for _ in range(REPEATS):
            theirs.append(seconds(by_mlx_lm))
            anew = reader(no_cache=True)
            ours.append(seconds(lambda anew=anew: anew.encode(DATA)))
        reader().encode(DATA)
        cached = []
        for _ in range(REPEATS):
            again = reader()
            cached.append(seconds(lambda again=again: again.encode(DATA)))
    mlx_lm, first, second = map(statistics.median, (theirs, ours, cached))
    ratios = [a / b for a, b in zip(theirs, ours, strict=True)]
    print(f"{len(rows):,} rows, median of {REPEATS}")
    print(f"  mlx-lm ChatDataset(mask_prompt=True)  {mlx_lm:.2f} s")
    print(
        f"  mlxtune                               {first:.2f} s, {mlx_lm / first:.2f} times as fast"
    )
    print(f"    each pair: {', '.join(f'{ratio:.2f}' for ratio in ratios)}")
    print(
        f"  mlxtune from the cache                {second:.2f} s, {first / second:.0f} times faster"
    )


def write_rows(path: Path, count: int) -> Path:
    with path.open("w") as file:
        for i in range(count):
            question, answer = f"What is {i} + {7 * i}?", f"It is {8 * i}."
            messages = [
                {"role": "user", "content": question},
                {"role": "assistant", "content": answer},
            ]
            file.write(json.dumps({"messages": messages}) + "\n")
    return path


def peak_gb(data: Path, folder: Path) -> float:
    """Return the peak resident memory of a run of three steps in a separate process."""
    code = (
        "from pathlib import Path; import resource, sys; from mlxtune.commands.train import train; "
        "from mlxtune import TrainConfig; "
        f"train(TrainConfig(model_path={str(ROOT / 'data' / 'demo-qwen3')!r}, data={str(data)!r}, "
        f"output={str(folder / 'adapters.safetensors')!r}, no_cache=True, max_steps=3, "
        "val_rows=100, quiet=True)); "
        # On Linux, ru_maxrss is the parent's peak if that was larger.
        "status = Path('/proc/self/status'); "
        "print(status.read_text().partition('VmHWM:')[2].split()[0] if status.exists() "
        "else resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024)"
    )
    out = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return int(out.stdout.split()[-1]) * 1024 / 1e9


def compare_memory(count: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        few = peak_gb(write_rows(folder / "few.jsonl", 1000), folder)
        started = time.perf_counter()
        many = peak_gb(write_rows(folder / "many.jsonl", count), folder)
        took = time.perf_counter() - started
    print(f"peak resident memory: {few:.3f} GB with 1,000 rows, {many:.3f} GB with {count:,}: ")
    print(f"  {(many - few) * 1000:.0f} MB more; {took:.0f} s for the run")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--memory-rows", type=int, default=0)
    rows = parser.parse_args().memory_rows
    compare_speed()
    if rows:
        compare_memory(rows)


if __name__ == "__main__":
    main()
