"""The result of an evaluation, and its JSON: losses, the verdict, and answers."""

import math
from dataclasses import asdict, dataclass
from typing import Any, TypeVar

from mlxtune.core.files.typed_json import from_json

VERDICTS = HELPED, HURT, CANNOT_TELL = "helped", "hurt", "cannot tell"
# With fewer rows, changes of the same sign in all rows are not significant: 2 * (1/2)^5 > 0.05.
MIN_ROWS = 6
# The name of the reward that is 1 for an answer equal to the row's, and 0 for any other.
EXACT = "exact"
PERPLEXITY_CAP = 1e6
# The largest size of a relative difference: a loss of 0 before training has no multiple.
MAX_FRACTION = 1e6

_T = TypeVar("_T")


def perplexity(loss: float) -> float:
    """Return exp(loss), at most 1e6; `loss` is in nats per supervised token."""
    return PERPLEXITY_CAP if loss >= math.log(PERPLEXITY_CAP) else math.exp(loss)


def baseline_of(base: _T, start: _T | None) -> _T:
    """Return the value with which an adapter's is compared: its starting point's or the base's."""
    return base if start is None else start


@dataclass(frozen=True)
class Loss:
    """A model's loss, in nats per supervised token."""

    loss: float
    perplexity: float


@dataclass(frozen=True)
class Difference:
    """The adapted model's loss minus another model's, and the interval of this difference.

    A difference below 0 is better. `share` is the difference relative to the other model's loss,
    at most 1e6 in size.
    """

    loss: float
    share: float
    low: float
    high: float
    confidence: float
    resamples: int
    seed: int

    @property
    def is_alike(self) -> bool:
        """Whether all rows changed equally, so that resampling says nothing about other rows."""
        return math.isclose(self.low, self.high, rel_tol=1e-9, abs_tol=1e-12)


@dataclass(frozen=True)
class RowLosses:
    """A row's losses in nats per token; `base_loss` is the baseline's, as in a FileVerdict.

    `row` is the row's number in `path`.
    """

    path: str
    row: int
    tokens: int
    base_loss: float
    adapted_loss: float


@dataclass(frozen=True)
class FileVerdict:
    """The losses of one file's rows, in nats per token, and the file's verdict.

    `base_loss` is the loss of the baseline, with which the verdict compares the adapter.
    Under a preference objective, `preferred_before` and `preferred_after` are the `before` and
    `after` of a PreferenceDifference over the file's rows.
    """

    path: str
    rows: int
    base_loss: float
    adapted_loss: float
    verdict: str
    hardly: bool = False
    preferred_before: float | None = None
    preferred_after: float | None = None

    @property
    def words(self) -> str:
        """The verdict, with `hardly` before it if the change is small."""
        return "hardly " * self.hardly + self.verdict


@dataclass(frozen=True)
class ExactMatch:
    """The number of each model's answers that equal the expected answers.

    `base` counts the answers that are `base` in samples, and `against` the right answers of the
    adapter that `--against` names.
    """

    base: int
    adapted: int | None
    against: int | None = None


@dataclass(frozen=True)
class KeyMatches:
    """How many of the `expected` values of a key each model's JSON answers got right."""

    key: str
    expected: int
    base: int
    adapted: int | None
    against: int | None = None


@dataclass(frozen=True)
class Matches:
    """The number of each model's answers that match; `by` is json, contains or regex=PATTERN.

    By json, `keys` counts the right values of each key of the expected objects, and `invalid` the
    answers that are not JSON.
    """

    by: str
    base: int
    adapted: int | None
    against: int | None = None
    keys: tuple[KeyMatches, ...] = ()
    invalid: ExactMatch | None = None


@dataclass(frozen=True)
class Sample:
    """The answers of the models to the prompt of one row, and the expected answer.

    `base` is the base model's answer or, where rewards are compared, the answer of the baseline,
    which may be another adapter. `right` says whether the adapter's answer, or without an adapter
    the base model's, matches. `against` is the answer of the adapter that `--against` names.
    """

    path: str
    row: int
    prompt: str
    expected: str
    base: str
    adapted: str | None
    right: bool | None = None
    against: str | None = None
    against_right: bool | None = None


@dataclass(frozen=True)
class Generated:
    """Greedy answers to the last prompt of each row whose last answer is complete."""

    rows: int
    exact_match: ExactMatch
    samples: list[Sample]
    matches: Matches | None = None

    @property
    def wrong(self) -> list[Sample]:
        """The samples whose answer does not match."""
        return [sample for sample in self.samples if sample.right is False]

    @property
    def differing(self) -> list[Sample]:
        """The samples that only one of the two compared adapters answers right."""
        judged = (sample for sample in self.samples if sample.against_right is not None)
        return [each for each in judged if each.right != each.against_right]


@dataclass(frozen=True)
class AnswersAtStep:
    """Answers after a validation within a run, stored as the `base` answers of the samples."""

    step: int
    samples: list[Sample]


@dataclass(frozen=True)
class MisjudgedAnswer:
    """A row that the adapted model misjudges: `margin_after`, in nats per token, is below 0."""

    path: str
    row: int
    margin_before: float
    margin_after: float


