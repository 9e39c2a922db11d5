"""CUDA's headers in folders as PyPI's packages and toolkits make them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.core.machine import cuda
from mlxtune.core.machine.cuda import header_remedy, missing_header, missing_headers

# The log of NVIDIA's compiler for a 4-bit product on an H200.
LOG = (
    "Failed to compile kernel: /site/nvidia/cu13/include/mma.h(55): catastrophic error: "
    'cannot open source file "crt/mma.h"\n  #include "crt/mma.h"\n'
)


def install(site: Path, name: str, version: str, *files: str) -> None:
    """Write a package's files, and its metadata as pip does."""
    info = site / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    for file in files:
        (site / file).parent.mkdir(parents=True, exist_ok=True)
        (site / file).touch()


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder of packages, and a machine without a CUDA toolkit."""
    folder = tmp_path / "site-packages"
    install(folder, "pip", "26", "pip/__init__.py")
    monkeypatch.setattr("sys.path", [str(folder)])
    monkeypatch.delenv("CUDA_PATH", raising=False)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path / "cuda"))
    return folder


def test_no_header_is_missed_without_a_library_for_cuda(site: Path) -> None:
    install(site, "mlx-cpu", "0.32.4")
    assert missing_headers() == {}


def test_library_for_cuda_12_needs_the_runtime_and_a_link(site: Path) -> None:
    install(site, "mlx-cuda-12", "0.32.4")
    install(site, "nvidia-cuda-nvrtc-cu12", "12.9.86")
    assert missing_headers()["cuda_fp16.h"] == "pip install 'nvidia-cuda-runtime-cu12==12.9.*'"

    header = "nvidia/cuda_runtime/include/cuda_fp16.h"
    install(site, "nvidia-cuda-runtime-cu12", "12.9.79", header)
    nvcc = site / "nvidia/cuda_nvcc/include/crt"
    install(site, "nvidia-cuda-nvcc-cu12", "12.9.86", str(nvcc / "mma.h"))
    link = site / "nvidia/cuda_runtime/include/crt"
    assert missing_headers() == {
        "crt/mma.h": f"pip install 'nvidia-cuda-nvcc-cu12==12.9.*', and ln -s {nvcc} {link}"
    }
    link.symlink_to(nvcc)
    assert missing_headers() == {}


def test_library_for_cuda_13_needs_crt_at_the_version_of_the_runtime(site: Path) -> None:
    install(site, "mlx-cuda-13", "0.32.4")
    install(site, "nvidia-cuda-runtime", "13.0.96", "nvidia/cu13/include/cuda_fp16.h")
    assert missing_headers() == {"crt/mma.h": "pip install 'nvidia-cuda-crt==13.0.*'"}
    install(site, "nvidia-cuda-crt", "13.0.88", "nvidia/cu13/include/crt/mma.h")
    assert missing_headers() == {}


def test_toolkit_serves_without_packages(site: Path, tmp_path: Path) -> None:
    install(site, "mlx-cuda-13", "0.32.4")
    include = tmp_path / "cuda" / "include"
    include.mkdir(parents=True)
    (include / "cuda_fp16.h").touch()
    toolkit = f"install all of the CUDA toolkit in {tmp_path / 'cuda'}, or set CUDA_HOME to another"
    assert missing_headers() == {"crt/mma.h": toolkit}
    (include / "crt").mkdir()
    (include / "crt" / "mma.h").touch()
    assert missing_headers() == {}


def test_header_is_read_from_the_compilers_log(site: Path) -> None:
    assert missing_header(LOG) == "crt/mma.h"
    assert header_remedy(missing_header(LOG)) == "pip install nvidia-cuda-crt"
    missed = "Can not find locations of CUDA headers, please set environment variable CUDA_HOME"
    assert missing_header(missed) == "cuda_fp16.h"


def test_invalid_cuda_folder_counts_as_missing(site: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install(site, "mlx-cuda-13", "0.32.4")
    monkeypatch.setenv("CUDA_HOME", "/c" * 2500)
    assert set(cuda.missing_headers()) == {cuda.RUNTIME, cuda.CRT}


def test_started_process_knows_the_problem_of_the_folder_of_kernels(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = cuda.KernelCache("/tmp/kernels", "mlxtune's folder: Permission denied")
    monkeypatch.setattr(cuda, "kernel_cache", lambda: kept)
    for name in (cuda.VARIABLE, cuda._PROBLEM):
        monkeypatch.setenv(name, "")
    cuda.keep_kernels()
    monkeypatch.undo()
    # The environment of a process that this one starts.
    for name, value in ((cuda.VARIABLE, kept.path), (cuda._PROBLEM, kept.problem)):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(cuda, "has_nvidia", lambda: True)
    monkeypatch.setattr("sys.platform", "linux")
    assert cuda.kernel_cache.__wrapped__() == kept
