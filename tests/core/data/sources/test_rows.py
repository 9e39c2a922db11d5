"""Files of every kind to rows: line numbers, bad rows, and invalid files."""

from __future__ import annotations

import gzip
import io
import json
import tempfile
import zipfile
import zlib
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.problems import BadRowError
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.errors import DataError
from tests.core.data.datafiles import GOOD, ROW, read

BOM = b"\xef\xbb\xbf"
NESTED = b"[" * 100_000 + b"]" * 100_000


def write(folder: Path, content: bytes, name: str = "data.jsonl") -> Path:
    path = folder / name
    path.write_bytes(content)
    return path


# JSON lines


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("bom", [b"", BOM], ids=["no_BOM", "BOM"])
@pytest.mark.parametrize("ending", [True, False], ids=["ended", "unended"])
def test_row_numbers_are_lines_without_blanks_and_comments(
    tmp_path: Path, pack: Callable[[bytes], bytes], newline: bytes, bom: bytes, ending: bool
) -> None:
    lines = [b"# made by hand", GOOD, b"", b"  \t", b"  # indented", GOOD, b"oops", GOOD]
    path = write(tmp_path, pack(bom + newline.join(lines) + newline * ending))

    bad = "not valid JSON (Expecting value at column 1)"
    assert read(path) == [(2, ROW), (6, ROW), (7, bad), (8, ROW)]


def test_byte_order_mark_before_the_first_row_is_dropped(tmp_path: Path) -> None:
    assert read(write(tmp_path, BOM + GOOD)) == [(1, ROW)]


BAD_LINES: list[tuple[str, bytes, str, str]] = [
    # name, line, the counted kind, the rest of the reason
    ("half_an_object", b'{"messages": [', "not valid JSON", "column 15"),
    ("two_objects", GOOD + GOOD, "not valid JSON", f"column {len(GOOD) + 1}"),
    ("latin_1", b'{"messages": "caf\xe9"}', "not UTF-8", "byte 18: save the file in UTF-8"),
    (
        "utf_8_surrogate",
        b'{"text": "\xed\xa0\x80"}',
        "not UTF-8",
        "byte 11: save the file in UTF-8",
    ),
    (
        "number_of_5000_digits",
        b"9" * 5000,
        "a number of more than 4,300 digits",
        "write it as text",
    ),
    ("nested_without_end", b"[" * 100_000, "JSON nested too deeply", ""),
    ("nested_to_an_end", b'{"a": %s}' % NESTED, "JSON nested too deeply", ""),
    ("list", b"[1]", "not a JSON object", "a list"),
    ("text", b'"messages"', "not a JSON object", "text"),
    ("null", b"null", "not a JSON object", "null"),
    ("nan", b"NaN", "not a JSON object", "a number"),
]


@pytest.mark.parametrize(
    ("line", "kind", "detail"),
    [case[1:] for case in BAD_LINES],
    ids=[case[0] for case in BAD_LINES],
)
def test_bad_line_is_a_row_with_its_reason(
    tmp_path: Path, line: bytes, kind: str, detail: str
) -> None:
    rows = list(read_objects(write(tmp_path, b"\n".join([GOOD, b"", line, GOOD]))))

    assert [row for row, _ in rows] == [1, 3, 4]
    problem = rows[1][1]
    assert isinstance(problem, BadRowError)
    assert problem.kind == kind
    assert detail in str(problem)


