"""Comparisons of metrics with a checkpoint's copy; tests/commands/test_verify.py edits runs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.run.checkpoint import Checkpoint
from mlxtune.core.run.checkpoint_checks import check_copy
from tests.runs import as_lines, metrics, step_line


def checkpoint(folder: Path, records: list[dict[str, Any]]) -> Checkpoint:
    (folder / "metrics.jsonl").write_bytes(as_lines(records))
    return Checkpoint(folder, {"step": 4})


def test_records_that_ended_an_unfinished_epoch_may_be_gone(tmp_path: Path) -> None:
    copied = metrics(1, 4)
    *before, validation, epoch = copied
    newest = checkpoint(tmp_path, copied)
    check_copy(as_lines([*copied, step_line(5, 4)]), newest)
    for kept in ([], [validation]):
        check_copy(as_lines([*before, *kept, step_line(5, 8)]), newest)
    check_copy(as_lines(before), newest)
    with pytest.raises(ValueError, match=r"lacks ValidationRecord 4 .*, which "):
        check_copy(as_lines(before), newest, finished=True)
    with pytest.raises(ValueError, match="lacks InstructEpochMetrics 1 with 2, which "):
        check_copy(as_lines([*before, validation]), newest, finished=True)
    changed = validation | {"val_loss": 0.1}
    for rest in ([epoch], [epoch, step_line(5, 4)], [step_line(5, 8)]):
        with pytest.raises(ValueError, match=r"has ValidationRecord 4 with 0\.1, but "):
            check_copy(as_lines([*before, changed, *rest]), newest)
