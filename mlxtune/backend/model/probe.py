"""The device and its speed, for `mlxtune doctor`, which runs this in a separate process:

    python -m mlxtune.backend.model.probe

A damaged installation of MLX may kill its process without a Python exception, which the doctor
must survive. Prints a JSON object.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict

import mlx.core as mx
import numpy as np

from mlxtune.backend.model import device, memory
from mlxtune.backend.model.blas import BLAS
from mlxtune.config import StepConfig
from mlxtune.core.machine.facts import Device

_CPU_SIZE, _GPU_SIZE = 512, 2048
# Seconds for each measurement, unless a single product takes longer.
_SECONDS = 0.12


def device_facts() -> Device:
    """Return the device, its memory, and the speed of a matrix product."""
    info = mx.device_info()
    limits = memory.find_limits(StepConfig.memory_limit)
    return Device(
        kind=_kind(),
        name=str(info.get("device_name", "unknown")),
        capacity=memory.capacity(),
        recommended=limits.recommended,
        limit=limits.memory,
        blas=BLAS,
        gflops=_mlx_gflops(),
        numpy_gflops=_numpy_gflops() if device.on_cpu() else None,
    )


def _kind() -> str:
    if device.on_cpu():
        return "CPU"
    return "Metal" if mx.metal.is_available() else "CUDA"


def _mlx_gflops() -> float:
    size = _CPU_SIZE if device.on_cpu() else _GPU_SIZE
    a = mx.random.uniform(-1, 1, (size, size))
    mx.eval(a)
    return _best(size, lambda: mx.eval(a @ a))


def _numpy_gflops() -> float:
    a = np.random.default_rng(0).random((_CPU_SIZE, _CPU_SIZE), dtype=np.float32)
    return _best(_CPU_SIZE, lambda: a @ a)


def _best(size: int, product: Callable[[], object]) -> float:
    """Return the best speed of a product of square matrices, in GFLOP/s."""
    product()
    ends, best = time.perf_counter() + _SECONDS, float("inf")
    while True:
        started = time.perf_counter()
        product()
        now = time.perf_counter()
        best = min(best, now - started)
        if now > ends:
            return 2 * size**3 / best / 1e9


if __name__ == "__main__":
    json.dump(asdict(device_facts()), sys.stdout)
