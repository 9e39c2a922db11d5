"""A benchmark as numbers: steps, runs, sides, their ratios and whether they agree. Nothing runs.

    side      one trainer: this package, or a peer
    run       one process of a side, which takes all steps
    step      one optimizer update, timed

Ratios are ours over theirs.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.core.data.encode import Example

SCHEMA_VERSION = 1
# How far losses may lie apart: the difference over the greater of 1 and the loss. Before the first
# update both sides compute the same function of the same numbers; after it, rounding has gone
# through an optimizer, which turns a gradient near 0 into an update of full size.
_TOLERANCES = {"float32": (1e-4, 1e-3)}
# Logits of 16 bits: bfloat16 rounds a log-sum-exp of 10 to within 0.03.
_TOLERANCES_16_BIT = (2e-2, 2e-2)


def _finite(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else value


@dataclass(frozen=True)
class TimedStep:
    """What one step took.

    `tokens` are those of the examples. `tokens_run` are those that ran through the model, and
    `padding` which of them need not have run: neither pads nor what comes after the last
    supervised token of an example predict anything. Memory is in bytes.
    """

    seconds: float
    tokens: int
    supervised_tokens: int
    tokens_run: int
    padding: int
    loss: float
    peak_memory: int

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON, which knows no number that is not finite."""
        return asdict(self) | {"loss": _finite(self.loss)}


@dataclass(frozen=True)
class Run:
    """What one process of a side measured. Seconds, bytes.

    `process_s` is from the start of the process to the first step, reading the weights included;
    `startup_s` what follows that reading. `peak_rss` is the most memory the process had, of all
    kinds. `loss_function` names what a peer computed, `loss_with_pad_targets` what its own batches
    would have it train on at the first step. `products` are the seconds of the matrix products of
    each step, by kind.
    """

    steps: tuple[TimedStep, ...]
    process_s: float
    weights_s: float
    startup_s: float
    warm_up_s: float
    peak_rss: int
    loss_function: str = "own"
    loss_with_pad_targets: float | None = None
    products: tuple[dict[str, float], ...] = ()

    @property
    def seconds(self) -> float:
        """The time of all steps."""
        return math.fsum(step.seconds for step in self.steps)

    def per_second(self, count: str) -> float:
        """Return tokens a second over all steps; `count` is a field of a step."""
        return float(sum(getattr(step, count) for step in self.steps)) / self.seconds

    @property
    def peak_memory(self) -> int:
        """The most bytes that MLX held at once in a step."""
        return max(step.peak_memory for step in self.steps)

    @property
    def padding_share(self) -> float:
        """The share of the tokens run that need not have run."""
        return sum(step.padding for step in self.steps) / sum(
            step.tokens_run for step in self.steps
        )

    @property
    def step_efficiency(self) -> float | None:
        """The time of the matrix products over the time of the steps that they belong to."""
        if not self.products:
            return None
        return math.fsum(sum(kinds.values()) for kinds in self.products) / self.seconds

    def as_dict(self) -> dict[str, Any]:
        """Return the run for JSON."""
        return asdict(self) | {
            "steps": [step.as_dict() for step in self.steps],
            "loss_with_pad_targets": _finite(self.loss_with_pad_targets),
            "products": list(self.products),
        }


