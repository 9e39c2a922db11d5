"""The device that MLX computes on."""

import mlx.core as mx


def on_cpu() -> bool:
    """Return whether MLX computes on the CPU."""
    return bool(mx.default_device().type == mx.DeviceType.cpu)


def device_name() -> str:
    """Return the device's name and type, such as "Apple M3 Max (gpu)"."""
    name = mx.device_info().get("device_name", "unknown device")
    return f"{name} ({mx.default_device().type.name})"


def finish() -> None:
    """Wait until the device has done all queued work."""
    mx.synchronize()
