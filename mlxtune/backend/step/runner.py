"""Runs graphs on the device: in stages, and again after a fault of the GPU.

macOS ends commands that keep the GPU from drawing the display for a few seconds (mlx#3267), so on a
Mac, no stage takes much longer than a second.
"""

import math
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten

from mlxtune.backend.device import allocator
from mlxtune.backend.device.default_device import has_metal, on_cpu
from mlxtune.backend.device.retry import Attempt, attempts
from mlxtune.backend.forward.forward import Forward
from mlxtune.core.formatting import byte_size
from mlxtune.core.machine.gpu_faults import Fault, fault_error
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import one_line

# The maximum duration of a stage in seconds; the number of operations per second that is assumed
# until a stage is timed, and that the slowest Macs reach; and the number of operations per
# parameter and token, forward and backward.
_MAX_STAGE_SECONDS = 1.0
_METAL_SPEED = 1e12
_OPERATIONS_PER_PARAMETER = 6
# The fraction of a micro-batch's time that the forward pass takes.
_FORWARD_FRACTION = 1 / 3

# Halves the micro-batches of examples, and returns their new limit in tokens; None if it cannot.
Halve = Callable[[StepLengths], int | None]


@dataclass(frozen=True)
class Graph:
    """The arrays to evaluate for a micro-batch: layers' `outputs`, `gradients`, then `arrays`.

    Without gradients, the graph is a forward pass. `outputs` is emptied once the graph is started.
    """

    tokens: int
    stages: int
    outputs: list[mx.array]
    gradients: Any
    arrays: Any

    def arrays_of_stages(self) -> list[Sequence[Any]]:
        """Return the arrays of each stage, and clear `outputs`."""
        stages: list[Sequence[Any]] = []
        if self.stages > 1:
            forward = max(int(self.stages * _FORWARD_FRACTION), 1)
            stages += _divided(self.outputs, forward)
            self.outputs.clear()
            # The backward pass runs from the last layer to the first.
            gradients = [array for _, array in tree_flatten(self.gradients)]
            stages += _divided(gradients[::-1], max(self.stages - forward, 1))
        return [*stages, [self.arrays]]


