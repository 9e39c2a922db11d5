"""The sections of a run's page on its rewards: what changed, and samples that show it."""

from collections.abc import Iterable, Iterator, Sequence
from operator import itemgetter
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.core.formatting import join_few, pluralize, sentence
from mlxtune.core.run.run_folder import SAMPLE_RECORDS
from mlxtune.core.run.sampled_answers import (
    GroupRecord,
    MetricChange,
    SampleRecord,
    gradient_warning,
    mean_text,
    opposites,
    read_shown,
)
from mlxtune.core.run.stored_run import Run
from mlxtune.core.run.summary import RunView
from mlxtune.errors import one_line

# The most groups of a step, pairs of rewards, and examples of a pair that a page shows.
_MAX_GROUPS, _MAX_PAIRS, _MAX_EXAMPLES = 3, 3, 3

# A sample with the group that it belongs to.
Drawn = tuple[GroupRecord, SampleRecord]
Floats = npt.NDArray[np.float64]


def reward_context(run: Run, view: RunView) -> dict[str, Any]:
    """Return the values of reward_section.html; `rewarded` is false for other runs."""
    if not view.is_rewarded:
        return {"rewarded": False, "learned": ""}
    changes, (steps, note) = view.changes, _read(run)
    samples = [(g, sample) for groups in steps.values() for g in groups for sample in g.samples]
    first_late = [*steps][-max(len(steps) // 3, 1)] if steps else 0
    late = [each for each in samples if each[0].step >= first_late]
    return {
        "rewarded": True,
        "changes": changes,
        "learned": _learned(changes),
        "pairs": [_pair(*pair, samples, late) for pair in opposites(changes)[:_MAX_PAIRS]],
        "steps": [_step(step, groups) for step, groups in steps.items()],
        "samples_note": note,
    }


def _read(run: Run) -> tuple[dict[int, list[GroupRecord]], str]:
    """Return groups by step, and why some or all are missing."""
    path = run.folder / SAMPLE_RECORDS
    try:
        steps, is_cut = read_shown(path)
    except FileNotFoundError:
        return {}, f"The run has no {SAMPLE_RECORDS}, so no samples are shown."
    except (OSError, ValueError) as problem:
        why = getattr(problem, "strerror", None) or one_line(problem)
        return {}, f"{SAMPLE_RECORDS} cannot be read, so no samples are shown: {why}."
    later = (
        f"{SAMPLE_RECORDS} is too large to search whole, so samples of later steps are not shown."
    )
    return steps, later * is_cut


def _learned(changes: Sequence[MetricChange]) -> str:
    """Return a sentence on what rose and fell."""
    rewards = [each for each in changes if each.kind != "answers"]
    if not rewards:
        return "The run is too short to compare its thirds."
    main, others = rewards[0], rewards[1:]
    text = f"The {main.sentence}." if others else f"The reward {main.sentence}."
    for verb, moved in (("Rose", 1), ("Fell", -1), ("Did not clearly change", 0)):
        if names := [each.name for each in others if each.moved == moved]:
            text += f" {verb}: {join_few(names)}."
    return " ".join([text, *map(sentence, gradient_warning(changes))])


# Best and worst


def _step(step: int, groups: Sequence[GroupRecord]) -> dict[str, Any]:
    """Return the groups of a step whose rewards differ most, with their best and worst sample."""
    ranged = [_group(group) for group in groups if group.samples]
    ranged.sort(key=itemgetter(0), reverse=True)
    shown = [article for _, article in ranged[:_MAX_GROUPS]]
    return {"step": step, "groups": shown, "of": len(groups)}


def _group(group: GroupRecord) -> tuple[float, dict[str, Any]]:
    """Return the range of a group's rewards, and its best and worst sample."""
    rewarded = [(each.reward, each) for each in group.samples if each.reward is not None]
    if not rewarded:
        return -1.0, _article(group, "no answer has a reward", [("no reward", group.samples[0])])
    rewarded.sort(key=itemgetter(0))
    (low, worst), (high, best) = rewarded[0], rewarded[-1]
    if low == high:
        note = f"all {pluralize(len(rewarded), 'reward')} are equal: no gradient"
        return 0.0, _article(group, note, [("one of the answers", worst)])
    note = f"of {len(group.samples):,} answers"
    return high - low, _article(group, note, [("best", best), ("worst", worst)])


def _article(
    group: GroupRecord, note: str, titled: Iterable[tuple[str, SampleRecord]]
) -> dict[str, Any]:
    answers = [
        {"title": title, "sample": each, "reward": _number(each.reward), "facts": _facts(each)}
        for title, each in titled
    ]
    place = group.row.rpartition("/")[2]  # a folder would take most of the line
    return {"row": place, "prompt": group.prompt, "note": note, "answers": answers}


def _facts(sample: SampleRecord) -> str:
    parts = [f"{name} {_number(value)}" for name, value in sample.rewards.items()]
    end = [f"advantage {sample.advantage:+.2f}", pluralize(len(sample.tokens), "token")]
    return ", ".join([*(parts if len(parts) > 1 else ()), *end])


def _number(value: float | None) -> str:
    return "–" if value is None else mean_text(value)


# Rewards that move apart


def _pair(
    better: MetricChange, worse: MetricChange, samples: Sequence[Drawn], late: Sequence[Drawn]
) -> dict[str, Any]:
    """Return two rewards that moved in opposite directions, and late samples that show it."""
    return {
        "title": f"{better.name} {better.verb}, {worse.name} {worse.verb}",
        "sentences": [better.sentence, worse.sentence],
        "examples": [
            _article(group, f"step {group.step:,}", [("answer", sample)])
            for group, sample in _opposed(better, worse, samples, late)
        ],
    }


def _opposed(
    better: MetricChange, worse: MetricChange, samples: Sequence[Drawn], late: Sequence[Drawn]
) -> Iterator[Drawn]:
    """Yield late samples with high values of one reward and low ones of the other.

    High and low are relative to all that were drawn.
    """
    first = len(samples) - len(late)
    good, bad = (_standardised(each, samples)[first:] for each in (better, worse))
    opposed = [(a - b, *each) for a, b, each in zip(good, bad, late, strict=True) if a > 0 > b]
    opposed.sort(key=lambda each: (each[0], each[1].step), reverse=True)
    texts = set[str]()
    for _, group, sample in opposed:
        if sample.text not in texts and len(texts) < _MAX_EXAMPLES:
            texts.add(sample.text)
            yield group, sample


def _standardised(change: MetricChange, samples: Sequence[Drawn]) -> Floats:
    """Return a reward of samples (S,) in standard deviations from the mean, NaN without a value."""
    values = np.array([each.rewards.get(change.name) for _, each in samples], dtype=np.float64)
    numbers = values[np.isfinite(values)]
    deviation = numbers.std() if len(numbers) else 0.0
    scale = -deviation if change.penalty else deviation
    return (values - numbers.mean()) / scale if scale else np.zeros(len(values))
