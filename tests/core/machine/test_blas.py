"""The BLAS of the Linux CPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from mlxtune.core.machine import blas
from tests.paths import DATA

linux = pytest.mark.skipif(sys.platform != "linux", reason="Linux's CPU wheel alone needs a BLAS")


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


@linux
def test_matrix_products_of_mlx_resolve_to_the_fast_library() -> None:
    """Ask the dynamic linker for the symbol that mlx calls."""
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
def test_mkl_that_the_environment_names_repeats_its_results(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loaded = {}

    def load(path: str | None, **_: object) -> object:
        loaded[path] = os.environ.get("MKL_CBWR")
        return object()

    monkeypatch.setattr(blas.ctypes, "CDLL", load)
    monkeypatch.delitem(sys.modules, "mlx.core", raising=False)
    monkeypatch.delenv("MKL_CBWR", raising=False)
    monkeypatch.setenv("MLXTUNE_BLAS", "libmkl_rt.so.9")
    assert blas.load_blas.__wrapped__().name == "libmkl_rt.so.9"
    assert loaded["libmkl_rt.so.9"] == "AUTO"


@linux
def test_missing_blas_gives_one_warning_with_a_remedy() -> None:
    result = run(
        "import ctypes\n"
        "real = ctypes.CDLL\n"
        "def without(path, *args, **options):\n"
        "    if path is None: return real(path, *args, **options)\n"
        "    raise OSError('not found')\n"
        "ctypes.CDLL = without\n"
        "from mlxtune.backend import BLAS\nimport mlxtune.backend.device.allocator\n"
        "assert BLAS is None\n"
    )
    assert result.stderr.count("RuntimeWarning") == 1
    assert "apt-get install libopenblas0, or pip install mkl" in result.stderr


@linux
def test_mlx_imported_first_is_reported() -> None:
    result = run(
        "import mlx.core\nimport mlxtune.backend\nimport mlxtune.backend.device.allocator\n"
    )
    assert result.stderr.count("put `import mlxtune` above `import mlx`") == 1


@linux
def test_importing_mlxtune_before_mlx_is_enough() -> None:
    """The error message recommends this order; `import mlxtune` alone loads no library."""
    result = run(
        "import mlxtune\nimport mlx.core\nimport mlxtune.backend\n"
        "print(mlxtune.backend.BLAS is not None)\n"
    )
    assert result.stdout == "True\n"
    assert result.stderr == ""


@linux
def test_wheel_for_a_gpu_needs_no_blas(tmp_path: Path) -> None:
    (tmp_path / "mlx_cuda_13-0.32.4.dist-info").mkdir()
    code = f"import sys; sys.path = [{str(tmp_path)!r}]\n"
    result = run("from mlxtune.core.machine import blas\n" + code + "print(blas.has_cpu_wheel())\n")
    assert result.stdout == "False\n"


@linux
def test_mlx_without_its_library_ends_in_a_line_that_names_the_extras(tmp_path: Path) -> None:
    (tmp_path / "core.cpython.so").touch()
    code = (
        "import importlib.util\n"
        "from types import SimpleNamespace\n"
        "real = importlib.util.find_spec\n"
        f"mlx = SimpleNamespace(submodule_search_locations=[{str(tmp_path)!r}])\n"
        "importlib.util.find_spec = lambda name: mlx if name == 'mlx' else real(name)\n"
        "from mlxtune.cli import main\n"
        f"main(['chat', '--model-path', {str(DATA / 'demo-qwen3')!r}])\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert "pip install 'mlxtune-lora[cpu]'" in result.stderr


def test_macos_is_left_alone() -> None:
    result = run(
        "import sys, ctypes\n"
        "sys.platform = 'darwin'\n"
        "def fail(*args, **options): raise AssertionError('touched')\n"
        "ctypes.CDLL = fail\n"
        "import mlxtune\n"
        "from mlxtune.core.machine.blas import BlasStatus, load_blas\n"
        "assert load_blas() == BlasStatus()\n"
    )
    assert result.stderr == ""
