"""NVRTC without a card, and the sources that MLX would give it."""

from __future__ import annotations

import ctypes
import sysconfig
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import mlx.core as mx
import pytest

# `dtype_to_cuda_type` in mlx/backend/cuda/utils.cpp.
_CUDA_TYPES = {
    mx.bool_: "bool",
    mx.uint8: "uint8_t",
    mx.uint16: "uint16_t",
    mx.uint32: "uint32_t",
    mx.uint64: "uint64_t",
    mx.int8: "int8_t",
    mx.int16: "int16_t",
    mx.int32: "int32_t",
    mx.int64: "int64_t",
    mx.float16: "__half",
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
}
UTILS = "mlx/backend/cuda/device/utils.cuh"
# The part of MLX's utils.cuh that kernels use. Its whole text is in libmlx.so alone, and
# tests/test_cuda_wheels.py compiles with it.
LIKE_MLX = {
    UTILS: """
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda/std/array>
#include <cuda/std/limits>
#include <cuda/std/tuple>
namespace mlx::core::cu {
using Shape = cuda::std::array<int32_t, 10>;
using Strides = cuda::std::array<int64_t, 10>;
}
"""
}


@dataclass(frozen=True)
class CudaSource:
    """A kernel's function for certain dtypes and template values, as MLX writes it."""

    kernel: str
    function: str
    header: str
    text: str


def program(sources: Sequence[CudaSource]) -> str:
    """Return the text that MLX would compile for these sources, which share a header.

    MLX compiles each of them separately. Together they read CUDA's headers once, which take nearly
    all of the time.
    """
    (header,) = {source.header for source in sources}
    functions = "\n\n".join(source.text for source in sources)
    return (
        f'#include "{UTILS}"\n\n#include <cooperative_groups.h>\n\n{header}'
        "namespace mlx::core::cu {\n\nnamespace cg = cooperative_groups;\n\n"
        f"{functions}\n\n}} // namespace mlx::core::cu\n"
    )


class Recorder:
    """Takes the place of `mx.fast.cuda_kernel`: records sources, and returns zeros.

    The functions are those of `build_kernel` in mlx/backend/cuda/custom_kernel.cpp.
    """

    def __init__(self) -> None:
        self.sources: list[CudaSource] = []

    def make(
        self,
        *,
        name: str,
        input_names: list[str],
        output_names: list[str],
        source: str,
        header: str = "",
    ) -> Callable[..., list[mx.array]]:
        def run(
            *,
            inputs: list[mx.array],
            template: Sequence[tuple[str, Any]],
            output_shapes: list[tuple[int, ...]],
            output_dtypes: list[mx.Dtype],
            **_: Any,
        ) -> list[mx.array]:
            parameters: list[str] = []
            for each, array in zip(input_names, inputs, strict=True):
                parameters.append(f"const {_CUDA_TYPES[array.dtype]}* {each}")
                for suffix, kind in (("shape", "Shape"), ("strides", "Strides"), ("ndim", "int")):
                    if array.ndim and f"{each}_{suffix}" in source:
                        parameters.append(f"const __grid_constant__ {kind} {each}_{suffix}")
            for each, dtype in zip(output_names, output_dtypes, strict=True):
                parameters.append(f"{_CUDA_TYPES[dtype]}* {each}")
            values = "".join(f"  {_constant(*each)}\n" for each in template)
            function = f"custom_kernel_{name}_{len(self.sources)}"
            text = (
                f"__global__ void {function}(\n    {', '.join(parameters)}) {{\n"
                f"{values}\n{source}\n}}"
            )
            self.sources.append(CudaSource(name, function, header, text))
            shaped = zip(output_shapes, output_dtypes, strict=True)
            return [mx.zeros(shape, dtype) for shape, dtype in shaped]

        return run


def _constant(name: str, value: Any) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {_CUDA_TYPES[value]};"
    kind = "bool" if isinstance(value, bool) else "int"
    return f"constexpr {kind} {name} = {str(value).lower()};"


class Nvrtc:
    """NVIDIA's compiler as a library, which needs no card."""

    def __init__(self, library: Path, include: Sequence[Path]) -> None:
        self._library = ctypes.CDLL(str(library))
        self._include = include

    def compile(
        self,
        text: str,
        functions: Sequence[str],
        headers: Mapping[str, str],
        architecture: str,
    ) -> bytes:
        """Return the machine code of functions, or PTX if `architecture` begins with "compute".

        Raises RuntimeError with the compiler's log. The options are MLX's, in
        mlx/backend/cuda/jit_module.cpp.
        """
        program = ctypes.c_void_p()
        count = len(headers)
        texts = (ctypes.c_char_p * count)(*(header.encode() for header in headers.values()))
        names = (ctypes.c_char_p * count)(*(header.encode() for header in headers))
        self._call(
            "CreateProgram",
            *(ctypes.byref(program), text.encode(), b"kernel.cu", count, texts, names),
        )
        try:
            for function in functions:
                self._call("AddNameExpression", program, f"mlx::core::cu::{function}".encode())
            options = [
                "--device-as-default-execution-space",
                f"--gpu-architecture={architecture}",
                *(f"--include-path={each}" for each in self._include),
            ]
            given = (ctypes.c_char_p * len(options))(*(option.encode() for option in options))
            if self._library.nvrtcCompileProgram(program, len(options), given):
                log = self._get("ProgramLog", program).decode().rstrip("\0")
                raise RuntimeError(f"Failed to compile kernel: {log}")
            return self._get("PTX" if architecture.startswith("compute") else "CUBIN", program)
        finally:
            self._library.nvrtcDestroyProgram(ctypes.byref(program))

    def _get(self, what: str, program: ctypes.c_void_p) -> bytes:
        size = ctypes.c_size_t()
        self._call(f"Get{what}Size", program, ctypes.byref(size))
        data = ctypes.create_string_buffer(size.value)
        self._call(f"Get{what}", program, data)
        return data.raw

    def _call(self, function: str, *arguments: Any) -> None:
        if code := getattr(self._library, f"nvrtc{function}")(*arguments):
            raise RuntimeError(f"nvrtc{function} returned {code}")


@cache
def installed() -> Nvrtc:
    """Return NVRTC from PyPI's packages, with the headers of CUDA 13 from others; skip without."""
    folder = Path(sysconfig.get_path("purelib"), "nvidia", "cu13")
    include = folder / "include"
    libraries = sorted(folder.glob("lib/libnvrtc.so.*"))
    needed = (include / "cuda_fp16.h", include / "cccl" / "cuda", include / "crt")
    if not libraries or not all(each.exists() for each in needed):
        pytest.skip("needs NVIDIA's compiler and headers, for Linux: pip install -e '.[dev]'")
    return Nvrtc(libraries[0], [include / "cccl", include])
