"""Data files that unpack to gigabytes or would take hours to read."""

from __future__ import annotations

import gzip
import json
import os
import re
import resource
import zlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.sources.rows import read_objects
from tests.attacks.limits import MEMORY, SECONDS, limited
from tests.command import Cli, finish, start
from tests.core.data.datafiles import GOOD
from tests.slow import long_except

MB = 1_000_000
UNPACKS = r"unpacks from [\d.]+ k?M?B to more than [\d.]+ [MG]B, far more than conversations do"
ALL_BAD = r"rows cannot be used; the first: "
Make = Callable[[Path], Path]


def _zipped(pieces: Iterable[bytes], name: str = "data.jsonl.gz") -> Make:
    def make(folder: Path) -> Path:
        with gzip.open(folder / name, "wb") as file:
            file.writelines(pieces)
        return folder / name

    return make


def _plain(pieces: Iterable[bytes], name: str = "data.jsonl") -> Make:
    def make(folder: Path) -> Path:
        with (folder / name).open("wb") as file:
            file.writelines(pieces)
        return folder / name

    return make


def _parquet(columns: Callable[[Any], dict[str, Any]], **options: Any) -> Make:
    def make(folder: Path) -> Path:
        pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
        from pyarrow import parquet

        path = folder / "data.parquet"
        parquet.write_table(pa.table(columns(pa)), path, **{"compression": "zstd"} | options)
        return path

    return make


def _dictionary(pa: Any, size: int, count: int) -> Any:
    """Return `count` equal texts of `size` characters; parquet stores the text only once."""
    return pa.DictionaryArray.from_arrays(pa.array([0] * count, pa.int32()), ["a" * size])


def _messages(pa: Any) -> dict[str, Any]:
    roles = pa.array(["user", "assistant"] * 1000)
    turn = pa.StructArray.from_arrays([roles, _dictionary(pa, 16 * MB, 2000)], ["role", "content"])
    return {"messages": pa.ListArray.from_arrays(pa.array(range(0, 2001, 2), pa.int32()), turn)}


def _many_nulls(pa: Any) -> dict[str, Any]:
    nulls = pa.nulls(60 * MB, pa.int8())
    return {"a": pa.ListArray.from_arrays(pa.array([0, 60 * MB], pa.int32()), nulls)}


def _deep(pa: Any) -> dict[str, Any]:
    value: Any = "a"
    for _ in range(400):
        value = [value]
    return {"a": [value]}


def _sparse(folder: Path) -> Path:
    path = folder / "data.jsonl"
    path.write_bytes(GOOD + b"\n" + b" " * 8192)
    os.truncate(path, 10**11)
    if path.stat().st_blocks * 512 > 10**9:
        pytest.skip("this file system has no sparse files")
    return path


def _split_members(folder: Path) -> Path:
    """Write a gzip file with a good member and a second member that unpacks to 200 MB."""
    path = folder / "data.jsonl.gz"
    bomb = zlib.compressobj(9, wbits=31)
    packed = b"".join(bomb.compress(b"{}\n" * 333_333) for _ in range(200)) + bomb.flush()
    path.write_bytes(gzip.compress((GOOD + b"\n") * 20) + packed)
    return path


def _folder(folder: Path) -> Path:
    data = folder / "data"
    data.mkdir()
    (data / "train.jsonl").write_bytes((GOOD + b"\n") * 20)
    _zipped([b"{}\n" * MB] * 60, "valid.jsonl.gz")(data)
    return data


