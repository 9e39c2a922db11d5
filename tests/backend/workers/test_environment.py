"""The checks of all workers' reports: versions, files and the network."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.backend.workers.environment import (
    Link,
    WorkerReport,
    is_one_of_several,
    judge_workers,
    launched_worker,
)
from mlxtune.core.machine.machine_checks import OK, PROBLEM, Check
from mlxtune.errors import ConfigError

# Adding one number takes 1 ms; adding 16 MB takes 0.1 s more.
LINK = Link(0.001, 0.101, 16_000_000)
REPORT = WorkerReport("mac1/501", {"mlx": "0.32.4"}, {"chat.jsonl": "a"})


def judged(*reports: WorkerReport) -> dict[str, Check]:
    return {check.name: check for check in judge_workers(reports, LINK)}


def test_workers_that_agree_have_nothing_to_fix() -> None:
    found = judged(REPORT, WorkerReport("mac2/501", REPORT.versions, REPORT.files))
    assert [check.level for check in found.values()] == [OK] * 3
    assert found["workers"].found == "2 on 2 machines"
    assert found["files"].found == "chat.jsonl is the same on all workers"
    # 10 MB take 63.5 ms, and each of two machines computes for half a second.
    assert found["network"].found == (
        "1.3 Gbit/s, 1 ms to add one number: steps of 1 s that add 10 MB run at most 1.8 times as "
        "fast as on one worker"
    )


@pytest.mark.parametrize(
    "changed, name, found",
    [
        (
            {"versions": {"mlx": "0.32.3"}},
            "versions",
            "worker 1 has mlx 0.32.3, on worker 0 0.32.4",
        ),
        ({"versions": {}}, "versions", "worker 1 has mlx None, on worker 0 0.32.4"),
        (
            {"files": {"chat.jsonl": "b"}},
            "files",
            "chat.jsonl is not the same as worker 0's on worker 1",
        ),
        ({"files": {"chat.jsonl": None}}, "files", "chat.jsonl cannot be read on worker 1"),
        (
            {"problems": [("MLX does not start", "reinstall")]},
            "worker",
            "worker 1: MLX does not start",
        ),
    ],
)
def test_workers_that_differ_are_named(changed: dict[str, object], name: str, found: str) -> None:
    fields = {"versions": REPORT.versions, "files": REPORT.files, **changed}
    check = judged(REPORT, WorkerReport("mac1/501", **fields))[name]  # type: ignore[arg-type]
    assert (check.level, check.found) == (PROBLEM, found)
    assert check.remedy


@pytest.mark.parametrize(
    "variables, several, worker",
    [
        ({}, False, 0),
        ({"MLX_RANK": "2"}, True, 2),
        ({"OMPI_COMM_WORLD_RANK": "1"}, True, 1),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "empty"}, False, 0),
        ({"MLX_RANK": "0", "MLX_HOSTFILE": "nobody"}, False, 0),
    ],
)
def test_launch_is_detected_by_its_variables(
    variables: dict[str, str],
    several: bool,
    worker: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    (tmp_path / "empty").write_text("")
    (tmp_path / "nobody").write_text("[]\n")
    monkeypatch.chdir(tmp_path)
    for name in ("MLX_RANK", "OMPI_COMM_WORLD_RANK", "MLX_HOSTFILE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert (is_one_of_several(), launched_worker()) == (several, worker)


@pytest.mark.parametrize("text", ["x", "", "-1", "1 ", "٣", "9" * 20])
def test_non_numeric_rank_is_refused(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLX_RANK", text)
    with pytest.raises(ConfigError, match=r"MLX_RANK: .* is not the number of a worker"):
        launched_worker()
