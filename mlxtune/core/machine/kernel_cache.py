"""The folder in which MLX keeps the kernels that it compiles for NVIDIA GPUs.

MLX runs what it finds there. By default, the folder is in the temporary folder, where any user may
make it first, and where kernels that took a minute to compile are lost at the next restart.
"""

import importlib.metadata
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from mlxtune.config import user_cache
from mlxtune.core.files.ours import private_folder
from mlxtune.core.files.reading import read_kernel_file
from mlxtune.core.files.scratch import lasting_folder
from mlxtune.core.machine.facts import has_nvidia
from mlxtune.errors import ConfigError

# MLX reads this variable when it first needs a kernel (ptx_cache_dir in mlx/backend/cuda).
VARIABLE = "MLX_PTX_CACHE_DIR"
_GPUS = Path("/proc/driver/nvidia/gpus")
# The longest name of a folder of kernels; any file system takes it.
_LONGEST = 120


@dataclass(frozen=True)
class KernelCache:
    """The folder of compiled kernels; `problem` says why they are lost when this process ends."""

    path: str
    problem: str = ""


def keep_kernels() -> None:
    """Make MLX, and the processes started later, keep compiled kernels in mlxtune's cache folder.

    Call this before mlx is imported. A folder that the user chose stays chosen.
    """
    if (kept := kernel_cache()) is not None:
        os.environ[VARIABLE] = kept.path


@cache
def kernel_cache() -> KernelCache | None:
    """Return the folder of compiled kernels, made if it is missing; None without an NVIDIA GPU.

    It is the user's choice, else mlxtune's folder or, if that cannot be made or other users may
    write to it, a new folder, which lasts as long as this process.
    """
    if sys.platform != "linux" or not has_nvidia():
        return None
    if chosen := os.environ.get(VARIABLE):
        return KernelCache(chosen)
    # MLX names a kernel after neither, and machines with other GPUs may share this folder.
    name = "-".join([_version(), *_gpus()])
    try:
        folder = user_cache() / "kernels" / re.sub(r"[^\w.-]+", "-", name)[:_LONGEST]
        private_folder(folder)
    except OSError as error:
        return KernelCache(str(lasting_folder("kernels")), f"{error.filename}: {error.strerror}")
    except ConfigError as error:
        return KernelCache(str(lasting_folder("kernels")), str(error))
    return KernelCache(str(folder))


def _version() -> str:
    try:
        return importlib.metadata.version("mlx")
    except importlib.metadata.PackageNotFoundError:  # its files were copied without metadata
        return "mlx"


def _gpus() -> Iterator[str]:
    """Yield the models of this machine's GPUs; if they differ, also which of them are visible."""
    models = set()
    with suppress(OSError):  # Linux under Windows has no such folder
        for folder in _GPUS.iterdir():
            models |= set(re.findall(r"Model:\s*(.+)", read_kernel_file(folder / "information")))
    yield from sorted(models)
    if len(models) > 1:
        yield os.environ.get("CUDA_VISIBLE_DEVICES", "all")
