"""A limit of memory for tests that measure a peak."""

from collections.abc import Iterator
from contextlib import contextmanager

import mlx.core as mx


@contextmanager
def frees_arrays_above(limit: int) -> Iterator[None]:
    """Let a GPU free the arrays of finished operations before it starts more above this limit.

    Without it, a large CUDA device keeps the arrays of 100 operations, others of fewer. The CPU
    needs no limit: it waits in a loop for the tasks of all streams, which was seen not to end.
    """
    if mx.default_device() == mx.cpu:
        yield
        return
    former = mx.set_memory_limit(limit)
    try:
        yield
    finally:
        mx.set_memory_limit(former)
