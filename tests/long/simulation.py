"""Simulates a machine in every Python process of an environment: hides files, or fakes a device.

tests/long/simulated.py copies this file into the environment, where Python imports it at start,
next to simulation.json: {"hidden": bool, "device": name or null}. Imports nothing from mlxtune.
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import json
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

GIB = 2**30
# Answers of `mx.device_info()`, with the keys in Metal's device_info.cpp, and in CUDA's. Metal
# recommends two thirds of a small Mac's memory, and three quarters of a large one's.
DEVICES: dict[str, dict[str, str | int]] = {
    "m1-8": {
        "device_name": "Apple M1",
        "architecture": "applegpu_g13g",
        "memory_size": 8 * GIB,
        "max_recommended_working_set_size": 8 * GIB * 2 // 3,
        "max_buffer_length": 8 * GIB // 2,
        "resource_limit": 499_000,
    },
    "m2-max-64": {
        "device_name": "Apple M2 Max",
        "architecture": "applegpu_g14s",
        "memory_size": 64 * GIB,
        "max_recommended_working_set_size": 48 * GIB,
        "max_buffer_length": 36 * GIB,
        "resource_limit": 499_000,
    },
    "m5-32": {
        "device_name": "Apple M5",
        "architecture": "applegpu_g17g",
        "memory_size": 32 * GIB,
        "max_recommended_working_set_size": 32 * GIB * 2 // 3,
        "max_buffer_length": 18 * GIB,
        "resource_limit": 499_000,
    },
    "h200": {
        "device_name": "NVIDIA H200",
        "architecture": "sm_90",
        "total_memory": 140 * GIB,
        "free_memory": 139 * GIB,
    },
}


def hide_proc() -> None:
    """Hide /proc from Python, because a Mac has none."""

    def hidden(path: object) -> bool:
        try:
            text = os.fsdecode(path)  # type: ignore[arg-type]
        except TypeError:  # a file descriptor
            return False
        return text == "/proc" or text.startswith("/proc/")

    def refusing(real: Callable[..., Any]) -> Callable[..., Any]:
        def call(path: Any, *args: Any, **options: Any) -> Any:
            if hidden(path):
                raise FileNotFoundError(2, "No such file or directory", os.fsdecode(path))
            return real(path, *args, **options)

        return call

    for name in ("stat", "lstat", "readlink"):
        setattr(os, name, refusing(getattr(os, name)))

    def hook(event: str, args: tuple[Any, ...]) -> None:
        if event in ("open", "os.listdir", "os.scandir", "os.mkdir") and args and hidden(args[0]):
            raise FileNotFoundError(2, "No such file or directory", os.fsdecode(args[0]))

    sys.addaudithook(hook)


class AfterImport(importlib.abc.MetaPathFinder):
    """Calls a function on a module once the module is imported."""

    def __init__(self, changes: dict[str, Callable[[ModuleType], None]]) -> None:
        self.changes = changes

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Return the module's own spec, with a loader that also calls the function."""
        if name not in self.changes:
            return None
        change = self.changes.pop(name)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            return spec
        real = spec.loader.exec_module

        def exec_module(module: ModuleType) -> None:
            real(module)
            change(module)

        try:
            spec.loader.exec_module = exec_module  # type: ignore[method-assign]
        except AttributeError:
            spec.loader = _Wrapped(spec.loader, exec_module)
        return spec


class _Wrapped(importlib.abc.Loader):
    def __init__(self, real: Any, exec_module: Callable[[ModuleType], None]) -> None:
        self.create_module = real.create_module
        self.exec_module = exec_module  # type: ignore[method-assign]


def simulate(device: str) -> None:
    """Make MLX answer like a device; it still computes on the CPU."""
    info = DEVICES[device]
    metal = "total_memory" not in info

    def change_mlx(mx: Any) -> None:
        mx.device_info = lambda *_: dict(info)
        mx.metal.device_info = mx.device_info
        mx.metal.is_available = lambda: metal

    def change_device(module: Any) -> None:
        module.on_cpu = lambda: False

    # On the CPU, MLX would compile functions with a C++ compiler.
    os.environ["MLX_DISABLE_COMPILE"] = "1"
    changes = {"mlx.core": change_mlx, "mlxtune.backend.device.default_device": change_device}
    sys.meta_path.insert(0, AfterImport(changes))


def begin(settings: dict[str, Any]) -> None:
    """Start the simulation that the settings describe."""
    if settings["hidden"]:
        hide_proc()
    if settings["device"]:
        simulate(settings["device"])


_SETTINGS = Path(__file__).with_name("simulation.json")
if _SETTINGS.exists():
    begin(json.loads(_SETTINGS.read_text()))
