"""Whether an adapter helped: the losses of rows without and with it, and how sure one may be.

The loss of a model is the sum over all supervised tokens divided by their count. The rows were
drawn from what the model is to be used on, so they are what is drawn again for the interval: with
all their tokens, and with both losses, which makes it a paired one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.text import count
from mlxtune.core.training.metrics import perplexity
from mlxtune.errors import NonFiniteLossError

VERDICTS = HELPED, HURT, CANNOT_TELL = "helped", "hurt", "cannot tell"
RESAMPLES, CONFIDENCE = 10_000, 0.95
# With fewer rows not even one sign for all of them says anything: 2 * (1/2)^5 is above 0.05.
FEWEST_ROWS = 6
# Rows that gained and lost most, of each.
_SHOWN = 5
# Rows that are drawn at once, over all resamples, and examples that are computed together.
_DRAWN_AT_ONCE, _COMPUTED_AT_ONCE = 1 << 22, 32

_Floats = npt.NDArray[np.float64]
# From examples to the summed loss of each, float64 (B,).
Losses = Callable[[Sequence[Example]], _Floats]


@dataclass(frozen=True)
class Loss:
    """A model's loss, in nats per supervised token."""

    loss: float
    perplexity: float


@dataclass(frozen=True)
class Difference:
    """The adapted model's loss minus the base's, with its interval; below 0 is better."""

    loss: float
    low: float
    high: float
    confidence: float
    resamples: int
    seed: int


@dataclass(frozen=True)
class RowLosses:
    """What one row lost under both, in nats per token; `row` is its number in the file."""

    path: str
    row: int
    tokens: int
    base_loss: float
    adapted_loss: float


@dataclass(frozen=True)
class ExactMatch:
    """How many answers are those of the data to the letter."""

    base: int
    adapted: int | None


@dataclass(frozen=True)
class Sample:
    """What both answer to one row, beside the answer that the row has."""

    path: str
    row: int
    prompt: str
    expected: str
    base: str
    adapted: str | None


@dataclass(frozen=True)
class Generated:
    """The greedy answers to the last turn of each row that has a prompt and a whole answer."""

    rows: int
    exact_match: ExactMatch
    samples: list[Sample]

    def describe(self) -> str:
        """Say in a line how many there are, and how many are right to the letter."""
        match = self.exact_match
        after = "" if match.adapted is None else f", {match.adapted:,} with the adapter"
        return (
            f"{count(self.rows, 'row')} answered, for the report: right to the letter "
            f"{match.base:,} without{after}"
        )


def generated_of(samples: list[Sample], *, adapted: bool) -> Generated:
    """Return samples with the count of those that are right, with the adapter if there is one."""
    base = sum(each.base == each.expected for each in samples)
    right = sum(each.adapted == each.expected for each in samples) if adapted else None
    return Generated(len(samples), ExactMatch(base, right), samples)


@dataclass(frozen=True)
class Evaluation:
    """What an evaluation found. Without an adapter, only what is said of the base is there.

    `tokens` counts the supervised ones. `gained` and `lost` are the rows that made most of the
    difference, by the nats that they brought to it.
    """

    rows: int
    tokens: int
    base: Loss
    adapted: Loss | None = None
    difference: Difference | None = None
    verdict: str | None = None
    gained: tuple[RowLosses, ...] = ()
    lost: tuple[RowLosses, ...] = ()
    generated: Generated | None = None

    def as_dict(self) -> dict[str, Any]:
        """Return all as JSON-ready values."""
        return asdict(self)


@dataclass(frozen=True, eq=False)
class Sums:
    """The losses of rows under a model: `losses` float64 (R,), summed over `tokens` int64 (R,)."""

    losses: _Floats
    tokens: npt.NDArray[np.int64]

    @property
    def loss(self) -> Loss:
        """The loss over all tokens."""
        mean = float(self.losses.sum() / self.tokens.sum())
        return Loss(mean, perplexity(mean))


def sums_of(rows: CorpusRows, losses: Losses, tell: Callable[[int, int], None]) -> Sums:
    """Compute the losses of rows; `tell` hears how many examples are done, and of how many.

    The first token of an example is never predicted, and counts nowhere.
    """
    # Neighbours in length share a micro-batch; the sums do not depend on the order.
    examples = [(place, example) for place, row in enumerate(rows) for example in row]
    examples.sort(key=lambda each: len(each[1]))
    found, tokens = np.zeros(len(rows)), np.zeros(len(rows), dtype=np.int64)
    for start in range(0, len(examples), _COMPUTED_AT_ONCE):
        chunk = examples[start : start + _COMPUTED_AT_ONCE]
        places = [place for place, _ in chunk]
        np.add.at(found, places, losses([example for _, example in chunk]))
        np.add.at(tokens, places, [int(each.assistant_mask[1:].sum()) for _, each in chunk])
        tell(start + len(chunk), len(examples))
    return Sums(found, tokens)


def evaluation_of(
    rows: CorpusRows, paths: Sequence[str], base: Sums, adapted: Sums | None, seed: int
) -> Evaluation:
    """Compare the losses of rows, whose files have these paths.

    Raises NonFiniteLossError where the loss of a row is no number.
    """
    places = [rows.corpus.place_of(index) for index in rows.indices]
    for name, sums in (("base", base), ("adapted", adapted)):
        if sums is not None and not np.isfinite(sums.losses).all():
            file, row = places[int(np.argmin(np.isfinite(sums.losses)))]
            raise NonFiniteLossError(
                f"{paths[file]}:{row}: its loss under the {name} model is no finite number: "
                "check the model, or use --dtype float32"
            )
    found = Evaluation(len(rows), int(base.tokens.sum()), base.loss)
    if adapted is None:
        return found
    difference = paired_difference(base.losses, adapted.losses, base.tokens, seed)
    most = _most_changed(places, paths, base, adapted)
    return replace(
        found,
        adapted=adapted.loss,
        difference=difference,
        verdict=verdict_of(difference, len(rows)),
        gained=tuple(next(most)),
        lost=tuple(next(most)),
    )


