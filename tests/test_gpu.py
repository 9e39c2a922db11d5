"""The report of tests/long/gpu.py without a GPU; `.ci/run` runs its parts on tiny models."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.files.processes import kernel_cache
from tests.long import gpu
from tests.long.gpu import CASES, Machine, Parts, Skip, write_long_rows
from tests.paths import SHARED


def report(path: Path) -> dict[str, Any]:
    return dict(json.loads(path.read_text())["parts"])


def test_parts_are_written_one_by_one_and_fail_one_by_one(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "gpu.json", {"parts": {}})

    def slow(seconds: float) -> dict[str, Any]:
        raise subprocess.TimeoutExpired("bench", seconds)

    def absent(_: float) -> dict[str, Any]:
        raise Skip("no rows")

    parts.run("good", 10, lambda _: {"figure": 7})
    assert report(parts.path)["good"]["figure"] == 7
    parts.run("bad", 10, lambda _: {"figure": 1 / 0})
    parts.run("slow", 10, slow)
    parts.run("absent", 10, absent)
    found = report(parts.path)
    assert found["bad"]["failed"].startswith("ZeroDivisionError")
    assert found["slow"]["failed"] == "took longer than 10 s"
    assert found["absent"]["skipped"] == "no rows"
    assert parts.failed == ["bad", "slow"]


def test_part_gets_the_time_that_is_left_or_none(tmp_path: Path) -> None:
    parts = Parts(tmp_path / "gpu.json", {"parts": {}}, total_s=50)
    parts.run("short", 10, lambda seconds: {"had": seconds})
    parts.run("long", 100, lambda seconds: {"had": seconds})
    parts.run("longer", 400, lambda seconds: {"had": seconds})
    found = report(parts.path)
    assert found["short"]["had"] == 10
    assert 40 < found["long"]["had"] <= 50
    assert found["longer"]["skipped"].endswith("s are left")


def test_report_of_a_proof_that_failed_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(arguments: list[str], seconds: float) -> None:
        Path(arguments[-1]).write_text('{"passed": false}')
        raise RuntimeError("1 of 42 checks failed")

    monkeypatch.setattr(gpu, "command", failing)
    parts = Parts(tmp_path / "gpu.json", {"parts": {}})
    parts.run("doctor --prove", 10, lambda seconds: gpu.proof(seconds, tmp_path))
    found = report(parts.path)["doctor --prove"]
    assert found["report"] == {"passed": False}
    assert found["failed"] == "1 of 42 checks failed"
    assert parts.failed == ["doctor --prove"]


def test_equality_has_no_tf32_and_all_processes_share_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        environments.append(options["env"])
        return subprocess.CompletedProcess(command, 0, stdout="{}", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("MLX_ENABLE_TF32")
    gpu.equality(10, [])
    (tmp_path / "proof.json").write_text("{}")
    gpu.proof(10, tmp_path)
    assert [each.get("MLX_ENABLE_TF32") for each in environments] == ["0", None]
    assert {each["MLX_PTX_CACHE_DIR"] for each in environments} == {kernel_cache()}


def test_first_compilations_have_room(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    limits = {}
    parts = Parts(tmp_path / "gpu.json", {"parts": {"card": {}}})
    monkeypatch.setattr(parts, "run", lambda name, limit_s, part: limits.update({name: limit_s}))
    gpu.run_all(parts, Machine(tmp_path, tmp_path, tiny=False))
    assert limits.pop("card") >= 30
    assert all(limit >= 120 for limit in limits.values())
    assert sum(limits.values()) > gpu.TOTAL_S


def test_machine_without_the_material_says_so(tmp_path: Path) -> None:
    with pytest.raises(Skip, match="--shared"):
        Machine(tmp_path, tmp_path / "nowhere", tiny=False).model(CASES[0])


@pytest.mark.skipif(not SHARED.is_dir(), reason=f"needs {SHARED}")
def test_long_rows_are_about_as_long_as_the_limit(tmp_path: Path) -> None:
    rows = write_long_rows(tmp_path / "long.jsonl", SHARED).read_text().splitlines()
    assert len(rows) >= 16
    for row in map(json.loads, rows):
        assert 3400 * 4.5 < len(row["messages"][0]["content"]) < 4400 * 4.5
