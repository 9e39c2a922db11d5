"""Metal's memory limits, where the device has them, and what has been used."""

from __future__ import annotations

from dataclasses import dataclass

import mlx.core as mx

GB = 10**9
# Of the limit: what MLX may keep of freed buffers, and the use above which it gives them back.
_CACHE_SHARE = 1 / 8
_PRESSURE = 0.9
# Copies of a float32 array that one forward and backward pass holds at its peak, as measured.
_LOGITS_COPIES = 6
_HIDDEN_COPIES = 40
# Wider micro-batches are no faster on the CPU, and pad and hold more.
_CPU_TOKENS = 512


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
        metal = "" if mx.metal.is_available() else "; no Metal here, MLX's own limits only"
        return (
            f"limit {self.memory / GB:.1f} GB, cache {self.cache / GB:.1f} GB{capped} "
            f"({self.device}{metal})"
        )


def set_limits(memory_limit_gb: float) -> MemoryLimits:
    """Limit the memory and the buffer cache of MLX, before a model is loaded.

    The limit is capped at the working set that the device recommends, if it recommends one.
    """
    info = mx.device_info()
    working_set = info.get("max_recommended_working_set_size")
    recommended = None if working_set is None else int(working_set)
    memory = int(memory_limit_gb * GB)
    if recommended is not None:
        memory = min(memory, recommended)
    cache = int(memory * _CACHE_SHARE)
    mx.set_memory_limit(memory)
    mx.set_cache_limit(cache)
    mx.reset_peak_memory()
    if mx.metal.is_available():
        mx.set_wired_limit(memory)
    return MemoryLimits(memory, cache, recommended, str(info.get("device_name", "unknown device")))


def relieve_pressure() -> None:
    """Give cached buffers back when what is used and cached nears the limit."""
    limit = mx.get_memory_limit()
    if mx.get_cache_memory() and mx.get_active_memory() + mx.get_cache_memory() > _PRESSURE * limit:
        mx.clear_cache()


def over_limit() -> bool:
    """Tell whether more is in use than the limit."""
    return bool(mx.get_active_memory() > mx.get_memory_limit())


def peak_gb() -> float:
    """Return the most memory that MLX has held at once, in GB."""
    return float(mx.get_peak_memory()) / GB


def micro_batch_tokens(*, vocab_size: int, hidden_size: int, num_layers: int) -> int:
    """Return how many tokens may run through the model at once within half of what is free.

    An estimate from the shapes: float32 logits, and the activations that the backward pass keeps.
    """
    if not (vocab_size and hidden_size):
        return _CPU_TOKENS
    free = max(mx.get_memory_limit() - mx.get_active_memory(), 0)
    per_token = 4 * (_LOGITS_COPIES * vocab_size + _HIDDEN_COPIES * num_layers * hidden_size)
    tokens = max(int(free / 2 / per_token), 1)
    return min(tokens, _CPU_TOKENS) if on_cpu() else tokens


def on_cpu() -> bool:
    """Tell whether MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)
