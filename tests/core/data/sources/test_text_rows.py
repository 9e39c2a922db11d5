"""Text in the encodings of spreadsheets, records of tables, plain text and ChatGPT's archive."""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import zipfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.problems import BadRowError, SkippedRows, where
from mlxtune.core.data.sources import rows
from mlxtune.core.data.sources.datafiles import find_data_files
from mlxtune.core.data.sources.recognition import read_rows
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.core.data.sources.text_rows import encoding_of
from mlxtune.errors import DataError

TEXTS = ["Grüße", "plain", "5 € “quoted” – naïve"]


def file(folder: Path, content: bytes | str, name: str) -> Path:
    path = folder / name
    path.parent.mkdir(exist_ok=True, parents=True)
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return path


def read(path: Path, **options: Any) -> list[tuple[int, Any]]:
    every = read_objects(path, **options)
    return [(number, str(row) if isinstance(row, BadRowError) else row) for number, row in every]


# Encodings


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    ("encoding", "found"),
    [
        *(("utf-8", "utf-8"), ("utf-8-sig", "utf-8"), ("utf-16", "utf-16"), ("cp1252", "cp1252")),
        ("utf-16-be", "utf-16"),
    ],
)
def test_text_that_spreadsheets_write_is_read_whole(
    tmp_path: Path, encoding: str, found: str, pack: Any
) -> None:
    written = io.StringIO()
    csv.writer(written).writerows([["text"], *([text] for text in TEXTS)])
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    path = file(tmp_path, pack(mark + written.getvalue().encode(encoding)), "a.csv")

    assert encoding_of(path) == found
    assert [row["text"] for _, row in read(path)] == TEXTS


@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "mac_roman"])
def test_table_whose_lines_end_in_cr_is_read(tmp_path: Path, encoding: str) -> None:
    """Excel's CSV for the Macintosh, which has LF within cells."""
    letter = "é" if encoding == "mac_roman" else "č"
    content = f'text,note\r"plain",1\r"5 “quoted”\n{letter}",2\rlast,"3\r'
    path = file(tmp_path, content.encode(encoding), "a.csv")
    assert encoding_of(path) == encoding.removesuffix("-sig")
    *rows, damaged = read(path)
    assert [row["text"] for _, row in rows] == ["plain", f"5 “quoted”\n{letter}"]
    assert (damaged[0], "not valid CSV" in damaged[1]) == (5, True)
    assert where(path, 5) == f"{path}:5"


@pytest.mark.parametrize("encoding", ["utf-8", "utf-16"])
@pytest.mark.parametrize("head", ['"a\rb",č\n', "a,č\r\r\n", "a,č\r\n", "a,čb\n"])
def test_cr_elsewhere_in_a_table_ends_no_line(tmp_path: Path, head: str, encoding: str) -> None:
    path = file(tmp_path, f'{head}1,"x\ry"\n'.encode(encoding), "a.csv")
    ((_, row),) = read(path)
    assert "x\ry" in row.values()


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_json_in_utf_16_is_read_as_in_utf_8(tmp_path: Path, encoding: str, pack: Any) -> None:
    texts = [*TEXTS, "two\u2028lines 😀" * 4000]
    lines = "".join(json.dumps({"text": text}, ensure_ascii=False) + "\r\n" for text in texts)
    found = [(number, {"text": text}) for number, text in enumerate(texts, start=1)]
    array = json.dumps([{"text": text} for text in texts], ensure_ascii=False)
    for name, content in (("a.jsonl", lines), ("a.json", array)):
        path = file(tmp_path, pack(f"\ufeff{content}".encode(encoding)), name)
        assert read(path) == found


def test_invalid_utf_8_line_is_skipped_and_others_are_kept(tmp_path: Path) -> None:
    content = b"text\n\xff\n" + "é\n".encode()
    assert read(file(tmp_path, content, "a.csv")) == [
        (2, "not UTF-8 (save it as CSV UTF-8)"),
        (3, {"text": "é"}),
    ]
    # Bytes that cp1252 leaves undefined.
    assert read(file(tmp_path, b"text\n\x81\n", "b.csv")) == [
        (2, "not UTF-8 (save it as CSV UTF-8)")
    ]


# Records


