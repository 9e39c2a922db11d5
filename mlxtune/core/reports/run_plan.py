"""What a run will take, for a person and for a program."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from mlxtune.core.reports.messages import memory
from mlxtune.core.steps.memory_plan import MemoryPlan
from mlxtune.core.text import count, duration
from mlxtune.core.training.speed import Speed

_GB = 1e9


@dataclass(frozen=True)
class RunPlan:
    """What a run will take. Without data, memory for the longest example alone is planned.

    `tokens` and `supervised` are those of the training rows, `all_tokens` those that all steps of
    the run train on. `max_seq_len` is the longest that an example may be.
    """

    model: str
    dtype: str
    device: str
    max_seq_len: int
    memory: MemoryPlan
    rows: int = 0
    steps_per_epoch: int = 0
    steps: int = 0
    tokens: int = 0
    supervised: int = 0
    all_tokens: int = 0
    speed: Speed | None = None

    @property
    def seconds(self) -> float | None:
        """How long all steps will take; None where no speed is known, or nothing is to be run."""
        return self.all_tokens / self.speed.tokens_per_s if self.speed and self.steps else None

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as docs/plan.md describes it."""
        plan, way, peak = self.memory, self.memory.way, self.memory.peak
        return {
            "model": self.model,
            "dtype": self.dtype,
            "device": self.device,
            "max_seq_len": self.max_seq_len,
            "micro_batch_tokens": way.micro_batch_tokens,
            "grad_checkpoint": way.recompute,
            "loss_chunk": way.loss_chunk,
            "memory": {"limit": plan.limit, "peak": peak.total, **asdict(peak)},
            "data": None if not self.steps else self._data(),
            "speed": None if self.speed is None else asdict(self.speed),
            "seconds": self.seconds,
        }

    def _data(self) -> dict[str, Any]:
        return {
            "rows": self.rows,
            "tokens": self.tokens,
            "supervised_tokens": self.supervised,
            "steps_per_epoch": self.steps_per_epoch,
            "steps": self.steps,
            "micro_batches_per_step": round(self.memory.micro_batches_per_step, 3),
            "padding_share": round(self.memory.padding_share, 4),
            "run_share": round(self.memory.run_share, 4),
        }


def micro_batches_line(plan: MemoryPlan) -> str:
    """Return how steps will be run."""
    tokens = plan.way.micro_batch_tokens
    line = f"micro-batches of {'one example' if tokens == 1 else f'up to {tokens:,} tokens'}"
    if plan.steps:
        line += f", {plan.micro_batches_per_step:.1f} a step with {plan.padding_share:.1%} padding"
    kept = "computed again in the backward pass" if plan.way.recompute else "kept"
    return f"{line}; activations {kept}"


def peak_line(plan: MemoryPlan) -> str:
    """Return the memory that is predicted."""
    return f"predicted peak memory {memory(plan.peak.total / _GB)} of {memory(plan.limit / _GB)}"


def plan_lines(found: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield the lines of a plan, each with the name of its stage, empty where that goes on."""
    plan, peak = found.memory, found.memory.peak
    yield "Model", found.model
    yield "Device", found.device
    yield "Memory", peak_line(plan)
    parts = (
        ("weights", peak.weights),
        ("optimizer", peak.optimizer),
        ("activations", peak.activations),
        ("head", peak.head),
    )
    for name, size in parts:
        yield "", f"{name:<12}{memory(size / _GB):>9}"
    yield "Plan", micro_batches_line(plan)
    if not found.steps:
        yield "", f"for one example of {count(found.max_seq_len, 'token')}: --data brings the rest"
        return
    yield (
        "Data",
        f"{count(found.rows, 'row')} train: {count(found.tokens, 'token')}, "
        f"{found.supervised:,} of them supervised; {plan.run_share:.0%} of them run with padding",
    )
    yield (
        "Steps",
        f"{count(found.steps, 'step')}, {found.steps_per_epoch:,} in an epoch",
    )
    yield "Time", _time(found)


def _time(found: RunPlan) -> str:
    if found.speed is None or found.seconds is None:
        return "unknown until a first run of at least 3 steps"
    rate = f"{found.speed.tokens_per_s:,.0f} tokens/s measured on {found.speed.measured}"
    return f"about {duration(found.seconds)} at {rate}, validation apart"
