"""The report of tests/long/gpu.py without a GPU; `.ci/run` runs its parts on tiny models."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.long import gpu
from tests.long.gpu_parts import Parts, Skip
from tests.long.gpu_processes import CaseProcesses
from tests.long.gpu_timing import compared


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


def test_equality_has_no_tf32_and_all_processes_share_compiled_kernels(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    environments = []

    def run(command: list[str], **options: Any) -> subprocess.CompletedProcess[str]:
        environments.append(options["env"])
        return subprocess.CompletedProcess(command, 0, stdout="{}", stderr="")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.delenv("MLX_ENABLE_TF32")
    monkeypatch.setenv("MLX_PTX_CACHE_DIR", "/kernels")
    gpu.equality(10, [])
    (tmp_path / "proof.json").write_text("{}")
    gpu.proof(10, tmp_path)
    assert [environment.get("MLX_ENABLE_TF32") for environment in environments] == ["0", None]
    assert {environment["MLX_PTX_CACHE_DIR"] for environment in environments} == {"/kernels"}


# Stands in for gpu_steps: case "dies" ends the process, "hangs" never ends, others have a figure.
FAKE = """
import json, sys, time
for name in json.load(open(sys.argv[1])):
    print("a library's own line")
    print(json.dumps({"case": name, "phase": "the warm-up"}), flush=True)
    if name == "dies":
        sys.exit("CUDA error")
    if name == "hangs":
        time.sleep(600)
    print(json.dumps({"case": name, "found": {"seconds": [1.0]}}), flush=True)
"""


@pytest.mark.slow
def test_case_that_ends_its_process_fails_alone_and_one_without_end_is_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "fake_steps.py").write_text(FAKE)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    starts = []

    def write(path: Path, names: Sequence[str]) -> None:
        starts.append(list(names))
        path.write_text(json.dumps(names))

    found: dict[str, Any] = {}
    processes = CaseProcesses("fake_steps", tmp_path / "cases.json", write)
    processes.run(["one", "dies", "two", "hangs", "three"], 12, found.__setitem__)
    assert starts == [["one", "dies", "two", "hangs", "three"], ["two", "hangs", "three"]]
    assert found["one"] == found["two"] == {"seconds": [1.0]}
    assert found["dies"]["failed"] == "exit 1 in the warm-up: CUDA error"
    assert found["hangs"]["skipped"].endswith("s, in the warm-up")
    assert found["three"]["skipped"] == "no time was left"


def test_rates_count_the_faster_pass_and_losses_are_compared_with_ours() -> None:
    case = {
        "tokens": 800,
        "dtype": "bfloat16",
        "sides": {"mlxtune": {"seconds": [1.0], "losses": [2.0, 1.0]}},
    }
    found = {"seconds": [4.0, 2.0], "losses": [2.01, 7.0], "needed_flops": 1e12}
    values = compared(found, case, {"measured_tflops": 5.0})
    assert values["tokens_per_s"] == 400
    assert values["share_of_measured_peak"] == 0.1
    assert values["losses_agree"] is True
    assert compared(found | {"losses": [3.0]}, case, {})["losses_agree"] is False
    assert compared({"failed": "no kernel"}, case, {}) == {}
