"""The memory of the device and the process, and the end of queued work, for benchmarks."""

from __future__ import annotations

import re
import resource
import sys
from pathlib import Path

import mlx.core as mx

from mlxtune.backend.model import memory


def finish() -> None:
    """Wait until the device has done all queued work."""
    mx.synchronize()


def reset_peak() -> None:
    """Reset the peak of MLX's memory to what is in use."""
    memory.forget_peak()


def peak_memory() -> int:
    """Return the most bytes that MLX has held at once since the reset."""
    return max(memory.peak_bytes(), int(mx.get_active_memory()))


def peak_rss() -> int:
    """Return the most bytes of real memory that this process has had."""
    try:
        # The kernel's other count takes over that of the process that started this one.
        text = Path("/proc/self/status").read_text()
        return int(re.findall(r"VmHWM:\s+(\d+) kB", text)[0]) * 1024
    except (OSError, IndexError):
        units = 1 if sys.platform == "darwin" else 1024
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * units
