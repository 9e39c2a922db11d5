"""Loads a fast BLAS for the CPU on Linux, and sets up the allocator, before mlx is loaded.

The Linux CPU wheel of mlx bundles the reference BLAS, which is about 27 times slower in float32
than a tuned BLAS. A tuned BLAS that is loaded first, with global symbols, replaces the reference
BLAS.
"""

import ctypes
import functools
import os
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from mlxtune.core.files.reading import read_text
from mlxtune.core.machine.installation import pip_command

# The environment variable that names the library to load.
_CHOICE = "MLXTUNE_BLAS"
# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_MAX_INT = 2**31 - 1


@dataclass(frozen=True)
class BlasStatus:
    """The name of the library that was loaded, or the reason why no library was loaded."""

    name: str | None = None
    problem: str = ""


def has_cpu_wheel() -> bool:
    """Return whether mlx's CPU wheel for Linux, which needs a fast BLAS, is installed."""
    return sys.platform == "linux" and any(_metadata("mlx_cpu"))


@functools.cache
def load_blas() -> BlasStatus:
    """On Linux, load a fast BLAS, once, and keep freed memory; elsewhere, do nothing."""
    if sys.platform != "linux":
        return BlasStatus()
    if "mlx.core" in sys.modules:
        return BlasStatus(
            problem="mlx was imported before mlxtune, too late for a fast BLAS: training on the "
            "CPU will be several times slower; put `import mlxtune` above `import mlx` and "
            "`import mlx_lm`"
        )
    try:
        Path.cwd()
    except FileNotFoundError:
        # In a removed folder, MKL would end the process.
        return BlasStatus(
            problem="the current folder no longer exists, so no fast BLAS can be loaded"
        )
    _keep_freed_memory()
    # Set even if the environment names MKL, so that each run gives the same bits at any alignment
    # of the arrays.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    for path in _candidates():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        # Child processes load the same library.
        os.environ[_CHOICE] = path
        return BlasStatus(Path(path).name)
    return BlasStatus(
        problem="no fast BLAS found, so training on the CPU will be about 27 times slower: "
        f"install one (apt-get install libopenblas0, or {pip_command('install', 'mkl')})"
    )


def _candidates() -> Iterator[str]:
    if _CHOICE in os.environ:
        yield os.environ[_CHOICE]
    # The system's library, if the dynamic linker finds it. scipy's OpenBLAS wheels do not work:
    # their symbols are prefixed.
    yield "libopenblas.so.0"
    for package in _metadata("mkl"):
        for line in read_text(package / "RECORD").splitlines():
            file = line.split(",")[0]
            if Path(file).name.startswith("libmkl_rt.so"):
                yield str(package.parent / file)


def _metadata(package: str) -> Iterator[Path]:
    """Yield the metadata folders of an installed package.

    importlib.metadata would take a third of the time of `mlxtune --help`.
    """
    for folder in filter(None, sys.path):
        yield from Path(folder).glob(f"{package}-*.dist-info")


def _keep_freed_memory() -> None:
    """Make glibc keep big freed arrays instead of returning them to the kernel.

    Otherwise each operation faults its result's pages in again: adding to a 78 MB array takes 34 ms
    without these settings and 5 ms with them.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has no mallopt
        mallopt(_M_MMAP_THRESHOLD, _MAX_INT)
        mallopt(_M_TRIM_THRESHOLD, _MAX_INT)
        mallopt(_M_MMAP_MAX, 0)
