"""The options with which a base model is opened."""

from dataclasses import dataclass, replace
from typing import Self


@dataclass(frozen=True, kw_only=True)
class BaseOptions:
    """How to open a base model: whether to trust its code, and how to store and multiply weights.

    `quantize`, a format of --quantize, quantises the weights of a full-precision model one by one
    as they are read; `double_quant` is for nf4. `quantized_compute` is a form of
    --quantized-compute.
    """

    trust_remote_code: bool = False
    quantize: str | None = None
    double_quant: bool = False
    quantized_compute: str = "auto"

    @property
    def as_stored(self) -> Self:
        """The same options for a base that is not quantised while loading."""
        return replace(self, quantize=None, double_quant=False)


# The options of a model whose weights stay in their format, and whose code is not run.
AS_STORED = BaseOptions()
