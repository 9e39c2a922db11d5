"""The facts of a machine, read with the system's own tools. This module does not import mlx.

machine_checks.py interprets the facts.
"""

import json
import os
import platform
import re
import shutil
import sys
import tempfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from mlxtune.config import as_path, user_cache
from mlxtune.core.files.processes import HelperTimeoutError, output_of, own_environment, python
from mlxtune.core.files.reading import read_kernel_file
from mlxtune.core.machine.installation import UNINSTALLED, installed_version
from mlxtune.errors import one_line

# The packages that install MLX's own library, each into the same file.
MLX_LIBRARIES = ("mlx-cpu", "mlx-cuda-12", "mlx-cuda-13", "mlx-metal")

_SYSCTL = ("machdep.cpu.brand_string", "sysctl.proc_translated", "iogpu.wired_limit_mb")
_TOOL_SECONDS = 2.0
# MLX starts within a second; after an update, the first start may take several seconds.
_MLX_SECONDS = 30.0
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_OFFLINE_VARIABLES = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


@dataclass(frozen=True)
class Package:
    """A required package: the accepted versions, and the installed version, if any.

    `serves` says whether the installed version is accepted. `extra` is the optional extra that
    requires the package.
    """

    name: str
    needs: str
    installed: str | None
    serves: bool
    extra: str = ""


@dataclass(frozen=True)
class Folder:
    """A folder that runs write to.

    `free` is the free space on its disk, and `size` the total size of its files if it is a cache,
    both in bytes. `problem` says why the folder cannot be written.
    """

    path: str
    free: int | None
    size: int | None = None
    problem: str = ""


@dataclass(frozen=True)
class Memory:
    """Memory in bytes, None if unknown. `total` and `available` respect a container's limit."""

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
    """MLX's device. Memory is in bytes; `limit` is the default of --memory-limit on the device.

    `gflops` is the speed of a float32 matmul in MLX, `numpy_gflops` in numpy on the CPU.
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
    """All facts of a machine. `device` is None if MLX does not start; `device_problem` says why.

    `libraries` are the installed packages with MLX's own library. `mlx_first` says whether mlx was
    imported before mlxtune, `translated` whether Python runs through Rosetta. `wired_limit_mb` is
    macOS's limit on GPU memory, 0 for the default. `thermal` describes thermal throttling, and is
    empty if there is none. `offline` is the variable that forbids downloads, if any.
    `missing_headers` are CUDA's that MLX needs, each with its remedy.
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
    thermal: str = ""
    wired_limit_mb: int | None = None
    offline: str = ""
    missing_headers: Mapping[str, str] = field(default_factory=dict)


def read_device() -> tuple[Device | None, str]:
    """Return MLX's device, or None and the reason why MLX does not start."""
    # A separate process survives a crash of MLX.
    command = python("-m", "mlxtune.backend.device.device_helper")
    try:
        output = output_of(command, _MLX_SECONDS, environment=own_environment())
    except HelperTimeoutError as error:
        return None, str(error)
    if output.status < 0:
        return None, f"it was killed by signal {-output.status}"
    if output.status:
        lines = output.stderr.split("\n\n")[-1].strip().splitlines()
        return None, one_line(RuntimeError(lines[-1] if lines else "it failed without a message"))
    return Device(**json.loads(output.stdout)), ""


def read_system() -> dict[str, Any]:
    if platform.system() == "Darwin":
        # For unknown names, macOS's sysctl only prints errors on stderr.
        values = dict(re.findall(r"(?m)^(\S+): (.*)$", tool_output("sysctl", *_SYSCTL)))
        return {
            "name": "macOS",
            "release": platform.mac_ver()[0],
            "chip": values.get("machdep.cpu.brand_string", ""),
            "translated": values.get("sysctl.proc_translated") == "1",
            "memory": read_memory(),
            "wired_limit_mb": _whole(values.get("iogpu.wired_limit_mb", "")),
        }
    name = platform.system()
    with suppress(OSError):
        name = platform.freedesktop_os_release().get("PRETTY_NAME", name)
    limits = (_whole(_text(path).strip()) for path in _CGROUP_LIMITS)
    limit = next((limit for limit in limits if limit is not None), sys.maxsize)
    return {"name": name, "release": platform.release(), "memory": read_memory(limit)}


