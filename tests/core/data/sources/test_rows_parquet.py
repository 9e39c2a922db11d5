"""Parquet files to rows: plain values, bad rows, and damaged files."""

from __future__ import annotations

import datetime
import decimal
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.sources.rows import read_objects
from mlxtune.errors import DataError
from tests.core.data.datafiles import read
from tests.slow import slow


def write_parquet(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
    from pyarrow import parquet

    parquet.write_table(pa.table(columns), path, **options)
    return path


def test_rows_of_parquet_are_numbered_and_plain(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
    moment = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.UTC)
    columns = {
        "text": pa.array(["a", None, "c"], pa.large_string()),
        "category": pa.array(["x", "x", "y"]).dictionary_encode(),
        "bytes": pa.array([b"caf\xc3\xa9", b"\xff", None]),
        "half": pa.array([0.5, float("inf"), None], pa.float32()),
        "moment": pa.array([moment, None, None], pa.timestamp("us", "UTC")),
        "day": pa.array([moment.date(), None, None]),
        "span": pa.array([datetime.timedelta(1), None, None]),
        "price": pa.array([decimal.Decimal("1.50"), None, None]),
        "map": pa.array([[("k", [1])], None, None], pa.map_(pa.string(), pa.list_(pa.int64()))),
        "structs": pa.array([[{"a": 1, "b": None}, {"a": None, "b": {"c": None}}], None, [None]]),
    }
    path = write_parquet(tmp_path / "named.jsonl", columns)

    assert read(path) == [
        (
            1,
            {
                "text": "a",
                "category": "x",
                "bytes": "café",
                "half": 0.5,
                "price": "1.50",
                "map": {"k": [1]},
                "structs": [{"a": 1}, {"b": {}}],
            },
        ),
        (2, {"category": "x", "bytes": "\udcff", "half": float("inf")}),
        (3, {"text": "c", "category": "y", "structs": [None]}),
    ]


def test_row_whose_text_is_not_utf_8_is_bad_and_its_neighbors_are_not(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
    texts = pa.array([b"a", b"caf\xe9", b"c"]).view(pa.string())

    rows = read(write_parquet(tmp_path / "data.parquet", {"text": texts}))

    assert rows[0::2] == [(1, {"text": "a"}), (3, {"text": "c"})]
    assert rows[1][0] == 2
    assert rows[1][1].startswith("not UTF-8 (")


def test_times_that_python_cannot_hold_spoil_no_row(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
    times = pa.array([1, 2], pa.timestamp("ns"))
    spans = pa.array([1, 2**60], pa.duration("s"))

    path = write_parquet(tmp_path / "a.parquet", {"t": times, "text": ["a", "b"], "s": spans})
    assert read(path) == [(1, {"text": "a"}), (2, {"text": "b"})]
    alone = read(write_parquet(tmp_path / "b.parquet", {"t": times}))
    assert alone == [(1, {}), (2, {})]


def test_empty_parquet_file_has_no_rows(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")

    assert read(write_parquet(tmp_path / "a.parquet", {"text": pa.array([], pa.string())})) == []
    assert read(write_parquet(tmp_path / "b.parquet", {})) == []


def test_rows_of_all_row_groups_and_batches_are_numbered_on(tmp_path: Path) -> None:
    texts = [str(i) for i in range(1000)]
    path = write_parquet(tmp_path / "data.parquet", {"text": texts}, row_group_size=300)

    assert read(path) == [(i, {"text": text}) for i, text in enumerate(texts, start=1)]


def test_parquet_is_not_held_as_a_whole(tmp_path: Path) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
    texts = [os.urandom(512).hex() for _ in range(20_000)]
    path = write_parquet(tmp_path / "data.parquet", {"text": texts}, row_group_size=1000)
    before = pa.total_allocated_bytes()

    held = max(pa.total_allocated_bytes() - before for _ in read_objects(path))

    assert held < path.stat().st_size / 4


@pytest.mark.parametrize(
    "damage",
    [
        slow(lambda content: content[:4], id="magic"),
        slow(lambda content: content[: len(content) // 2], id="half"),
        pytest.param(lambda content: content[:4] + b"\xff" * 60 + content[64:], id="pages"),
        pytest.param(lambda content: content[:-40] + b"\xff" * 32 + content[-8:], id="footer"),
    ],
)
def test_damaged_parquet_is_an_error_that_names_the_file(
    tmp_path: Path, damage: Callable[[bytes], bytes]
) -> None:
    path = write_parquet(tmp_path / "data.parquet", {"text": ["a" * 50, "b" * 50]})
    path.write_bytes(damage(path.read_bytes()))

    with pytest.raises(DataError, match=r"is a damaged parquet file \(.+\): .+ again$") as raised:
        read(path)
    assert str(raised.value).startswith(str(path))
    assert str(raised.value).isprintable()


def test_parquet_without_pyarrow_is_an_error_that_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "data.parquet"
    path.write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)

    with pytest.raises(DataError) as raised:
        read(path)
    assert str(raised.value) == f"{path} needs pyarrow: pip install 'mlxtune-lora[parquet]'"
