"""The numbers of a benchmark: steps, runs, contestants, ratios, and whether the losses agree.

    contestant  one trainer: this package, or a peer
    run         one process of a contestant, which takes all steps
    step        one optimizer update, timed

A ratio is mlxtune's number divided by the peer's.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

SCHEMA_VERSION = 2
# The largest accepted differences between losses, relative to the greater of 1 and the loss: at the
# first step, and later. Before the first update, both contestants compute the same function of
# the same numbers; later, AdamW turns a rounding error in a gradient near 0 into an update of full
# size.
_TOLERANCES = {"float32": (1e-4, 1e-3)}
# The largest accepted differences in 16 bits: bfloat16 rounds a log-sum-exp of 10 to within 0.03.
_TOLERANCES_16_BIT = (2e-2, 2e-2)


@dataclass(frozen=True)
class TimedStep:
    """One step: its time in seconds, peak memory in bytes, loss and numbers of tokens.

    `tokens` counts the examples' tokens, `tokens_run` all tokens that the model processed, and
    `padding` the wasted tokens: pads, and tokens after an example's last supervised token.
    """

    seconds: float
    tokens: int
    supervised_tokens: int
    tokens_run: int
    padding: int
    loss: float
    peak_memory: int


@dataclass(frozen=True)
class BenchmarkRun:
    """The measurements of one process of a contestant, in seconds and bytes.

    `process_s` is the time from the start of the process until it is ready to train, and
    `startup_s` the part of that time after the weights are read. `peak_rss` is the largest memory
    of the process. `loss_function` names the loss of a peer, and `loss_with_pad_targets` is the
    first step's loss with the peer's own labels. `execution` names how the contestant computes,
    and `reference_s` is the time for the reference's log-probabilities, if the objective needs
    them. `large_cache_s` is the time of the same steps on a GPU while MLX's cache of freed memory
    may grow to the memory limit; None on a CPU and for a peer.
    """

    steps: list[TimedStep]
    process_s: float
    weights_s: float
    startup_s: float
    warm_up_s: float
    peak_rss: int
    loss_function: str = "own"
    loss_with_pad_targets: float | None = None
    execution: str = ""
    reference_s: float = 0.0
    large_cache_s: float | None = None

    @property
    def cache_ratio(self) -> float | None:
        """The speed as a fraction of the speed with a large cache; None if that was not timed."""
        return None if self.large_cache_s is None else self.large_cache_s / self.seconds

    @property
    def seconds(self) -> float:
        """The time of all steps, in seconds."""
        return math.fsum(step.seconds for step in self.steps)

    @property
    def real_tokens_per_s(self) -> float:
        """The examples' tokens per second, over all steps."""
        return sum(step.tokens for step in self.steps) / self.seconds

    @property
    def supervised_tokens_per_s(self) -> float:
        """Supervised tokens per second, over all steps."""
        return sum(step.supervised_tokens for step in self.steps) / self.seconds

    @property
    def peak_memory(self) -> int:
        """MLX's peak memory in bytes, over all steps."""
        return max(step.peak_memory for step in self.steps)

    @property
    def padding_share(self) -> float:
        """The fraction of padding in the tokens that the model processed."""
        forward = sum(step.tokens_run for step in self.steps)
        return sum(step.padding for step in self.steps) / forward

    def as_dict(self) -> dict[str, Any]:
        """Return the content of a run for JSON."""
        entries = asdict(self)
        # The report names the execution once for each contestant.
        del entries["execution"]
        return entries | {
            "steps": [asdict(step) | {"loss": _finite(step.loss)} for step in self.steps],
            "loss_with_pad_targets": _finite(self.loss_with_pad_targets),
        }


def _finite(value: float | None) -> float | None:
    """Return a number for JSON; None for NaN and infinities, which JSON lacks."""
    return None if value is None or not math.isfinite(value) else value