def available_memory() -> int | None:
    """Return the number of bytes of memory available to a new process; None if unknown."""
    memory = read_system()["memory"]
    return memory.available if isinstance(memory, Memory) else None


def read_memory(limit: int = sys.maxsize) -> Memory:
    """Return the memory of the machine; `limit` is a container's limit in bytes."""
    # psutil is loaded only on use.
    import psutil

    try:
        memory, swap = psutil.virtual_memory(), psutil.swap_memory()
    except OSError:  # a system without /proc
        return Memory()
    return Memory(min(memory.total, limit), min(memory.available, limit), swap.used)


@cache
def versions() -> dict[str, str]:
    installed = {
        name: installed_version(name) for name in ("mlx", "mlx-lm", "transformers", "numpy")
    }
    return {"python": platform.python_version()} | {
        package: version or UNINSTALLED
        for package, version in ({"mlxtune": installed_version()} | installed).items()
    }


def machine_id() -> str:
    """Return an id of this boot of the machine and of this user.

    Falls back to the host's name if the system has no boot id.
    """
    boot = _text("/proc/sys/kernel/random/boot_id").strip()
    if platform.system() == "Darwin":
        boot = tool_output("sysctl", "-n", "kern.bootsessionuuid").strip()
    return f"{boot or platform.node()}/{os.getuid()}"


def has_nvidia() -> bool:
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def offline() -> str:
    """Return the name of the environment variable that forbids downloads; empty if none is set."""
    on = ("1", "true", "yes", "on")
    names = (name for name in _OFFLINE_VARIABLES if os.environ.get(name, "").lower() in on)
    return next(names, "")


def folders() -> dict[str, Folder]:
    return {
        "folder": read_folder(Path.cwd),
        "cache": read_folder(user_cache, measured=True),
        "downloads": read_folder(_downloads),
        "temporary": read_folder(lambda: Path(tempfile.gettempdir())),
    }


def _downloads() -> Path:
    """Return the folder that huggingface_hub's documented variables set for downloaded models."""
    if folder := os.environ.get("HF_HUB_CACHE"):
        return as_path(folder)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return as_path(home) / "hub"


def read_folder(find: Callable[[], Path], *, measured: bool = False) -> Folder:
    """Return the facts of the folder that `find` returns, with its size if `measured`."""
    path: Path | str = ""
    try:
        path = find()  # fails if the current folder was removed
        existing = next(parent for parent in (path, *path.absolute().parents) if parent.exists())
        free = shutil.disk_usage(existing).free
        problem = "" if os.access(existing, os.W_OK | os.X_OK) else "cannot be written"
        size = _size(path) if measured and path.is_dir() else None
    except OSError as error:
        return Folder(str(path), None, problem=error.strerror or str(error))
    return Folder(str(path), free, size, problem)


def _size(folder: Path) -> int:
    total = 0
    for path in folder.rglob("*"):
        with suppress(OSError):  # a run may have removed it by now
            total += 0 if path.is_dir() else path.lstat().st_size
    return total


def _whole(text: str) -> int | None:
    return int(text) if text.isdecimal() else None


def _text(path: str) -> str:
    with suppress(OSError):
        return read_kernel_file(Path(path))
    return ""


def tool_output(*command: str) -> str:
    """Return the output of a system tool; empty if the tool is missing, slow or cannot start."""
    if (path := shutil.which(command[0])) is None:
        return ""
    with suppress(OSError, HelperTimeoutError):
        return output_of([path, *command[1:]], _TOOL_SECONDS).stdout
    return ""
