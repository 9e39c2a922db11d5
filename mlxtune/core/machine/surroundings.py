"""What the system says of itself: processor, memory, power, disks. Nothing here needs mlx."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

from mlxtune.config import as_path, user_cache
from mlxtune.core.machine import facts
from mlxtune.core.machine.facts import Folder, Memory, Power

_SYSCTL = (
    "hw.memsize",
    "machdep.cpu.brand_string",
    "sysctl.proc_translated",
    "vm.swapusage",
    "iogpu.wired_limit_mb",
)
# A tool of the system answers within this, or is done without.
_PATIENCE = 2.0
# A cache is measured for no longer than this: what was not seen by then is left out.
_MEASURING = 0.3
_CGROUP_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
_OFFLINE = ("HF_HUB_OFFLINE", "TRANSFORMERS_OFFLINE")


def sysctl() -> dict[str, str]:
    """Return what macOS says of its processor and memory; nothing elsewhere."""
    if platform.system() != "Darwin":
        return {}
    # Those that a Mac does not know are told on stderr; the others are printed all the same.
    return facts.read_pairs(_said("sysctl", *_SYSCTL))


def system_name() -> tuple[str, str]:
    """Return the name of the system and its release, as a person knows them."""
    if platform.system() == "Darwin":
        return "macOS", platform.mac_ver()[0]
    with suppress(OSError):
        return platform.freedesktop_os_release().get("PRETTY_NAME", "Linux"), platform.release()
    return platform.system(), platform.release()


def memory(said: dict[str, str]) -> Memory:
    """Return the memory of the machine, or of the container that this is."""
    if platform.system() == "Darwin":
        total = said.get("hw.memsize", "")
        return Memory(
            total=int(total) if total.isdecimal() else None,
            available=facts.read_vm_stat(_said("vm_stat")),
            swap_used=facts.read_swap(said.get("vm.swapusage", "")),
        )
    return facts.within(facts.read_meminfo(_text("/proc/meminfo")), _container_limit())


def power() -> Power:
    """Return where the current comes from, on a Mac."""
    if platform.system() != "Darwin":
        return Power()
    return facts.read_pmset(_said("pmset", "-g", "batt"), _said("pmset", "-g"))


def has_nvidia() -> bool:
    """Tell whether there is a driver of NVIDIA."""
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi") is not None


def offline() -> str:
    """Return the variable that keeps models from being downloaded, if one is set."""
    on = ("1", "true", "yes", "on")
    return next((name for name in _OFFLINE if os.environ.get(name, "").lower() in on), "")


def folders() -> dict[str, Folder]:
    """Return the folders that runs write to, by what they are for."""
    # Of these, the first may have been removed, and the last may be nowhere.
    asked: dict[str, Callable[[], Path]] = {
        "folder": Path.cwd,
        "cache": user_cache,
        "downloads": _downloads,
        "temporary": lambda: Path(tempfile.gettempdir()),
    }
    found = {}
    for name, path in asked.items():
        try:
            found[name] = _folder(path(), measured=name == "cache")
        except OSError as error:
            found[name] = Folder("", None, problem=error.strerror or str(error))
    return found


def _downloads() -> Path:
    """Return where huggingface_hub keeps models, by its documentation of environment variables."""
    if own := os.environ.get("HF_HUB_CACHE"):
        return as_path(own)
    cache = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    home = os.environ.get("HF_HOME") or f"{cache}/huggingface"
    return as_path(home) / "hub"


def _folder(path: Path, *, measured: bool = False) -> Folder:
    try:
        existing = next(each for each in (path, *path.absolute().parents) if each.exists())
        free = shutil.disk_usage(existing).free
        problem = "" if os.access(existing, os.W_OK | os.X_OK) else "cannot be written"
        size = _size(path) if measured and path.is_dir() else None
    except OSError as error:
        return Folder(str(path), None, problem=error.strerror or str(error))
    return Folder(str(path), free, size, problem)


def _size(folder: Path) -> int:
    """Return the bytes of the files in a folder, as far as a short while suffices."""
    ends, total = time.monotonic() + _MEASURING, 0
    for size in _sizes(folder):
        total += size
        if time.monotonic() > ends:
            break
    return total


def _sizes(folder: Path) -> Iterator[int]:
    for parent, _, names in os.walk(folder):
        for name in names:
            with suppress(OSError):
                yield (Path(parent) / name).lstat().st_size


def _container_limit() -> int | None:
    for path in _CGROUP_LIMITS:
        text = _text(path).strip()
        if text.isdecimal():
            return int(text)
    return None


def _text(path: str) -> str:
    with suppress(OSError):
        return Path(path).read_text(errors="replace")
    return ""


def _said(*command: str) -> str:
    """Return what a tool of the system prints; nothing where it is not there or takes too long."""
    try:
        return subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PATIENCE
        ).stdout
    except (OSError, subprocess.TimeoutExpired):
        return ""
