"""A run as a person starts it, on a disk that fails or in a process that dies, now and then.

`python -m tests.long.check_faults --whole` fails every operation.
"""

from __future__ import annotations

from pathlib import Path

from tests.long.check_faults import check


def test_run_that_fails_at_some_operations_is_gone_on_with_to_the_same_result(
    tmp_path: Path,
) -> None:
    ended, failures = check(300, tmp_path, whole=True)
    assert failures == []
    assert ended["crash: ended by Crash"] >= 1
    assert sum(ended.values()) >= 8
