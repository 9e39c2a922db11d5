"""Make each file operation of a run fail in turn, resume, and compare with an undisturbed run.

    python -m tests.long.check_faults [--every 1] [--whole]

A tiny model is trained for two epochs, many times. Each time, one operation on the run's folder
(opening, writing, flushing, renaming, making a folder, removing) fails with ENOSPC, EIO or EACCES,
or the process dies at it. The newest valid checkpoint must load, and the resumed run must produce
the same adapter bytes and metrics. With --whole, the run is a whole `mlxtune train` with PiSSA and
unequal ranks, which also writes an adapter, a verdict and a page; in the end it must pass `mlxtune
verify`. tests/core/training/test_resume.py does the same in seconds, with a pipeline that computes
nothing.

Results: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import operator
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxtune import TrainConfig, train, verify
from mlxtune import resume as resume_run
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig, InstructTrainingConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.run.progress import same_except_measurements
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import OutputError
from tests.faults import KINDS, Crash, FaultyDisk
from tests.long.check_kills import metrics_of
from tests.models import VOCAB_SIZE, sums, write_chat, write_model


def corpus() -> list[Example]:
    """Return ten rows of 6 to 12 tokens."""
    draw = np.random.default_rng(0)
    rows = []
    for row in range(1, 11):
        tokens = draw.integers(3, VOCAB_SIZE, draw.integers(6, 13)).astype(np.int32)
        mask = np.ones(len(tokens), dtype=np.uint8)
        rows.append(Example(row, tokens, mask))
    return rows


def run(model: Path, folder: Path, *, resume: bool = False) -> tuple[bytes, list[Any]]:
    """Train, or resume; return the adapter's bytes and the records."""
    settings = InstructConfig(lora_rank=2, targets=("all",), dropout=0.1)
    pipeline = InstructPipeline(load_base(model, "float32").model, settings)
    config = InstructTrainingConfig(
        epochs=2, batch_size=3, checkpoint_dir=str(folder), save_steps=2, keep=2
    )
    trainer = InstructTrainer(pipeline, corpus(), config)
    trainer.train(resume=find_resume_point(folder) if resume else None)
    adapter = (trainer.best_folder / "adapters.safetensors").read_bytes()
    return adapter, trainer.progress


def run_whole(model: Path, folder: Path, *, resume: bool = False) -> tuple[bytes, list[Any]]:
    """Do the same as `run`, with `mlxtune train`."""
    adapter, chat = folder / "adapters.safetensors", model.parent / "chat.jsonl"
    lora: dict[str, Any] = {"rank": 2, "init": "pissa", "target_rank": ("q_proj=4",)}
    config = TrainConfig(
        *(str(model), (str(chat),)),
        **{"output": str(adapter), "epochs": 2, "batch_size": 3, "save_steps": 2},
        **{"samples": 1, "dropout": 0.1, "quiet": True, **lora},
    )
    if not resume:
        train(config)
    elif find_resume_point(config.checkpoint_path) is None:
        train(replace(config, overwrite=True))
    else:
        resume_run(folder)
    if resume and (failed := [each for each in verify(folder).checks if not each.ok]):
        raise AssertionError(f"{folder}: {failed}")
    return adapter.read_bytes(), metrics_of(folder)


def bury(folder: Path) -> None:
    """Close this process's files in a folder, as the kernel does when a process dies."""
    theirs = {(found.st_dev, found.st_ino) for found in map(Path.stat, folder.rglob("*"))}
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        with suppress(OSError):
            found = os.fstat(int(name))
            if (found.st_dev, found.st_ino) in theirs:
                os.close(int(name))


def check(
    every: int, scratch: Path, *, whole: bool, kinds: Iterable[str] = KINDS
) -> tuple[Counter[str], list[str]]:
    """Fail each operation, or each `every`-th; return how the runs ended, and the failures."""
    go, agree = (run_whole, operator.eq) if whole else (run, same_except_measurements)
    model = write_model(scratch / "model", "qwen3")
    write_chat(scratch / "chat.jsonl", sums(12))
    adapter, records = go(model, scratch / "whole")
    ended: Counter[str] = Counter()
    failures: list[str] = []
    for kind in kinds:
        for fails_at in range(1, 10_000, every):
            folder = scratch / f"{kind}-{fails_at}"
            with pytest.MonkeyPatch.context() as monkeypatch:
                disk = FaultyDisk(monkeypatch, fails_at, KINDS[kind], within=folder)
                try:
                    go(model, folder)
                    ended[f"{kind}: went on to the end"] += 1
                except (Crash, OutputError) as error:
                    ended[f"{kind}: ended by {type(error).__name__}"] += 1
            bury(folder)
            found, after = go(model, folder, resume=True)
            if found != adapter or not agree(after, records):
                failures.append(f"{folder}: another result")
            if not disk.failed:
                break
            sys.stderr.write(f"\r{kind} {fails_at} ")
    return ended, failures


def main() -> None:
    """Fail the operations and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--every", type=int, default=1, help="fail only every N-th operation")
    parser.add_argument("--whole", action="store_true", help="run all of mlxtune train")
    given = parser.parse_args()
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="mlxtune-faults-") as scratch:
        ended, failures = check(given.every, Path(scratch), whole=given.whole)
    print(f"\n{sum(ended.values())} runs in {time.monotonic() - began:.0f} s")
    for how, count in ended.items():
        print(f"  {count:5} {how}")
    print("\n".join(failures) or "all resumed to the same adapter and metrics")
    sys.exit(bool(failures))


if __name__ == "__main__":
    main()
