"""The models, rows and runs of `doctor --prove`; real runs are in test_prove.py."""

from __future__ import annotations

import json
import signal
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.files.processes import HelperError, Helpers, HelperTimeoutError
from mlxtune.diagnosis import workbench
from mlxtune.diagnosis.checks import check_gradients
from mlxtune.diagnosis.workbench import QWEN, Workbench


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[list[str]]]:
    """A function that fakes processes by exit codes and files, and returns their arguments."""

    def replace(*statuses: int, **files: str) -> list[list[str]]:
        started: list[list[str]] = []

        def run(self: Helpers, arguments: list[str], folder: Path, **_: Any) -> int:
            folder.mkdir(exist_ok=True)
            (folder / "checkpoints").mkdir(exist_ok=True)
            (folder / "stderr").write_text("mlxtune: error: no\n")
            for name, content in files.items():
                (folder / name.replace("__", "/").replace("_", ".")).write_text(content)
            started.append(arguments)
            return statuses[min(len(started), len(statuses)) - 1]

        monkeypatch.setattr(Helpers, "call", run)
        return started

    return replace


def test_step_has_rows_that_share_beginnings_and_one_twice(tmp_path: Path) -> None:
    rows = [json.loads(line) for line in Workbench(tmp_path).step.read_text().splitlines()]
    roles = [[message["role"][0] for message in row["messages"]] for row in rows]
    assert sorted({"".join(role) for role in roles}) == ["sua", "suaua", "ua", "uaua"]
    assert rows[-1] == rows[-2]


def test_straight_run_is_made_once(tmp_path: Path, runs: Any) -> None:
    started = runs(0, adapters_safetensors="weights")
    bench = Workbench(tmp_path)
    assert bench.train(QWEN) == bench.train(QWEN)
    assert len(started) == 1
    bench.train(QWEN, "again")
    assert len(started) == 2


def test_failed_run_shows_its_last_message(tmp_path: Path, runs: Any) -> None:
    runs(1)
    with pytest.raises(HelperError, match="exit code 1: mlxtune: error: no"):
        Workbench(tmp_path).train(QWEN)


def test_checks_before_a_crash_are_kept(tmp_path: Path, runs: Any) -> None:
    check = check_gradients("plain", 1e-7, 2e-7).taking(1.5)
    runs(-6, records=json.dumps(asdict(check)))
    found = []
    with pytest.raises(HelperError, match="killed by signal 6"):
        for each in Workbench(tmp_path).measure("gradients", tmp_path):
            found.append(each)
    assert found == [check]


def test_checks_before_a_timeout_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    check = check_gradients("plain", 1e-7, 2e-7).taking(1.5)

    def run(self: Helpers, arguments: list[str], folder: Path, **_: Any) -> int:
        Path(arguments[2]).write_text(json.dumps(asdict(check)))
        raise HelperTimeoutError("did not end within 300 seconds")

    monkeypatch.setattr(Helpers, "call", run)
    found = Workbench(tmp_path).measure("gradients")
    assert next(found) == check
    with pytest.raises(HelperTimeoutError):
        next(found)


@pytest.mark.parametrize(
    ("stop", "status"), [(signal.SIGINT, 130), (signal.SIGKILL, -signal.SIGKILL)]
)
def test_stopped_run_is_resumed(
    tmp_path: Path, runs: Any, stop: signal.Signals, status: int
) -> None:
    files = {"adapters_safetensors": "weights", "checkpoints__metrics_jsonl": "{}\n{}\n"}
    started = runs(status, 0, **files)
    _, step = Workbench(tmp_path).resumed(QWEN, stop)
    assert step == 2
    assert started[1][2:] == ["train", "--resume", "--quiet"]


@pytest.mark.parametrize(
    ("status", "error"), [(0, "ended before it was stopped"), (1, "exit code 1: mlxtune: error")]
)
def test_run_that_was_not_stopped_is_an_error(
    tmp_path: Path, runs: Any, status: int, error: str
) -> None:
    runs(status, checkpoints__metrics_jsonl="")
    with pytest.raises(HelperError, match=error):
        Workbench(tmp_path).resumed(QWEN, signal.SIGINT)


def test_demo_is_next_to_the_package() -> None:
    for name in (QWEN, workbench.GEMMA):
        assert (Workbench(Path()).model(name) / "model.safetensors").is_file()


@pytest.mark.parametrize(("job", "exact"), [("gradients", True), ("dtype", False)])
def test_products_are_rounded_only_where_training_rounds_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, exact: bool
) -> None:
    seen: dict[str, str] = {}

    def run(self: Helpers, *_: Any, variables: dict[str, str]) -> int:
        seen.update(variables)
        return 0

    monkeypatch.setattr(Helpers, "call", run)
    assert list(Workbench(tmp_path).measure(job)) == []
    assert seen.get("MLX_ENABLE_TF32") == ("0" if exact else None)
