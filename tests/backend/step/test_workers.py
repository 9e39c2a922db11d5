"""Steps of several workers equal those of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import needs_ring, run


@needs_ring
@pytest.mark.parametrize(
    "workers", [2, *(pytest.param(workers, marks=pytest.mark.slow) for workers in (3, 4))]
)
def test_several_workers_compute_what_one_does(workers: int, tmp_path: Path) -> None:
    said = run(workers, ["-m", "tests.backend.step.on_workers"], tmp_path / "log")
    for worker in range(workers):
        assert f"worker {worker}: done" in said, said


@needs_ring
@pytest.mark.parametrize(
    ("workers", "architectures"),
    [(2, ("llama", "qwen3")), pytest.param(2, (), marks=pytest.mark.slow)],
)
def test_workers_that_share_a_model_compute_what_one_does(
    workers: int, architectures: tuple[str, ...], tmp_path: Path
) -> None:
    command = ["-m", "tests.backend.step.on_split_workers", *architectures]
    said = run(workers, command, tmp_path / "log")
    for worker in range(workers):
        assert f"worker {worker}: done" in said, said
