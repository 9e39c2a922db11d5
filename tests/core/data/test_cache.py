"""Encoded files on disk: equal to a new encoding, or encoded again."""

from __future__ import annotations

import errno
import multiprocessing
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtune.core.data import cache as cache_module
from mlxtune.core.data.cache import cache_key, encode_file
from mlxtune.core.data.encode import EncodedRows
from mlxtune.core.data.encoded_file import EncodedFile
from mlxtune.core.data.problems import BadRowError, RowTally, SkippedRows
from mlxtune.errors import DataError, OutputError
from tests.core.data.encoding import example

DATA = Path("data/chat.jsonl")
COLUMNS = {"tokens", "mask", "ends", "rows", "identities"}
FILES = {*COLUMNS, "roles", "account.json", cache_module.CHECKSUMS}


class Encoding:
    """Encodes three of 14 rows, skips the others, and counts notes; `times` counts the calls."""

    def __init__(self, first: int = 7, tokens: int = 3) -> None:
        self.first = first
        self.tokens = tokens
        self.times = 0

    def __call__(self, skipped: SkippedRows, told: RowTally) -> Iterator[EncodedRows]:
        self.times += 1
        skipped.add(2, BadRowError("not valid JSON", "ünd \ud800"))
        told.count(1, "odd", "message 3")
        told.count(1, "even")
        skipped.unanswered |= {1, 4, 700}
        ids, span = [self.first] * self.tokens, (1, self.tokens)
        yield [[example(1, ids, span), example(1, [1, 2], (0, 1))]]
        yield [[example(3, [9], (0, 1))], [example(4, ids, span)]]
        for row in range(5, 15):
            told.count(row, "odd")
            skipped.add(row, BadRowError("an empty row"))


def content(file: EncodedFile) -> object:
    arrays = {
        name: column.tolist() for name, column in vars(file.arrays).items() if name in COLUMNS
    }
    assert len(arrays) == 5
    return (
        *(arrays, file.skipped.path, file.skipped.counts, file.skipped.places),
        *(file.notes.counts, file.notes.places, file.skipped.total),
        file.skipped.unanswered,
    )


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


EXPECTED = content(encode_file(DATA, Encoding(), cache=None, key=""))


def encode(cache: Path | None, encoding: Encoding, key: str = "key") -> EncodedFile:
    return encode_file(DATA, encoding, cache=cache, key=key)


def test_file_is_encoded_once_and_then_read_back_whole(tmp_path: Path) -> None:
    encoding, cache = Encoding(), tmp_path / "far" / "away"

    first, second = encode(cache, encoding), encode(cache, encoding)

    assert encoding.times == 1
    assert content(first) == content(second) == EXPECTED
    kinds = {"tokens": "i4", "mask": "u1", "ends": "i8", "rows": "i8", "roles": "u1"}
    kinds["identities"] = "u8"
    assert {name: getattr(second.arrays, name).dtype for name in kinds} == kinds
    assert {file.name for file in (cache / "key").iterdir()} == FILES
    assert names_in(cache) == ["key"]
    # Later counts stay out of the entry.
    second.truncate(1)
    assert content(encode(cache, encoding)) == EXPECTED


def test_entry_is_read_by_key_under_the_requested_name(tmp_path: Path) -> None:
    encoding = Encoding()
    encode(tmp_path, encoding, "a")
    encode(tmp_path, encoding, "b")
    assert encoding.times == 2

    moved = encode_file(Path("elsewhere.jsonl"), encoding, cache=tmp_path, key="a")
    assert encoding.times == 2
    assert moved.skipped.path == Path("elsewhere.jsonl")
    assert moved.skipped.first().startswith("elsewhere.jsonl:2: ")


def test_entry_with_any_byte_changed_is_encoded_again(tmp_path: Path) -> None:
    encode(tmp_path, Encoding())
    whole = {file.name: file.read_bytes() for file in (tmp_path / "key").iterdir()}
    for name, before in whole.items():
        for at in range(0, len(before), 3 if name.endswith(".json") else 11):
            for flip in (1, 4, 128):
                damaged = bytearray(before)
                damaged[at] ^= flip
                (tmp_path / "key" / name).write_bytes(damaged)
                found = cache_module._read(tmp_path / "key", DATA)
                assert found is None or content(found) == EXPECTED, (name, at)
                assert found is None or name == cache_module.CHECKSUMS
        (tmp_path / "key" / name).write_bytes(before)
    assert cache_module._read(tmp_path / "key", DATA) is not None


