"""MLX's memory limits, and peaks of memory use."""

import gc
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlx.core as mx

from mlxtune.backend.device.default_device import finish, has_metal, on_cpu
from mlxtune.config import user_cache
from mlxtune.core.files.reading import read_kernel_file
from mlxtune.core.formatting import byte_size
from mlxtune.core.machine.facts import available_memory
from mlxtune.core.machine.reservation import reservations
from mlxtune.core.steps.memory_in_flight import GraphLimits

GB = 10**9
# Fractions of the limit: the size of MLX's cache of freed buffers, and the memory use above
# which the cache is cleared.
_CACHE_FRACTION = 1 / 8
_PRESSURE_FRACTION = 0.9
# The fraction of a CUDA device's memory to use, because CUDA recommends no size. The rest is for
# the context, the libraries of each process, and fragmentation. MLX's own default is 0.95.
_CUDA_FRACTION = 0.9
# The fraction of the GPU's memory that is wired. Wiring all of it starves the window server and
# other programs, which then stall.
_WIRED_FRACTION = 0.9
# The numbers of operations, and of Mi array entries that they read, at which MLX ends a graph: by
# CUDA architecture, and otherwise (`get_graph_limits` in mlx/backend/cuda/device.cpp).
_GRAPH_LIMITS = {"sm_80": (20, 400), "sm_121": (20, 25)}
_GRAPH_LIMITS |= dict.fromkeys(("sm_90", "sm_100", "sm_120"), (100, 1000))
_OTHER_GRAPHS = 20, 100
_MIB = 1 << 20
# The highest peaks before MLX's own peak was last reset: in the whole process, and since
# `start_peak`.
_highest = [0]
_since_start = [0]


@dataclass(frozen=True)
class MemoryLimits:
    """Limits in bytes. `recommended` is the maximum memory to use on a GPU, None on a CPU."""

    memory: int
    cache: int
    recommended: int | None
    device: str

    def describe(self) -> str:
        """Return a line that states the limits and the device."""
        capped = ""
        if self.recommended is not None:
            capped = f", GPU maximum {byte_size(self.recommended)}"
        metal = "; no Metal, so only MLX's own limits apply" if on_cpu() else ""
        cache = f", cache {byte_size(self.cache)}" if self.cache else ""
        return f"limit {byte_size(self.memory)}{cache}{capped} ({self.device}{metal})"


def find_limits(memory_limit_gb: float) -> MemoryLimits:
    """Return the limits that `set_limits` would set."""
    info = mx.device_info()
    recommended = _recommended(info)
    if recommended is not None and (free := info.get("free_memory")) is not None:
        # Memory that other programs use is not available. Memory of other runs counts as available:
        # their reservations make this run wait, or stop with an error that names those runs.
        in_use = mx.get_active_memory() + mx.get_cache_memory() + _reserved_by_others()
        recommended = min(recommended, int(free) + in_use)
    memory = int(memory_limit_gb * GB)
    if recommended is not None:
        memory = min(memory, recommended)
    device = str(info.get("device_name", "unknown device"))
    # On the CPU, malloc reuses freed memory for arrays of any size. MLX's cache reuses it for
    # similar sizes only, which doubles the memory in use if sizes differ from step to step.
    cache = 0 if on_cpu() else int(memory * _CACHE_FRACTION)
    return MemoryLimits(memory, cache, recommended, device)


def capacity() -> int:
    """Return the memory, in bytes, that all runs on this machine share."""
    info = mx.device_info()
    if size := _recommended(info) or info.get("memory_size"):
        return int(size)
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def graph_limits() -> GraphLimits | None:
    """Return the limits of the graphs that MLX queues on a CUDA device; None on other devices."""
    info = mx.device_info()
    if "total_memory" not in info:
        return None
    operations, read = _GRAPH_LIMITS.get(str(info.get("architecture")), _OTHER_GRAPHS)
    return GraphLimits(
        _environment_number("MLX_MAX_OPS_PER_BUFFER", operations),
        _environment_number("MLX_MAX_MB_PER_BUFFER", read) * _MIB,
    )


