"""Names that are not UTF-8, and two names for one file."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from mlxtune.core.files.output_folder import new_folder
from mlxtune.core.files.writing import check_outputs, is_same_place
from mlxtune.errors import OutputError
from tests.command import Cli, files_in

NAMES = {
    "bytes": b"\xff\xfe",
    "latin-1": b"caf\xe9",
    "cut": b"a\xe2\x82",
    "surrogate": b"\xed\xa0\x80",
}
OPTIONS = ["--output", "--checkpoint-dir", "--model-path", "--data", "--cache-dir", "--targets"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_name_that_is_not_utf_8_is_refused_before_training(
    train: Cli, tmp_path: Path, option: str, name: str
) -> None:
    before = files_in(tmp_path)
    path = tmp_path / os.fsdecode(NAMES[name]) / "x"
    error = train("--max-steps", 1, option, path).error
    assert f"{option} must be text in UTF-8" in error
    assert error.isprintable()
    assert files_in(tmp_path) == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("command", ["verify", "report", "runs"])
def test_run_whose_name_is_not_utf_8(cli: Cli, tmp_path: Path, command: str, name: str) -> None:
    folder = tmp_path / os.fsdecode(NAMES[name])
    folder.mkdir()
    outcome = cli(command, folder)
    assert outcome.code in (0, 1)
    assert "Traceback" not in outcome.err


@pytest.fixture
def two_names(tmp_path: Path) -> tuple[Path, Path]:
    """Give one file two names with different real paths, as a change of case does on macOS."""
    (tmp_path / "chat.jsonl").write_text("mine")
    (tmp_path / "Chat.jsonl").hardlink_to(tmp_path / "chat.jsonl")
    return tmp_path / "chat.jsonl", tmp_path / "Chat.jsonl"


def test_input_file_is_refused_as_output_under_another_name(two_names: tuple[Path, Path]) -> None:
    read, written = two_names
    assert is_same_place(read, written)
    with pytest.raises(OutputError, match="is read by this run"):
        check_outputs([written], [read], "--output")


@pytest.mark.parametrize("form", ["Caf\u00e9", "CAFE\u0301"])
def test_input_folder_is_refused_as_output_under_another_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, form: str
) -> None:
    source = tmp_path / "caf\u00e9"
    (source / "base").mkdir(parents=True)
    # On macOS both names belong to the same folder.
    alike = {str(tmp_path / form), str(source)}
    same = Path.samefile
    monkeypatch.setattr(
        Path, "samefile", lambda one, other: {str(one), str(other)} == alike or same(one, other)
    )
    with (
        pytest.raises(OutputError, match="which is an input"),
        new_folder(tmp_path / form, [source / "base"], manifest="m", overwrite=True),
    ):
        pass
    shutil.rmtree(source)
