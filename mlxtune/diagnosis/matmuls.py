"""Compares products of a real model's sizes with the CPU's, for `mlxtune doctor --prove`.

Wrong kernels have shown only in sizes that no small model reaches. On M5 GPUs alone, these were
wrong: matmuls of 1,024 x 2,048 by 2,048 x 2,048 in bfloat16, where 256 rows were right, by a
compiler's fault (PrismML-Eng/Bonsai-Image-Demo#12, ml-explore/mlx#3586); matmuls in 16 bits whose
inner size is far the largest, which are split along it (mlx#3797); and quantised matmuls of sorted
experts whose inner size is not a multiple of 64 (mlx#3887). On all Macs, matmuls with a quantised
matrix that is not transposed were wrong, or their last columns missing (mlx#4201, mlx#4250).
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt

from mlxtune.backend.device.default_device import has_metal, on_cpu
from mlxtune.diagnosis.checks import MATMULS, ProofCheck, check_matmul, failed_check
from mlxtune.diagnosis.kernel_proof import on_the_cpu
from mlxtune.errors import one_line

Matrix = npt.NDArray[np.float32]
DTYPES = ("float32", "float16", "bfloat16")
# Unit roundoffs of the dtypes that results, and dequantised weights, are rounded to; float32's
# factors may be truncated to TF32's 11 bits.
_UNIT_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_WEIGHT_ROUNDOFF = {"float32": 2.0**-10, "float16": 2.0**-11, "bfloat16": 2.0**-8}
# The largest rounding error of one addition: tensor cores truncate their sums.
_SUM_ROUNDOFF = 2.0**-23
# The roundings of one result: its own, and the roundings of a split matmul's partial sums.
_ROUNDINGS = 4
# The roundings of one dequantised weight: its scaled value, its sum with the bias, and itself. The
# scaled value may be twice as large.
_WEIGHT_ROUNDINGS = 4
# Standard deviations that a sum of random rounding errors may be large: among 10^8 results, none
# exceeds 8 by chance.
_DEVIATIONS = 8


class Size(NamedTuple):
    """The size of a matmul of a (rows, inner) and an (inner, columns) matrix."""

    tokens: int
    inner: int
    columns: int


class Sizes(NamedTuple):
    """The sizes of a kind of matmul: `even` ones, and `odd` ones, which get the group added."""

    even: Sequence[Size]
    odd: Sequence[Size]


# Rows by the hundred, few rows, whose quantised matmul a GPU splits, and one row have kernels of
# their own.
_GPU = Sizes(
    (Size(1024, 2048, 2048), Size(16, 2048, 2048)), (Size(300, 2048, 1024), Size(1, 2048, 1024))
)
# GPUs use split-K for other matmuls with a large inner dimension.
_SPLIT_SIZE = Size(512, 3072, 992)
_GPU_EXPERTS = Sizes((Size(1024, 1024, 512),), (Size(1024, 256, 256),))
# The CPU's quantised matmuls are slow.
_CPU = Sizes((Size(64, 512, 256),), (Size(30, 512, 256), Size(1, 1024, 256)))
_CPU_EXPERTS = Sizes((Size(64, 256, 128),), (Size(64, 64, 64),))


@dataclass(frozen=True)
class Matmul:
    """A kind of matmul, such as one with a quantised matrix.

    `group_size` is the unit of its odd sizes. `bits` is 0 if the matrix is not quantised. With
    `experts`, each row has its own matrix, and the rows are sorted by matrix.
    """

    name: str
    group_size: int
    bits: int = 0
    experts: int = 0

    def sizes(self) -> list[Size]:
        """Return the sizes to compute on this device."""
        if on_cpu():
            sizes = _CPU_EXPERTS if self.experts else _CPU
        else:
            sizes = _GPU_EXPERTS if self.experts else _GPU
        odd = [*sizes.odd] if self.bits or on_cpu() else [*sizes.odd, _SPLIT_SIZE]
        more = self.group_size
        return [*sizes.even, *(Size(rows, inner + more, n + more) for rows, inner, n in odd)]

    @property
    def dtypes(self) -> tuple[str, ...]:
        """The dtypes to compute in.

        The CPU adds up quantised matmuls in the dtype itself, and CUDA compiles a kernel for each
        dtype, which may take tens of seconds.
        """
        if not self.bits:
            return DTYPES
        if on_cpu():
            return ("float32",)
        return DTYPES if has_metal() else ("bfloat16",)

    def check(self) -> Iterator[ProofCheck]:
        """Compare the products in each dtype, forward and as in the gradient; yield the worst."""
        worst: dict[str, ProofCheck] = {}
        for size in self.sizes():
            for transposed in (True, False):
                factors = self._draw(size, transposed)
                for dtype in self.dtypes:
                    check = self._compare(size, factors, dtype)
                    previous = worst.get(dtype)
                    if previous is None or _severity(check) > _severity(previous):
                        worst[dtype] = check
        yield from worst.values()

    def _draw(self, size: Size, transposed: bool) -> "MatmulFactors":
        """Draw factors that all dtypes, and TF32, hold exactly; the product of them is NumPy's."""
        rng = np.random.default_rng(0)
        shape = (size.columns, size.inner) if transposed else (size.inner, size.columns)
        shapes = ((size.tokens, size.inner), (self.experts, *shape) if self.experts else shape)
        factors = [rng.standard_normal(each, dtype=np.float32) for each in shapes]
        owners = np.sort(rng.integers(0, max(self.experts, 1), size.tokens))
        with on_the_cpu():
            x, w = (mx.array(array).astype(mx.bfloat16) for array in factors)
            scales: tuple[mx.array, ...] = ()
            plain = w.astype(mx.float32)
            if self.bits:
                w, *parameters = mx.quantize(plain, self.group_size, self.bits)
                scales = tuple(parameter.astype(mx.bfloat16) for parameter in parameters)
                scale, bias = (each.astype(mx.float32) for each in scales)
                plain = mx.dequantize(w, scale, bias, self.group_size, self.bits)
            rows, matrices = np.array(x.astype(mx.float32)), np.array(plain)
        matrices = matrices if self.experts else matrices[None]
        matrices = np.swapaxes(matrices, -1, -2) if transposed else matrices
        expected = [rows[owners == i] @ each for i, each in enumerate(matrices)]
        norms = np.linalg.norm(rows, axis=1, keepdims=True)
        norms = norms * np.linalg.norm(matrices, axis=1)[owners]
        return MatmulFactors(x, w, scales, owners, transposed, np.concatenate(expected), norms)

    def _compare(self, size: Size, factors: "MatmulFactors", dtype: str) -> ProofCheck:
        name = f"{self.name}, {dtype}"
        try:
            result = self._compute(factors, getattr(mx, dtype))
        except Exception as error:  # noqa: BLE001
            # Any error fails the check of this matmul.
            return failed_check(MATMULS, name, one_line(error))
        bound = factors.bound(dtype, size.inner, quantized=self.bits > 0)
        # Unlike Python's max, NumPy's keeps a NaN.
        ratio = float((np.abs(result - factors.expected) / bound).max())
        return check_matmul(name, ratio, *size)

    def _compute(self, factors: "MatmulFactors", dtype: mx.Dtype) -> Matrix:
        """Return the product on this device, in float32."""
        x, transposed = factors.x.astype(dtype), factors.transposed
        if not self.bits:
            w = factors.w.astype(dtype)
            matmul = x @ (w.T if transposed else w)
        else:
            w, (scale, bias) = factors.w, (each.astype(dtype) for each in factors.scales)
            how: dict[str, Any] = {"group_size": self.group_size, "bits": self.bits}
            how["transpose"] = transposed
            if self.experts:
                owners = mx.array(factors.owners.astype(np.uint32))
                how |= {"rhs_indices": owners, "sorted_indices": True}
                matmul = mx.gather_qmm(x[:, None], w, scale, bias, **how)[:, 0]
            else:
                matmul = mx.quantized_matmul(x, w, scale, bias, **how)
        return np.array(matmul.astype(mx.float32))