def test_line_of_20_megabytes_is_read_like_any_other(tmp_path: Path) -> None:
    long = {"text": "lorem 🦙 " * 2_000_000}
    content = json.dumps(long).encode() + b"\n" + GOOD
    assert len(content) > 20_000_000

    assert read(write(tmp_path, content)) == [(1, long), (2, ROW)]


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize(
    "content",
    [
        json.dumps({"messages": [ROW]}, indent=2),
        "\n\n" + json.dumps(ROW, indent=1) + "\n" + json.dumps(ROW, indent=1),
        '{\n"text": "a"}',
    ],
    ids=["pretty", "two", "brace"],
)
def test_object_over_several_lines_is_a_bad_row_that_says_what_is_expected(
    tmp_path: Path, content: str, pack: Callable[[bytes], bytes]
) -> None:
    rows = read(write(tmp_path, pack(content.encode())))

    assert rows[0][1] == (
        "a JSON object over several lines "
        "(write each on one line, or all as one JSON array, without an object around it)"
    )
    assert not any(isinstance(row, dict) for _, row in rows)


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (b'{"text": ', "Expecting value at column 9"),
        (GOOD + b" junk", f"Extra data at column {len(GOOD) + 2}"),
        (b'{"text": "a', "Unterminated string starting at column 10"),
        (b'{"a": [1, 2, ]}', "trailing comma before ']' at column 12"),
        (b'{"a": 1, }', "trailing comma before '}' at column 8"),
        (b"{'a': 1}", "single quotes instead of double quotes at column 2"),
        (b"""{"a": 'b'}""", "single quotes instead of double quotes at column 7"),
        (b'{"a": None}', "Python's None instead of null at column 7"),
        (GOOD + b",", f"comma after the end at column {len(GOOD) + 1}"),
    ],
)
def test_invalid_first_line_is_a_bad_row(tmp_path: Path, line: bytes, said: str) -> None:
    rows = read(write(tmp_path, line + b"\n" + GOOD))

    assert rows == [(1, f"not valid JSON ({said})"), (2, ROW)]


def test_syntax_error_of_an_array_has_its_line(tmp_path: Path) -> None:
    path = write(tmp_path, b'[\n  {"text": "a"},\n]\n')
    with pytest.raises(
        DataError, match=r"array \(trailing comma before '\]' at line 2, column 16\)"
    ):
        read(path)


# JSON arrays


@pytest.mark.parametrize("pack", [bytes, gzip.compress], ids=["plain", "gzip"])
@pytest.mark.parametrize("before", [b"", BOM, b"\r\n \t", BOM + b"\n"])
def test_rows_of_an_array_are_numbered_by_element(
    tmp_path: Path, pack: Callable[[bytes], bytes], before: bytes
) -> None:
    elements = [ROW, {"a": None}, 3, [ROW], None, ROW]
    path = write(tmp_path, pack(before + json.dumps(elements, indent=2).encode()))

    assert read(path) == [
        (1, ROW),
        (2, {"a": None}),
        (3, "not a JSON object (a number)"),
        (4, "not a JSON object (a list)"),
        (5, "not a JSON object (null)"),
        (6, ROW),
    ]


def test_empty_array_has_no_rows(tmp_path: Path) -> None:
    assert read(write(tmp_path, b"[]")) == []


OBJECTS = ': write each line as an object, such as {"messages": […]}'


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (
            b'[\n{"a": 1}\n{"a": 2}\n]',
            ": not a valid JSON array (Expecting ',' delimiter at line 3",
        ),
        (b'[{"a": 1},\r\n', ": not a valid JSON array (Expecting value at line 2, column 1)"),
        (b"[1]\n" + GOOD, ": not a valid JSON array (Extra data at line 2, column 1)" + OBJECTS),
        (b'[\n\n{"a": "\xe9"}]', ": not UTF-8 (byte 11: save"),
        (NESTED, ": JSON nested too deeply"),
        (b"[" + b"9" * 5000 + b"]", ": a number of more than 4,300 digits (write it as text): "),
        (b'[{"a": 1, "b": 2, "a": 1}]', ": a key twice in one object ('a': keep one): write one"),
    ],
    ids=["comma", "unended", "extra", "latin_1", "nested", "digits", "twice"],
)
def test_broken_array_is_an_error_that_names_its_line(
    tmp_path: Path, content: bytes, said: str
) -> None:
    path = write(tmp_path, content)

    with pytest.raises(DataError) as raised:
        read(path)

    assert str(raised.value).startswith(f"{path}{said}")
    assert str(raised.value).isprintable()


# gzip


