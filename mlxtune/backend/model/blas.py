"""A fast BLAS and allocator settings for the CPU on Linux, before mlx is loaded.

The Linux CPU wheel of mlx bundles the reference BLAS, about 27 times slower in float32 than a tuned
one. A tuned BLAS that is loaded first, with its symbols global, takes its place.
"""

import ctypes
import importlib.metadata
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

# The environment variable that names a library.
_CHOICE = "MLXTUNE_BLAS"
# glibc's mallopt parameters (malloc.h).
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_MMAP_MAX = -1, -3, -4
_LARGEST_INT = 2**31 - 1


def prepare_cpu() -> str | None:
    """Load a fast BLAS and keep freed memory, on Linux; do nothing elsewhere.

    Returns the name of the library, or None elsewhere. If none is found, it warns once with what to
    install, and returns None.
    """
    if sys.platform != "linux":
        return None
    if "mlx.core" in sys.modules:
        _warn("mlx was imported before mlxtune, too late for a fast BLAS: import mlxtune first")
        return None
    _keep_freed_memory()
    for path in _candidates():
        try:
            ctypes.CDLL(path, mode=ctypes.RTLD_GLOBAL)
        except OSError:
            continue
        # Processes that this one starts load the same.
        os.environ[_CHOICE] = path
        return Path(path).name
    _warn(
        "no fast BLAS found, training on the CPU will be about 27 times slower: "
        "install one (apt-get install libopenblas0, or pip install mkl)"
    )
    return None


def _candidates() -> Iterator[str]:
    if _CHOICE in os.environ:
        yield os.environ[_CHOICE]
    # The system's library, if the dynamic linker finds it. scipy's OpenBLAS wheels do not work:
    # their symbols are prefixed.
    yield "libopenblas.so.0"
    try:
        files = importlib.metadata.files("mkl") or []
    except importlib.metadata.PackageNotFoundError:
        return
    # The same result bit for bit in every run, whatever the alignment of the arrays.
    os.environ.setdefault("MKL_CBWR", "AUTO")
    os.environ.setdefault("MKL_DYNAMIC", "FALSE")
    yield from (str(file.locate()) for file in files if file.name.startswith("libmkl_rt.so"))


def _keep_freed_memory() -> None:
    """Have glibc keep big freed arrays instead of returning them to the kernel.

    Otherwise each operation faults its result's pages in again: adding to a 78 MB array takes
    34 ms without this and 5 ms with it.
    """
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:  # musl has none
        mallopt(_M_MMAP_THRESHOLD, _LARGEST_INT)
        mallopt(_M_TRIM_THRESHOLD, _LARGEST_INT)
        mallopt(_M_MMAP_MAX, 0)


def _warn(message: str) -> None:
    warnings.warn(message, RuntimeWarning, stacklevel=4)


BLAS = prepare_cpu()
