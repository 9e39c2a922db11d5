"""Memory, speed and open files of a run that takes thousands of steps."""

from __future__ import annotations

import os
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import pytest

from mlxtune import TrainConfig, train
from mlxtune.core.run.metrics import StepRecord
from mlxtune.views.console import RunConsole
from tests.models import sums, write_chat

STEPS, EVERY, WINDOW = 20_000, 20, 50


class Sample(NamedTuple):
    """The process after a step: processor seconds, bytes of memory, and open files."""

    processor: float
    memory: int
    files: int


def sample() -> Sample:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    files = len(os.listdir("/dev/fd"))  # noqa: PTH208
    return Sample(time.process_time(), pages * os.sysconf("SC_PAGE_SIZE"), files)


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux's /proc")
def test_run_of_20_000_steps_neither_grows_nor_slows(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    samples: list[Sample] = []

    def on_step(self: RunConsole, record: StepRecord) -> None:
        shown(self, record)
        # Memory and speed settle in the first steps.
        if record.step >= 500 and record.step % EVERY == 0:
            samples.append(sample())

    shown = RunConsole.on_step
    monkeypatch.setattr(RunConsole, "on_step", on_step)
    rows = write_chat(tmp_path / "chat.jsonl", sums(2000))
    options: dict[str, Any] = {"batch_size": 1, "lr": 1e-4, "schedule": "constant", "val_rows": 8}
    options |= {"epochs": STEPS, "max_steps": STEPS, "patience": STEPS, "quiet": True}
    options |= {"save_steps": 500, "save_minutes": 1.0}
    train(TrainConfig(str(model), str(rows), output=str(tmp_path / "a.safetensors"), **options))

    first, last = samples[:WINDOW], samples[-WINDOW:]
    memory, seconds, files = (
        [median(values) for values in both]
        for both in zip(*map(measures, (first, last)), strict=True)
    )
    print(f"\nmemory {memory}, processor seconds of {EVERY} steps {seconds}, files {files}")
    assert memory[1] < 1.05 * memory[0]
    assert seconds[1] < 1.05 * seconds[0]
    assert files[1] == files[0]


def measures(samples: list[Sample]) -> tuple[list[int], list[float], list[int]]:
    """Return memory, the processor seconds between samples, and open files."""
    spent = [b.processor - a.processor for a, b in pairwise(samples)]
    return [each.memory for each in samples], spent, [each.files for each in samples]
