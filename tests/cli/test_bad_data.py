"""`train` and `inspect` on files and rows that cannot be trained on."""

from __future__ import annotations

import functools
import gzip
import json
import os
import re
import resource
import sys
from pathlib import Path

import pytest

from tests.command import ROWS, Cli, Outcome, files_in
from tests.models import sums, write_chat

# Test ids contain these bytes, so they must not depend on the time.
packed = functools.partial(gzip.compress, mtime=0)

# The data file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty|no rows"),
        (b"\n# a comment\n\n", "no rows|only blank lines and comments"),
        (bytes(range(256)) * 20, "is a binary file"),
        (packed(b"{}\n"), "its only row cannot be used: .*data.jsonl:1: no known format"),
        (packed(b"{}\n" * 99)[:-9], "is a damaged gzip file .*copy or compress it again"),
        (packed(bytes(range(256)) * 20), "is a binary file"),
        (b'[\n{"messages": []}\n]\n', "its only row cannot .*data.jsonl\\[1\\]: no assist"),
        (b'[\n{"messages": []\n]\n', "data.jsonl: not a valid JSON array .* at line 3, col"),
        (
            b'{\n"messages": []\n}\n',
            "data.jsonl:1: a JSON object over several lines",
        ),
        (b"PAR1 and nothing else", "is a damaged parquet file"),
        (
            b"\x80\x81\n\xfe\n",
            "none of its 2 rows can be used; the first: .*:1: not UTF-8",
        ),
        (
            b'{"messages": []}\n{"txt": "x"}\n3\n',
            "none of its 3 rows .*data.jsonl:1: no assist",
        ),
        (b'{"messages": []}\n{"text": "x"}\n', "data.jsonl:2: is in the text format, but the file"),
    ],
    ids=[
        *("empty", "bom", "comments", "binary", "gzip", "cut gzip", "gzipped binary"),
        *("array", "bad array", "object over lines", "parquet", "bytes", "bad rows", "mixed"),
    ],
)
def test_useless_data_gives_a_one_line_error(
    train: Cli, tmp_path: Path, output: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    outcome = train("--data", file, "--max-steps", 1)
    assert outcome.code == 1
    assert re.match(rf"{re.escape(str(file))}(:(\d+:)?)? ", outcome.error)
    assert re.search(said, outcome.error)
    assert files_in(tmp_path) == ["chat.jsonl", "data.jsonl"]


@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_missing_file_is_named_with_its_option(train: Cli, tmp_path: Path, option: str) -> None:
    missing = tmp_path / "missing.jsonl"
    assert train(option, missing).error == f"{missing}: no such file: check {option}"


@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_folder_in_place_of_a_file_is_refused(train: Cli, tmp_path: Path, option: str) -> None:
    said = {
        "--data": "has no file to train on: name a file in it, or rename one to any of "
        "train.jsonl, train.json, train.jsonl.gz, train.json.gz, train.parquet, "
        "train.csv, train.tsv, train.csv.gz, train.tsv.gz",
        "--val-data": "is a folder: name a file in it",
    }
    assert train(option, tmp_path).error == f"{tmp_path} {said[option]}"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission_is_named(train: Cli, chat: Path) -> None:
    chat.chmod(0)
    assert train().error == f"{chat} cannot be read: Permission denied"


def test_rows_truncated_to_no_tokens_name_the_limit(train: Cli, chat: Path, output: Path) -> None:
    outcome = train("--max-seq-len", 8)
    assert outcome.error.startswith(f"{chat}: none of its {ROWS} rows can be used")
    assert f"{chat}:1: no supervised token within --max-seq-len 8" in outcome.error
    assert re.search(r"the answer starts at token \d+", outcome.error)
    assert files_in(output.parent) == []


def test_refused_command_leaves_no_folder(train: Cli, output: Path) -> None:
    assert train("--max-seq-len", 8).code == 1
    assert not output.parent.exists()


@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_pipe_in_place_of_a_file_is_refused_and_not_waited_for(
    train: Cli, tmp_path: Path, option: str
) -> None:
    os.mkfifo(tmp_path / "pipe.jsonl")
    error = train(option, tmp_path / "pipe.jsonl").error
    assert error == f"{tmp_path / 'pipe.jsonl'} is not a regular file: save the data in one"


def test_line_without_an_end_is_refused_before_it_fills_the_memory(
    train: Cli, tmp_path: Path
) -> None:
    # 4 MB compressed and 300 MB decompressed: the limit for compressed files allows this.
    file = tmp_path / "bomb.jsonl.gz"
    with gzip.open(file, "wb", compresslevel=1) as zipped:
        zipped.write(json.dumps({"messages": []}).encode() + b"\n{")
        for _ in range(300):
            zipped.write(os.urandom(2**12).hex().encode() + b" " * (2**20 - 2**13))
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    error = train("--data", file).error
    assert error == f"{file}:2: is longer than 67,108,864 bytes: write one JSON object per line"
    # ru_maxrss is in kilobytes on Linux, and in bytes on macOS.
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    assert grown < 200 * (2**10 if sys.platform == "linux" else 2**20)


@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_too_long_file_name_is_reported(train: Cli, option: str) -> None:
    name = "a" * 5000
    assert train(option, name).error == f"{name} cannot be read: File name too long"


def test_output_whose_name_is_too_long_is_an_error_before_any_work(train: Cli) -> None:
    name = "a" * 5000
    error = train("--output", name).error
    assert error.startswith(f"{name}/adapters.safetensors cannot be written: File name too long")


# Rows


BAD_ROWS = {
    "{not json": "not valid JSON (Expecting property name enclosed in double quotes at column 2)",
    "[1]": "not a JSON object (a list)",
    '{"words": "x"}': "no known format (its keys: 'words'; looked for: messages, ",
    '{"messages": "x"}': "'messages' is not a list (text)",
    '{"messages": null, "id": 1}': "'messages' is empty (its keys: 'messages' (empty), 'id')",
    '{"messages": [1]}': "a message is not an object (message 1 is a number)",
    '{"messages": [{"role": "user", "content": "x"}]}': "no assistant turn",
    '{"messages": [{"role": "bot", "content": "x"}]}': "unknown role (message 1: 'bot'; ",
    '{"messages": [{"role": "assistant", "content": " "}]}': "empty answer (message 1)",
    '{"messages": [{"role": "assistant", "content": 3}]}': "content is not text (message 1: ",
    '{"messages": [{"content": "x"}]}': "a message has no role (message 1)",
    "[" * 200_000: "JSON nested too deeply",
    '{"messages": ' * 200_000: "JSON nested too deeply",
}


def test_bad_rows_are_skipped_with_path_line_and_reason(
    train: Cli, tmp_path: Path, output: Path
) -> None:
    # As in an editor, line numbers count the comment in line 1 and the blank line 2.
    file = write_chat(tmp_path / "mixed.jsonl", ["# bad first", "", *BAD_ROWS, *sums(ROWS)])
    outcome = train("--data", file, "--max-steps", 1)
    assert outcome.code == 0
    said = sorted(outcome.err.splitlines())
    assert len(said) == len(BAD_ROWS)
    for line, reason in enumerate(BAD_ROWS.values(), start=3):
        assert any(warning.startswith(f"warning: {file}:{line}: {reason}") for warning in said)
    (ledger,) = json.loads((output.parent / "checkpoints" / "ledger.json").read_text())
    assert ledger["path"] == str(file)
    assert ledger["rows_read"] == ROWS + len(BAD_ROWS)
    assert sum(ledger["rows_skipped"].values()) == len(BAD_ROWS)


def test_first_two_of_a_kind_are_shown_and_the_others_counted(train: Cli, tmp_path: Path) -> None:
    file = write_chat(tmp_path / "mixed.jsonl", [*sums(4), *[{"words": "x"}] * 12])
    lines = train("--data", file, "--dry-run").err.splitlines()
    assert lines == [
        *(
            f"warning: {file}:{line}: no 'messages' (its keys: 'words'); row skipped"
            for line in (5, 6)
        ),
        f"warning: {file}: 10 more rows skipped: no 'messages'",
    ]


def test_strict_makes_a_bad_row_an_error(train: Cli, tmp_path: Path, output: Path) -> None:
    file = write_chat(tmp_path / "mixed.jsonl", [*sums(4), {"words": "x"}, "3"])
    outcome = train("--data", file, "--strict", "--max-steps", 1)
    assert outcome.code == 1
    assert outcome.error.startswith(f"{file}:5: no 'messages'")
    assert "2 of 6 rows" in outcome.error
    assert files_in(output.parent) == []


def test_strict_accepts_a_file_of_good_rows(train: Cli, output: Path) -> None:
    assert train("--strict", "--max-steps", 1).code == 0
    assert output.is_file()


def test_control_characters_of_a_file_do_not_reach_the_terminal(train: Cli, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "\x1b[31m\nred", "content": "x"}]}, {"\x1b]0;title\x07": 1}]
    file = write_chat(tmp_path / "mixed.jsonl", [*sums(4), *rows])
    outcome = train("--data", file, "--dry-run")
    assert len(outcome.err.splitlines()) == 2
    assert "\x1b" not in outcome.err


def test_single_row_with_a_split_names_the_remedy(train: Cli, tmp_path: Path) -> None:
    file = write_chat(tmp_path / "one.jsonl", sums(1))
    assert train("--data", file).error == (
        f"{file}: one row cannot be both trained on and held out: add rows or set --val-split 0"
    )


def test_single_row_trains_without_validation(train: Cli, tmp_path: Path, output: Path) -> None:
    file = write_chat(tmp_path / "one.jsonl", sums(1))
    assert train("--data", file, "--val-split", 0) == Outcome(0, "", "")
    assert output.is_file()


def test_fewer_rows_than_a_batch_still_train(train: Cli, tmp_path: Path, output: Path) -> None:
    file = write_chat(tmp_path / "few.jsonl", sums(3))
    assert train("--data", file, "--batch-size", 64) == Outcome(0, "", "")
    assert output.is_file()
