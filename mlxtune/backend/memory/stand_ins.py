"""Functions that keep in a graph what the kernels of a device keep, for graphs that never run.

MLX cannot export all of its kernels, and uses other ones on a machine without a GPU.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import mlx.core as mx

from mlxtune.backend.device.device import on_cpu


@contextmanager
def stand_ins() -> Iterator[None]:
    """Have what the device's kernels keep in the place of functions that cannot be exported."""
    plain = mx.fast.scaled_dot_product_attention
    fused = {
        "scaled_dot_product_attention": partial(_attention, plain),
        "rms_norm": _norm,
        "layer_norm": _norm,
        "rope": lambda x, *_, **__: 2 * x,
    }
    with ExitStack() as patched:
        patched.enter_context(patch.object(mx, "gather_mm", _experts))
        patched.enter_context(patch.object(mx.distributed, "all_sum", lambda x, **_: 2 * x))
        for name, function in ({} if on_cpu() else fused).items():
            patched.enter_context(patch.object(mx.fast, name, function))
        yield


def _experts(a: mx.array, b: mx.array, *, rhs_indices: mx.array, **_: Any) -> mx.array:
    """Return an array like that of `gather_mm`, with the product of one expert."""
    return mx.broadcast_to(a, (*rhs_indices.shape, *a.shape[-2:])) @ b[0]


def _norm(x: mx.array, *_: Any, **__: Any) -> mx.array:
    # Like the kernel, its gradient needs its input alone.
    return mx.square(x)


def _attention(
    plain: Callable[..., mx.array], q: mx.array, k: mx.array, v: mx.array, **options: Any
) -> mx.array:
    """Return an array like that of attention, which keeps what the device's kernel keeps."""
    mask, sinks = options.get("mask"), options.get("sinks")
    if mx.cuda.is_available():
        fused = q.dtype.size == 2 and q.shape[-1] <= 128
    else:
        fused = sinks is None and 64 <= q.shape[-1] <= 256
    if not fused or isinstance(mask, mx.array):
        return plain(q, k, v, **options)
    # The gradient of each factor needs that factor, and that of `exp` its output.
    return mx.exp(q * (mx.square(k).sum() + mx.square(v).sum()))[..., : v.shape[-1]]