@dataclass(frozen=True)
class Spread:
    """Some measurements of one quantity."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of one or more values."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


@dataclass
class Side:
    """One trainer and its runs; `failed` says why there are no more of them."""

    name: str
    runs: list[Run] = field(default_factory=list)
    failed: str | None = None

    def spread(self, quantity: str) -> Spread:
        """Return the spread over the runs of one of their numbers."""
        return Spread.of(getattr(run, quantity) for run in self.runs)

    def per_second(self, count: str) -> Spread:
        """Return the spread over the runs of tokens a second."""
        return Spread.of(run.per_second(count) for run in self.runs)

    @property
    def seconds_per_step(self) -> Spread:
        """The spread over every step of every run."""
        return Spread.of(step.seconds for run in self.runs for step in run.steps)

    def as_dict(self) -> dict[str, Any]:
        """Return the side for JSON: its spreads, then its runs."""
        if not self.runs:
            return {"name": self.name, "failed": self.failed, "runs": []}
        spreads = {
            "real_tokens_per_s": self.per_second("tokens"),
            "supervised_tokens_per_s": self.per_second("supervised_tokens"),
            "seconds_per_step": self.seconds_per_step,
            **{name: self.spread(name) for name in _QUANTITIES},
        }
        return {
            "name": self.name,
            "failed": self.failed,
            **{name: asdict(spread) for name, spread in spreads.items()},
            "runs": [run.as_dict() for run in self.runs],
        }


_QUANTITIES = ("padding_share", "peak_memory", "peak_rss", "startup_s")


@dataclass(frozen=True)
class Agreement:
    """Whether two sides had the same losses. Differences are over the greater of 1 and the loss.

    `largest` is that of the steps after the first; None where a loss is not finite.
    """

    first: float | None
    largest: float | None
    first_tolerance: float
    tolerance: float

    @property
    def agree(self) -> bool:
        """Whether the first step and all others are within their tolerance."""
        if self.first is None or self.largest is None:
            return False
        return self.first <= self.first_tolerance and self.largest <= self.tolerance

    def as_dict(self) -> dict[str, Any]:
        """Return the fields for JSON."""
        return asdict(self)


def agreement(ours: Sequence[float], theirs: Sequence[float], dtype: str) -> Agreement:
    """Compare the losses of the same steps, computed in `dtype`."""
    apart = [abs(a - b) / max(1.0, abs(b)) for a, b in zip(ours, theirs, strict=True)]
    finite = all(map(math.isfinite, apart))
    first_tolerance, tolerance = _TOLERANCES.get(dtype, _TOLERANCES_16_BIT)
    return Agreement(
        first=apart[0] if finite else None,
        largest=max(apart[1:], default=0.0) if finite else None,
        first_tolerance=first_tolerance,
        tolerance=tolerance,
    )


@dataclass(frozen=True)
class Benchmark:
    """What was measured on which work. `rows` and `examples` are those of all steps."""

    model: str
    device: str
    dtype: str
    rows: int
    examples: int
    batch_size: int
    ours: Side
    theirs: Side | None
    options: dict[str, Any]
    versions: dict[str, str]

    @property
    def steps(self) -> int:
        """How many steps each run takes."""
        return len(self.ours.runs[0].steps)

    @property
    def pairs(self) -> list[tuple[Run, Run]]:
        """Each run of ours with theirs that came right after it."""
        return list(zip(self.ours.runs, self.theirs.runs, strict=False)) if self.theirs else []

    def ratios(self) -> dict[str, Spread]:
        """Return ours over theirs, pair by pair; empty where there is no pair."""
        return {
            name: Spread.of(of(ours) / of(theirs) for ours, theirs in self.pairs)
            for name, of in _COMPARED.items()
            if self.pairs
        }

    def agreement(self) -> Agreement | None:
        """Return how well the losses of the first pair agree; None without a pair."""
        if not self.pairs:
            return None
        ours, theirs = ([step.loss for step in run.steps] for run in self.pairs[0])
        return agreement(ours, theirs, self.dtype)

    def efficiency(self) -> Spread:
        """Return the spread over our runs of their step efficiency."""
        return Spread.of(run.step_efficiency or 0.0 for run in self.ours.runs)

    def as_dict(self) -> dict[str, Any]:
        """Return the benchmark for JSON; docs/bench.md describes it."""
        ratios, agreed = self.ratios(), self.agreement()
        return {
            "schema_version": SCHEMA_VERSION,
            "model": self.model,
            "device": self.device,
            "dtype": self.dtype,
            "rows": self.rows,
            "examples": self.examples,
            "batch_size": self.batch_size,
            "steps": self.steps,
            "against": self.theirs.name if self.theirs else None,
            "ratio": {name: spread.median for name, spread in ratios.items()} or None,
            "ratio_spread": {name: asdict(spread) for name, spread in ratios.items()} or None,
            "step_efficiency": self.efficiency().median,
            "padding_share": self.ours.spread("padding_share").median,
            "losses_agree": agreed.agree if agreed else None,
            "loss_difference": agreed.as_dict() if agreed else None,
            "ours": self.ours.as_dict(),
            "theirs": self.theirs.as_dict() if self.theirs else None,
            "options": self.options,
            "versions": self.versions,
        }


_COMPARED: dict[str, Callable[[Run], float]] = {
    "real_tokens_per_s": lambda run: run.per_second("tokens"),
    "supervised_tokens_per_s": lambda run: run.per_second("supervised_tokens"),
    "peak_memory": lambda run: run.peak_memory,
    "peak_rss": lambda run: run.peak_rss,
}


def one_span(example: Example) -> bool:
    """Tell whether the supervised tokens of an example stand side by side."""
    where = np.flatnonzero(example.assistant_mask)
    return bool(len(where)) and int(where[-1] - where[0]) == len(where) - 1


def write_steps(path: Path, steps: Sequence[Sequence[Example]]) -> None:
    """Write the examples of each step as one .npz file."""
    examples = [(number, example) for number, step in enumerate(steps) for example in step]
    with path.open("wb") as file:
        np.savez(
            file,
            tokens=np.concatenate([example.tokens for _, example in examples]),
            mask=np.concatenate([example.assistant_mask for _, example in examples]),
            ends=np.cumsum([len(example) for _, example in examples]),
            places=np.array([(number, each.file, each.row) for number, each in examples]),
        )


def read_steps(path: Path) -> list[list[Example]]:
    """Read what `write_steps` wrote."""
    with np.load(path) as arrays:
        tokens, mask, ends, places = (arrays[k] for k in ("tokens", "mask", "ends", "places"))
    steps: list[list[Example]] = [[] for _ in range(int(places[-1, 0]) + 1)]
    start = 0
    for end, (number, file, row) in zip(ends.tolist(), places.tolist(), strict=True):
        steps[number].append(Example(row, tokens[start:end], mask[start:end], file))
        start = end
    return steps
