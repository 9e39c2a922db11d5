"""NVIDIA's compiler accepts every CUDA source that the package makes."""

from __future__ import annotations

import importlib
import pkgutil
import re
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import mlx.core as mx
import pytest

import mlxtune.backend
from mlxtune.backend.forward.kernels.attention_kernels import AttentionKernels, HeadSizes
from mlxtune.backend.forward.kernels.attention_trial import trial_heads, trial_of
from mlxtune.backend.forward.kernels.device_kernels import CUDA, TOLERANCES, KernelSource
from mlxtune.backend.forward.kernels.gate_kernels import GateKernels
from tests.backend.forward.kernels.nvrtc import LIKE_MLX, CudaSource, Recorder, installed, program
from tests.paths import ROOT
from tests.slow import long, slow

DTYPES = tuple(TOLERANCES)


def swiglu(make: Callable[..., Any], dtype: mx.Dtype) -> None:
    x = mx.ones((2, 9), dtype)
    mx.vjp(GateKernels(make, metal=False).swiglu, [x, x], [x])


def around_attention(make: Callable[..., Any], dtype: mx.Dtype) -> None:
    for sizes in (HeadSizes(4, 2, 128, 128), HeadSizes(2, 1, 80, 40)):
        for normalized in (True, False):
            heads = trial_heads(sizes, normalized=normalized)
            tried = trial_of(AttentionKernels(CUDA, make), heads)
            tried.small().astype(dtype).run(tried.forms["kernels"])


# Each function runs a module's kernels with all template values that a dtype leads to.
USERS: Mapping[str, Callable[[Callable[..., Any], mx.Dtype], None]] = {
    "swiglu": swiglu,
    "around attention": around_attention,
}


def recorded() -> list[CudaSource]:
    recorder = Recorder()
    for use in USERS.values():
        for dtype in DTYPES:
            use(recorder.make, dtype)
    return recorder.sources


def test_every_kernel_of_the_package_is_compiled_here() -> None:
    constants: set[str] = set()
    for module in pkgutil.walk_packages(mlxtune.backend.__path__, "mlxtune.backend."):
        values = vars(importlib.import_module(module.name)).values()
        constants |= {value.name for value in values if isinstance(value, KernelSource)}
    sources = recorded()
    assert {source.kernel for source in sources} == constants
    assert all(
        sum(source.kernel == name for source in sources) >= len(DTYPES) for name in constants
    )


def test_kernels_are_made_in_one_module() -> None:
    makers = {
        file.name
        for file in (ROOT / "mlxtune").rglob("*.py")
        if "fast.cuda_kernel" in (text := file.read_text()) or "fast.metal_kernel" in text
    }
    assert makers == {"device_kernels.py"}


@cache
def compiled(architecture: str) -> bytes:
    sources = recorded()
    functions = [source.function for source in sources]
    return installed().compile(program(sources), functions, LIKE_MLX, architecture)


# The architectures of H100 and H200, A100, B200 and RTX 50, spelled as MLX spells them.
@pytest.mark.parametrize(
    "architecture", [slow("sm_90a"), *map(long, ("sm_80", "sm_100a", "sm_120a"))]
)
def test_sources_compile(architecture: str) -> None:
    assert compiled(architecture).startswith(b"\x7fELF")


@pytest.mark.slow
def test_name_that_only_metal_has_is_an_error() -> None:
    source = recorded()[0]
    text = program([replace(source, text=source.text.replace("unsigned int", "uint"))])
    with pytest.raises(RuntimeError, match='identifier "uint" is undefined'):
        installed().compile(text, [source.function], LIKE_MLX, "compute_90a")


@pytest.mark.slow
def test_swiglu_reads_and_writes_16_bytes_at_once() -> None:
    functions = compiled("compute_90a").decode().split(".entry ")[1:]
    swiglu = [text for text in functions if "mlxtune_swiglu" in text.partition("(")[0]]
    assert len(swiglu) == 2 * len(DTYPES)
    for text in swiglu:
        inputs, outputs = (3, 2) if "vjp" in text.partition("(")[0] else (2, 1)
        assert len(re.findall(r"\bld\.global\.v4\.\w32\b", text)) == inputs
        assert len(re.findall(r"\bst\.global\.v4\.\w32\b", text)) == outputs