@pytest.mark.parametrize(
    ("then", "said"),
    [
        (b"", "end-of-stream"),
        # The header of a deflate block (RFC 1951, 3.2.3) of the reserved type 11.
        (b"\x07", "invalid block type"),
    ],
)
def test_rows_before_damage_are_read_and_then_it_is_an_error(
    tmp_path: Path, then: bytes, said: str
) -> None:
    """Rows before the damage can be read only if the file is not read as a whole."""
    rows = [{"text": str(i)} for i in range(5000)]
    packer = zlib.compressobj(wbits=31)
    packed = packer.compress("\n".join(map(json.dumps, rows)).encode() + b"\n")
    packed += packer.flush(zlib.Z_FULL_FLUSH) + then
    found = read_objects(write(tmp_path, packed))

    assert [next(found) for _ in range(4000)] == list(enumerate(rows[:4000], start=1))
    with pytest.raises(DataError, match=rf"is a damaged gzip file \(.*{said}"):
        list(found)


@pytest.mark.parametrize(
    "damage",
    [
        lambda packed: packed[:5],
        lambda packed: packed[:-8],
        lambda packed: packed[:-8] + b"\0" * 8,
        lambda packed: packed[:20] + b"\xff" * 20 + packed[40:],
        lambda packed: packed + b"rubbish",
    ],
    ids=["header", "unended", "checksum", "middle", "behind"],
)
@pytest.mark.parametrize("content", [GOOD * 2 + b"\n" + GOOD, b"[" + GOOD + b"]"])
def test_damaged_gzip_is_an_error_that_names_the_file(
    tmp_path: Path, damage: Callable[[bytes], bytes], content: bytes
) -> None:
    path = write(tmp_path, damage(gzip.compress(content)), "data.jsonl.gz")

    with pytest.raises(DataError, match=r"is a damaged gzip file \(.+\): .+ again$") as raised:
        read(path)
    assert str(raised.value).startswith(str(path))


def test_file_of_prose_is_refused_and_json_lines_named_as_text_are_read(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"is plain text: write JSON lines, such as {\"text\": "):
        read(write(tmp_path, b"Once upon a time.", "story.txt"))
    assert read(write(tmp_path, BOM + GOOD, "rows.txt")) == [(1, ROW)]


# Any bytes

JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
LINES = st.one_of(
    st.just(GOOD),
    JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    JSON_VALUES.map(lambda value: json.dumps(value, indent=1).encode()),
    st.binary(),
    st.sampled_from([b"", b"#", b" ", BOM, b"\r", b"\xff", b"\x0b\x0c", b'{"a": "\\ud800"}']),
)


@settings(deadline=None)
@given(
    lines=st.lists(LINES, max_size=8),
    newline=st.sampled_from([b"\n", b"\r\n"]),
    bom=st.booleans(),
    zipped=st.booleans(),
)
def test_each_row_is_an_object_or_a_reason_for_any_bytes(
    lines: list[bytes], newline: bytes, bom: bool, zipped: bool
) -> None:
    content = BOM * bom + newline.join(lines)
    stripped = [line.strip() for line in content.removeprefix(BOM).split(b"\n")]
    expected = [i for i, line in enumerate(stripped, start=1) if line and not line.startswith(b"#")]

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), gzip.compress(content) if zipped else content)
        try:
            rows = list(read_objects(path))
        except DataError as error:
            said = str(error)
            assert said.startswith(str(path))
            first = content.removeprefix(BOM).lstrip()[:1]
            assert (
                (not content and "is empty" in said)
                or (b"\0" in content and "is a binary file" in said)
                or (first == b"[" and ("array" in said or "not UTF-8" in said))
                or (content.startswith(b"PAR1") and "parquet" in said)
                or (content.startswith(b"\x1f\x8b") and "gzip" in said)
            )
            return

    for _, row in rows:
        assert isinstance(row, dict | BadRowError)
    if content.removeprefix(BOM).lstrip().startswith(b"["):
        assert len(rows) == len(json.loads(content.removeprefix(BOM)))
    else:
        assert [number for number, _ in rows] == expected


@pytest.mark.parametrize("at", [60, 70, 90])
def test_damaged_archive_is_a_damaged_zip_file(tmp_path: Path, at: int) -> None:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("conversations.json", "[" + ", ".join(map(str, range(100))) + "]")
    content = bytearray(file.getvalue())
    content[at : at + 8] = b"\xff" * 8
    path = write(tmp_path, bytes(content), "export.zip")
    with pytest.raises(DataError, match=r"is a damaged zip file \(.+\): .+ again$"):
        read(path)
