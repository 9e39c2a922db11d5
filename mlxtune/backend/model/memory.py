"""Metal's memory limits, where the device has them, and what has been used."""

from __future__ import annotations

import gc
import os
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import mlx.core as mx

from mlxtune.backend.model.device import on_cpu

GB = 10**9
# Of the limit: what MLX may keep of freed buffers, and the use above which it gives them back.
_CACHE_SHARE = 1 / 8
_PRESSURE = 0.9
# As MLX says it on the CPU, Metal and CUDA, and numpy.
_RAN_OUT = re.compile(
    r"unable to allocate|attempting to allocate|out of memory|insufficient memory"
    r"|resource limit|memory allocation",
    re.IGNORECASE,
)
# The highest peak before MLX's own count was last reset, of the process and since `start_peak`.
_highest = [0]
_since_start = [0]


@dataclass(frozen=True)
class MemoryLimits:
    """What was set, in bytes. `recommended` is the device's own limit, None where it has none."""

    memory: int
    cache: int
    recommended: int | None
    device: str

    def describe(self) -> str:
        """Say in one line what was set."""
        capped = ""
        if self.recommended is not None:
            capped = f", of {self.recommended / GB:.1f} GB that the device recommends"
        metal = "; no Metal here, MLX's own limits only" if on_cpu() else ""
        cache = f", cache {self.cache / GB:.1f} GB" if self.cache else ""
        return f"limit {self.memory / GB:.1f} GB{cache}{capped} ({self.device}{metal})"


def find_limits(memory_limit_gb: float) -> MemoryLimits:
    """Return what `set_limits` sets."""
    info = mx.device_info()
    working_set = info.get("max_recommended_working_set_size")
    recommended = None if working_set is None else int(working_set)
    memory = int(memory_limit_gb * GB)
    if recommended is not None:
        memory = min(memory, recommended)
    device = str(info.get("device_name", "unknown device"))
    # On the CPU malloc keeps what is freed, for arrays of any size: MLX's cache, for those of about
    # the same size alone, doubles the memory in use where sizes differ from step to step.
    cache = 0 if on_cpu() else int(memory * _CACHE_SHARE)
    return MemoryLimits(memory, cache, recommended, device)


def capacity() -> int:
    """Return how many bytes all runs on this machine have together."""
    info = mx.device_info()
    recommended = info.get("max_recommended_working_set_size") or info.get("memory_size")
    if recommended:
        return int(recommended)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def set_limits(memory_limit_gb: float) -> MemoryLimits:
    """Limit the memory and the buffer cache of MLX, before a model is loaded.

    The limit is capped at the working set that the device recommends, if it recommends one.
    """
    limits = find_limits(memory_limit_gb)
    memory, cache = limits.memory, limits.cache
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    forget_peak()
    if mx.metal.is_available():
        mx.set_wired_limit(memory)
    return limits


def relieve_pressure() -> None:
    """Give cached buffers back when what is used and cached nears the limit."""
    limit = mx.get_memory_limit()
    if mx.get_cache_memory() and mx.get_active_memory() + mx.get_cache_memory() > _PRESSURE * limit:
        mx.clear_cache()


def release() -> None:
    """Give back what a model held that nothing names any more."""
    # Modules and what runs them name each other.
    gc.collect()
    mx.clear_cache()


def peak_bytes() -> int:
    """Return the most memory that MLX has held at once, in bytes."""
    return max(_highest[0], int(mx.get_peak_memory()))


def peak_gb() -> float:
    """Return the most memory that MLX has held at once, in GB."""
    return peak_bytes() / GB


def last_peak_bytes() -> int:
    """Return the most memory that MLX has held at once since `start_peak`, in bytes."""
    return max(_since_start[0], int(mx.get_peak_memory()))


def last_peak_gb() -> float:
    """Return the most memory that MLX has held at once since `start_peak`, in GB."""
    return last_peak_bytes() / GB


def start_peak() -> None:
    """Have the next peak be judged anew; `peak_bytes` stays what it was."""
    _highest[0] = peak_bytes()
    _since_start[0] = 0
    mx.reset_peak_memory()


def lap_peak() -> int:
    """Return the most bytes that MLX has held at once since this was last asked.

    All other peaks stay what they were.
    """
    peak = int(mx.get_peak_memory())
    _highest[0], _since_start[0] = max(_highest[0], peak), max(_since_start[0], peak)
    mx.reset_peak_memory()
    return peak


@contextmanager
def apart() -> Iterator[None]:
    """Within it, no peak is one of the run's."""
    lap_peak()
    try:
        yield
    finally:
        mx.reset_peak_memory()


def forget_peak() -> None:
    """Let all peaks start anew from what is in use."""
    _highest[0] = _since_start[0] = 0
    mx.reset_peak_memory()


def over_limit() -> bool:
    """Tell whether more has been in use since `start_peak` than the limit."""
    return bool(last_peak_bytes() > mx.get_memory_limit())


def ran_out(error: BaseException) -> bool:
    """Tell whether an error says that memory could not be allocated."""
    return isinstance(error, MemoryError) or bool(_RAN_OUT.search(str(error)))
