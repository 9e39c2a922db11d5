"""Train a tiny model for many steps: memory, speed and open files must not change.

    python -m tests.long.check_soak [--steps 20000]

Compares the end of the run with its state after 500 steps: memory may grow and speed may fall by
5%, and the number of open files must be equal. Speed is in steps per second of processor time,
because other programs do not affect it; speed by the clock is printed too. Saves every 500 steps
and once a minute.

Results: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

from tests.models import sums, write_chat, write_model

SETTLED, EVERY = 500, 20
TOLERANCE = 0.05


@dataclass(frozen=True)
class Sample:
    """Memory and open files of the process after a step, with clock and processor seconds."""

    step: int
    seconds: float
    processor: float
    memory: int
    files: int


def sample(step: int) -> Sample:
    """Return this process's memory, open files and times after a step."""
    files = len(os.listdir("/dev/fd"))  # noqa: PTH208
    return Sample(step, time.perf_counter(), time.process_time(), resident(), files)


def resident() -> int:
    """Return the resident memory of this process in bytes."""
    statm = Path("/proc/self/statm")
    if statm.exists():
        return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    said = subprocess.run(
        ["ps", "-o", "rss=", "-p", str(os.getpid())], capture_output=True, text=True, check=True
    )
    return int(said.stdout) * 1024


def soak(steps: int, scratch: Path) -> list[Sample]:
    """Train for some steps; return a sample of every EVERY-th step."""
    from mlxtune import TrainConfig, train
    from mlxtune.core.run.metrics import StepRecord
    from mlxtune.views.console import RunConsole

    samples: list[Sample] = []

    class Watched(RunConsole):
        def on_step(self, record: StepRecord) -> None:
            super().on_step(record)
            if record.step % EVERY == 0:
                samples.append(sample(record.step))

    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    model = write_model(scratch / "model", "qwen3")
    rows = write_chat(scratch / "chat.jsonl", sums(2000))
    options: dict[str, Any] = {"batch_size": 1, "lr": 1e-4, "schedule": "constant", "val_rows": 8}
    options |= {"epochs": steps, "max_steps": steps, "patience": steps, "quiet": True}
    options |= {"save_steps": 500, "save_minutes": 1.0}
    import mlxtune.views.console

    mlxtune.views.console.RunConsole = Watched  # type: ignore[misc]
    train(TrainConfig(str(model), str(rows), output=str(scratch / "a.safetensors"), **options))
    return samples


def speed(samples: list[Sample], clock: str) -> float:
    """Return the median steps per second between consecutive samples, by one of the two clocks."""
    return statistics.median(
        (b.step - a.step) / (getattr(b, clock) - getattr(a, clock)) for a, b in pairwise(samples)
    )


def report(samples: list[Sample], window: int) -> bool:
    """Print memory, speed and open files at both ends of the run; return whether they agree."""
    settled = [each for each in samples if each.step >= SETTLED]
    first, last = settled[:window], settled[-window:]
    memory = [statistics.median(each.memory for each in part) for part in (first, last)]
    files = [statistics.mode(each.files for each in part) for part in (first, last)]
    speeds = [speed(part, "processor") for part in (first, last)]
    clock = [speed(part, "seconds") for part in (first, last)]
    print(f"after {first[0].step} steps, and after {last[-1].step}:")
    print(f"  memory  {memory[0] / 1e6:.1f} MB, {memory[1] / 1e6:.1f} MB ({change(memory):+.1%})")
    print(f"  speed   {speeds[0]:.1f}, {speeds[1]:.1f} steps a second ({change(speeds):+.1%})")
    print(f"          {clock[0]:.1f}, {clock[1]:.1f} by the clock ({change(clock):+.1%})")
    print(f"  files   {files[0]}, {files[1]} open")
    print(f"  most    {max(each.memory for each in settled) / 1e6:.1f} MB at any time")
    grows = change(memory) > TOLERANCE
    slows = change(speeds) < -TOLERANCE
    return not grows and not slows and files[0] == files[1]


def change(pair: list[float]) -> float:
    """Return the relative change from the first value to the second."""
    return pair[1] / pair[0] - 1


def main() -> None:
    """Train, and compare the end with the start."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=20_000)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxtune-soak-") as scratch:
        samples = soak(given.steps, Path(scratch))
    sys.exit(not report(samples, window=50))


if __name__ == "__main__":
    main()