def _environment_number(name: str, default: int) -> int:
    """Return an environment variable's number as MLX reads it: 0 if the text is not a number."""
    text = os.environ.get(name)
    if text is None:
        return default
    match = re.match(r"\s*[+-]?[0-9]{1,9}", text)
    return int(match[0]) if match else 0


def free_now() -> int | None:
    """Return the free memory of the device or its machine, in bytes; None if unknown."""
    if (free := mx.device_info().get("free_memory")) is not None:
        return int(free)
    return available_memory()


def _recommended(info: Mapping[str, str | int]) -> int | None:
    """Return the maximum number of bytes to use on an otherwise idle device, or None for a CPU."""
    if working_set := info.get("max_recommended_working_set_size"):
        return int(working_set)
    total = info.get("total_memory")
    return None if total is None else int(_CUDA_FRACTION * int(total))


def _reserved_by_others() -> int:
    runs = reservations(user_cache() / "memory")
    return sum(run.size for run in runs if run.pid != os.getpid())


def set_limits(memory_limit_gb: float) -> MemoryLimits:
    """Limit MLX's memory and cache; call this before a model is loaded.

    On a GPU, the limit is at most `MemoryLimits.recommended`.
    """
    limits = find_limits(memory_limit_gb)
    mx.set_memory_limit(limits.memory)
    mx.set_cache_limit(limits.cache)
    reset_peaks()
    if has_metal() and limits.recommended is not None:
        mx.set_wired_limit(min(limits.memory, int(_WIRED_FRACTION * limits.recommended)))
    return limits


def clear_cache_near_limit() -> None:
    """Clear MLX's cache if used and cached memory are close to the limit.

    The cache may grow while the peak of used memory stays the same (mlx-lm#986).
    """
    limit = mx.get_memory_limit()
    if (
        mx.get_cache_memory()
        and mx.get_active_memory() + mx.get_cache_memory() > _PRESSURE_FRACTION * limit
    ):
        mx.clear_cache()


def release() -> None:
    """Free the memory of objects that are no longer referenced."""
    # Modules and the objects that run them form reference cycles.
    gc.collect()
    mx.clear_cache()


def peak_bytes() -> int:
    """Return MLX's peak memory use, in bytes."""
    # MLX updates its peak only when it allocates.
    return max(_highest[0], int(mx.get_peak_memory()), int(mx.get_active_memory()))


def peak_gb() -> float:
    """Return MLX's peak memory use, in GB."""
    return peak_bytes() / GB


def peak_rss() -> int:
    """Return the process's largest resident set, in bytes."""
    try:
        # The counter of getrusage starts at the parent process's peak.
        text = read_kernel_file(Path("/proc/self/status"))
        return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) * 1024
    except (OSError, IndexError):
        units = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units


def last_peak_bytes() -> int:
    """Return MLX's peak memory use since `start_peak`, in bytes."""
    return max(_since_start[0], int(mx.get_peak_memory()))


def start_peak() -> None:
    """Reset `last_peak_bytes`; `peak_bytes` does not change."""
    _highest[0] = peak_bytes()
    _since_start[0] = 0
    mx.reset_peak_memory()


def lap_peak() -> int:
    """Return MLX's peak memory use since the last call or reset, in bytes; keep the other peaks."""
    peak = int(mx.get_peak_memory())
    _highest[0], _since_start[0] = peak_bytes(), last_peak_bytes()
    mx.reset_peak_memory()
    return peak


def peak_of(compute: Callable[[], Any]) -> int:
    """Return MLX's peak memory use during `compute`, in bytes above the use before the call."""
    # Operations that are still queued would free buffers in the meantime.
    finish()
    mx.clear_cache()
    start_peak()
    before = mx.get_active_memory()
    compute()
    return lap_peak() - before


@contextmanager
def peaks_kept() -> Iterator[None]:
    """Leave the memory use inside the block out of `peak_bytes` and `last_peak_bytes`."""
    before = peak_bytes(), last_peak_bytes()
    try:
        yield
    finally:
        _highest[0], _since_start[0] = before
        mx.reset_peak_memory()


def reset_peaks() -> None:
    """Reset all peaks to the memory in use."""
    _highest[0] = _since_start[0] = 0
    mx.reset_peak_memory()