@given(st.lists(st.lists(st.text('a\n",;', max_size=4), min_size=2, max_size=2), max_size=6))
@settings(deadline=None)
def test_record_is_counted_as_python_counts_it(
    tmp_path_factory: pytest.TempPathFactory, cells: list[list[str]]
) -> None:
    path = tmp_path_factory.mktemp("records") / "a.csv"
    with path.open("w", newline="") as target:
        csv.writer(target, quoting=csv.QUOTE_ALL).writerows([["prompt", "completion"], *cells])

    numbers = [number for number, _ in read(path)]
    kept = [i for i, row in enumerate(cells, start=1) if any(row)]
    for number, record in zip(numbers, kept, strict=True):
        several = "" if number == record + 1 else f" (record {record})"
        assert where(path, number) == f"{path}:{number}{several}"


# Advice


@pytest.mark.parametrize(
    ("header", "advice"),
    [
        ("Where is my order?,It ships today.", "write a line of column names above it"),
        ("1,Where is my order", "write a line of column names above it"),
        ("Antwort lang,Frage", "use --field prompt='Antwort lang' --field completion=Frage"),
        ("Answer,Question", "use --field prompt=Question --field completion=Answer"),
        ("id,ANSWER,note,Question", "use --field prompt=Question --field completion=ANSWER"),
        (f"{'q' * 150},a", f"use --field prompt={'q' * 150} --field completion=a"),
    ],
)
def test_columns_with_other_names_get_advice(tmp_path: Path, header: str, advice: str) -> None:
    cells = ",".join(["some words"] * (header.count(",") + 1))
    skipped = SkippedRows(file(tmp_path, f"{header}\n{cells}\n", "a.csv"))

    assert list(read_rows(skipped.path, skipped)) == []
    assert advice in skipped.first()


# Plain text

MARKDOWN = """\
Before.

# One
text

```sh
# a comment
```
## Two

more
"""


@pytest.mark.parametrize(
    ("split_at", "found"),
    [
        (None, [(1, MARKDOWN.rstrip())]),
        (
            "heading",
            [
                (1, "Before."),
                (3, "# One\ntext\n\n```sh\n# a comment\n```"),
                (9, "## Two\n\nmore"),
            ],
        ),
        (
            "paragraph",
            [
                (1, "Before."),
                (3, "# One\ntext"),
                (6, "```sh\n# a comment\n```\n## Two"),
                (11, "more"),
            ],
        ),
    ],
)
def test_plain_text_is_a_row_or_several(tmp_path: Path, split_at: Any, found: Any) -> None:
    for name in ("a.md", "a.txt", "a.markdown"):
        path = file(tmp_path, "\ufeff" + MARKDOWN.replace("\n", "\r\n"), name)
        pieces = read(path, texts=True, split_at=split_at)
        assert [(number, row["text"]) for number, row in pieces] == found
        assert len("\n".join(text for _, text in found).split()) == len(MARKDOWN.split())


def test_markdown_that_starts_like_json_is_text_and_json_lines_stay_rows(tmp_path: Path) -> None:
    for content in ("[A link](there) is text.\n", "[] \n"):
        assert read(file(tmp_path, content, "a.md"), texts=True) in (
            [(1, {"text": content.rstrip()})],
            [],
        )
    assert read(file(tmp_path, '# rows\n{"text": "a"}\n', "a.txt"), texts=True) == [
        (2, {"text": "a"})
    ]


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("# A heading\n\nText.\n", "is plain text: .*use --format text"),
        ("[Text](of a link)\n", "is plain text"),
        ("[12/05/2024, 10:15:01] Ida: Hello\n", "is a chat of WhatsApp"),
        ("5/12/24, 9:07 PM - Ida: Hello\n", "is a chat of WhatsApp"),
        ("\u200e[12.05.24, 10:15:01] Ida: Hello\n", "is a chat of WhatsApp"),
    ],
)
def test_plain_text_without_its_format_is_named(tmp_path: Path, content: str, said: str) -> None:
    with pytest.raises(DataError, match=said):
        read(file(tmp_path, content, "a.txt"))


def test_folder_of_text_files_needs_the_format(tmp_path: Path) -> None:
    for name in ("b.md", "a.TXT", "deep/c.md", ".git/d.md", "image.png"):
        file(tmp_path, "text", name)

    with pytest.raises(DataError, match=r"for its \.txt and \.md files, use --format text$"):
        find_data_files([tmp_path])
    found = find_data_files([tmp_path], texts=True)
    names = [str(path.relative_to(tmp_path)) for path in found.train]
    assert names == ["a.TXT", "b.md", "deep/c.md"]


