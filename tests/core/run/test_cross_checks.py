"""Checks of records; tests/commands/test_verify.py edits runs."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.core.run.checkpoint import METRICS
from mlxtune.core.run.cross_checks import check_ledger, check_metrics_agree
from mlxtune.core.run.progress import Progress
from tests.runs import LENGTHS, as_lines, metrics, write_run


def test_losses_agree_with_perplexities_and_means() -> None:
    records = metrics(1, 4, validation=False)
    with pytest.raises(ValueError, match="epoch 1 has training loss 3, but its steps have "):
        check_metrics_agree(Progress.from_jsonl(as_lines(records)))
    records[2]["loss"] /= 4
    with pytest.raises(ValueError, match=r"step 3 has loss .*, but perplexity "):
        check_metrics_agree(Progress.from_jsonl(as_lines(records)))


@pytest.mark.parametrize("epochs", [1, 2])
@pytest.mark.parametrize("updates", [1, 2, 3, 8])
def test_rows_count_once_for_all_updates_on_their_samples(
    tmp_path: Path, updates: int, epochs: int
) -> None:
    """The ledger has 40 rows to train on, in steps of 4."""
    run = write_run(
        tmp_path,
        epochs=epochs,
        per_epoch=10 * updates,
        options={"objective": "grpo", "reward": ("json",), "updates": updates},
        about={"lengths": LENGTHS | {"tokens": {"total": 4900}}},
    )
    content = (run / METRICS).read_bytes()
    lines = content.splitlines(keepends=True)
    # Whole, stopped within the last rollout, and stopped within the first rollout.
    for part in (content, b"".join(lines[:-3]), b"".join(lines[:2])):
        assert check_ledger(run, None, Progress.from_jsonl(part)).startswith("50 rows")
    longer = as_lines(metrics(epochs, 11 * updates))
    with pytest.raises(ValueError, match=f"has 40 rows to train on, but epoch 1 in {METRICS} has"):
        check_ledger(run, None, Progress.from_jsonl(longer))
