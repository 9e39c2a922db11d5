"""Run all checks and benchmarks of an NVIDIA GPU in one command, in nine minutes.

    python -m tests.long.gpu [--json docs/measured/NAME.json] [--seconds 540] [--only PART ...]
                             [--shared FOLDER]
    python -m tests.long.gpu --tiny

The parts, in order: the card's speed; what failed or was cut off on the first card (attention with
sinks, a 4-bit base); steps by mlxtune, with settings of MLX, by mlx-lm, and by transformers and
PEFT where torch is installed; the GPU's kernels, by torch's profiler; and, in the time that is
left, two equal runs, the equality tests and `doctor --prove`. The limits of the parts before these
fit the time even if every kernel has to be compiled; more `--seconds` give the others room.

Models with random weights are made in a temporary folder. A part is skipped with the reason when no
time is left. The JSON, whose fields tests/long/measured.py describes, is written after each part
and each case. Exits with 1 if a part failed. All processes and later runs share the kernels that
MLX compiles (MLX_PTX_CACHE_DIR).

`--tiny` runs the parts on tiny models and any device, in less than a minute on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import UTC, datetime
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from tests.paths import ROOT, SHARED

import mlx.core as mx  # isort: skip

from mlxtune.backend.device.default_device import device_name, on_cpu
from mlxtune.core.files.processes import HelperTimeoutError, output_of
from mlxtune.core.machine.facts import versions
from tests.long.gpu_material import CASES, FOUR_BITS, TINY, Case, Machine
from tests.long.gpu_parts import Parts
from tests.long.gpu_processes import command
from tests.long.gpu_timing import (
    PEFT,
    SETTINGS_CASES,
    make_steps,
    take_steps,
    time_kernels,
    time_settings,
)
from tests.long.measured import SCHEMA_VERSION

TOTAL_S = 540
# These failed on the first card: the graph of a step whose attention has sinks.
SINKS = [
    *("-n0", "tests/backend/models/mixers/test_attention.py"),
    *("-k", "cannot_differentiate and sinks"),
]
EQUALITY = [
    "tests/backend/step/test_execution.py",
    "tests/backend/step/test_execution_models.py",
    "tests/backend/forward/test_layer_calls.py",
    "tests/backend/forward/test_packed_mixers.py",
    "tests/backend/forward/test_loss.py",
    "tests/backend/forward/test_head.py",
]
# Dense 16-bit TFLOP/s from the makers' data sheets; keys are parts of device names.
DATA_SHEETS = {
    "H100": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}


GIT = ("git", "-C", str(ROOT))


def card(size: int) -> dict[str, Any]:
    """Return the measured TFLOP/s of a large product, and the data sheet's TFLOP/s if known."""
    dtype = mx.float32 if on_cpu() else mx.bfloat16
    a, b = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
    mx.eval(a @ b)
    samples = []
    for _ in range(5):
        started = time.perf_counter()
        mx.eval([a @ b for _ in range(4)])
        samples.append(4 * 2 * size**3 / (time.perf_counter() - started) / 1e12)
    sheet = next((peak for part, peak in DATA_SHEETS.items() if part in device_name()), None)
    del a, b
    mx.clear_cache()
    return {"measured_tflops": max(samples), "data_sheet_tflops": sheet}


def sinks(seconds: float) -> dict[str, Any]:
    """Run the tests of attention with sinks, and again without CUDA's graphs if they fail."""
    deadline = time.monotonic() + seconds
    try:
        return equality(seconds * 2 / 3, SINKS)
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found = {"failed": str(error)}
    try:
        left = deadline - time.monotonic()
        found["without_graphs"] = equality(left, SINKS, MLX_USE_CUDA_GRAPHS="0")["result"]
    except (RuntimeError, subprocess.TimeoutExpired) as error:
        found["without_graphs"] = str(error)
    return found


def equality(seconds: float, tests: list[str], **variables: str) -> dict[str, Any]:
    """Run the tests that compare each way of computing a step with the plain path."""
    arguments = ["pytest", "-q", "-p", "no:cacheprovider", *tests]
    # TF32, MLX's default on CUDA, has three digits; the tests need five.
    done = command(arguments, seconds, MLX_ENABLE_TF32="0", **variables)
    return {"tests": tests, "result": done.stdout.strip().splitlines()[-1]}


def proof(seconds: float, scratch: Path) -> dict[str, Any]:
    """Run `doctor --prove`; return its report, marked as failed if a check failed."""
    path = scratch / "proof.json"
    try:
        command(["mlxtune", "doctor", "--prove", "--share", str(path)], seconds)
    except RuntimeError as error:
        if not path.exists():
            raise
        return {"failed": str(error), "report": json.loads(path.read_text())}
    return {"report": json.loads(path.read_text())}


