"""The memory that a test's operations hold while a CUDA device has them queued."""

from __future__ import annotations

from mlxtune.backend.device import allocator
from mlxtune.core.steps.memory_in_flight import QueuedWork


def queued(operations: int, allocated: int) -> int:
    """Return the bytes in flight of operations that allocate `allocated` bytes; 0 without CUDA."""
    limits = allocator.graph_limits()
    # Tests' operations read too little to end a graph.
    return 0 if limits is None else limits.queued_bytes(QueuedWork(operations, allocated, read=0))
