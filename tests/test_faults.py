"""`mlxtune train` on a disk that fails at some operations, or in a process that dies at one.

`python -m tests.long.check_faults --whole` fails every operation.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.faults import KINDS
from tests.long.check_faults import check
from tests.slow import long, slow


@pytest.mark.parametrize(
    ("kinds", "every", "runs"), [slow(["crash"], 700, 2), long(list(KINDS), 300, 8)], ids=str
)
def test_run_that_fails_at_some_operations_is_resumed_to_the_same_result(
    tmp_path: Path, kinds: list[str], every: int, runs: int
) -> None:
    ended, failures = check(every, tmp_path, whole=True, kinds=kinds)
    assert failures == []
    assert ended["crash: ended by Crash"] >= 1
    assert sum(ended.values()) >= runs
