"""Take the steps of many cases in one process, on one side, and print each result as JSON.

    python -m tests.long.gpu_steps JOBS.pickle

`gpu` writes the file, a list of `TimedCase`, and reads the lines: a `phase` for each phase of a
case, and then its `found` or its `failed`. A process costs 10 to 20 s on a GPU before its first
step, so the cases of a side share one.
"""

from __future__ import annotations

import json
import pickle
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from mlxtune.backend.device import allocator, default_device
from mlxtune.benchmark.bench_helper import BenchTrainer, Job, OurTrainer, open_trainer
from mlxtune.core.data.encode import Example
from tests.long.floor import needed_flops
from tests.long.step_costs import needed_matmuls

MAX_KERNELS = 40

Steps = Sequence[Sequence[Example]]


@dataclass(frozen=True)
class TimedCase:
    """A side's steps under the name of their case, and how often to take them all.

    If `profiled`, one more pass counts and times the GPU's kernels, by torch's profiler.
    """

    name: str
    job: Job
    passes: int = 2
    profiled: bool = False


def measure(case: TimedCase, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the seconds of each pass and the peak; `report` is called with each phase's name."""
    allocator.release()
    report("reading the weights")
    side, steps = open_trainer(case.job), case.job.steps
    default_device.finish()
    side.start(case.job.adapter, steps)
    report("the warm-up")
    started = time.perf_counter()
    side.warm_up(steps)
    default_device.finish()
    found: dict[str, Any] = {"warm_up_s": time.perf_counter() - started, "seconds": []}
    report("the timed steps")
    allocator.reset_peaks()
    for _ in range(case.passes):
        started = time.perf_counter()
        losses = take(side, steps)
        found["seconds"].append(time.perf_counter() - started)
        found.setdefault("losses", losses)
    found["peak_memory"] = allocator.peak_bytes()
    # The times stay, whatever becomes of the rest.
    try:
        found |= _counted(side, case, report)
    except Exception as error:  # noqa: BLE001
        found["uncounted"] = f"{type(error).__name__}: {error}"[:500]
    return found


def _counted(side: BenchTrainer, case: TimedCase, report: Callable[[str], None]) -> dict[str, Any]:
    """Return the FLOPs that mlxtune's steps need and, if wanted, the times of the kernels."""
    found: dict[str, Any] = {}
    steps = case.job.steps
    if isinstance(side, OurTrainer):
        flops = sum(needed_flops(needed_matmuls(side, examples)) for examples in steps)
        found["needed_flops"] = flops
    if case.profiled:
        report("the profiled steps")
        found |= kernel_times(lambda: take(side, steps), len(steps))
    return found


def take(side: BenchTrainer, steps: Steps) -> list[float]:
    """Take all steps, mlxtune's on a GPU as `train` does; return their losses when all is done."""
    if isinstance(side, OurTrainer) and not default_device.on_cpu():
        losses = [step.loss for step in side.overlapped(steps)]
    else:
        losses = [side.step(number, examples) for number, examples in enumerate(steps, 1)]
    default_device.finish()
    return losses


def kernel_times(run: Callable[[], Any], steps: int) -> dict[str, Any]:
    """Return the kernels' seconds and launches a step, and the kernels that take longest.

    torch reads them through CUPTI, which sees the kernels of the whole process, MLX's included.
    """
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        started = time.perf_counter()
        run()
        seconds = time.perf_counter() - started
    # The host's calls are events too, without a time on the device.
    events = [event for event in profiler.events() if event.device_time_total > 0]
    launches = Counter(event.name for event in events)
    spent = Counter[str]()
    for event in events:
        spent[event.name] += event.device_time_total / 1e6
    return {
        "profiled_s_per_step": seconds / steps,
        "kernel_s_per_step": spent.total() / steps,
        "launches_per_step": len(events) / steps,
        "kernels": [
            {"name": name[:160], "ms_per_step": 1e3 * took / steps, "launches": launches[name]}
            for name, took in spent.most_common(MAX_KERNELS)
        ],
    }


def main() -> None:
    """Measure the cases in the file that the command line names; an error ends only its case."""
    cases: list[TimedCase] = pickle.loads(Path(sys.argv[1]).read_bytes())
    if any(case.profiled for case in cases):
        import torch

        # CUPTI must be ready before MLX launches the first kernel.
        torch.zeros(1).cuda()

    for case in cases:

        def say(name: str = case.name, **entry: Any) -> None:
            print(json.dumps({"case": name} | entry), flush=True)

        try:
            say(found=measure(case, lambda phase: say(phase=phase)))
        # Any error: the other cases still run.
        except Exception as error:  # noqa: BLE001
            say(failed=f"{type(error).__name__}: {error}"[:500])


if __name__ == "__main__":
    main()