@dataclass(frozen=True)
class PreferenceDifference:
    """The fraction of pairs whose chosen answer a model prefers, before and after training.

    For answers with a label (`pairs` is false), `after` is the fraction of pairs of a good and a
    bad answer in which the good answer gained more, and `before` is 0.5, the value at random. `low`
    and `high` are the interval of the difference. Margins are means, in nats per token. `fewest`
    counts pairs, or the answers with the rarer label.
    """

    objective: str
    pairs: bool
    before: float
    after: float
    low: float
    high: float
    confidence: float
    margin_before: float
    margin_after: float
    misjudged: tuple[MisjudgedAnswer, ...] = ()
    fewest: int | None = None


@dataclass(frozen=True)
class RewardChange:
    """The mean of a reward over answers to the rows, before and after training.

    `name` is empty for the weighted sum of all rewards. The answers are greedy or `sampled`; `low`
    and `high` are the interval of the difference.
    """

    name: str
    sampled: bool
    before: float
    after: float
    low: float
    high: float


@dataclass(frozen=True)
class Unrewarded:
    """Rows that the verdict leaves out because a greedy answer to them has no reward.

    `rows` counts them among all rows, `total`; `before` and `after` count the answers without a
    reward before and after training. `reason` is the first of their problems.
    """

    rows: int
    total: int
    before: int
    after: int
    reason: str


@dataclass(frozen=True)
class Evaluation:
    """The result of an evaluation. Without an adapter, only the base model's values are set.

    `tokens` counts supervised tokens. The difference and the verdict compare the adapter with the
    base model or, if training started from an adapter, with that first adapter: then `start` is the
    first adapter's loss, and `base_difference` is the difference from the base model. If the
    difference is below 1% of the loss, the adapter `hardly` helped or hurt. `gained` and `lost` are
    the rows that contribute most to the difference, in nats, for the better and for the worse.

    Under a preference objective, the losses are those of the good answers, the verdict is about
    `preference`, and without an adapter `preferred` is the fraction of pairs whose chosen answer
    the base model prefers.

    If rewards are compared, the losses are negative mean rewards of greedy answers, by which the
    verdict goes, before and after training; `rewards` starts with their sum and includes `exact`.
    `unrewarded` describes the rows without a reward, if there are any.

    `left_out` counts rows that are left out because they were also trained on; with `only_trained`,
    no other rows remained, and all rows were evaluated. `copies` counts rows that are left out
    because an earlier row says the same. `files` has a verdict on each file, if
    there are several. With `unknown_rows`, it is unknown which rows the adapter was trained on.
    `against` names the adapter that `--against` compares with: then `start` is its loss. If
    training validated on these rows and chose the best adapter, `candidates` is the number of
    adapters from which it chose.
    """

    rows: int
    tokens: int
    base: Loss
    adapted: Loss | None = None
    difference: Difference | None = None
    verdict: str | None = None
    hardly: bool = False
    gained: tuple[RowLosses, ...] = ()
    lost: tuple[RowLosses, ...] = ()
    generated: Generated | None = None
    start: Loss | None = None
    base_difference: Difference | None = None
    left_out: int = 0
    only_trained: bool = False
    files: tuple[FileVerdict, ...] = ()
    preference: PreferenceDifference | None = None
    preferred: float | None = None
    candidates: int = 1
    unknown_rows: bool = False
    against: str | None = None
    rewards: tuple[RewardChange, ...] = ()
    unrewarded: Unrewarded | None = None
    copies: int = 0

    @property
    def baseline(self) -> Loss:
        """The loss with which the difference and the verdict compare the adapter's."""
        return baseline_of(self.base, self.start)

    @property
    def baseline_name(self) -> str:
        """The model or adapter that has the loss `baseline`."""
        if self.against is not None:
            return self.against
        if self.rewards:
            return "the model before training"
        return baseline_of("the base model", None if self.start is None else "the first adapter")

    def as_dict(self) -> dict[str, Any]:
        """Return JSON-ready values.

        They include `matches` only if matches were counted, `files` only for several files,
        `rewards`, `unrewarded` and `copies` only if there are any, `candidates` only for several
        adapters, and `against` only if two adapters are compared.
        """
        values = asdict(self)
        if self.candidates == 1:
            del values["candidates"]
        for name in ("files", "rewards", "copies"):
            if not values[name]:
                del values[name]
        if not self.unknown_rows:
            del values["unknown_rows"]
        kept: dict[str, Any] = _without_absent(values)
        return kept


# Entries that are left out, at any depth, if they are None or empty.
_OPTIONAL_ENTRIES = (
    "matches",
    "against",
    "against_right",
    "right",
    "keys",
    "invalid",
    "unrewarded",
)


def _without_absent(values: Any) -> Any:
    if isinstance(values, dict):
        return {
            name: _without_absent(value)
            for name, value in values.items()
            if name not in _OPTIONAL_ENTRIES or value not in (None, ())
        }
    return [*map(_without_absent, values)] if isinstance(values, list) else values


def parse_evaluation(values: Any) -> Evaluation:
    """Return an evaluation from the JSON of `as_dict`. Raises ValueError for other values."""
    evaluation: Evaluation = from_json(Evaluation, values)
    if evaluation.verdict not in (None, *VERDICTS):
        raise ValueError(f"no such verdict: {evaluation.verdict!r}")
    return evaluation
