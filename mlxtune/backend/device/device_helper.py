"""Measures the device for `mlxtune doctor`, which runs this module in a separate process.

    python -m mlxtune.backend.device.device_helper

A damaged installation of MLX may kill the process without a Python exception, and the doctor must
survive this. Prints a JSON object.
"""

import json
import sys
import timeit
from collections.abc import Callable
from dataclasses import asdict

import mlx.core as mx
import numpy as np

from mlxtune.backend import BLAS
from mlxtune.backend.device import allocator, default_device
from mlxtune.config import TrainConfig
from mlxtune.core.machine.facts import Device

_CPU_SIZE, _GPU_SIZE = 512, 2048
_REPEATS = 10


def device_facts() -> Device:
    """Return the device, its memory, and the speed of a matmul."""
    info, on_cpu = mx.device_info(), default_device.on_cpu()
    limits = allocator.find_limits(TrainConfig.memory_limit)
    size = _CPU_SIZE if on_cpu else _GPU_SIZE
    a = np.random.default_rng(0).random((size, size), dtype=np.float32)
    b = mx.array(a)
    return Device(
        kind="CPU" if on_cpu else "Metal" if default_device.has_metal() else "CUDA",
        name=str(info.get("device_name", "unknown")),
        capacity=allocator.capacity(),
        recommended=limits.recommended,
        limit=limits.memory,
        blas=BLAS,
        gflops=_gflops(size, lambda: mx.eval(b @ b)),
        numpy_gflops=_gflops(size, lambda: a @ a) if on_cpu else None,
    )


def _gflops(size: int, matmul: Callable[[], object]) -> float:
    """Return the best speed of a matmul of square matrices, in GFLOP/s."""
    return 2 * size**3 / min(timeit.repeat(matmul, repeat=_REPEATS, number=1)) / 1e9


if __name__ == "__main__":
    json.dump(asdict(device_facts()), sys.stdout)
