"""Retries work after GPU faults."""

from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any, TypeVar

from mlxtune.backend.device import allocator, default_device
from mlxtune.core.machine.gpu_faults import Fault, fault_error, fault_of

Result = TypeVar("Result")


def with_retries(work: Callable[[], Result], change: Callable[[Fault, str], None]) -> Result:
    """Return the result of `work`, retried with `attempts`. A failed one must have no effect."""
    for attempt in attempts(change):
        with attempt:
            result = work()
    return result


def attempts(change: Callable[[Fault, str], None]) -> Iterator["Attempt"]:
    """Yield a context for each attempt at some work, until one ends without a GPU fault.

    After a fault, `change` is called with it and MLX's message, to shrink the work or free memory,
    and the work is tried again. `change` raises an error if nothing is left to change. After each
    kind of transient fault, which earlier work or another program may have caused, the work is
    tried again only once.

    Raises MemoryLimitError or GpuError.
    """
    repeated: set[Fault] = set()
    while True:
        attempt = Attempt()
        yield attempt
        # Outside the context, the exception no longer holds the arrays of the work.
        fault, text = attempt.fault, attempt.text
        if fault is None:
            return
        if fault.is_final:
            raise fault_error(fault, text)
        if fault in repeated and not fault.asks_for_less:
            raise fault_error(fault, text, "twice in a row")
        repeated.add(fault)
        # Work that is queued behind a failed command fails too, and must not make the next attempt
        # fail.
        with suppress(RuntimeError):
            default_device.finish()
        change(fault, text)
        allocator.release()


class Attempt:
    """A context for one attempt; it suppresses and records GPU faults, but no other errors."""

    fault: Fault | None = None
    text = ""

    def __enter__(self) -> None:
        pass

    def __exit__(self, _: Any, error: BaseException | None, __: Any) -> bool:
        if isinstance(error, (RuntimeError, MemoryError)):
            self.fault, self.text = fault_of(error), str(error)
        return self.fault is not None
