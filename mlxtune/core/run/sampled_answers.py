"""What a run records of its sampled answers: how their metrics changed, and the answers themselves.

`samples.jsonl.gz` has a line for each group. The samples of a rollout are a gzip member of their
own, which is added and flushed before they are trained on. A run that was killed leaves at most one
incomplete member, at the end.
"""

from __future__ import annotations

import io
import json
import math
import re
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Literal, NamedTuple

import numpy as np

from mlxtune.config.limits import (
    MAX_MEMBER_BYTES,
    MAX_SEARCHED_BYTES,
    MAX_SHOWN_BYTES,
    MAX_SHOWN_STEPS,
    SAMPLE_LIMITS,
    TooLargeError,
    parse_json,
)
from mlxtune.config.objective_config import PolicyConfig, is_rewarded, reward_weight
from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.objectives.policy import has_gradient
from mlxtune.core.run.metrics import (
    ADDED_METRICS,
    CLIPPED_RATIO,
    EQUAL_REWARDS,
    MASKED_ROWS,
    MEAN_LENGTH,
    REWARD,
    ROWS_WITHOUT_REWARD,
    WITHOUT_REWARD,
)
from mlxtune.core.run.stored_run import Run, get_int

# The fewest steps of a third that show a change.
_MIN_STEPS = 3
# A change by less than this fraction may be rounding.
_PRECISION = 1e-9
SUM = "sum of rewards"
_REWARDS, _MEAN = "rewards/", "/mean"
FRACTION = "fraction of "
_SAME_REWARD = "all answers got the same reward"
# The labels of what a run measures of its answers besides rewards.
ANSWER_LABELS = {
    MEAN_LENGTH: "tokens per answer",
    CLIPPED_RATIO: "fraction of truncated answers",
    EQUAL_REWARDS: "fraction of rows with equal rewards",
    WITHOUT_REWARD: "fraction of answers without a reward",
    ROWS_WITHOUT_REWARD: "fraction of rows without a reward",
    MASKED_ROWS: "fraction of rows whose answers are masked",
    "kl": "divergence from the start (KL)",
}
Kind = Literal["reward", "sum", "answers"]
# The bytes of a read, and of a member's start with its step.
_PIECE, _START = 2**16, 64
_STEP = re.compile(rb'\{"step": (\d{1,15}),')


# Metrics


@dataclass(frozen=True)
class MetricChange:
    """The means of a metric over the first and the last third of a run's steps.

    `moved` is 1 or -1 if the metric rose or fell by more than twice the standard error of the
    difference, else 0. A `penalty` is a reward with a negative weight.
    """

    name: str
    first: float
    last: float
    moved: int
    kind: Kind
    penalty: bool = False

    @property
    def texts(self) -> list[str]:
        """Both means."""
        return [self._text(self.first), self._text(self.last)]

    def _text(self, mean: float) -> str:
        return f"{mean:.1%}" if self.name.startswith(FRACTION) else mean_text(mean)

    @property
    def verb(self) -> str:
        return {1: "rose", 0: "did not clearly change", -1: "fell"}[self.moved]

    @property
    def sentence(self) -> str:
        return (
            f"{self.name} {self.verb}: {self._text(self.first)} in the first third of the steps, "
            f"{self._text(self.last)} in the last"
        )


def mean_text(value: float) -> str:
    return f"{value:,.0f}" if 1000 <= abs(value) < 1e9 else f"{value:.3g}"


def reward_keys(run: Run) -> dict[str, str]:
    """Return the metrics of a run's rewards by name, in the order of its options; their sum first.

    A single reward has no sum.
    """
    every = dict.fromkeys(name for step in run.progress.steps.metrics for name in step)
    means = (key for key in every if key.startswith(_REWARDS) and key.endswith(_MEAN))
    keys = {key.removeprefix(_REWARDS).removesuffix(_MEAN): key for key in means}
    return {SUM: REWARD, **keys} if len(keys) > 1 else keys


def spread_key(key: str) -> str:
    """Return the name of the metric of a reward's spread, by the name of its mean's metric."""
    return f"{key}_std" if key == REWARD else key.removesuffix(_MEAN) + "/std"


