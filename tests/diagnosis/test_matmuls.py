"""The products that `mlxtune doctor --prove` compares; defects that GPUs had are found."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from mlxtune.diagnosis import kernel_proof, matmuls
from mlxtune.diagnosis.kernel_proof import kernel_checks
from mlxtune.diagnosis.matmuls import Matmul, Size, Sizes, matmul_checks
from tests.slow import slow

# The sizes of a real model, or as far above the small models' as a test has time for.
GPU = Sizes((Size(1024, 256, 128), Size(16, 256, 128)), (Size(300, 256, 128), Size(1, 256, 128)))


@pytest.fixture(autouse=True)
def _on_the_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(matmuls, "on_cpu", lambda: True)


def failed() -> set[str]:
    return {check.name for check in matmul_checks() if check.passed is False}


def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Take the checks' GPU sizes, narrowed, and compute them on this machine's CPU."""
    monkeypatch.setattr(matmuls, "on_cpu", lambda: False)
    monkeypatch.setattr(matmuls, "has_metal", lambda: True)
    monkeypatch.setattr(matmuls, "_GPU", GPU)
    monkeypatch.setattr(matmuls, "_GPU_EXPERTS", GPU)
    monkeypatch.setattr(matmuls, "_SPLIT_SIZE", Size(40, 480, 96))
    # Elsewhere than on the CPU, sums are in float32.
    _in_float32(monkeypatch, "quantized_matmul")
    _in_float32(monkeypatch, "gather_qmm")