@dataclass(frozen=True)
class Spread:
    """The median and range of some measurements."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Iterable[float]) -> Spread:
        """Return the spread of at least one value."""
        ordered = sorted(values)
        return cls(statistics.median(ordered), ordered[0], ordered[-1])


@dataclass
class ContestantResult:
    """A trainer and its runs; `failed` is the error that stopped further runs."""

    name: str
    runs: list[BenchmarkRun] = field(default_factory=list)
    failed: str | None = None

    def spread(self, quantity: str) -> Spread:
        """Return a quantity's spread over the runs or, for `seconds_per_step`, over all steps."""
        if quantity == "seconds_per_step":
            return Spread.of(step.seconds for run in self.runs for step in run.steps)
        return Spread.of(getattr(run, quantity) for run in self.runs)

    def as_dict(self) -> dict[str, Any]:
        """Return the contestant for JSON: name, failure, execution, spreads and runs."""
        execution = {"execution": self.runs[0].execution} if self.runs else {}
        spreads = {name: asdict(self.spread(name)) for name in _SPREADS if self.runs}
        runs = [run.as_dict() for run in self.runs]
        return {"name": self.name, "failed": self.failed, **execution, **spreads, "runs": runs}


# The quantities by which contestants are compared, and all quantities of a contestant.
_COMPARED_QUANTITIES = ("real_tokens_per_s", "supervised_tokens_per_s", "peak_memory", "peak_rss")
_SPREADS = (*_COMPARED_QUANTITIES, "seconds_per_step", "padding_share", "startup_s")


@dataclass(frozen=True)
class Agreement:
    """The differences between two contestants' losses, relative to the greater of 1 and the loss.

    `first` is the difference at the first step, and `largest` the largest difference at later
    steps; both are None if a loss is not finite.
    """

    first: float | None
    largest: float | None
    first_tolerance: float
    tolerance: float

    @property
    def losses_agree(self) -> bool:
        """Whether the losses of all steps agree within their tolerances."""
        if self.first is None or self.largest is None:
            return False
        return self.first <= self.first_tolerance and self.largest <= self.tolerance


def agreement(ours: Sequence[float], theirs: Sequence[float], dtype: str) -> Agreement:
    """Compare both contestants' losses at the same steps; `dtype` decides the tolerances."""
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
    """The measurements and their conditions; `rows` and `examples` are totals over all steps."""

    model: str
    device: str
    dtype: str
    rows: int
    examples: int
    batch_size: int
    ours: ContestantResult
    theirs: ContestantResult | None
    options: dict[str, Any]
    versions: dict[str, str]

    @property
    def steps(self) -> int:
        """The number of steps of each run."""
        return len(self.ours.runs[0].steps)

    @property
    def pairs(self) -> list[tuple[BenchmarkRun, BenchmarkRun]]:
        """Each run of mlxtune, paired with the peer's run that followed it."""
        return list(zip(self.ours.runs, self.theirs.runs, strict=False)) if self.theirs else []

    def ratios(self) -> dict[str, Spread]:
        """Return the spreads of ratios over all pairs, by quantity; empty without a pair."""
        if not (pairs := self.pairs):
            return {}
        return {
            name: Spread.of(getattr(ours, name) / getattr(theirs, name) for ours, theirs in pairs)
            for name in _COMPARED_QUANTITIES
        }

    def cache_ratio(self) -> float | None:
        """Return the median over runs of mlxtune's `cache_ratio`; None if none was timed."""
        ratios = [run.cache_ratio for run in self.ours.runs if run.cache_ratio is not None]
        return statistics.median(ratios) if ratios else None

    def agreement(self) -> Agreement | None:
        """Compare the losses of the first pair of runs; None without a pair."""
        if not self.pairs:
            return None
        ours, theirs = ([step.loss for step in run.steps] for run in self.pairs[0])
        return agreement(ours, theirs, self.dtype)

    def as_dict(self) -> dict[str, Any]:
        """Return the content of the JSON result, which docs/bench.md describes."""
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
            "padding_share": self.ours.spread("padding_share").median,
            "losses_agree": agreed.losses_agree if agreed else None,
            "loss_difference": asdict(agreed) if agreed else None,
            "cache_ratio": self.cache_ratio(),
            "ours": self.ours.as_dict(),
            "theirs": self.theirs.as_dict() if self.theirs else None,
            "options": self.options,
            "versions": self.versions,
        }
