"""Steps of several ranks equal those of one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.launch import needs_ring, run


@needs_ring
@pytest.mark.parametrize(
    "ranks", [2, *(pytest.param(ranks, marks=pytest.mark.slow) for ranks in (3, 4))]
)
def test_several_ranks_compute_what_one_does(ranks: int, tmp_path: Path) -> None:
    said = run(ranks, ["-m", "tests.backend.step.on_ranks"], tmp_path / "log")
    for rank in range(ranks):
        assert f"rank {rank}: done" in said, said


@needs_ring
@pytest.mark.parametrize(
    ("ranks", "architectures"),
    [(2, ("llama", "qwen3")), pytest.param(2, (), marks=pytest.mark.slow)],
)
def test_ranks_that_share_a_model_compute_what_one_does(
    ranks: int, architectures: tuple[str, ...], tmp_path: Path
) -> None:
    command = ["-m", "tests.backend.step.on_split_ranks", *architectures]
    said = run(ranks, command, tmp_path / "log")
    for rank in range(ranks):
        assert f"rank {rank}: done" in said, said
