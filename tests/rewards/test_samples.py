"""The record of samples: exact, the same bytes for the same samples, and whole after a kill."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from mlxtune.core.run import sampled_answers
from mlxtune.core.run.checkpoint import Checkpoint
from mlxtune.core.run.sampled_answers import GroupRecord, SampleRecord, read_groups
from mlxtune.errors import OutputError
from mlxtune.rewards.samples import SampleRecords, copy_samples

# A checkpoint without facts on samples.
RESUMED = Checkpoint(Path(), {"step": 0})


def group(step: int, adapter: str = "a", **changes: object) -> GroupRecord:
    sample = SampleRecord(
        tokens=(3, 1),
        logps=(-0.1, float(np.float32(-2.75))),
        text="é\u2028",
        finished=True,
        rewards={"json": 1.0, "check.reward": None},
        reward=None,
        advantage=0.0,
        problems=("rows.jsonl:1: reward check.reward: no",),
    )
    other = replace(sample, problems=(), reward=0.5, old_logps=(-0.1, -2.0))
    given = GroupRecord(step, "rows.jsonl:1", 0, 42, adapter, "Hi", (7, 8, 9), (sample, other))
    return replace(given, **changes)  # type: ignore[arg-type]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "samples.jsonl.gz"


def test_samples_are_read_as_they_were_added(path: Path) -> None:
    records = SampleRecords(path, RESUMED)
    groups = {step: [group(step), group(step, use=1)] for step in (1, 3)}
    for each in groups.values():
        records.add(each)
    for opened in (records, SampleRecords(path, RESUMED)):
        assert [opened.read(step, "a") for step in (1, 3)] == [groups[1], groups[3]]
        assert opened.read(2, "a") is None
        assert opened.read(3, "of another adapter") is None
    assert list(read_groups(path)) == [*groups[1], *groups[3]]


def test_file_is_json_lines_for_other_tools(path: Path) -> None:
    SampleRecords(path, RESUMED).add([group(1), group(1, use=1)])
    lines = gzip.decompress(path.read_bytes()).splitlines()
    assert [json.loads(line)["use"] for line in lines] == [0, 1]
    assert json.loads(lines[0])["samples"][0]["text"] == "é\u2028"


def test_same_samples_have_the_same_bytes(tmp_path: Path) -> None:
    paths = [tmp_path / name for name in ("one", "two")]
    for each in paths:
        SampleRecords(each).add([group(1)])
    assert paths[0].read_bytes() == paths[1].read_bytes()


def test_new_run_does_not_read_earlier_samples(path: Path) -> None:
    SampleRecords(path, RESUMED).add([group(1)])
    new = SampleRecords(path)
    assert new.read(1, None) is None
    new.add([group(1, adapter="b")])
    assert [each.adapter for each in read_groups(path)] == ["b"]


def test_samples_up_to_a_step_are_copied(path: Path, tmp_path: Path) -> None:
    records = SampleRecords(path, RESUMED)
    for step in (1, 3, 5):
        records.add([group(step)])
    copy_samples(path, tmp_path / "copy", 3)
    assert [each.step for each in read_groups(tmp_path / "copy")] == [1, 3]
    assert path.read_bytes().startswith((tmp_path / "copy").read_bytes())


@pytest.mark.parametrize("piece", [2**20, 7])
def test_every_incomplete_end_is_replaced(
    path: Path, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sampled_answers, "_PIECE", piece)
    records = SampleRecords(path, RESUMED)
    records.add([group(1)])
    first = path.stat().st_size
    records.add([group(2)])
    whole = path.read_bytes()
    for length in range(first, len(whole), 5):
        path.write_bytes(whole[:length])
        opened = SampleRecords(path, RESUMED)
        assert opened.read(1, "a") == [group(1)]
        assert opened.read(2, "a") is None
        opened.add([group(2)])
        assert path.read_bytes() == whole


def test_rollout_of_another_adapter_replaces_the_later_ones(path: Path) -> None:
    records = SampleRecords(path, RESUMED)
    for step in (1, 2, 3):
        records.add([group(step)])
    records.add([group(2, adapter="b")])
    assert [each.step for each in read_groups(path)] == [1, 2]
    assert records.read(3, "a") is None
    assert records.read(2, "b") == [group(2, adapter="b")]


@pytest.mark.parametrize(
    "content",
    [b"not gzip", gzip.compress(b"{}\n"), gzip.compress(b'{"step": 1}\n'), gzip.compress(b"")],
    ids=["text", "no step", "no group", "nothing"],
)
def test_damaged_file_is_an_error(path: Path, content: bytes) -> None:
    path.write_bytes(content)
    with pytest.raises(OutputError, match=r"samples.jsonl.gz .*move it away to train on"):
        SampleRecords(path, RESUMED)
