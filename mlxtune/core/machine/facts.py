"""The facts of a machine, and reading them from the system's own tools. Nothing here needs mlx.

diagnosis.py interprets the facts; requirements.py reads the installed packages.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

from mlxtune.config import as_path, user_cache

# The packages that install MLX's own library, all into the same place.
MLX_LIBRARIES = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")

_MIB = 2**20
_SYSCTL = (
    "hw.memsize",
    "machdep.cpu.brand_string",
    "sysctl.proc_translated",
    "vm.swapusage",
    "iogpu.wired_limit_mb",
)
# Pages that macOS can give to a program: free, read ahead, or unused for a while.
_AVAILABLE_PAGES = ("free", "speculative", "inactive")
_TOOL_SECONDS = 2.0
# Measuring a cache stops after this many seconds, and leaves out the remaining files.
_MEASURING_SECONDS = 0.3
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Package:
    """A required package: which versions are accepted, and which is installed, if any.

    `extra` is the extra that requires it; the command works without it.
    """

    name: str
    needs: str
    installed: str | None
    serves: bool
    extra: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to: bytes `free` on its disk, and the `size` of a cache's files.

    `problem` says why it cannot be written.
    """

    path: str
    free: int | None
    size: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, None if unknown. `total` respects a container's limit."""

    total: int | None = None
    available: int | None = None
    swap_used: int | None = None


@dataclass(frozen=True)
class Power:
    """Whether the machine runs on battery, and whether it saves power; None if unknown."""

    on_battery: bool | None = None
    saving: bool | None = None


@dataclass(frozen=True)
class Device:
    """What MLX computes on. Memory in bytes; `limit` is the default of --memory-limit here.

    `gflops` is the speed of a float32 matrix product in MLX, `numpy_gflops` in numpy on the CPU.
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
    """All facts. `device` is None if MLX does not start, and `device_problem` says why.

    `libraries` are the installed packages with MLX's own library. `mlx_first`: mlx was imported
    before mlxtune. `translated`: Python runs through Rosetta. `wired_limit_mb` is macOS's limit of
    GPU memory, 0 for its default. `offline` is the variable that forbids downloads, if any.
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


def sysctl() -> dict[str, str]:
    """Return macOS's values for processor and memory; none on another system."""
    if platform.system() != "Darwin":
        return {}
    # Names unknown to a Mac only give errors on stderr.
    return parse_pairs(_output("sysctl", *_SYSCTL))


def parse_pairs(text: str) -> dict[str, str]:
    """Parse the output of `sysctl a b`, lines of `name: value`."""
    pairs = (line.partition(": ") for line in text.splitlines())
    return {name.strip(): value.strip() for name, colon, value in pairs if colon}


def system_name() -> tuple[str, str]:
    """Return the usual name of the system, and its release."""
    if platform.system() == "Darwin":
        return "macOS", platform.mac_ver()[0]
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux"), platform.release()
    return platform.system(), platform.release()


def memory(values: Mapping[str, str]) -> Memory:
    """Return the memory of the machine or container; `values` are those of `sysctl`."""
    if platform.system() == "Darwin":
        total = values.get("hw.memsize", "")
        return Memory(
            total=int(total) if total.isdecimal() else None,
            available=parse_vm_stat(_output("vm_stat")),
            swap_used=parse_swap(values.get("vm.swapusage", "")),
        )
    limits = (_text(path).strip() for path in _CGROUP_LIMITS)
    limit = next((int(text) for text in limits if text.isdecimal()), None)
    return within(parse_meminfo(_text("/proc/meminfo")), limit)


def parse_swap(text: str) -> int | None:
    """Parse the bytes used in macOS's `vm.swapusage`, such as `used = 1033.75M`."""
    used = re.search(r"used = ([\d.]+)M", text)
    return int(float(used[1]) * _MIB) if used else None


