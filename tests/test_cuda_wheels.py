"""The CUDA extras bring every header that MLX's kernels include, checked with NVIDIA's compiler.

The wheels of MLX, the compiler and the headers are unpacked, 150 MB for CUDA 13 and 220 MB for
CUDA 12. No card is needed, and nothing of them is imported.
"""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

from mlxtune.core.machine.cuda import PACKAGES, missing_headers
from mlxtune.core.machine.gpu_faults import Fault, fault_error, fault_of
from tests.backend.forward.kernels.nvrtc import UTILS, Nvrtc, program
from tests.backend.forward.kernels.test_cuda_sources import recorded
from tests.test_dependencies import LINUX, resolve

pytestmark = pytest.mark.slow

# A pattern that only one of the texts in libmlx.so matches, for each name that others include.
DEVICE = "mlx/backend/cuda/device/"
NAMED = {
    "atomic_ops.cuh": r"#include <cuda/atomic>",
    "binary_ops.cuh": r"struct FloorDivide",
    "cast_op.cuh": r"struct CastOp",
    "complex.cuh": r"#include <cuda/std/complex>",
    "config.h": r"#define MAX_NDIM",
    "cute_dequant.cuh": r"#include <cutlass/numeric_conversion.h>",
    "fp16_math.cuh": r"#include <cuda_fp16.h>\n#include <cuda/std/type_traits>",
    "gemm_sm70.cuh": r"\A// Copyright[^\n]*\n\n#include <cute/tensor.hpp>",
    "indexing.cuh": r"#include <cuda/std/tuple>\n#include <cuda/std/type_traits>",
    "scatter_ops.cuh": r"#include \"mlx/backend/cuda/device/atomic_ops.cuh\"",
    "ternary_ops.cuh": r"struct Select",
    "unary_ops.cuh": r"#include <math_constants.h>",
    "utils.cuh": r"struct alignas\(sizeof\(T\) \* N\) AlignedVector",
}
# The kernels that include CUTLASS's products for Hopper, and through them CUDA's mma.h.
HOPPER = "collective_builder.hpp"


@dataclass(frozen=True)
class Wheels:
    """MLX's wheel for CUDA and its dependencies, unpacked into a folder as pip does."""

    library: str
    site: Path

    @property
    def headers(self) -> Path:
        return self.site / PACKAGES[self.library].folder

    def compiler(self) -> Nvrtc:
        """Return NVRTC with the folders that MLX gives it."""
        (library,) = self.site.glob("nvidia/*/lib/libnvrtc.so.1?")
        include = self.site / "mlx" / "include"
        return Nvrtc(library, [include, include / "cccl", self.headers])

    def texts(self) -> set[str]:
        """Return the sources in MLX's library, which ends each of them with a zero byte."""
        data = (self.site / "mlx" / "lib" / "libmlx.so").read_bytes()
        found = re.findall(rb"// Copyright[^\0\n]*Apple[^\0]+", data)
        return {each.decode() for each in found}

    def named(self) -> dict[str, str]:
        """Return the sources that MLX gives the compiler under a name, to be included."""
        named = {}
        for name, pattern in NAMED.items():
            (named[DEVICE + name],) = (text for text in self.texts() if re.search(pattern, text))
        return named

    def compile_hopper(self) -> None:
        (text,) = (text for text in self.texts() if HOPPER in text)
        self.compiler().compile(text, [], self.named(), "sm_90a")

    def compile_includes(self) -> None:
        """Compile the includes of all other sources: in one program, except for CUTLASS's."""
        includes = [re.findall(r"#include .*", text) for text in self.texts() if HOPPER not in text]
        alone = [include for include in includes if any("cut" in line for line in include)]
        together = [line for include in includes if include not in alone for line in include]
        # The compiler takes seconds for CUTLASS, so it reads the longest lists only.
        longest = [each for each in alone if not any(set(each) < set(other) for other in alone)]
        for lines in (list(dict.fromkeys(together)), *longest):
            self.compiler().compile("\n".join(lines) + "\n", [], self.named(), "sm_90a")


@pytest.fixture(scope="module", params=["cuda13", pytest.param("cuda12", marks=pytest.mark.long)])
def wheels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Wheels:
    options = ("--python-version", "3.12", "--extra", request.param)
    resolved = resolve(*options, platform=LINUX, versions=True)
    library = f"mlx-cuda-{request.param[-2:]}"
    parts = (library, "nvidia-cuda-nvrtc", "nvidia-cuda-runtime", "nvidia-cuda-crt")
    chosen = [each for each in resolved if each.startswith((*parts, "nvidia-cuda-nvcc"))]
    site = tmp_path_factory.mktemp(request.param)
    platform = ("--python-platform", LINUX, "--python-version", "3.12")
    uv = Path(sys.executable).with_name("uv")
    command = [str(uv) if uv.exists() else "uv", "pip", "install", "--quiet", "--no-deps"]
    subprocess.run(
        [*command, "--only-binary", ":all:", *platform, "--target", str(site), *chosen],
        check=True,
        timeout=600,
    )
    return Wheels(library, site)


def test_extra_brings_the_headers_of_mlxs_kernels(wheels: Wheels) -> None:
    wheels.compile_includes()


@pytest.mark.long
def test_kernels_for_hopper_need_crt(wheels: Wheels, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.path", [str(wheels.site)])
    # NVIDIA's packages for CUDA 12 have it in a folder where MLX does not look.
    crt = wheels.headers / "crt"
    assert crt.exists() == (wheels.library == "mlx-cuda-13")
    assert ("crt/mma.h" in missing_headers()) == (not crt.exists())
    if crt.exists():
        wheels.compile_hopper()
        crt.rename(crt.with_name("away"))
    with pytest.raises(RuntimeError) as caught:
        wheels.compile_hopper()
    assert fault_of(caught.value) is Fault.MISSING_HEADER
    message = str(fault_error(Fault.MISSING_HEADER, str(caught.value)))
    remedy = missing_headers()["crt/mma.h"]
    assert message.endswith(f"{remedy}, then start mlxtune again")
    assert PACKAGES[wheels.library].crt in remedy
    if wheels.library == "mlx-cuda-12":
        subprocess.run(remedy[remedy.index("ln -s") :], shell=True, check=True)
        assert missing_headers() == {}
        wheels.compile_hopper()


@pytest.mark.long
def test_sources_compile_with_mlxs_own_utilities(wheels: Wheels) -> None:
    sources = recorded()
    functions = [source.function for source in sources]
    assert UTILS in wheels.named()
    wheels.compiler().compile(program(sources), functions, wheels.named(), "sm_90a")
