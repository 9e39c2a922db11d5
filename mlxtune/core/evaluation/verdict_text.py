"""The result of an evaluation, in sentences."""

from mlxtune.core.evaluation.interval import CONFIDENCE
from mlxtune.core.evaluation.outcome import (
    CANNOT_TELL,
    EXACT,
    HELPED,
    HURT,
    MAX_FRACTION,
    MIN_ROWS,
    Difference,
    Evaluation,
    ExactMatch,
    FileVerdict,
    Matches,
    PreferenceDifference,
    RewardChange,
)
from mlxtune.core.formatting import pluralize

# With fewer answers, a percentage says little.
_MIN_ANSWERS = 10
# A verdict on two adapters, as a comparison.
_COMPARATIVES = {HELPED: "better", HURT: "worse"}


def verdict_lines(evaluation: Evaluation) -> list[str]:
    """Return a line with the verdict and the size of the change, and sometimes a second line.

    The second line compares further training with the base model or, for preferences, describes the
    change in loss. The evaluation must have an adapter.
    """
    if evaluation.rewards:
        return _reward_lines(evaluation)
    if evaluation.preference is not None:
        return _preference_lines(evaluation, evaluation.preference)
    difference, further = evaluation.difference, evaluation.base_difference
    assert difference is not None
    rows = (
        f"{pluralize(evaluation.rows, 'row')}, {pluralize(evaluation.tokens, 'supervised token')}"
    )
    if left_out := _left_out(evaluation):
        rows += f"; {left_out}"
    other = f" of {evaluation.baseline_name}"
    amount = f"{_amount(difference, other)}, on {rows}{_answers(evaluation)}"
    line = _verdict_line(evaluation, amount)
    if further is None:
        return [line]
    return [line, f"compared with the base model, {_amount(further)}"]


def _earlier(evaluation: Evaluation) -> str:
    """Return a phrase for the values of the baseline: `before`, or `with` another adapter."""
    return "before" if evaluation.against is None else f"with {evaluation.against}"


def _left_out(evaluation: Evaluation) -> str:
    """Return a phrase on rows that do not count, if there are any."""
    parts = []
    if evaluation.left_out:
        parts.append(f"{pluralize(evaluation.left_out, 'row')} that training also used")
    if evaluation.copies:
        parts.append(f"{pluralize(evaluation.copies, 'repeated row')}")
    return f"without {' and '.join(parts)}" if parts else ""


def verdict_words(evaluation: Evaluation) -> str:
    """Return the words of the verdict in its line: `hardly helped`, `better` or `cannot tell`."""
    verdict = evaluation.verdict
    if verdict is None or verdict == CANNOT_TELL:
        return verdict or ""
    word = verdict if evaluation.against is None else _COMPARATIVES[verdict]
    return f"{'hardly ' * evaluation.hardly}{word}"


def file_verdict_lines(evaluation: Evaluation) -> list[str]:
    """Return the verdict on each file, for readers who may see the files' paths."""
    return [
        f"{file.path}: {file.words}, {_preferred(file)}{file.base_loss:.4f} to "
        f"{file.adapted_loss:.4f} on {pluralize(file.rows, 'row')}"
        for file in evaluation.files
    ]


def _preferred(file: FileVerdict) -> str:
    if file.preferred_before is None or file.preferred_after is None:
        return ""
    return f"prefers {file.preferred_before:.0%} to {file.preferred_after:.0%}, loss "


def _reward_lines(evaluation: Evaluation) -> list[str]:
    """Return the verdict with the change of the reward, and a line for each further reward."""
    first, *others = evaluation.rewards
    rows = pluralize(evaluation.rows, "row")
    if left_out := _left_out(evaluation):
        rows += f" ({left_out})"
    before = _earlier(evaluation)
    what = f"greedy answers to {rows} get a mean reward of {_reward_text(first, before)}"
    if (without := evaluation.unrewarded) is not None:
        what += (
            f"; {without.rows:,} of {pluralize(without.total, 'row')} without a reward "
            f"({without.before:,} {before}, {without.after:,} after) are left out, so the verdict "
            "may be wrong"
        )
    lines = [f"{_reward_name(each)}: {_reward_text(each, before)}" for each in others]
    return [_verdict_line(evaluation, what), *lines]


def _reward_name(change: RewardChange) -> str:
    answers = f"{'sampled' if change.sampled else 'greedy'} answers"
    if change.name == EXACT:
        return f"exact {answers}"
    return f"reward {change.name} of {answers}" if change.name else f"reward of {answers}"


def _reward_text(change: RewardChange, before: str) -> str:
    # An exact answer has the reward 1, and any other 0, so the mean is a fraction.
    exact = change.name == EXACT
    scale, digits, percent, points = (100, 0, "%", " points") if exact else (1, 3, "", "")
    after, earlier = (
        f"{scale * each:.{digits}f}{percent}" for each in (change.after, change.before)
    )
    changes = change.after - change.before, change.low, change.high
    gain, low, high = (f"{scale * each:+.{digits}f}" for each in changes)
    return (
        f"{after}, {earlier} {before} ({gain}{points}, {CONFIDENCE:.0%} interval {low} to {high})"
    )