class GraphRunner:
    """Runs the graphs of steps and evaluations on the device, and retries them after GPU faults.

    A long graph runs in stages, each of which ends at the output of a layer's mixer or at a
    layer's gradients. Stages change no arithmetic, so measured times may decide their number.

    After a fault of the GPU, the pass is retried. Its micro-batches are halved if memory ran out,
    or if a command exceeded the GPU's time limit and stages cannot get shorter. Without `retries`,
    a fault is an error: workers that share a model wait for each other within a pass.

    `parameters` counts the model's parameters. `warn` is called before each retry. `remedy` is the
    advice in the error for a single example that does not fit.
    """

    def __init__(
        self,
        forward: Forward,
        parameters: int,
        *,
        remedy: str,
        warn: Callable[[str], None],
        retries: bool = True,
    ) -> None:
        self._remedy = remedy
        self.retries = retries
        self._warn = warn
        self._warned_of_limit = False
        # CUDA has no time limit on a card without a display.
        cuda = not on_cpu() and not has_metal()
        self._max_stages = 1 if cuda else max(2 * forward.mixers.count, 1)
        # Nothing limits commands on the CPU.
        self.seconds_per_token = (
            0.0 if on_cpu() else _OPERATIONS_PER_PARAMETER * parameters / _METAL_SPEED
        )
        self._shortening = 1
        # The kinds of passes, with or without a gradient, that have run once: the first pass of a
        # kind also compiles kernels, so it is not timed.
        self._compiled: set[bool] = set()
        self._running: Graph | None = None
        self._remaining_stages: list[Sequence[Any]] = []
        self._started = 0.0
        # The memory peak of a pass excludes loading.
        allocator.start_peak()

    # Stages

    def shorten_stages(self) -> bool:
        """Halve the length of later stages; return False if they cannot be shorter."""
        can = self._shortening < self._max_stages
        self._shortening *= 2 if can else 1
        return can

    def stages_for(self, tokens: int) -> int:
        """Return the number of stages of a micro-batch with this many tokens."""
        needed = max(math.ceil(self.seconds_per_token * tokens / _MAX_STAGE_SECONDS), 1)
        return min(needed * self._shortening, self._max_stages)

    def outputs_of_stages(self, tokens: int) -> list[mx.array] | None:
        """Return a list for layers' outputs if a micro-batch needs several stages, else None."""
        return [] if self.stages_for(tokens) > 1 else None

    def graph(
        self, tokens: int, outputs: list[mx.array] | None, gradients: Any, *arrays: Any
    ) -> Graph:
        """Return the graph of a micro-batch, with the layers' outputs if it needs stages."""
        stages = self.stages_for(tokens) if outputs else 1
        return Graph(tokens, stages, outputs or [], gradients, arrays)

    def start(self, graph: Graph) -> None:
        """Start computing a graph after the previous graph: the device never holds two."""
        if self._running is not None:
            self.finish(self._running)
        self._begin(graph)

    def finish(self, graph: Graph) -> None:
        """Wait until a graph is computed."""
        if self._running is not graph:
            self._begin(graph)
        # Clears all references first, so that a failed graph's arrays are freed.
        left, self._remaining_stages, self._running = self._remaining_stages, [], None
        while left:
            # The device runs the next stage while the host waits for this stage.
            for following in left[1:2]:
                mx.async_eval(*following)  # type: ignore[no-untyped-call]
            mx.eval(*left.pop(0))
        if not on_cpu():
            self._time(graph, time.perf_counter() - self._started)

    def _begin(self, graph: Graph) -> None:
        self._running, self._started = graph, time.perf_counter()
        self._remaining_stages = graph.arrays_of_stages()
        mx.async_eval(*self._remaining_stages[0])  # type: ignore[no-untyped-call]

    def _time(self, graph: Graph, seconds: float) -> None:
        backward = bool(graph.gradients)
        if backward in self._compiled:
            per_token = seconds / max(graph.tokens, 1)
            self.seconds_per_token = per_token if backward else per_token / _FORWARD_FRACTION
        self._compiled.add(backward)

    # Faults

    def warn_of_limit(self) -> None:
        """Warn once if a pass took more memory than the limit; settings stay unchanged.

        The peak includes buffers in flight, whose number depends on timing.
        """
        used, limit = allocator.last_peak_bytes(), mx.get_memory_limit()
        if used > limit and not self._warned_of_limit:
            self._warned_of_limit = True
            self._warn(
                f"{byte_size(used)} were in use, more than the limit of {byte_size(limit)}: "
                "lower --memory-limit if the machine swaps"
            )

    def attempts(self, lengths: StepLengths, halve: Halve) -> Iterator[Attempt]:
        """Yield a context for each attempt at a pass over examples; `halve` makes it smaller.

        Raises MemoryLimitError or GpuError if all attempts fail.
        """
        return attempts(partial(self._adapt_to_fault, lengths, halve))

    def _adapt_to_fault(self, lengths: StepLengths, halve: Halve, fault: Fault, text: str) -> None:
        """Change settings so that a pass over examples may succeed after a fault.

        Raises MemoryLimitError or GpuError if nothing is left to change.
        """
        what = fault.meaning
        if not self.retries:
            out = fault is Fault.OUT_OF_MEMORY
            raise fault_error(fault, text, "on this worker", "lower --memory-limit" if out else "")
        if not fault.asks_for_less:
            self._warn(f"{what} ({one_line(text)}): trying again")
        elif fault is not Fault.OUT_OF_MEMORY and self.shorten_stages():
            self._warn(f"{what}: shorter evaluations from now on; to avoid this, {fault.remedy}")
        elif (tokens := halve(lengths)) is not None:
            self._warn(f"{what}: micro-batches of up to {tokens:,} tokens from now on")
        else:
            one = f"with one example of up to {max(lengths.tokens):,} tokens at a time"
            remedy = self._remedy if fault is Fault.OUT_OF_MEMORY else ""
            raise fault_error(fault, text, one, remedy)


def _divided(arrays: Sequence[mx.array], count: int) -> Iterator[Sequence[mx.array]]:
    size = math.ceil(len(arrays) / count) or 1
    for start in range(0, len(arrays), size):
        yield arrays[start : start + size]
