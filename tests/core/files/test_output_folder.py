"""A folder that is put in place whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.core.files.output_folder import new_folder
from mlxtune.errors import OutputError
from tests.command import files_in


def write(target: Path, text: str = "new", *, overwrite: bool = False) -> None:
    with new_folder(target, [], marker="mark", overwrite=overwrite) as folder:
        (folder / "mark").write_text(text)


def test_folder_appears_whole_and_leaves_nothing_beside_it(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "out")
    assert files_in(tmp_path) == ["deep/out/mark"]


def test_nothing_is_left_where_filling_it_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="No space"),
        new_folder(tmp_path / "out", [], marker="mark", overwrite=False) as folder,
    ):
        (folder / "mark").write_text("half")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_what_stood_there_stays_where_filling_the_new_one_failed(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with (
        pytest.raises(KeyboardInterrupt),
        new_folder(tmp_path / "out", [], marker="mark", overwrite=True),
    ):
        raise KeyboardInterrupt
    assert files_in(tmp_path) == ["out/mark"]
    assert (tmp_path / "out" / "mark").read_text() == "old"


def test_folder_of_ours_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out" / "more").touch()
    with pytest.raises(OutputError, match=r"already exists.*--overwrite"):
        write(tmp_path / "out")
    write(tmp_path / "out", overwrite=True)
    assert files_in(tmp_path) == ["out/mark"]
    assert (tmp_path / "out" / "mark").read_text() == "new"


def test_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")  # an empty one is free
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name, said in [("home", "other files"), ("file", "not a folder"), ("link", "not a folder")]:
        with pytest.raises(OutputError, match=said):
            write(tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "letter").exists()


def test_what_is_read_is_not_written_over(tmp_path: Path) -> None:
    model = tmp_path / "models" / "base"
    model.mkdir(parents=True)
    (tmp_path / "link").symlink_to(model)
    for target in (model, tmp_path / "models", tmp_path / "link"):
        with (
            pytest.raises(OutputError, match="which is an input"),
            new_folder(target, [model], marker="mark", overwrite=True),
        ):
            pytest.fail("the folder was given")
    with new_folder(model / "fused", [model], marker="mark", overwrite=False):
        pass