class MatmulFactors(NamedTuple):
    """The factors of a product; the product as NumPy computes it, and each result's largest sum."""

    x: mx.array
    w: mx.array
    scales: Sequence[mx.array]
    owners: npt.NDArray[np.int64]
    transposed: bool
    expected: Matrix
    norms: Matrix

    def bound(self, dtype: str, inner: int, *, quantized: bool) -> Matrix:
        """Return the largest difference that rounding explains, for each result.

        A sum of n products a·b with the norms |a| and |b| has rounding errors of about
        √n·u·|a|·|b|, and errors of its factors add about u·|a|·|b|/√n, if they are random (Higham
        and Mary, A New Approach to Probabilistic Rounding Error Analysis, 2019). Truncation also
        shrinks the result by a fraction of itself.
        """
        of_weights = _WEIGHT_ROUNDINGS * _WEIGHT_ROUNDOFF[dtype] if quantized else 0.0
        of_result = _ROUNDINGS * _UNIT_ROUNDOFF[dtype] + of_weights
        random = of_weights / inner**0.5 + _SUM_ROUNDOFF * inner**0.5
        return np.abs(self.expected) * of_result + _DEVIATIONS * random * self.norms


def _severity(check: ProofCheck) -> float:
    """Return a check's severity: its ratio, or infinity for an error or NaN."""
    ratio: float | None = check.values.get("rounding_ratio")
    return float("inf") if ratio is None else ratio


# Add an entry for each new kind of matmul.
KINDS: tuple[Matmul, ...] = (
    Matmul("products", 32),
    *(Matmul(f"{bits} bits, group {n}", n, bits) for bits in (4, 8) for n in (32, 64)),
    Matmul("experts of 4 bits", 32, bits=4, experts=8),
)


def matmul_checks() -> Iterator[ProofCheck]:
    """Yield a check of each kind of matmul in each dtype."""
    for matmul in KINDS:
        yield from matmul.check()
