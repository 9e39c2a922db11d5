"""What MLX needs to compile kernels for NVIDIA GPUs: CUDA's headers, and a folder for the results.

MLX compiles most of its CUDA kernels on first use. It looks for headers in one folder, as
`include_path_args` in mlx/backend/cuda/jit_module.cpp does. Without the headers, or with a part of
them, it raises an error in the middle of a run.

MLX runs the kernels that it finds in its folder of compiled kernels. By default, that folder is in
the temporary folder, where any user may make it first, and where kernels that took a minute to
compile are lost at the next restart.
"""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from importlib import metadata
from pathlib import Path

from mlxtune.config import user_cache
from mlxtune.core.files.ours import private_folder
from mlxtune.core.files.reading import read_kernel_file
from mlxtune.core.files.scratch import lasting_folder
from mlxtune.core.machine.facts import has_nvidia
from mlxtune.core.machine.installation import installed_version, pip_command
from mlxtune.errors import ConfigError

# A header of each package, as an example. Only matmuls of quantised matrices on Hopper include
# crt/mma.h, by CUDA's mma.h.
RUNTIME, CRT = "cuda_fp16.h", "crt/mma.h"
_MISSING_HEADER = re.compile(r'cannot open source file "([^"]+)"')
# MLX reads this variable when it first needs a kernel (ptx_cache_dir in mlx/backend/cuda).
VARIABLE = "MLX_PTX_CACHE_DIR"
# The same folder's problem, for the processes that this one starts.
_PROBLEM = "MLXTUNE_KERNELS_PROBLEM"
_GPUS = Path("/proc/driver/nvidia/gpus")
# The longest name of a folder of kernels; any file system takes it.
_MAX_CHARS = 120


@dataclass(frozen=True)
class Packages:
    """PyPI's packages of a CUDA version: their folder, and the names of those with headers."""

    folder: str
    runtime: str
    crt: str
    # The folder of CRT's headers, if MLX does not look there.
    crt_folder: str = ""


PACKAGES = {
    "mlx-cuda-12": Packages(
        "nvidia/cuda_runtime/include",
        "nvidia-cuda-runtime-cu12",
        "nvidia-cuda-nvcc-cu12",
        "nvidia/cuda_nvcc/include/crt",
    ),
    "mlx-cuda-13": Packages("nvidia/cu13/include", "nvidia-cuda-runtime", "nvidia-cuda-crt"),
}


def missing_headers() -> dict[str, str]:
    """Return the headers that MLX's installed library for CUDA lacks, each with its remedy."""
    if (library := _library()) is None:
        return {}
    folder = _folder(library)
    return {
        header: header_remedy(header)
        for header in (RUNTIME, CRT)
        if folder is None or not (folder / header).exists()
    }


def missing_header(text: str) -> str:
    """Return the header that a compiler reports as missing; an example if it names none."""
    match = _MISSING_HEADER.search(text)
    return match[1] if match else RUNTIME


def header_remedy(header: str) -> str:
    """Return how to install a header for MLX's library."""
    library = _library() or "mlx-cuda-13"
    packages, folder = PACKAGES[library], _folder(library)
    own = _site(library) / packages.folder
    if folder is not None and folder != own:
        return f"install all of the CUDA toolkit in {folder.parent}, or set CUDA_HOME to another"
    if not header.startswith("crt/"):
        return pip_command("install", _matching(packages.runtime, _compiler(library)))
    install = pip_command("install", _matching(packages.crt, packages.runtime))
    if not packages.crt_folder:
        return install
    # NVIDIA's packages for CUDA 12 have separate folders, and MLX searches the runtime's alone.
    return f"{install}, and ln -s {_site(library) / packages.crt_folder} {own / 'crt'}"


def _library() -> str | None:
    return next((name for name in PACKAGES if installed_version(name)), None)


def _folder(library: str) -> Path | None:
    """Return the folder where MLX looks for a library's headers; None if there is none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    tried = (_site(library) / PACKAGES[library].folder, Path(home, "include"))
    # Unlike Path.exists, this returns False for a path that the system refuses.
    return next((folder for folder in tried if os.path.exists(folder)), None)  # noqa: PTH110


def _site(library: str) -> Path:
    """Return the folder of a package, normally site-packages."""
    try:
        return Path(str(metadata.distribution(library).locate_file("")))
    except metadata.PackageNotFoundError:
        return Path("site-packages")


def _compiler(library: str) -> str:
    return "nvidia-cuda-nvrtc" + ("-cu12" if library.endswith("12") else "")


def _matching(package: str, other: str) -> str:
    """Return a requirement of `package` at the minor version of `other`, if that is installed."""
    version = installed_version(other)
    return f"'{package}=={'.'.join(version.split('.')[:2])}.*'" if version else package


@dataclass(frozen=True)
class KernelCache:
    """The folder of compiled kernels; `problem` says why they are lost when this process ends."""

    path: str
    problem: str = ""


def keep_kernels() -> None:
    """Make MLX, and the processes started later, keep compiled kernels in mlxtune's cache folder.

    Call this before mlx is imported. A folder that the user chose stays chosen.
    """
    if (cache := kernel_cache()) is not None:
        os.environ |= {VARIABLE: cache.path, _PROBLEM: cache.problem}


@cache
def kernel_cache() -> KernelCache | None:
    """Return the folder of compiled kernels, made if it is missing; None without an NVIDIA GPU.

    It is the user's choice, else mlxtune's folder or, if that cannot be made or other users may
    write to it, a new folder, which lasts as long as this process.
    """
    if sys.platform != "linux" or not has_nvidia():
        return None
    if user_folder := os.environ.get(VARIABLE):
        return KernelCache(user_folder, os.environ.get(_PROBLEM, ""))
    # MLX names a kernel after neither, and machines with other GPUs may share this folder.
    # Without metadata, the files of mlx were copied.
    name = "-".join([installed_version("mlx") or "mlx", *_gpus()])
    try:
        folder = user_cache() / "kernels" / re.sub(r"[^\w.-]+", "-", name)[:_MAX_CHARS]
        private_folder(folder)
    except OSError as error:
        return KernelCache(str(lasting_folder("kernels")), f"{error.filename}: {error.strerror}")
    except ConfigError as error:
        return KernelCache(str(lasting_folder("kernels")), str(error))
    return KernelCache(str(folder))


def _gpus() -> Iterator[str]:
    """Yield the models of this machine's GPUs; if they differ, also which of them are visible."""
    models = set()
    with suppress(OSError):  # Linux under Windows has no such folder
        for folder in _GPUS.iterdir():
            models |= set(re.findall(r"Model:\s*(.+)", read_kernel_file(folder / "information")))
    yield from sorted(models)
    if len(models) > 1:
        yield os.environ.get("CUDA_VISIBLE_DEVICES", "all")