def train_twice(seconds: float, machine: Machine, case: Case) -> dict[str, Any]:
    """Train twice with one command; compare the hashes, and measured with predicted memory."""
    hashes, peaks = [], []
    given = machine.options(case)
    options = [part for name, value in given.items() for part in (_flag(name), str(value))]
    for number in (1, 2):
        folder = machine.scratch / f"{case.name}-run{number}"
        output = ["--output", str(folder / "adapters.safetensors"), "--max-steps", "4", "--quiet"]
        more = ["--val-split", "0", "--samples", "0", *output]
        command(["mlxtune", "train", *options, *more], seconds / 2)
        found = json.loads(command(["mlxtune", "runs", str(folder), "--json"], 60).stdout)
        (run,) = found["runs"] if isinstance(found, dict) else found
        hashes.append(json.loads(next(folder.rglob("result.json")).read_text())["sha256"])
        peaks.append((run["peak_memory"], run["predicted_memory"]))
    return {
        "sha256": hashes,
        "bytes_equal": hashes[0] == hashes[1],
        "peak_memory": [peak for peak, _ in peaks],
        "predicted_memory": peaks[0][1],
        "measured_over_predicted": max(peak for peak, _ in peaks) / peaks[0][1],
    }


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def run_all(parts: Parts, machine: Machine) -> None:
    """Run all parts; when time runs out, the last ones are skipped."""
    tiny = machine.tiny
    cases = (TINY,) if tiny else CASES
    few = [case for case in cases if tiny or case.name in SETTINGS_CASES]

    def steps(side: str, some: Sequence[Case] = cases) -> Callable[[float], dict[str, Any]]:
        return lambda seconds: take_steps(seconds, parts, machine, side, some)

    parts.run("card", 10, lambda _: card(256 if tiny else 8192))
    if not tiny:
        parts.run("attention with sinks", 60, sinks)
        parts.run("4 bits", 65, steps("mlxtune", [FOUR_BITS]))
    parts.run("models", 40, lambda _: make_steps(parts, machine, cases))
    parts.run("mlxtune", 75, steps("mlxtune"))
    parts.run("settings", 90, lambda seconds: time_settings(seconds, parts, machine, few))
    parts.run("mlx-lm", 100, steps("mlx-lm"))
    parts.run("PEFT", 60, steps(PEFT))
    parts.run("kernels", 40, lambda seconds: time_kernels(seconds, parts, machine, few))
    parts.run("two runs", 90, lambda seconds: train_twice(seconds, machine, cases[0]))
    tests = EQUALITY[-2:] if tiny else EQUALITY
    parts.run("equality", 240, lambda seconds: equality(seconds, tests))
    if not tiny:
        parts.run("doctor --prove", 240, lambda seconds: proof(seconds, machine.scratch))


def facts() -> dict[str, Any]:
    """Return the facts of this machine for the head of the report."""
    smi, commit = _output("nvidia-smi"), _output(*GIT, "rev-parse", "--short=8", "HEAD")
    driver, cuda = (re.search(rf"{name} Version: *([\d.]+)", smi) for name in ("Driver", "CUDA"))
    peers = [name for name in ("torch", "peft") if find_spec(name)]
    return {
        "device": str(mx.device_info().get("device_name", device_name())),
        "device_info": {key: str(value) for key, value in mx.device_info().items()},
        "driver": driver and driver[1],
        "cuda": cuda and cuda[1],
        "cores": os.cpu_count(),
        "versions": versions() | {name: metadata.version(name) for name in peers},
        "date": datetime.now(UTC).date().isoformat(),
        "commit": commit.strip() or None,
    }


def _output(*command: str) -> str:
    with suppress(OSError, HelperTimeoutError):
        return output_of(command, 15).stdout
    return ""


def main() -> None:
    """Run the parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--shared", type=Path, default=SHARED)
    parser.add_argument("--seconds", type=float, default=TOTAL_S, help="the time for all parts")
    parser.add_argument("--only", nargs="+", default=[], metavar="PART", help="parts to run")
    given = parser.parse_args()
    if on_cpu() and not given.tiny:
        parser.error("MLX computes on the CPU here: install mlxtune-lora[cuda13], or use --tiny")
    report = {"schema_version": SCHEMA_VERSION, **facts(), "tiny": given.tiny}
    parts = Parts(given.json, report | {"cases": {}, "parts": {}}, given.seconds, given.only)
    with (
        tempfile.TemporaryDirectory(prefix="mlxtune-gpu-") as scratch,
        Machine(Path(scratch), given.shared, given.tiny) as machine,
    ):
        run_all(parts, machine)
    print(f"{given.json}: {time.monotonic() - parts.started:.0f} s")
    if parts.failed:
        sys.exit(f"failed: {', '.join(parts.failed)}")


if __name__ == "__main__":
    main()