@pytest.mark.parametrize("name", sorted(FILES))
@pytest.mark.parametrize("damage", ["cut", "empty", "missing", "longer", "folder"])
def test_damaged_entry_is_encoded_again_and_replaced(
    tmp_path: Path, name: str, damage: str
) -> None:
    encoding = Encoding()
    encode(tmp_path, encoding)
    path = tmp_path / "key" / name
    before = path.read_bytes()
    path.unlink()
    if damage == "folder":
        path.mkdir()
    elif damage != "missing":
        damages = {"cut": before[: len(before) // 2], "empty": b"", "longer": before + before}
        path.write_bytes(damages[damage])

    assert content(encode(tmp_path, encoding)) == EXPECTED
    assert encoding.times == 2
    assert content(encode(tmp_path, encoding)) == EXPECTED
    assert encoding.times == 2


@pytest.mark.parametrize("written", ["", "[]", "{}", "null", "7", "[" * 100_000, '"\\ud800"'])
@pytest.mark.parametrize("name", ["account.json", cache_module.CHECKSUMS])
def test_foreign_cache_file_is_encoded_again(tmp_path: Path, name: str, written: str) -> None:
    encoding = Encoding()
    encode(tmp_path, encoding)
    (tmp_path / "key" / name).write_text(written)

    assert content(encode(tmp_path, encoding)) == EXPECTED
    assert encoding.times == 2


# Folders that cannot keep entries


def test_without_a_cache_nothing_is_left_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    encoding = Encoding()

    files = [encode(None, encoding) for _ in range(2)]

    assert encoding.times == 2
    assert [content(file) for file in files] == [EXPECTED] * 2
    assert names_in(tmp_path) == []


@pytest.mark.parametrize("where", ["file", "below_a_file", "dangling", "too_long"])
def test_encoding_works_if_the_cache_is_not_a_folder(tmp_path: Path, where: str) -> None:
    (tmp_path / "file").write_text("kept")
    (tmp_path / "dangling").symlink_to(tmp_path / "file" / "none")
    cache = {"below_a_file": tmp_path / "file" / "a" / "b", "too_long": tmp_path / ("x" * 300)}

    file = encode(cache.get(where, tmp_path / where), Encoding())

    assert content(file) == EXPECTED
    assert (tmp_path / "file").read_text() == "kept"


def test_cache_that_can_only_be_read_is_read_and_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = Encoding()
    encode(tmp_path, encoding)

    def denied(*_: object, **__: object) -> None:
        raise PermissionError(errno.EROFS, os.strerror(errno.EROFS))

    monkeypatch.setattr(os, "access", lambda *_: False)
    monkeypatch.setattr(os, "utime", denied)
    assert content(encode(tmp_path, encoding)) == EXPECTED
    assert encoding.times == 1
    assert content(encode(tmp_path, encoding, "other")) == EXPECTED
    assert encoding.times == 2
    assert names_in(tmp_path) == ["key"]


def test_full_disk_is_an_error_with_a_remedy_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(cache_module, "write_arrays", full)
    with pytest.raises(OutputError) as raised:
        encode(tmp_path, Encoding())
    assert str(raised.value).startswith(f"{tmp_path} cannot be written: No space")
    assert "--cache-dir" in str(raised.value)
    assert names_in(tmp_path) == []


def test_data_that_fails_midway_leaves_nothing(tmp_path: Path) -> None:
    def fails(skipped: SkippedRows, told: RowTally) -> Iterator[EncodedRows]:
        yield [[example(1, [1, 2], (1, 2))]]
        raise DataError("chat.jsonl:2: is in another format")

    with pytest.raises(DataError, match="another format"):
        encode_file(DATA, fails, cache=tmp_path, key="key")
    assert names_in(tmp_path) == []


def test_file_without_any_example_is_kept_too(tmp_path: Path) -> None:
    def nothing(skipped: SkippedRows, told: RowTally) -> Iterator[EncodedRows]:
        skipped.add(1, BadRowError("empty answer"))
        yield []

    for _ in range(2):
        file = encode_file(DATA, nothing, cache=tmp_path, key="key")
        assert file.arrays.num_rows == len(file.arrays.tokens) == 0
        assert file.skipped.total == 1
        assert file.truncate(9).ledger().adds_up()


# Other processes


def test_entry_stays_readable_when_it_is_removed_or_replaced(tmp_path: Path) -> None:
    first = encode(tmp_path, Encoding())
    again = encode(tmp_path, Encoding())

    shutil.rmtree(tmp_path / "key")
    encode(tmp_path, Encoding(first=8))

    assert content(first) == content(again) == EXPECTED


def _write_often(cache: Path, key: str) -> None:
    for _ in range(20):
        assert content(encode(cache, Encoding(), key)) == EXPECTED
        (cache / key / "tokens").unlink(missing_ok=True)


@pytest.mark.slow
def test_concurrent_writers_of_an_entry_leave_it_complete(tmp_path: Path) -> None:
    context = multiprocessing.get_context("spawn")
    writers = [context.Process(target=_write_often, args=(tmp_path, "key")) for _ in range(2)]
    for writer in writers:
        writer.start()
    for writer in writers:
        writer.join()

    assert [writer.exitcode for writer in writers] == [0, 0]
    assert content(encode(tmp_path, Encoding())) == EXPECTED
    assert names_in(tmp_path) == ["key"]


def test_concurrently_written_entry_is_accepted(tmp_path: Path) -> None:
    class Overtaken(Encoding):
        def __call__(self, skipped: SkippedRows, told: RowTally) -> Iterator[EncodedRows]:
            yield from super().__call__(skipped, told)
            encode(tmp_path, Encoding())
            self.stored = (tmp_path / "key").stat().st_ino

    overtaken = Overtaken()
    assert content(encode(tmp_path, overtaken)) == EXPECTED
    assert content(encode(tmp_path, Encoding())) == EXPECTED
    assert names_in(tmp_path) == ["key"]
    # The entry of the first stays: a third process may be reading it.
    assert (tmp_path / "key").stat().st_ino == overtaken.stored


def test_least_recently_used_entries_go_first_and_never_the_new_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for age, key in enumerate("abc"):
        encode(tmp_path, Encoding(tokens=1000), key)
        os.utime(tmp_path / key / cache_module.CHECKSUMS, (age, age))
    size = sum(file.stat().st_size for file in (tmp_path / "a").iterdir())
    encode(tmp_path, Encoding(), "a")  # the entry is used again

    monkeypatch.setattr(cache_module, "MAX_BYTES", 3 * size)
    encode(tmp_path, Encoding(tokens=1000), "d")
    assert names_in(tmp_path) == ["a", "c", "d"]

    monkeypatch.setattr(cache_module, "MAX_BYTES", 1)
    encode(tmp_path, Encoding(), "e")
    assert names_in(tmp_path) == ["e"]


def test_foreign_files_in_the_cache_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cache_module, "MAX_BYTES", 1)
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "cat.png").write_bytes(b"cat")
    (tmp_path / "notes.txt").write_text("mine")

    encode(tmp_path, Encoding())

    assert names_in(tmp_path) == ["key", "notes.txt", "photos"]


# Keys


def test_key_depends_on_every_part_and_not_on_their_order() -> None:
    parts = {"data": "a", "options": {"turns": "all", "merge_system": False}, "field": ["b"]}
    others: list[object] = [
        parts | {"data": "b"},
        parts | {"options": {"turns": "all", "merge_system": True}},
        parts | {"field": []},
        parts | {"field": ["ab"]},
        parts | {"more": None},
    ]

    assert cache_key(dict(reversed(parts.items()))) == cache_key(parts)
    assert len({cache_key(each) for each in [parts, *others]}) == 1 + len(others)
    assert cache_key(parts).isalnum()


def test_file_of_the_user_in_an_entry_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    encode(tmp_path, Encoding())
    (tmp_path / "key" / "thesis.tex").write_text("mine")
    (tmp_path / "key" / "tokens").write_bytes(b"damaged")
    monkeypatch.setattr(cache_module, "MAX_BYTES", 1)
    assert content(encode(tmp_path, Encoding())) == EXPECTED
    encode(tmp_path, Encoding(), "other")
    assert (tmp_path / "key" / "thesis.tex").read_text() == "mine"
