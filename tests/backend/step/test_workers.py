"""Several workers compute the same steps as one worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import needs_ring, run
from tests.slow import long, slow


@needs_ring
@pytest.mark.parametrize(("workers", "cases"), [slow(2, ("all",)), long(3, ("all",))])
def test_several_workers_compute_what_one_does(
    workers: int, cases: tuple[str, ...], tmp_path: Path
) -> None:
    said = run(workers, ["-m", "tests.backend.step.on_workers", *cases], tmp_path / "log")
    for worker in range(workers):
        assert f"worker {worker}: done" in said, said


@needs_ring
@pytest.mark.parametrize(
    ("workers", "architectures"),
    [slow(2, ("qwen3_moe",)), long(2, ())],
)
def test_workers_that_share_a_model_compute_what_one_does(
    workers: int, architectures: tuple[str, ...], tmp_path: Path
) -> None:
    command = ["-m", "tests.backend.step.on_sharded_workers", *architectures]
    said = run(workers, command, tmp_path / "log")
    for worker in range(workers):
        assert f"worker {worker}: done" in said, said