def metric_values(run: Run, key: str) -> tuple[list[float], list[float]]:
    """Return the steps that have a metric, and its values."""
    steps, values = [], []
    for step, metrics in zip(run.column("step"), run.progress.steps.metrics, strict=True):
        value = metrics.get(key)
        if key in ADDED_METRICS and EQUAL_REWARDS in metrics:
            value = value or 0.0
        if value is not None:
            steps.append(step)
            values.append(value)
    return steps, values


def metric_changes(run: Run) -> list[MetricChange]:
    """Return the changes of a run's rewards and of its answers.

    Empty for a run that does not learn from rewards, or has too few steps.
    """
    if not is_rewarded(run.config.get("objective")):
        return []
    keys, options = reward_keys(run), run.config.get("reward")
    names, penalties = [name for name in keys if name != SUM], set[str]()
    if isinstance(options, list) and len(options) == len(names):
        weights = map(reward_weight, map(str, options))
        penalties = {name for name, weight in zip(names, weights, strict=True) if weight < 0}
    changes = [
        _change(run, key, name, "sum" if name == SUM else "reward", name in penalties)
        for name, key in keys.items()
    ]
    changes += [_change(run, key, name, "answers") for key, name in ANSWER_LABELS.items()]
    complete = (change for change in changes if change is not None)
    return [each for each in complete if each.kind != "answers" or each.first or each.last]


