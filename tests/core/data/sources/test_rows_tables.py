"""CSV and TSV with a header: their rows and line numbers; spreadsheets; elements of arrays."""

from __future__ import annotations

import csv
import gzip
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.data.problems import BadRowError, where
from mlxtune.core.data.sources import text_rows
from mlxtune.core.data.sources.datafiles import find_data_files
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.errors import DataError


def rows_of(path: Path) -> list[tuple[int, Any]]:
    return [
        (number, str(row) if isinstance(row, BadRowError) else row)
        for number, row in read_objects(path)
    ]


def table(folder: Path, content: str | bytes, name: str = "data.csv") -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_rows_have_the_number_of_their_first_line(tmp_path: Path) -> None:
    path = table(
        tmp_path,
        '\ufeffprompt, completion,id\r\n\r\nHi,Hello!,1\r\n"two\r\nlines","He said ""no"""\r\n'
        "x,,\r\n,,\r\na,b,c,d\r\nlast,one,2,",
    )

    assert rows_of(path) == [
        (3, {"prompt": "Hi", "completion": "Hello!", "id": "1"}),
        (4, {"prompt": "two\r\nlines", "completion": 'He said "no"'}),
        (6, {"prompt": "x", "completion": None, "id": None}),
        (8, "more cells than columns (4 cells, 3 columns: quote values that contain a separator)"),
        (9, {"prompt": "last", "completion": "one", "id": "2"}),
    ]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("data.tsv", "prompt\tcompletion\na, b\tc;d\n"),
        ("data.csv", 'prompt;completion\n"a, b";"c;d"\n'),
        ("DATA.CSV", 'prompt,completion\n"a, b","c;d"\n'),
        ("bars.csv", "prompt|completion\na, b|c;d\n"),
        ("spaced.csv", 'prompt, completion\n"a, b", c;d\n'),
        ("quoted.csv", '"prompt", "completion"\n"a, b", "c;d"\n'),
        ("data.csv.gz", gzip.compress(b'prompt,completion\n"a, b","c;d"\n', mtime=0)),
    ],
    ids=["tsv", "semicolons", "commas", "bars", "spaced", "quoted", "gzip"],
)
def test_separator_is_taken_from_header(tmp_path: Path, name: str, content: str | bytes) -> None:
    assert rows_of(table(tmp_path, content, name)) == [(2, {"prompt": "a, b", "completion": "c;d"})]


@pytest.mark.parametrize("first", ["sep=|\n", '\ufeff"sep=|"\r\n'])
def test_first_line_may_name_the_separator(tmp_path: Path, first: str) -> None:
    path = table(tmp_path, first + "prompt|completion\na, b|c;d\n")

    assert rows_of(path) == [(3, {"prompt": "a, b", "completion": "c;d"})]


def test_space_of_a_cell_stays_unless_the_header_has_it(tmp_path: Path) -> None:
    path = table(tmp_path, "prompt,completion\na, b\n")
    assert rows_of(path) == [(2, {"prompt": "a", "completion": " b"})]


def test_broken_row_is_skipped_and_the_next_is_read(tmp_path: Path) -> None:
    path = table(tmp_path, b'text\nCaf\xe9\n"a" b\n"[1"\nm\xc3\xb6re\n')

    assert rows_of(path) == [
        (2, "not UTF-8 (save it as CSV UTF-8)"),
        (3, "not valid CSV (',' expected after '\"')"),
        (4, {"text": "[1"}),
        (5, {"text": "möre"}),
    ]


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("data.xlsx", b"PK\x03\x04...", "is a spreadsheet: save it as CSV: in Excel"),
        ("data.xls", b"\xd0\xcf\x11\xe0...", "is an Excel file: save it as CSV: in Excel, File > "),
        ("data.csv", "a,b,a\n", ":1: has two columns named 'a': rename one of them"),
        ("data.csv", "\n\n", "is empty: it needs a line of column names"),
    ],
)
def test_non_table_file_is_refused_with_a_remedy(
    tmp_path: Path, name: str, content: str | bytes, said: str
) -> None:
    with pytest.raises(DataError) as raised:
        rows_of(table(tmp_path, content, name))

    assert said in str(raised.value)


