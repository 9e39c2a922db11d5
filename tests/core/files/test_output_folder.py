"""A folder is written atomically."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.core.files.output_folder import hashes, new_folder
from mlxtune.errors import OutputError
from tests.attacks.attack import contents
from tests.command import files_in

MANIFEST = "manifest.json"


def write(target: Path, text: str = "new", *, overwrite: bool = False) -> None:
    with new_folder(target, [], manifest=MANIFEST, overwrite=overwrite) as folder:
        (folder / "inner").mkdir()
        for name in ("weights", "inner/template"):
            (folder / name).write_text(text)
        (folder / MANIFEST).write_text(json.dumps({"files": hashes(folder)}))


WRITTEN = ["inner/template", "manifest.json", "weights"]


def test_folder_appears_whole_without_leftovers(tmp_path: Path) -> None:
    write(tmp_path / "deep" / "out")
    assert files_in(tmp_path / "deep") == [f"out/{name}" for name in WRITTEN]


def test_nothing_is_left_where_filling_it_failed(tmp_path: Path) -> None:
    with (
        pytest.raises(OutputError, match="No space"),
        new_folder(tmp_path / "out", [], manifest=MANIFEST, overwrite=False) as folder,
    ):
        (folder / "weights").write_text("half")
        raise OSError(28, "No space left on device")
    assert list(tmp_path.iterdir()) == []


def test_old_folder_stays_if_filling_the_new_one_fails(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    with (
        pytest.raises(KeyboardInterrupt),
        new_folder(tmp_path / "out", [], manifest=MANIFEST, overwrite=True),
    ):
        raise KeyboardInterrupt
    assert files_in(tmp_path) == [f"out/{name}" for name in WRITTEN]
    assert (tmp_path / "out" / "weights").read_text() == "old"


def test_folder_of_ours_is_replaced_only_when_asked(tmp_path: Path) -> None:
    write(tmp_path / "out", "old")
    (tmp_path / "out" / ".DS_Store").touch()
    with pytest.raises(OutputError, match=r"already exists.*--overwrite"):
        write(tmp_path / "out")
    write(tmp_path / "out", overwrite=True)
    assert files_in(tmp_path) == [f"out/{name}" for name in WRITTEN]
    assert (tmp_path / "out" / "weights").read_text() == "new"


def _forged(out: Path) -> None:
    """Replace files of a folder with an empty manifest and a foreign file, as anyone can."""
    for path in (out / "inner" / "template", out / "weights"):
        path.unlink()
    (out / MANIFEST).write_text('{"files": {}}')
    (out / "thesis.tex").write_text("mine")


def _forged_with_hashes(out: Path) -> None:
    """Write a manifest of a changed folder, as somebody who knew the format could."""
    (out / "inner" / "a.bin").write_text("mine")
    (out / MANIFEST).write_text(json.dumps({"files": hashes(out)}))


CHANGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "a file more": (lambda out: (out / "thesis.tex").write_text("mine"), "holds thesis.tex"),
    "one below": (lambda out: (out / "inner" / "a").write_text("mine"), "holds inner/a"),
    "one in a folder": (lambda out: (out / "new").mkdir() or (out / "new/a").touch(), "new/a"),
    "a changed file": (lambda out: (out / "weights").write_text("own"), "weights was changed"),
    "a link": (lambda out: (out / "a").symlink_to(out.parent), "holds a, not"),
    "a hard link": (lambda out: os.link(out / "weights", out.parent / "w"), "holds weights, not"),
    "a pipe": (lambda out: os.mkfifo(out / "pipe"), "holds pipe"),
    "a manifest of nothing": (_forged, "was not written by you"),
    "a manifest of more": (_forged_with_hashes, "was not written by you on this machine"),
    "an empty manifest": (lambda out: (out / MANIFEST).write_text(""), "other files"),
    "a manifest of a list": (lambda out: (out / MANIFEST).write_text('{"files": []}'), "other"),
}


@pytest.mark.parametrize("name", CHANGES)
def test_folder_with_files_that_were_not_written_here_is_never_replaced(
    tmp_path: Path, name: str
) -> None:
    out = tmp_path / "out"
    write(out, "old")
    change, said = CHANGES[name]
    change(out)
    before = contents(tmp_path, folder_times=False)
    with pytest.raises(OutputError, match=f"{said}.*choose another --output"):
        write(out, overwrite=True)
    assert contents(tmp_path, folder_times=False) == before


def test_file_that_comes_into_the_old_folder_meanwhile_stays(tmp_path: Path) -> None:
    out = tmp_path / "out"
    write(out, "old")
    with (
        pytest.raises(OutputError, match="holds files that mlxtune did not write"),
        new_folder(out, [], manifest=MANIFEST, overwrite=True) as folder,
    ):
        (folder / MANIFEST).touch()
        (out / "thesis.tex").write_text("mine")
    assert (out / "thesis.tex").read_text() == "mine"
    assert (out / "weights").read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_folder_of_something_else_is_never_replaced(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    write(tmp_path / "out")  # an empty folder may be used
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "letter").touch()
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to(tmp_path / "home")
    for name, said in [("home", "other files"), ("file", "not a folder"), ("link", "not a folder")]:
        with pytest.raises(OutputError, match=said):
            write(tmp_path / name, overwrite=True)
    assert (tmp_path / "home" / "letter").exists()


def test_inputs_are_not_overwritten(tmp_path: Path) -> None:
    model = tmp_path / "models" / "base"
    model.mkdir(parents=True)
    (tmp_path / "link").symlink_to(model)
    for target in (model, tmp_path / "models", tmp_path / "link"):
        with (
            pytest.raises(OutputError, match="which is an input"),
            new_folder(target, [model], manifest=MANIFEST, overwrite=True),
        ):
            pytest.fail("the folder was given")
    with new_folder(model / "fused", [model], manifest=MANIFEST, overwrite=False) as folder:
        (folder / MANIFEST).touch()
