"""The device that MLX computes on."""

import mlx.core as mx

from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding

# Metal's fused attention takes blocks of 32 queries (`steel_attention_*_bq32_*` in mlx.metallib).
# On CUDA, attention's gradient is fused for multiples of 128 only, and cuDNN makes a plan for each
# new shape (`ScaledDotProductAttentionVJP::use_fallback` in mlx/backend/cuda).
_METAL, _CUDA = Rounding(length=64, width=32), Rounding(length=64, width=128)


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def has_metal() -> bool:
    """Return whether MLX was built with Metal and has a Metal device."""
    return bool(mx.metal.is_available())


def rounding() -> Rounding:
    """Return the units to which this device rounds lengths up; the CPU pads nothing."""
    if on_cpu():
        return NOT_ROUNDED
    return _METAL if has_metal() else _CUDA


def device_name() -> str:
    """Return the device's name and type, such as "Apple M3 Max (gpu)"."""
    name = mx.device_info().get("device_name", "unknown device")
    return f"{name} ({mx.default_device().type.name})"


def finish() -> None:
    """Wait until the device has done all queued work."""
    mx.synchronize()


def compiles() -> bool:
    """Return whether `mx.compile` saves time; on the CPU, it runs a C++ compiler for no gain."""
    return not on_cpu()