def test_missing_file_is_answered_with_the_similar_one_beside_it(tmp_path: Path) -> None:
    file(tmp_path, "text\n", "tickets.csv")
    with pytest.raises(DataError, match=r"ticket\.csv: no such file \(did you mean .*/tickets\."):
        find_data_files([tmp_path / "ticket.csv"])
    with pytest.raises(DataError, match=r"other\.jsonl: no such file: check --data"):
        find_data_files([tmp_path / "other.jsonl"])


# ChatGPT's export


def archive(folder: Path, files: dict[str, bytes], how: int = zipfile.ZIP_DEFLATED) -> Path:
    path = folder / "export.zip"
    with zipfile.ZipFile(path, "w", how) as target:
        for name, content in files.items():
            target.writestr(name, content)
    return path


def test_archive_and_folder_of_chatgpt_are_read(tmp_path: Path) -> None:
    first, second = [{"mapping": {}}, {"mapping": {"a": 1}}], [{"mapping": {"b": 2}}, 7]
    files = {
        "export/conversations-001.json": json.dumps(second).encode(),
        "export/conversations-000.json": json.dumps(first).encode(),
        "export/chat.html": b"<html>",
        "export/shared_conversations.json": b"[]",
    }
    path = archive(tmp_path, files)
    expected = [
        (1, first[0]),
        (2, first[1]),
        (3, second[0]),
        (4, "not a JSON object (a number)"),
    ]
    assert read(path) == expected
    assert where(path, 3) == f"{path}[3]"
    assert read(archive(tmp_path, files, zipfile.ZIP_STORED)) == expected

    folder = tmp_path / "unpacked"
    for name, content in files.items():
        file(folder, content, Path(name).name)
    found = find_data_files([folder]).train
    assert [each.name for each in found] == ["conversations-000.json", "conversations-001.json"]


def test_foreign_or_oversized_archive_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(DataError, match="is a spreadsheet: save it as CSV"):
        read(archive(tmp_path, {"xl/workbook.xml": b""}))
    with pytest.raises(DataError, match="has an unusual compression"):
        read(archive(tmp_path, {"conversations.json": b"[]"}, zipfile.ZIP_LZMA))

    path = archive(tmp_path, {"conversations.json": b'[{"a": 1}]'})
    whole = path.read_bytes()
    file(tmp_path, whole[: len(whole) // 2] + whole[len(whole) // 2 + 4 :], "export.zip")
    with pytest.raises(DataError, match=r"is a damaged zip file|is an archive"):
        read(path)

    monkeypatch.setattr(rows, "_BASE_BYTES", 0)
    bomb = archive(tmp_path, {"conversations.json": b"[" + b" " * 2**20 + b"]"})
    with pytest.raises(DataError, match="unpacks from"):
        read(bomb)
    monkeypatch.setattr(rows, "_MAX_ZIP_LIST", 10)
    with pytest.raises(DataError, match="is an archive: unpack it"):
        read(bomb)


@pytest.mark.parametrize("large", [False, True])
def test_list_of_an_archive_has_the_size_that_zipfile_reads(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, large: bool
) -> None:
    if large:
        monkeypatch.setattr(zipfile, "ZIP_FILECOUNT_LIMIT", 1)
    path = archive(tmp_path, {f"{i}.json": b"[]" for i in range(5)})
    content = path.read_bytes()
    assert (b"PK\x06\x06" in content) == large
    size = rows._zip_list_size(content[-(2**16) - rows._ZIP_END_BYTES :])
    listed = content.index(b"PK\x01\x02")
    assert content[listed + int(size) :].startswith(b"PK\x06\x06" if large else b"PK\x05\x06")
    assert rows._zip_list_size(b"no archive") == math.inf


# Git LFS

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"0" * 64 + b"\nsize 9\n"


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.csv", "a.parquet", "a.txt"])
def test_pointer_of_git_lfs_is_named(tmp_path: Path, name: str) -> None:
    with pytest.raises(DataError, match=r"is a Git LFS pointer: .*git lfs pull"):
        read(file(tmp_path, POINTER, name), texts=True)
