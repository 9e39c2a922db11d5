"""Comparisons of records with a replay's; tests/commands/test_verify.py replays whole runs."""

from __future__ import annotations

from mlxtune.core.run.progress import Progress
from mlxtune.core.run.replay_checks import check_metrics, up_to
from tests.runs import as_lines, metrics


def test_records_that_are_missing_on_either_side_are_named() -> None:
    own = list(Progress.from_jsonl(as_lines(metrics(1, 4))))
    assert check_metrics(own, own) is None
    assert "no InstructEpochMetrics 1" in (check_metrics(own[:-1], own) or "")
    assert "does not give" in (check_metrics(own, own[:-1]) or "")
    assert [getattr(each, "step", None) for each in up_to(own, 3)][-1] == 3