def test_overlong_line_is_refused(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mlxtune.core.data.sources.text_rows._MAX_LINE_BYTES", 1000)

    with pytest.raises(DataError, match=r"data\.csv:2: is longer than 1,000 bytes"):
        rows_of(table(tmp_path, "text\n" + "a" * 2000 + "\n"))


def test_value_without_end_is_one_bad_row(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr("mlxtune.core.data.sources.text_rows._MAX_LINE_BYTES", 1000)

    found = rows_of(table(tmp_path, 'text\n"' + "a\n" * 2000))

    assert found[0] == (2, "not valid CSV (field larger than field limit (1000))")


def test_json_in_a_file_named_as_a_table_is_json(tmp_path: Path) -> None:
    assert rows_of(table(tmp_path, '{"text": "a"}\n')) == [(1, {"text": "a"})]


def test_folder_may_hold_tables(tmp_path: Path) -> None:
    table(tmp_path, "text\na\n", "train.csv")
    table(tmp_path, "text\na\n", "valid.tsv")

    found = find_data_files([tmp_path])

    assert [path.name for path in found.all] == ["train.csv", "valid.tsv"]


CELLS = st.text(st.characters(codec="utf-8", exclude_characters="\0"), max_size=8)


@given(st.lists(st.lists(CELLS, min_size=2, max_size=2), max_size=5))
@settings(deadline=None)
def test_files_written_from_python_are_read(
    tmp_path_factory: pytest.TempPathFactory, rows: list[list[str]]
) -> None:
    path = tmp_path_factory.mktemp("table") / "data.csv"
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file, quoting=csv.QUOTE_ALL)
        writer.writerows([["left", "right"], *rows])

    written = [dict(zip(("left", "right"), row, strict=True)) for row in rows]
    expected = [{k: v or None for k, v in row.items()} for row in written if any(row.values())]
    assert [row for _, row in read_objects(path)] == expected


def test_elements_of_an_array_are_not_lines(tmp_path: Path) -> None:
    array, lines = tmp_path / "data.json", tmp_path / "data.jsonl"
    array.write_text('\n[{"text": 1}]')
    lines.write_text('{"text": 1}')

    assert where(array, 26) == f"{array}[26]"
    assert where(lines, 26) == f"{lines}:26"
    assert where("gone.jsonl", 26) == "gone.jsonl:26"


def test_header_of_many_columns_is_read_at_once(tmp_path: Path) -> None:
    """A comparison of each name with all others would take minutes."""
    names = ",".join(f"c{i}" for i in range(100_000))
    found = rows_of(table(tmp_path, f"{names},prompt,completion\n{',' * 100_000}Hi,Hello\n"))
    assert [row for row, _ in found] == [2]


@pytest.mark.parametrize(
    ("before", "row"),
    [
        ("", "{}"),
        ("prompt,completion\n", "a,b{}"),
        ("prompt;completion\n", "a;b{}"),
        # A quoted line break ends no row.
        ("prompt,completion\n", 'a,"\n"{}"\n"{}'),
    ],
)
def test_row_of_too_many_cells_is_refused_before_it_is_split(
    tmp_path: Path, before: str, row: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_MAX_COLUMNS", 1000)
    mark = ";" if ";" in before else ","
    path = table(tmp_path, before + row.replace("{}", mark * (700 if "\n" in row else 1500)))
    with pytest.raises(DataError, match="has more than 1,000 columns: remove some"):
        rows_of(path)


def test_separators_in_quoted_cells_are_not_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_rows, "_MAX_COLUMNS", 1000)
    text = "one, two, " * 300
    path = table(tmp_path, "prompt,completion\n" + f'"{text}",b\n' * 3)
    assert [row for row, _ in rows_of(path)] == [2, 3, 4]
