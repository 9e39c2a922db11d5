"""Checks of records; tests/commands/test_verify.py edits runs."""

from __future__ import annotations

import pytest

from mlxtune.core.run.cross_checks import check_records
from mlxtune.core.run.progress import Progress
from tests.runs import as_lines, metrics


def test_losses_agree_with_perplexities_and_means() -> None:
    records = metrics(1, 4, validation=False)
    with pytest.raises(ValueError, match="epoch 1 has training loss 3, but its steps have "):
        check_records(Progress.from_jsonl(as_lines(records)))
    records[2]["loss"] /= 4
    with pytest.raises(ValueError, match=r"step 3 has loss .*, but perplexity "):
        check_records(Progress.from_jsonl(as_lines(records)))
