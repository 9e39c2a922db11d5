"""The memory that operations hold because they were queued before earlier ones completed.

MLX encodes a CUDA stream as graphs of operations, and frees a temporary when the graph that reads
it has completed. It queues graphs while the device computes, and waits only if ten are incomplete
(`MAX_ACTIVE_TASKS` in mlx/transforms.cpp).
"""

from dataclasses import dataclass

# The fewest and the most graphs that hold temporaries: the graph that the host encodes, with one
# that the device computes, or with the ten at which MLX waits.
_MIN_LAYERS, _MAX_LAYERS = 2, 11
# The number of queued operations for each MB that an operation allocates on average: the larger the
# operations, the further the device falls behind the host. Fitted to peaks of training steps on an
# H200 (docs/measured/h200-memory.json).
_OPERATIONS_PER_MB = 225
_MB = 1e6


@dataclass(frozen=True)
class QueuedWork:
    """Similar operations: the bytes that they allocate and free, and the array entries they read.

    All numbers are totals over `operations`.
    """

    operations: int
    allocated: int
    read: int


@dataclass(frozen=True)
class GraphLimits:
    """The numbers of operations, and of array entries read, at which MLX ends a graph."""

    operations: int
    read: int

    def queued_bytes(self, work: QueuedWork) -> int:
        """Return how many bytes queued operations hold beyond what their order needs."""
        if not work.operations:
            return 0
        each, read = work.allocated / work.operations, work.read / work.operations
        graph = max(min(self.operations, self.read / max(read, 1)), 1)
        queued = min(
            max(_MIN_LAYERS * graph, _OPERATIONS_PER_MB * each / _MB),
            _MAX_LAYERS * graph,
            work.operations,
        )
        return int(queued * each)
