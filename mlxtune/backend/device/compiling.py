"""Whether functions are compiled."""

from mlxtune.backend.device.device import on_cpu


def compiles() -> bool:
    """Return whether compiling pays: on the CPU, MLX compiles with a C++ compiler, for no gain."""
    return not on_cpu()
