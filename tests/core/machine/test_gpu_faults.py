"""Each fault of a GPU, recognised by MLX's texts."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.core.machine.gpu_faults import Fault, fault_error, fault_of
from mlxtune.errors import GpuError, MemoryLimitError

METAL = "[METAL] Command buffer execution failed: "
CODE = "kIOGPUCommandBufferCallbackError"
TEXTS = {
    # Texts from MLX's source or from users' reports.
    "[malloc] Unable to allocate 18 bytes.": Fault.OUT_OF_MEMORY,
    "[metal::malloc] Attempting to allocate 9 bytes which is greater than the maximum allowed "
    "buffer size of 8 bytes.": Fault.OUT_OF_MEMORY,
    f"{METAL}Insufficient Memory (00000008:{CODE}OutOfMemory).": Fault.OUT_OF_MEMORY,
    "cudaMallocAsync(&data, size, stream) failed: out of memory": Fault.OUT_OF_MEMORY,
    "cublasCreate(&handle) failed: CUBLAS_STATUS_ALLOC_FAILED": Fault.OUT_OF_MEMORY,
    "[metal::malloc] Resource limit (499000) exceeded.": Fault.RESOURCE_LIMIT,
    f"{METAL}Caused GPU Timeout Error (00000002:{CODE}Timeout).": Fault.TIMEOUT,
    f"{METAL}Caused GPU Hang Error (00000003:{CODE}Hang).": Fault.TIMEOUT,
    # One report has a space in the code.
    f"{METAL}Impacting Interactivity (0000000e: {CODE}ImpactingInteractivity)": Fault.INTERACTIVITY,
    f"{METAL}Innocent Victim (00000005:{CODE}InnocentVictim).": Fault.VICTIM,
    f"{METAL}Discarded (victim of GPU error/recovery) (00000005:{CODE}InnocentVictim)": (
        Fault.VICTIM
    ),
    f"{METAL}Ignored (for causing prior/excessive GPU errors) "
    f"(00000004:{CODE}SubmissionsIgnored).": (Fault.VICTIM),
    "cudaStreamSynchronize(stream) failed: the launch timed out and was terminated": Fault.LOST,
    "cudaEventSynchronize(event) failed: uncorrectable ECC error encountered": Fault.LOST,
    "Failed to compile kernel: include/mma.h(55): catastrophic error: cannot open source file "
    '"crt/mma.h"': Fault.MISSING_HEADER,
    "Can not find locations of CUDA headers, please set environment variable CUDA_HOME or "
    "CUDA_PATH.": Fault.MISSING_HEADER,
}


@pytest.mark.parametrize(("text", "fault"), TEXTS.items(), ids=str)
def test_fault_is_recognized_by_mlxs_own_text(text: str, fault: Fault) -> None:
    assert fault_of(RuntimeError(text)) is fault
    assert [each for each in Fault if each.texts.search(text)] == [fault]


def test_python_out_of_memory_is_the_same_fault() -> None:
    assert fault_of(MemoryError()) is Fault.OUT_OF_MEMORY


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("[matmul] Last dimension of first input"),
        RuntimeError("cudaMallocManaged failed: an illegal memory access was encountered"),
        ValueError("out of memory"),
        MemoryLimitError("memory ran out"),
        GpuError("Impacting Interactivity"),
    ],
    ids=repr,
)
def test_other_errors_are_not_gpu_faults(error: Exception) -> None:
    assert fault_of(error) is None


def test_error_of_a_fault_is_one_line_that_quotes_mlx_and_names_a_remedy() -> None:
    for text, fault in TEXTS.items():
        error = fault_error(fault, f"{text}\n at line 9", "while loading")
        assert "\n" not in str(error)
        assert str(error).startswith(f"{fault.meaning} while loading")
        assert str(error).endswith(fault.remedy)
        # Commands with different options share the remedy.
        assert "--" not in fault.remedy
        assert isinstance(error, MemoryLimitError if fault is Fault.OUT_OF_MEMORY else GpuError)
        assert (text in str(error)) == (fault is not Fault.OUT_OF_MEMORY)
    assert str(fault_error(Fault.OUT_OF_MEMORY, "", "here", "go")) == "memory ran out here: go"


def test_error_of_a_missing_header_names_its_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No package but pip is installed.
    (tmp_path / "pip").mkdir()
    monkeypatch.setattr("sys.path", [str(tmp_path)])
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    (text,) = (text for text in TEXTS if "crt/mma.h" in text)
    assert str(fault_error(Fault.MISSING_HEADER, text)) == (
        f"a header of CUDA is missing ({text}): pip install nvidia-cuda-crt, "
        "then start mlxtune again"
    )