def _preference_lines(evaluation: Evaluation, change: PreferenceDifference) -> list[str]:
    """Return the verdict with the changes in preferences and in the loss of the good answers."""
    rows = pluralize(evaluation.rows, "pair" if change.pairs else "answer")
    if left_out := _left_out(evaluation):
        rows += f" ({left_out})"
    before, after = f"{change.before:.0%} {_earlier(evaluation)}", f"{change.after:.0%}"
    interval = (
        f"{100 * (change.after - change.before):+.0f} points, {change.confidence:.0%} interval "
        f"{100 * change.low:+.0f} to {100 * change.high:+.0f}"
    )
    what = f"it prefers the chosen answer in {after} of {rows}, {before} ({interval})"
    if not change.pairs:
        what = f"good answers gained more than bad ones in {after} of pairs, on {rows} ({interval})"
    difference = evaluation.difference
    assert difference is not None
    margin = (
        f"margin {change.margin_before:.3f} nats per token {_earlier(evaluation)}, "
        f"{change.margin_after:.3f} after; "
    )
    return [
        _verdict_line(evaluation, what + _answers(evaluation)),
        f"{margin if change.pairs else ''}loss of the "
        f"{'chosen' if change.pairs else 'good'} answers changed by {difference.loss:+.4f} nats "
        "per token",
    ]


def _verdict_line(evaluation: Evaluation, evidence: str) -> str:
    if evaluation.candidates > 1:
        evidence += (
            f"; as the best of {evaluation.candidates} adapters on these rows, it may change other "
            "rows less"
        )
    if evaluation.unknown_rows:
        evidence += "; whether these rows were trained on is unknown"
    words, other = verdict_words(evaluation), evaluation.against
    if evaluation.verdict != CANNOT_TELL:
        if other is not None:
            words = f"is {words} than {other}"
        return f"the adapter {words}{_but_none_right(evaluation)}: {evidence}"
    caveat = f"; at least {MIN_ROWS} rows are needed" * (evaluation.rows < MIN_ROWS)
    preference = evaluation.preference
    if (
        preference
        and not preference.pairs
        and preference.fewest is not None
        and preference.fewest < MIN_ROWS
    ):
        caveat = f"; at least {MIN_ROWS} answers of each label are needed"
    if evaluation.only_trained:
        caveat = "; all of these rows are training rows too"
    question = "helped" if other is None else f"is better than {other}"
    return f"cannot tell whether the adapter {question}: {evidence}{caveat}"


def _but_none_right(evaluation: Evaluation) -> str:
    """Return a clause for an adapter that helped, although none of its answers is right."""
    generated = evaluation.generated
    # Rows that are judged by rewards may have no right answer.
    if evaluation.rewards or evaluation.verdict != HELPED:
        return ""
    if generated is None or generated.rows < MIN_ROWS:
        return ""
    counted = generated.matches or generated.exact_match
    if counted.adapted != 0:
        return ""
    return f", but none of its {pluralize(generated.rows, 'answer')} {_matching(counted)}"


def _matching(counted: ExactMatch | Matches) -> str:
    return f"matches by {counted.by}" if isinstance(counted, Matches) else "is exact"


def _amount(difference: Difference, other: str = "") -> str:
    """Describe a difference; a verb replaces its sign."""
    verb, low, high = "adds", difference.low, difference.high
    if difference.loss <= 0:
        verb, low, high = "takes", -high, -low
    direction = "off" if verb == "takes" else "to"
    interval = f"{difference.confidence:.0%} interval {low + 0.0:.4f} to {high + 0.0:.4f}"
    if difference.is_alike:
        interval = "no interval: all rows changed alike"
    return (
        f"it {verb} {_percentage(abs(difference.share))} {direction} the loss{other}, "
        f"{abs(difference.loss):.4f} nats per token ({interval})"
    )


def _percentage(fraction: float) -> str:
    if 0.995 <= fraction < 1:
        return "more than 99%"
    if fraction >= MAX_FRACTION:
        return f"at least {MAX_FRACTION:,.0%}"
    return f"{fraction:.0%}" if fraction >= 0.1 else f"{fraction:.1%}"


def _answers(evaluation: Evaluation) -> str:
    generated = evaluation.generated
    counted = generated and (generated.matches or generated.exact_match)
    if generated is None or not counted or counted.adapted is None:
        return ""
    if generated.rows < _MIN_ANSWERS:
        return ""
    fraction, earlier = counted.adapted / generated.rows, counted.base / generated.rows
    other = "without it"
    if counted.against is not None:
        earlier, other = counted.against / generated.rows, _earlier(evaluation)
    how = f"match by {counted.by}" if isinstance(counted, Matches) else "exact"
    return f"; {fraction:.0%} of {pluralize(generated.rows, 'answer')} {how}, {earlier:.0%} {other}"
