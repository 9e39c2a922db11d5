"""The samples that a page reads from the record: some steps, within limits."""

from __future__ import annotations

import dataclasses
import gzip
from hashlib import sha256
from pathlib import Path

import pytest

from mlxtune.core.run import sampled_answers
from mlxtune.core.run.sampled_answers import (
    GroupRecord,
    SampleRecord,
    read_groups,
    read_members,
    read_shown,
)


def group(step: int, text: str = "answer", row: int = 1) -> GroupRecord:
    sample = SampleRecord((3, 1), (-0.5, -0.25), text, True, {"json": 1.0}, 1.0, 0.0)
    return GroupRecord(step, f"rows.jsonl:{row}", 0, 42, "a", "Hi", (7, 8), (sample, sample))


def test_recorded_samples_cannot_change() -> None:
    recorded = group(1)
    for record in (recorded, *recorded.samples):
        for field in dataclasses.fields(record):
            with pytest.raises(dataclasses.FrozenInstanceError):
                setattr(record, field.name, None)


def write(path: Path, *steps: list[GroupRecord]) -> list[bytes]:
    members = [gzip.compress(b"".join(each.as_json() for each in step)) for step in steps]
    path.write_bytes(b"".join(members))
    return members


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.jsonl.gz"


@pytest.mark.parametrize(("count", "shown"), [(1, [1]), (3, [1, 2, 3]), (9, [1, 3, 6, 9])])
def test_shown_steps_spread_from_the_first_to_the_last(
    path: Path, monkeypatch: pytest.MonkeyPatch, count: int, shown: list[int]
) -> None:
    monkeypatch.setattr(sampled_answers, "MAX_SHOWN_STEPS", 4)
    groups = [[group(step), group(step, row=2)] for step in range(1, count + 1)]
    write(path, *groups)
    assert read_shown(path) == ({step: groups[step - 1] for step in shown}, False)


def test_step_that_is_too_large_has_its_first_groups(
    path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    groups = [group(1, row=row) for row in range(5)]
    monkeypatch.setattr(sampled_answers, "MAX_SHOWN_BYTES", len(groups[0].as_json()) * 3 - 1)
    write(path, groups, [group(2, "x" * 5000), group(2)])
    assert read_shown(path) == ({1: groups[:2], 2: []}, False)


def test_large_file_is_searched_up_to_a_limit(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Bytes that unpack to a hundred times as many count as what they unpack to."""
    write(path, [group(1)], [group(2, "x" * 100_000)], [group(3)])
    monkeypatch.setattr(sampled_answers, "MAX_SEARCHED_BYTES", 50_000)
    assert read_shown(path) == ({1: [group(1)]}, True)


@pytest.mark.parametrize("piece", [5, 64, 1000])
def test_pieces_of_any_size_give_the_same_samples(
    path: Path, monkeypatch: pytest.MonkeyPatch, piece: int
) -> None:
    groups = [[group(1, "x" * 3000), group(1)], [group(2)]]
    write(path, *groups)
    monkeypatch.setattr(sampled_answers, "_PIECE", piece)
    assert list(read_groups(path)) == [each for step in groups for each in step]
    assert read_shown(path)[0] == {1: groups[0], 2: groups[1]}
    content = path.read_bytes()
    with path.open("rb") as file:
        members = list(read_members(file))
    assert [each.digest.digest() for each in members] == [
        sha256(content[: each.end]).digest() for each in members
    ]


def test_incomplete_end_is_left_out(path: Path) -> None:
    members = write(path, [group(1)], [group(2)])
    path.write_bytes(members[0] + members[1][:-1])
    assert read_shown(path) == ({1: [group(1)]}, False)
    path.write_bytes(b"")
    assert read_shown(path) == ({}, False)


@pytest.mark.parametrize(
    "content",
    [b"not gzip", gzip.compress(b"{}\n"), gzip.compress(b'{"step": 1, "row": 3}\n')],
    ids=["text", "no step", "no group"],
)
def test_damaged_record_is_a_value_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(ValueError, match=r"^(is damaged: |its |it has )"):
        read_shown(path)


@pytest.mark.parametrize("steps", [(1, 1), (2, 1), (1, 3, 2)])
def test_steps_that_do_not_increase_are_damage(path: Path, steps: tuple[int, ...]) -> None:
    write(path, *([group(step)] for step in steps))
    for read in (read_shown, lambda path: list(read_groups(path))):
        with pytest.raises(ValueError, match=f"step {steps[-1]} comes after step {steps[-2]}$"):
            read(path)