ISSUE: dict[str, tuple[Make, str]] = {
    "parquet of 16 MB x 2,000": (
        _parquet(lambda pa: {"text": _dictionary(pa, 16 * MB, 2000)}),
        UNPACKS,
    ),
    "gzip of 33 million {}": (_zipped([b"{}\n" * MB] * 33), UNPACKS),
    "gzip of 100 million blank lines": (_zipped([b"\n" * MB] * 100), UNPACKS),
}
TOO_MANY = "more than 4,000,000 values"
# Objects with one value each: a list of them takes 25 times the memory of their text.
VALUES = b'{"a":0},' * (MB // 8)
NEW: dict[str, tuple[Make, str]] = {
    # gzip
    "gzip of 33 million []": (_zipped([b"[]\n" * MB] * 33), UNPACKS),
    "gzip of numbers": (_zipped([b"1\n" * MB] * 60), UNPACKS),
    "gzip of comments": (_zipped([b"#\n" * MB] * 60), UNPACKS),
    "gzip of one line of spaces": (_zipped([b" " * MB] * 100), UNPACKS),
    "gzip of one text": (_zipped([b'{"text": "', *[b"a" * MB] * 500]), UNPACKS),
    "gzip of brackets": (_zipped([b"[" * MB] * 200), UNPACKS),
    "gzip of an array of {}": (_zipped([b"[", *[b"{}," * MB] * 60]), UNPACKS),
    "gzip of an array of one text": (_zipped([b'["', *[b"a" * MB] * 300]), UNPACKS),
    "gzip of an array of spaces": (_zipped([b"[", *[b" " * MB] * 300]), UNPACKS),
    "gzip of good rows": (_zipped([(GOOD + b"\n") * 50_000] * 400), UNPACKS),
    "gzip of few good rows": (_zipped([GOOD, *[b"\n" * MB] * 300]), UNPACKS),
    "gzip behind a good gzip": (_split_members, UNPACKS),
    "gzip for validation": (_folder, UNPACKS),
    "gzip of 15 MB of {}": (_zipped([b"{}\n" * MB] * 5), ALL_BAD),
    "gzip of 15 MB of an array": (_zipped([b"[", *[b"{}," * MB] * 5]), TOO_MANY),
    "gzip of 15 MB of blank lines": (_zipped([b"\n" * MB] * 15), "blank lines and comments"),
    "gzip of 15 MB of spaces": (_zipped([b" " * MB] * 15), "has no rows"),
    "gzip in gzip": (_zipped([gzip.compress(b"{}\n" * MB)] * 9000), "binary|not UTF-8|longer"),
    "gzip of 50,000 empty ones": (_plain([gzip.compress(b"")] * 50_000, "a.gz"), "is empty"),
    # parquet
    "parquet of messages": (_parquet(_messages), UNPACKS),
    "parquet of 2,000 MB of bytes": (
        _parquet(lambda pa: {"text": _dictionary(pa, 2 * MB, 1000).cast(pa.binary())}),
        UNPACKS,
    ),
    "parquet of a row of 60 million nulls": (_parquet(_many_nulls), f"{UNPACKS}|values|damaged"),
    "parquet of 20 million nulls": (
        _parquet(lambda pa: {"a": pa.nulls(20 * MB, pa.int8())}),
        ALL_BAD,
    ),
    "parquet of lists in lists": (_parquet(_deep), "nested too deeply|no known format|damaged"),
    "parquet of 300 MB of text": (
        _parquet(lambda pa: {"text": ["a" * 60 * MB] * 5}, use_dictionary=False),
        UNPACKS,
    ),
    "parquet of 300 MB of text in brotli": (
        _parquet(lambda pa: {"text": ["a" * 60 * MB] * 5}, compression="brotli"),
        UNPACKS,
    ),
    "parquet of 10,000 columns": (
        _parquet(lambda pa: {str(i): [0] for i in range(10_000)}),
        "no known format",
    ),
    # Plain files
    "5 million {}": (_plain([b"{}\n" * MB] * 5), ALL_BAD),
    "5 million rows of another format": (_plain([b'{"a":"b"}\n' * MB] * 5), ALL_BAD),
    "60 million blank lines": (_plain([b"\n" * MB] * 60), "blank lines and comments"),
    "60 million blank lines behind a row": (
        _plain([GOOD, *[b"\n" * MB] * 60]),
        "blank lines and comments",
    ),
    "20 million comments": (_plain([b"#\n" * MB] * 20), "blank lines and comments"),
    "array of 20 million {}": (_plain([b"[", *[b"{}," * MB] * 20]), TOO_MANY),
    "array of 40 million 1": (_plain([b"[", *[b"1," * MB] * 40]), TOO_MANY),
    "element of 60 MB of values": (_plain([b"[[", *[VALUES] * 60]), TOO_MANY),
    "element of 80 MB": (_plain([b'["', *[b"a" * MB] * 80, b'"]']), "can be used"),
    "line of 60 MB of values": (
        _plain([b'{"a":[', *[VALUES] * 60, b"0]}"]),
        "more than 4,000,000 values",
    ),
    "line of 60 MB of brackets": (_plain([b"{", *[b"[" * MB] * 60]), "more than 4,000,000 values"),
    "array of 120 MB that take four times as much": (
        _plain(['["🦙'.encode(), *[b"a" * MB] * 120, b'"]']),
        "can be used",
    ),
    "array of 300 MB": (_plain([b'["', *[b"a" * MB] * 300]), "a JSON array of more than"),
    "file of holes": (_sparse, "of them are on disk"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(ISSUE, "gzip of 33 million {}"))
def test_command_ends_within_its_limits(tmp_path: Path, model: Path, name: str) -> None:
    make, said = ISSUE[name]

    def limit() -> None:
        resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
        resource.setrlimit(resource.RLIMIT_CPU, (int(SECONDS), int(SECONDS)))

    path = make(tmp_path)
    before = sorted(tmp_path.rglob("*"))
    command = ["inspect", "--model-path", model, "--data", path, "--no-cache"]
    error = finish(start(*command, preexec_fn=limit)).error
    assert error.startswith(str(path))
    _assert_said(error, said)
    assert sorted(tmp_path.rglob("*")) == before


QUICK = [
    *("gzip for validation", "parquet of lists in lists", "array of 20 million {}"),
    "file of holes",
]


@pytest.mark.parametrize("name", long_except(NEW, *QUICK))
def test_file_that_expands_ends_in_a_line_that_names_it(
    tmp_path: Path, inspect: Cli, name: str
) -> None:
    make, said = NEW[name]
    path = make(tmp_path)
    with limited():
        error = inspect("--data", path, "--no-cache", "--val-split", 0).error
    assert error.startswith(str(path))
    _assert_said(error, said)


def _assert_said(error: str, said: str) -> None:
    assert re.search(said, error), error


def test_realistic_files_unpack_unchanged(tmp_path: Path) -> None:
    """The most repetitive real data: a system prompt of 4 kB before each short question."""
    system = os.urandom(2048).hex()
    rows = [{"system": system, "prompt": str(i), "completion": str(i * i)} for i in range(6_000)]
    lines = [json.dumps(row).encode() + b"\n" for row in rows]
    path = _zipped(lines)(tmp_path)
    assert 60 < sum(map(len, lines)) / path.stat().st_size < 200
    assert [row for _, row in read_objects(path)] == rows


def test_text_with_millions_of_commas_is_a_row(tmp_path: Path) -> None:
    path = _plain([b'{"text": "', b"," * 4_000_001, b'"}\n'])(tmp_path)
    assert [len(row["text"]) for _, row in read_objects(path)] == [4_000_001]
