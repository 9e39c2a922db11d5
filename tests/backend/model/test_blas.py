"""The BLAS of the Linux CPU. Its speed is in tests/long/check_blas.py: no timing decides a test."""

from __future__ import annotations

import subprocess
import sys

import pytest

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's CPU wheel alone needs a BLAS")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@linux
def test_matrix_products_of_mlx_resolve_to_the_fast_library() -> None:
    """The dynamic linker's own answer for the symbol that mlx calls."""
    result = run(
        "import ctypes\n"
        "from mlxtune.backend import BLAS\n"
        "import mlx.core as mx\n"
        "class Info(ctypes.Structure):\n"
        "    _fields_ = [('file', ctypes.c_char_p), ('base', ctypes.c_void_p),\n"
        "                ('name', ctypes.c_char_p), ('address', ctypes.c_void_p)]\n"
        "info = Info()\n"
        "libc = ctypes.CDLL(None)\n"
        "symbol = ctypes.cast(libc.cblas_sgemm, ctypes.c_void_p)\n"
        "assert libc.dladdr(symbol, ctypes.byref(info))\n"
        "print(BLAS, info.file.decode())\n"
    )
    name, file = result.stdout.split()
    assert name.startswith(("libmkl_rt", "libopenblas"))
    assert "libmkl" in file or "openblas" in file
    assert result.stderr == ""


@linux
def test_one_warning_says_what_to_install_when_there_is_none() -> None:
    result = run(
        "import ctypes\n"
        "real = ctypes.CDLL\n"
        "def without(path, *args, **options):\n"
        "    if path is None: return real(path, *args, **options)\n"
        "    raise OSError('not found')\n"
        "ctypes.CDLL = without\n"
        "from mlxtune.backend import BLAS\nfrom mlxtune.backend.model import blas as cpu\n"
        "assert BLAS is None\n"
    )
    assert result.stderr.count("RuntimeWarning") == 1
    assert "apt-get install libopenblas0, or pip install mkl" in result.stderr


@linux
def test_mlx_imported_first_is_said() -> None:
    result = run("import mlx.core\nimport mlxtune.backend\nimport mlxtune.backend.model.memory\n")
    assert result.stderr.count("import mlxtune first") == 1


def test_macos_is_left_alone() -> None:
    result = run(
        "import sys, ctypes\n"
        "sys.platform = 'darwin'\n"
        "def fail(*args, **options): raise AssertionError('touched')\n"
        "ctypes.CDLL = fail\n"
        "from mlxtune.backend.model.blas import prepare_cpu\n"
        "assert prepare_cpu() is None\n"
    )
    assert result.stderr == ""
