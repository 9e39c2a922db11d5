"""Comparisons of records with a replay's; tests/commands/test_verify.py replays whole runs."""

from __future__ import annotations

from dataclasses import replace

from mlxtune.core.run.progress import Progress
from mlxtune.core.run.replay_checks import check_metrics, up_to
from tests.core.training.records import step_record
from tests.runs import as_lines, metrics


def test_records_that_are_missing_on_either_side_are_named() -> None:
    own = list(Progress.from_jsonl(as_lines(metrics(1, 4))))
    assert check_metrics(own, own) is None
    assert "no InstructEpochMetrics 1" in (check_metrics(own[:-1], own) or "")
    assert "does not give" in (check_metrics(own, own[:-1]) or "")
    assert [getattr(each, "step", None) for each in up_to(own, 3)][-1] == 3


def test_metrics_that_an_earlier_version_did_not_record_are_not_compared() -> None:
    metrics = {"reward": 0.5, "frac_reward_zero_std": 0.25}
    own, other = step_record(1, metrics=metrics), step_record(1, metrics={**metrics, "kl": 0.1})
    again = step_record(1, metrics={**metrics, "frac_without_reward": 0.25, "frac_masked": 0.5})
    assert check_metrics([own], [again]) is None
    # A run that records them must agree.
    assert check_metrics([again], [own]) is not None
    assert check_metrics([replace(again, metrics={**again.metrics, "frac_masked": 0.1})], [again])
    assert check_metrics([own], [other]) is not None
