"""`mlxtune train` on a disk that fails at some operations, or in a process that dies at one.

tests/core/training/test_resume.py fails every operation of a pipeline that computes nothing.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from mlxtune import TrainConfig, resume, train, verify
from mlxtune.core.run.run_folder import find_resume_point
from mlxtune.errors import OutputError
from tests.faults import KINDS, Crash, FaultyDisk
from tests.models import sums, write_chat
from tests.slow import long, slow

# What differs between two runs of one command.
MEASURED = {
    *("seconds", "epoch_time_ms", "samples_per_sec", "memory", "micro_batches", "run_tokens"),
    "padding",
}


def options(model: Path, folder: Path) -> TrainConfig:
    adapter, chat = folder / "adapters.safetensors", folder.parent / "chat.jsonl"
    lora: dict[str, Any] = {"rank": 2, "init": "pissa", "target_rank": ("q_proj=4",)}
    return TrainConfig(
        *(str(model), (str(chat),)),
        **{"output": str(adapter), "epochs": 2, "batch_size": 3, "save_steps": 2},
        **{"samples": 1, "dropout": 0.1, "quiet": True, **lora},
    )


def finish(model: Path, folder: Path) -> None:
    """Resume the run, or start it again if it has no checkpoint yet, and verify it."""
    config = options(model, folder)
    if find_resume_point(config.checkpoint_path) is None:
        train(replace(config, overwrite=True))
    else:
        resume(folder)
    assert [check for check in verify(folder).checks if not check.ok] == []


def result_of(folder: Path) -> tuple[bytes, list[dict[str, Any]]]:
    """Return the bytes of the adapter, and the records of metrics.jsonl without measurements."""
    lines = (folder / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    records = [{k: v for k, v in json.loads(x).items() if k not in MEASURED} for x in lines]
    return (folder / "adapters.safetensors").read_bytes(), records


def bury(folder: Path) -> None:
    """Close this process's files in a folder, as the kernel does when a process dies."""
    theirs = {(found.st_dev, found.st_ino) for found in map(Path.stat, folder.rglob("*"))}
    for name in os.listdir("/dev/fd"):  # noqa: PTH208
        with suppress(OSError):
            found = os.fstat(int(name))
            if (found.st_dev, found.st_ino) in theirs:
                os.close(int(name))


@pytest.mark.parametrize(
    ("kinds", "every", "runs"), [slow(["crash"], 700, 2), long(list(KINDS), 5, 300)], ids=str
)
def test_run_that_fails_at_some_operations_is_resumed_to_the_same_result(
    model: Path, tmp_path: Path, kinds: list[str], every: int, runs: int
) -> None:
    write_chat(tmp_path / "chat.jsonl", sums(12))
    train(options(model, tmp_path / "whole"))
    expected = result_of(tmp_path / "whole")
    ended = Counter[str]()
    for kind in kinds:
        for fails_at in range(1, 10_000, every):
            folder = tmp_path / f"{kind}-{fails_at}"
            with pytest.MonkeyPatch.context() as monkeypatch:
                disk = FaultyDisk(monkeypatch, fails_at, KINDS[kind], within=folder)
                try:
                    train(options(model, folder))
                    ended["completed"] += 1
                except (Crash, OutputError) as error:
                    ended[type(error).__name__] += 1
            bury(folder)
            finish(model, folder)
            assert result_of(folder) == expected, folder
            if not disk.failed:
                break
    assert ended["Crash"] >= 1
    assert ended.total() >= runs
