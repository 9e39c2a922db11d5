"""Work is tried again after a GPU fault."""

from __future__ import annotations

import pytest

from mlxtune.backend.device import allocator, default_device
from mlxtune.backend.device.retry import with_retries
from mlxtune.core.machine.gpu_faults import Fault
from mlxtune.errors import GpuError, MemoryLimitError

VICTIM, NO_MEMORY = "Innocent Victim", "[malloc] Unable to allocate 9 bytes."
LIMIT, LOST = "Resource limit (499000) exceeded", "the launch timed out and was terminated"


def run(*errors: str | Exception) -> tuple[int, list[Fault]]:
    """Run work that fails with these errors in turn; return the number of tries, and the faults."""
    changes: list[Fault] = []
    left, tries = list(errors), 0

    def work() -> int:
        nonlocal tries
        tries += 1
        if left:
            error = left.pop(0)
            raise error if isinstance(error, Exception) else RuntimeError(error)
        return tries

    return with_retries(work, lambda fault, text: changes.append(fault)), changes


def test_work_is_tried_until_nothing_is_left_to_change() -> None:
    assert run() == (1, [])
    assert run(NO_MEMORY, NO_MEMORY, NO_MEMORY) == (4, [Fault.OUT_OF_MEMORY] * 3)
    assert run(MemoryError()) == (2, [Fault.OUT_OF_MEMORY])


def test_each_fault_that_may_pass_is_tried_once() -> None:
    assert run(VICTIM, LIMIT) == (3, [Fault.VICTIM, Fault.RESOURCE_LIMIT])
    with pytest.raises(GpuError, match="twice in a row"):
        run(VICTIM, LIMIT, VICTIM)


def test_lost_device_and_other_errors_are_not_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for module, name in ((default_device, "finish"), (allocator, "release")):
        monkeypatch.setattr(module, name, pytest.fail)
    with pytest.raises(GpuError, match="no longer serves"):
        run(LOST)
    with pytest.raises(GpuError, match="header of CUDA is missing"):
        run("cannot open source file")
    with pytest.raises(RuntimeError, match="shapes"):
        run("[matmul] shapes")
    with pytest.raises(MemoryLimitError, match="ours"):
        run(MemoryLimitError("ours"))


def test_queue_is_emptied_and_memory_freed_after_the_change(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    events: list[str] = []

    def queued_work_fails() -> None:
        events.append("finish")
        raise RuntimeError("Ignored (for causing prior/excessive GPU errors)")

    monkeypatch.setattr(default_device, "finish", queued_work_fails)
    monkeypatch.setattr(allocator, "release", lambda: events.append("release"))
    errors = [RuntimeError(LIMIT)]

    def work() -> str:
        if errors:
            raise errors.pop()
        return "done"

    assert with_retries(work, lambda fault, text: events.append("change")) == "done"
    assert events == ["finish", "change", "release"]