def parse_vm_stat(text: str) -> int | None:
    """Parse the bytes available to a program in the output of macOS's `vm_stat`."""
    page = re.search(r"page size of (\d+) bytes", text)
    pages = [re.search(rf"Pages {kind}:\s+(\d+)\.", text) for kind in _AVAILABLE_PAGES]
    if page is None or not any(pages):
        return None
    return int(page[1]) * sum(int(count[1]) for count in pages if count)


def parse_meminfo(text: str) -> Memory:
    """Parse Linux's /proc/meminfo."""
    sizes = {m[1]: int(m[2]) * 1024 for m in re.finditer(r"(?m)^(\w+):\s+(\d+) kB", text)}
    total, free = sizes.get("SwapTotal"), sizes.get("SwapFree")
    return Memory(
        total=sizes.get("MemTotal"),
        available=sizes.get("MemAvailable"),
        swap_used=None if total is None or free is None else total - free,
    )


def within(memory: Memory, limit: int | None) -> Memory:
    """Return the memory of a container with a limit in bytes; None is no limit."""
    if limit is None or memory.total is None or limit >= memory.total:
        return memory
    available = None if memory.available is None else min(memory.available, limit)
    return replace(memory, total=limit, available=available)


def power() -> Power:
    """Return how a Mac is powered; unknown on another system."""
    if platform.system() != "Darwin":
        return Power()
    return parse_pmset(_output("pmset", "-g", "batt"), _output("pmset", "-g"))


def parse_pmset(battery: str, settings: str) -> Power:
    """Parse the output of macOS's `pmset -g batt` and `pmset -g`.

    Low Power Mode is `lowpowermode 1`, or `powermode 1` on Macs that also have High Power Mode.
    """
    source = re.search(r"drawing from '([^']+)'", battery)
    mode = re.search(r"(?m)^\s*(?:lowpowermode|powermode)\s+(\d)", settings)
    return Power(
        on_battery=None if source is None else source[1] == "Battery Power",
        saving=None if mode is None else mode[1] == "1",
    )


def has_nvidia() -> bool:
    """Return whether an NVIDIA driver is installed."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def offline() -> str:
    """Return the environment variable that forbids downloads of models, if one is set."""
    on = ("1", "true", "yes", "on")
    names = (name for name in _OFFLINE_VARIABLES if os.environ.get(name, "").lower() in on)
    return next(names, "")


def folders() -> dict[str, Folder]:
    """Return the folders that runs write to, by their purpose."""
    # Looking up the first or last raises OSError if it is gone.
    purposes: dict[str, Callable[[], Path]] = {
        "folder": Path.cwd,
        "cache": user_cache,
        "downloads": _downloads,
        "temporary": lambda: Path(tempfile.gettempdir()),
    }
    result = {}
    for name, path in purposes.items():
        try:
            result[name] = _folder(path(), measured=name == "cache")
        except OSError as error:
            result[name] = Folder("", None, problem=error.strerror or str(error))
    return result


def _downloads() -> Path:
    """Return where huggingface_hub keeps models, by its documented environment variables."""
    if own := os.environ.get("HF_HUB_CACHE"):
        return as_path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return as_path(home) / "hub"


def _folder(path: Path, *, measured: bool) -> Folder:
    try:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        free = shutil.disk_usage(existing).free
        problem = "" if os.access(existing, os.W_OK | os.X_OK) else "cannot be written"
        size = _size(path) if measured and path.is_dir() else None
    except OSError as error:
        return Folder(str(path), None, problem=error.strerror or str(error))
    return Folder(str(path), free, size, problem)


def _size(folder: Path) -> int:
    deadline, total = time.monotonic() + _MEASURING_SECONDS, 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                total += (Path(parent) / name).lstat().st_size
            if time.monotonic() > deadline:
                return total
    return total


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _output(*command: str) -> str:
    """Return the output of a system tool; empty if the tool is missing or slow."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_TOOL_SECONDS
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