def _change(
    run: Run, key: str, name: str, kind: Kind, penalty: bool = False
) -> MetricChange | None:
    # The updates on the same answers have the same metrics.
    updates = max(get_int(run.config, "updates") or 1, 1)
    values = metric_values(run, key)[1][::updates]
    if (third := len(values) // 3) < _MIN_STEPS:
        return None
    first, last = (float(np.mean(each)) for each in (values[:third], values[-third:]))
    scatter = np.var(values[:third], ddof=1) + np.var(values[-third:], ddof=1)
    # Steps have different rows, so a change within their noise is not significant.
    change, noise = last - first, 2 * math.sqrt(scatter / third) + _PRECISION * abs(first)
    moved = (change > noise) - (change < -noise)
    return MetricChange(name, first, last, moved, kind, penalty)


@dataclass(frozen=True)
class NoGradient:
    """The main reason why rows teach nothing, its remedy, and the fraction of rows it is for.

    `answers` says in a few words what the answers had.
    """

    fraction: float
    reason: str
    remedy: str
    answers: str

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> NoGradient | None:
        """Choose the reason from a step's metrics, or from their means; None if all rows teach."""
        unrewarded, masked = (metrics.get(key, 0.0) for key in (ROWS_WITHOUT_REWARD, MASKED_ROWS))
        reasons = (
            cls(
                metrics.get(EQUAL_REWARDS, 0.0) - unrewarded,
                _SAME_REWARD,
                "add a reward with partial credit, such as json_keys, or raise --group-size",
                "got equal rewards",
            ),
            cls(
                unrewarded,
                "no answer had a reward",
                "fix the reward, which mlxtune reward tries on rows",
                "got no reward",
            ),
            cls(
                masked,
                "the answers that would teach were truncated",
                "raise --max-new-tokens, or leave out --mask-truncated",
                "were truncated",
            ),
        )
        main = max(reasons, key=lambda each: each.fraction)
        return main if main.fraction > 0 else None

    @property
    def nothing_learned(self) -> str:
        """A sentence on steps of which no row teaches."""
        if self.reason == _SAME_REWARD:
            text = "all answers to each prompt got the same reward, so nothing was learned"
        else:
            text = f"nothing was learned, and for {self.fraction:.0%} of the rows, {self.reason}"
        return f"{text}: {self.remedy}"


def untaught(metrics: Mapping[str, float]) -> float:
    """Return the fraction of a step's rows that teach nothing, which its metrics state in parts."""
    return metrics.get(EQUAL_REWARDS, 0.0) + metrics.get(MASKED_ROWS, 0.0)


def gradient_warning(changes: Sequence[MetricChange]) -> Iterator[str]:
    """Yield a line if most rows of the last third taught nothing."""
    last = {each.name: each.last for each in changes if each.kind == "answers"}
    metrics = {key: last.get(name, 0.0) for key, name in ANSWER_LABELS.items()}
    if untaught(metrics) > 0.5 and (why := NoGradient.of(metrics)):
        yield (
            f"in the last third, {why.fraction:.0%} of the rows taught nothing, because "
            f"{why.reason}"
        )


def mean_metric(run: Run, key: str) -> float:
    """Return the mean of a metric over a run's steps; 0 if none has it."""
    values = metric_values(run, key)[1]
    return float(np.mean(values)) if values else 0.0


def taught_nothing(run: Run) -> NoGradient | None:
    """Return why no row of any step taught a run anything; None for other runs."""
    steps = run.progress.steps.metrics
    if not steps or any(untaught(step) < 1 - _PRECISION for step in steps):
        return None
    keys = (EQUAL_REWARDS, ROWS_WITHOUT_REWARD, MASKED_ROWS)
    return NoGradient.of({key: mean_metric(run, key) for key in keys})


def opposites(changes: Sequence[MetricChange]) -> list[tuple[MetricChange, MetricChange]]:
    """Return pairs of rewards of which the first got better while the second got worse."""
    rewards = [each for each in changes if each.kind == "reward"]
    toward = {each.name: -each.moved if each.penalty else each.moved for each in rewards}
    better = [each for each in rewards if toward[each.name] > 0]
    worse = [each for each in rewards if toward[each.name] < 0]
    return [(one, other) for one in better for other in worse]


def exploit_sentence(changes: Sequence[MetricChange]) -> str:
    """Return a clause on the first of the `opposites`; empty if no reward got worse."""
    for better, worse in opposites(changes):
        return f"reward {worse.name} {worse.verb} while {better.name} {better.verb}"
    return ""


def exploit_warning(changes: Sequence[MetricChange]) -> Iterator[str]:
    """Yield a line if a reward got better while another got worse."""
    for better, _ in opposites(changes)[:1]:
        yield (
            f"{exploit_sentence(changes)}: the model may be exploiting {better.name}: read the "
            "answers of the last steps in the report"
        )


# Samples


@dataclass(frozen=True)
class SampleRecord:
    """A sample: its tokens with their log-probabilities, its text, and what its rewards were.

    `finished` says whether the model ended it; otherwise, its length was limited. A reward is None
    if it has no value, and `reward`, the weighted sum, is None if any is; `problems` say why.
    `SampledExample` describes `old_logps` and `reference_logps`; like `advantage`, they follow from
    all samples of the rollout.
    """

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    text: str
    finished: bool
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float = 0.0
    problems: tuple[str, ...] = ()
    old_logps: tuple[float, ...] | None = None
    reference_logps: tuple[float, ...] | None = None

    def is_masked(self, config: PolicyConfig) -> bool:
        """Return whether the sample has no loss: without a reward, or truncated and left out."""
        return self.reward is None or (config.mask_truncated and not self.finished)

    def has_gradient(self, config: PolicyConfig) -> bool:
        """Return whether the sample has a part in a step's gradient."""
        return has_gradient(self.is_masked(config), self.advantage, config.kl > 0)

    def teaches(self, config: PolicyConfig) -> bool:
        """Return whether the sample has a gradient from its reward, not only its divergence."""
        return has_gradient(self.is_masked(config), self.advantage, has_divergence=False)


@dataclass(frozen=True)
class GroupRecord:
    """The samples of one prompt.

    `step` is the first step that trains on them, `row` the place of the prompt's row, `use` the
    number of earlier uses of the row in the step, and `adapter` a hash of the LoRA matrices that
    sampled.
    """

    step: int
    row: str
    use: int
    seed: int
    adapter: str
    prompt: str
    prompt_tokens: tuple[int, ...]
    samples: tuple[SampleRecord, ...]

    @property
    def has_equal_rewards(self) -> bool:
        """Whether all rewards are equal or missing."""
        return all(sample.advantage == 0 for sample in self.samples)

    @property
    def is_unrewarded(self) -> bool:
        """Whether no sample has a reward."""
        return all(sample.reward is None for sample in self.samples)

    def is_masked(self, config: PolicyConfig) -> bool:
        """Return whether rewards differ, but every sample that would teach is masked."""
        return not self.has_equal_rewards and not any(s.teaches(config) for s in self.samples)

    def as_json(self) -> bytes:
        values = asdict(self)
        for sample in values["samples"]:
            for name in ("problems", "old_logps", "reference_logps"):
                if not sample[name]:
                    del sample[name]
        return json.dumps(values, allow_nan=False, ensure_ascii=False).encode() + b"\n"


class Member(NamedTuple):
    """A member of the record: the step of its samples, its place, and the start of its content.

    `digest` is the hash of the file up to the member's end, if the file is read from its start.
    """

    step: int
    start: int
    end: int
    content: bytes
    digest: Any


def read_groups(path: Path) -> Iterator[GroupRecord]:
    """Yield the groups of a run. Raises OSError, or ValueError for a damaged file."""
    with open_regular(path, links=False) as file:
        for member in read_members(file):
            yield from groups_in(member.content)


def read_shown(path: Path) -> tuple[dict[int, list[GroupRecord]], bool]:
    """Return groups by step, for a page: of some steps from the first to the last.

    A step has its first groups, if they are too large together. Also return whether the file is too
    large to search, so that later steps are missing. Raises OSError, or ValueError for a damaged
    file.
    """
    starts, is_cut = dict[int, int](), False
    with open_regular(path, links=False) as file:
        try:
            for member in read_members(file, keep=0, most=MAX_SEARCHED_BYTES):
                starts[member.step] = member.start
        except TooLargeError:
            is_cut = True
        steps, shown = sorted(starts), dict[int, list[GroupRecord]]()
        last, count = len(steps) - 1, min(len(steps), MAX_SHOWN_STEPS)
        for i in range(count):
            step = steps[last * i // max(count - 1, 1)]
            shown[step] = groups_at(file, starts[step], keep=MAX_SHOWN_BYTES)
    return shown, is_cut


def groups_in(content: bytes) -> list[GroupRecord]:
    """Return the groups of a member. Raises ValueError."""
    lines = content.splitlines()
    return [from_json(GroupRecord, parse_json(line, SAMPLE_LIMITS, "a group")) for line in lines]


def groups_at(
    file: io.BufferedReader, start: int, keep: int = MAX_MEMBER_BYTES
) -> list[GroupRecord]:
    """Return the groups of the member at `start`, as far as its first `keep` bytes have them."""
    file.seek(start)
    content = next((member.content for member in read_members(file, keep)), b"")
    return groups_in(content[: content.rfind(b"\n") + 1])


def read_members(
    file: io.BufferedReader, keep: int = MAX_MEMBER_BYTES, most: int | None = None
) -> Iterator[Member]:
    """Yield each complete gzip member from here, with the first `keep` bytes of its content.

    An incomplete member at the end is left out. Raises ValueError for a damaged one, or for steps
    that do not increase, and TooLargeError for a member that unpacks to more than MAX_MEMBER_BYTES,
    or if all together unpack to more than `most`.
    """
    start, total, digest, last = file.tell(), 0, sha256(), 0
    while True:
        file.seek(start)
        unpack, parts, size, piece = zlib.decompressobj(wbits=31), list[bytes](), 0, b""
        while not unpack.eof:
            packed = unpack.unconsumed_tail or file.read(_PIECE)
            # A full piece may not be all that the last bytes unpack to.
            if not packed and len(piece) < _PIECE:
                return
            try:
                piece = unpack.decompress(packed, _PIECE)
            except zlib.error as error:
                raise ValueError(f"is damaged: {error}") from error
            left = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
            digest.update(packed[: len(packed) - len(left)])
            parts.append(piece[: max(keep - size, _START - size, 0)])
            size, total = size + len(piece), total + len(piece)
            if size > MAX_MEMBER_BYTES or (most is not None and total > most):
                raise TooLargeError("unpacks to too much")
        content, end = b"".join(parts), file.tell() - len(unpack.unused_data)
        if (step := _STEP.match(content)) is None:
            raise ValueError("is damaged: it has samples without a step")
        if (number := int(step[1])) <= last:
            raise ValueError(f"is damaged: step {number} comes after step {last}")
        yield Member(number, start, end, content, digest.copy())
        start, last = end, number