def _most_changed(
    places: Sequence[tuple[int, int]], paths: Sequence[str], base: Sums, adapted: Sums
) -> Iterator[list[RowLosses]]:
    """Yield the rows that gained most, then those that lost most."""
    change = adapted.losses - base.losses
    for sign in (1, -1):
        order = np.argsort(sign * change, kind="stable")[:_SHOWN].tolist()
        yield [
            RowLosses(
                paths[places[i][0]],
                places[i][1],
                int(base.tokens[i]),
                float(base.losses[i] / base.tokens[i]),
                float(adapted.losses[i] / base.tokens[i]),
            )
            for i in order
            if sign * change[i] < 0
        ]


def verdict_of(difference: Difference, rows: int) -> str:
    """Return what the interval says of so many rows."""
    if rows < FEWEST_ROWS or difference.low <= 0 <= difference.high:
        return CANNOT_TELL
    return HELPED if difference.high < 0 else HURT


def paired_difference(
    base: _Floats,
    adapted: _Floats,
    tokens: npt.NDArray[np.int64],
    seed: int,
    *,
    resamples: int = RESAMPLES,
    confidence: float = CONFIDENCE,
) -> Difference:
    """Return the difference of two losses over the same rows, with its bootstrap interval.

    `base`, `adapted` and `tokens` are (R,): the summed losses of each row, and its tokens. Rows are
    drawn with replacement, and each resample is the difference of sums divided by its tokens.

    Source: the bias-corrected and accelerated interval, Efron, Better Bootstrap Confidence
    Intervals, JASA 82 (1987), equations 2.3 and 6.6; Efron and Tibshirani, An Introduction to the
    Bootstrap (1993), equations 14.9, 14.10, 14.14 and 14.15. Percentiles by themselves are too
    short where few rows bring most of the difference.
    """
    change = adapted - base
    observed = float(change.sum() / tokens.sum())
    drawn = np.sort(_resampled(change, tokens, seed, resamples))
    edges = _bca_levels(observed, drawn, change, tokens, confidence)
    low, high = (float(value) for value in np.quantile(drawn, edges))
    return Difference(observed, low, high, confidence, resamples, seed)


def _resampled(
    change: _Floats, tokens: npt.NDArray[np.int64], seed: int, resamples: int
) -> _Floats:
    generator = np.random.default_rng(seed)
    rows = len(change)
    at_once = max(1, _DRAWN_AT_ONCE // rows)
    parts = []
    for start in range(0, resamples, at_once):
        chosen = generator.integers(0, rows, (min(at_once, resamples - start), rows))
        parts.append(change[chosen].sum(axis=1) / tokens[chosen].sum(axis=1))
    return np.concatenate(parts)


def _bca_levels(
    observed: float,
    drawn: _Floats,
    change: _Floats,
    tokens: npt.NDArray[np.int64],
    confidence: float,
) -> tuple[float, float]:
    """Return which shares of the resamples the interval begins and ends at."""
    normal = NormalDist()
    half = (1 - confidence) / 2
    # Those that equal it count half, so that a median of many equal values is no bias.
    below = float((drawn < observed).mean() + (drawn == observed).mean() / 2)
    least = 1 / (2 * len(drawn))
    bias = normal.inv_cdf(min(max(below, least), 1 - least))
    acceleration = _acceleration(change, tokens)
    levels = []
    for share in (half, 1 - half):
        z = bias + normal.inv_cdf(share)
        room = 1 - acceleration * z
        # Where the correction runs away, as with a single row that differs, none is made.
        levels.append(normal.cdf(bias + z / room) if room > 0 else share)
    return levels[0], levels[1]


def _acceleration(change: _Floats, tokens: npt.NDArray[np.int64]) -> float:
    """Return the skewness of the statistic without each row in turn (the jackknife), over 6."""
    if len(change) < 2:
        return 0.0
    without = (change.sum() - change) / (tokens.sum() - tokens)
    apart = without.mean() - without
    spread = float((apart**2).sum())
    return float((apart**3).sum()) / (6 * spread**1.5) if spread > 0 else 0.0


def verdict_line(found: Evaluation) -> str:
    """Return what the verdict is, and by how much, in a sentence."""
    difference = found.difference
    assert difference is not None
    rows = f"{count(found.rows, 'row')}, {count(found.tokens, 'supervised token')}"
    change = abs(difference.loss)
    better = "less" if difference.loss <= 0 else "more"
    # The interval of what is said, which is without a sign.
    low, high = difference.low, difference.high
    if difference.loss <= 0:
        low, high = -high, -low
    amount = (
        f"{change:.4f} nats per token {better} than the base model "
        f"({difference.confidence:.0%} interval {low + 0.0:.4f} to {high + 0.0:.4f}) on {rows}"
    )
    if found.verdict != CANNOT_TELL:
        return f"the adapter {found.verdict}: {amount}"
    few = f"; {FEWEST_ROWS} rows are the fewest that say anything"
    return f"cannot tell whether the adapter helped: {amount}{few * (found.rows < FEWEST_ROWS)}"
