"""What is known of a machine and of what is installed on it: facts, with nothing said of them.

Also the reading of what the system's own tools print of it, which needs no such system to test.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

_MIB = 2**20
# The packages that bring MLX's own library, each into the same place.
MLX_LIBRARIES = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")


@dataclass(frozen=True)
class Package:
    """A package that is asked for: which versions serve, and which one is there, if any.

    `extra` is what it is for where the command works without it.
    """

    name: str
    needs: str
    installed: str | None
    serves: bool
    extra: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to. `free` is in bytes; `size` of what lies in it, where it counts.

    `problem` says why it cannot be written.
    """

    path: str
    free: int | None
    size: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes; None where the system does not say. `total` heeds a container's limit."""

    total: int | None = None
    available: int | None = None
    swap_used: int | None = None


@dataclass(frozen=True)
class Power:
    """Where the current comes from, and whether the system saves it; None where it is not known."""

    on_battery: bool | None = None
    saving: bool | None = None


@dataclass(frozen=True)
class Device:
    """What MLX computes on. Memory in bytes; `limit` is what --memory-limit is by default here.

    `gflops` is what MLX reaches there in a product of float32 matrices, `numpy_gflops` what numpy
    reaches on the CPU.
    """

    kind: str
    name: str
    capacity: int
    recommended: int | None
    limit: int
    blas: str | None = None
    gflops: float | None = None
    numpy_gflops: float | None = None


@dataclass(frozen=True)
class Machine:
    """All facts. `device` is None where MLX does not start, and `device_problem` says why.

    `libraries` are the packages that bring MLX's own library, `mlx_first` tells whether mlx was
    imported before mlxtune, `translated` whether Python runs through Rosetta, `has_nvidia` whether
    there is an NVIDIA driver, `wired_limit_mb` macOS's limit of the GPU's memory, 0 for its own.
    """

    system: str
    release: str
    processor: str
    python: str
    packages: tuple[Package, ...]
    memory: Memory
    folders: Mapping[str, Folder]
    device: Device | None = None
    device_problem: str = ""
    name: str = ""
    chip: str = ""
    translated: bool = False
    has_nvidia: bool = False
    libraries: tuple[str, ...] = ()
    mlx_first: bool = False
    default_limit: int = 0
    reserved: tuple[str, ...] = ()
    power: Power = field(default_factory=Power)
    wired_limit_mb: int | None = None
    offline: str = ""


def read_pairs(text: str) -> dict[str, str]:
    """Return what `sysctl a b` prints, `name: value` a line."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def read_swap(text: str) -> int | None:
    """Return the bytes used of macOS's `vm.swapusage`, such as `used = 1033.75M`."""
    found = re.search(r"used = ([\d.]+)M", text)
    return int(float(found[1]) * _MIB) if found else None


def read_vm_stat(text: str) -> int | None:
    """Return the bytes that macOS could give a program, by what `vm_stat` prints.

    That is what is free, read ahead, or has not been used for a while.
    """
    page = re.search(r"page size of (\d+) bytes", text)
    pages = [re.search(rf"Pages {kind}:\s+(\d+)\.", text) for kind in _GIVEN_BACK]
    if page is None or not any(pages):
        return None
    return int(page[1]) * sum(int(found[1]) for found in pages if found)


_GIVEN_BACK = ("free", "speculative", "inactive")


def read_meminfo(text: str) -> Memory:
    """Return what Linux says in /proc/meminfo."""
    sizes = {m[1]: int(m[2]) * 1024 for m in re.finditer(r"(?m)^(\w+):\s+(\d+) kB", text)}
    swap = sizes.get("SwapTotal"), sizes.get("SwapFree")
    return Memory(
        total=sizes.get("MemTotal"),
        available=sizes.get("MemAvailable"),
        swap_used=None if swap[0] is None or swap[1] is None else swap[0] - swap[1],
    )


def within(memory: Memory, limit: int | None) -> Memory:
    """Return the memory of a container that may use so many bytes; None, or more, is no limit."""
    if limit is None or memory.total is None or limit >= memory.total:
        return memory
    available = None if memory.available is None else min(memory.available, limit)
    return replace(memory, total=limit, available=available)


def read_pmset(battery: str, settings: str) -> Power:
    """Return what macOS's `pmset -g batt` and `pmset -g` say of power.

    Its low power mode stands as `lowpowermode 1`, or, where there is a high one too, as
    `powermode 1`.
    """
    source = re.search(r"drawing from '([^']+)'", battery)
    mode = re.search(r"(?m)^\s*(?:lowpowermode|powermode)\s+(\d)", settings)
    return Power(
        on_battery=None if source is None else source[1] == "Battery Power",
        saving=None if mode is None else mode[1] == "1",
    )