def _in_float32(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    matmul = getattr(mx, name)

    def precise(x: mx.array, w: mx.array, *scales: mx.array, **how: Any) -> mx.array:
        exact = (scale.astype(mx.float32) for scale in scales)
        return matmul(x.astype(mx.float32), w, *exact, **how).astype(x.dtype)

    monkeypatch.setattr(mx, name, precise)


def test_products_of_the_cpu_are_right() -> None:
    found = list(matmul_checks())
    assert [check for check in found if check.passed is not True] == []
    assert {check.name for check in found} >= {
        "products, bfloat16",
        "8 bits, group 32, float32",
        "experts of 4 bits, float32",
    }


@pytest.mark.slow
def test_real_sizes_reach_the_kernels_that_were_wrong() -> None:
    """The conditions are those of MLX's sources, and of the issues."""
    gpu, experts = matmuls._GPU, matmuls._GPU_EXPERTS
    assert any(size >= (1024, 2048, 2048) for size in gpu.even)
    more = [inner + 32 for _, inner, _ in (*gpu.odd, *experts.odd, matmuls._SPLIT_SIZE)]
    assert all(inner % 64 for inner in more)
    rows, inner, columns = matmuls._SPLIT_SIZE
    assert inner + 32 >= 3 * max(rows, columns + 32)
    assert any(size.tokens == 1 and size.inner >= 1024 for size in gpu.odd)


@pytest.mark.slow
def test_right_products_of_a_gpu_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    assert failed() == set()
    assert {check.name.rpartition(", ")[2] for check in matmul_checks()} == set(matmuls.DTYPES)


def test_cuda_compiles_quantized_products_in_one_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    on_a_gpu(monkeypatch)
    monkeypatch.setattr(matmuls, "has_metal", lambda: False)
    dtypes = {kind.name: kind.dtypes for kind in matmuls.KINDS}
    assert dtypes.pop("products") == matmuls.DTYPES
    assert set(dtypes.values()) == {("bfloat16",)}


def wrong(
    monkeypatch: pytest.MonkeyPatch, name: str, defect: Callable[..., mx.array | None]
) -> None:
    """Plant a defect in an operation of MLX, on the device alone; None leaves a result as it is."""
    right = getattr(mx, name)

    def planted(x: mx.array, *rest: Any, **how: Any) -> mx.array:
        result = right(x, *rest, **how)
        changed = defect(x, result, **how)
        return result if changed is None else changed

    monkeypatch.setattr(mx, name, planted)


@pytest.mark.slow
def test_columns_that_are_never_written_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As mlx#4250: columns after the last full block of 64 are zeros, for one row."""
    on_a_gpu(monkeypatch)

    def defect(x: mx.array, result: mx.array, *, transpose: bool, **_: Any) -> mx.array | None:
        if transpose or x.shape[0] > 1:
            return None
        written = mx.arange(result.shape[-1]) < result.shape[-1] // 64 * 64
        return mx.where(written, result, 0)

    wrong(monkeypatch, "quantized_matmul", defect)
    names = {name.rpartition(", ")[0] for name in failed()}
    assert names == {"4 bits, group 32", "8 bits, group 32"}


@pytest.mark.slow
def test_misread_tail_of_the_inner_size_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As mlx#3887: sorted experts read the tail of an inner size that is no multiple of 64."""
    on_a_gpu(monkeypatch)

    def defect(x: mx.array, result: mx.array, *, transpose: bool, **_: Any) -> mx.array | None:
        if not transpose or x.shape[-1] % 64 == 0:
            return None
        return result * 1.19

    wrong(monkeypatch, "gather_qmm", defect)
    assert failed() == {f"experts of 4 bits, {dtype}" for dtype in matmuls.DTYPES}


@pytest.mark.slow
def test_matmul_wrong_from_1024_rows_is_detected(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As PrismML-Eng/Bonsai-Image-Demo#12: 256 rows are right in bfloat16, 1,024 are not."""
    on_a_gpu(monkeypatch)
    right = mx.array.__matmul__

    def planted(x: mx.array, y: mx.array) -> mx.array:
        result = right(x, y)
        is_wrong = x.dtype == mx.bfloat16 and x.shape[0] >= 1024
        return mx.concatenate([result[:512], result[:512]]) if is_wrong else result

    monkeypatch.setattr(mx.array, "__matmul__", planted)
    assert failed() == {"products, bfloat16"}


@pytest.mark.parametrize("dtype", ["float32", slow("float16"), "bfloat16"])
def test_one_wrong_number_fails(monkeypatch: pytest.MonkeyPatch, dtype: str) -> None:
    monkeypatch.setattr(matmuls, "KINDS", matmuls.KINDS[:1])
    for value in (40.0, np.nan, np.inf):
        right = Matmul._compute

        def planted(
            self: Matmul, factors: Any, kind: mx.Dtype, value: float = value, right: Any = right
        ) -> Any:
            found = right(self, factors, kind)
            if kind == getattr(mx, dtype):
                found[-1, -1] += value
            return found

        with monkeypatch.context() as context:
            context.setattr(Matmul, "_compute", planted)
            assert failed() == {f"products, {dtype}"}


def test_product_that_raises_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def raising(*_: Any, **__: Any) -> Any:
        raise RuntimeError("NYI")

    monkeypatch.setattr(mx, "gather_qmm", raising)
    (check,) = (check for check in matmul_checks() if check.passed is False)
    assert (check.name, check.found) == ("experts of 4 bits, float32", "NYI")


@pytest.mark.parametrize(("length", "dtype"), [(300, "float32"), slow(512, "float32")])
def test_attention_wrong_in_its_last_block_is_detected(
    monkeypatch: pytest.MonkeyPatch, length: int, dtype: str
) -> None:
    name = f"32 heads, {length} tokens"
    chosen = tuple(kernel for kernel in kernel_proof.KERNELS if kernel.name == name)
    monkeypatch.setattr(kernel_proof, "KERNELS", chosen)
    assert [check.passed for check in kernel_checks(dtype)] == [True]
    right = mx.fast.scaled_dot_product_attention

    def planted(q: mx.array, *rest: mx.array, **how: Any) -> mx.array:
        late = mx.arange(length)[:, None] >= length - 12
        return mx.where(late, 0, right(q, *rest, **how))

    monkeypatch.setattr(mx.fast, "scaled_dot_product_attention", planted)
    assert [check.passed for check in kernel_checks(dtype)] == [False]
