"""CUDA's headers: where MLX looks for them, and the packages that install them.

MLX compiles most of its CUDA kernels on first use. It looks in one folder, as `include_path_args`
in mlx/backend/cuda/jit_module.cpp does. Without the headers, or with a part of them, it raises an
error in the middle of a run.
"""

import os
import re
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

# A header of each package, as an example. Only products of quantised matrices on Hopper include
# crt/mma.h, by CUDA's mma.h.
RUNTIME, CRT = "cuda_fp16.h", "crt/mma.h"
_MISSING = re.compile(r'cannot open source file "([^"]+)"')


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


def header_in(text: str) -> str:
    """Return the header that a compiler's message misses; an example if it misses all."""
    found = _MISSING.search(text)
    return found[1] if found else RUNTIME


def header_remedy(header: str) -> str:
    """Return how to install a header for MLX's library."""
    library = _library() or "mlx-cuda-13"
    packages, folder = PACKAGES[library], _folder(library)
    own = _site(library) / packages.folder
    if folder is not None and folder != own:
        return f"install all of the CUDA toolkit in {folder.parent}, or set CUDA_HOME to another"
    if not header.startswith("crt/"):
        return f"pip install {_matching(packages.runtime, _compiler(library))}"
    install = f"pip install {_matching(packages.crt, packages.runtime)}"
    if not packages.crt_folder:
        return install
    # NVIDIA's packages for CUDA 12 have separate folders, and MLX searches the runtime's alone.
    return f"{install}, and ln -s {_site(library) / packages.crt_folder} {own / 'crt'}"


def _library() -> str | None:
    return next((name for name in PACKAGES if _version(name)), None)


def _folder(library: str) -> Path | None:
    """Return the folder where MLX looks; None if it finds none."""
    home = os.environ.get("CUDA_HOME") or os.environ.get("CUDA_PATH") or "/usr/local/cuda"
    tried = (_site(library) / PACKAGES[library].folder, Path(home, "include"))
    return next((folder for folder in tried if folder.exists()), None)


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
    version = _version(other)
    return f"'{package}=={'.'.join(version.split('.')[:2])}.*'" if version else package


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
