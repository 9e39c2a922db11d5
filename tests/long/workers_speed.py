"""Measure the speed-up of several workers over one, each with one thread on its own core.

    python -m tests.long.workers_speed [--workers 2] [--batch-size 16] [--steps 8] [--repeats 3]

Trains the small shape of bench_table on WikiSQL's rows in float32, with one worker and with several
in turn. Prints each run's real tokens/s, the median of the ratios, and each worker's processor
time. Starts the workers itself, because mlx.launch takes most of a core. Needs ../shared and as
many idle cores as workers.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from tests.launch import free_ports
from tests.long.bench_table import write_model
from tests.paths import SHARED


def start(
    worker: int, workers: int, folder: Path, options: Sequence[object]
) -> subprocess.Popen[bytes]:
    """Start a worker on the core with its number."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    if workers > 1:
        hosts = folder / "hosts.json"
        environment |= {"MLX_RANK": str(worker), "MLX_HOSTFILE": str(hosts)}
    command = [sys.executable, "-m", "mlxtune", "train", *map(str, options)]
    with (folder / f"worker-{worker}.log").open("wb") as log:
        return subprocess.Popen(
            command,
            env=environment,
            stdout=log,
            stderr=log,
            preexec_fn=lambda: os.sched_setaffinity(0, {worker}),
        )


def run(workers: int, folder: Path, options: Sequence[object]) -> tuple[float, list[float]]:
    """Train once; return real tokens/s after the first step, and each worker's CPU seconds."""
    folder.mkdir()
    places = [[f"127.0.0.1:{port}"] for port in free_ports(workers)]
    (folder / "hosts.json").write_text(json.dumps(places))
    output = ["--output", folder / "adapters.safetensors"]
    started = [start(worker, workers, folder, [*options, *output]) for worker in range(workers)]
    used = [os.wait4(process.pid, 0)[2] for process in started]
    lines = (folder / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    steps = [each for line in lines if (each := json.loads(line))["kind"] == "step"][1:]
    speed = sum(each["tokens"] for each in steps) / sum(each["seconds"] for each in steps)
    return speed, [each.ru_utime + each.ru_stime for each in used]


def main() -> None:
    """Measure, and print the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    for name, default in {"workers": 2, "batch-size": 16, "steps": 8, "repeats": 3}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    ratios = []
    with tempfile.TemporaryDirectory(prefix="mlxtune-workers-") as scratch:
        model = Path(scratch) / "small"
        write_model(model, "small")
        options: list[object] = ["--model-path", model, "--dtype", "float32", "--samples", 0]
        options += ["--data", SHARED / "chat" / "wikisql_train.jsonl", "--val-split", 0]
        options += ["--batch-size", given.batch_size, "--max-steps", given.steps + 1]
        for repeat in range(given.repeats):
            speeds = []
            for workers in (1, given.workers):
                folder = Path(scratch) / f"{repeat}-{workers}"
                speed, used = run(workers, folder, options)
                speeds.append(speed)
                spent = ", ".join(f"{seconds:.1f}" for seconds in used)
                print(f"{workers} worker(s): {speed:.1f} tokens/s, CPU seconds {spent}", flush=True)
            ratios.append(speeds[1] / speeds[0])
    print(f"{given.workers} workers: {statistics.median(ratios):.2f} times as fast: {ratios}")


if __name__ == "__main__":
    main()
