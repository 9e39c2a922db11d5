"""Files that hold no data, and folders in the layout of mlx-lm."""

from __future__ import annotations

import bz2
import functools
import gzip
import io
import lzma
import tarfile
import zipfile
from pathlib import Path

import pytest

from mlxtune.core.data.sources.datafiles import DataFiles, find_data_files, held_out_file
from mlxtune.core.data.sources.rows import read_objects
from mlxtune.errors import DataError
from tests.core.data.sources.test_rows import GOOD, read, write

# The bytes must not depend on the time, because names of tests contain them.
packed = functools.partial(gzip.compress, mtime=0)


def archive_of(*names: str) -> bytes:
    with zipfile.ZipFile(content := io.BytesIO(), "w") as archive:
        for name in names:
            archive.writestr(zipfile.ZipInfo(name), "x")
    return content.getvalue()


def tar_of(content: bytes) -> bytes:
    with tarfile.open(fileobj=(packed := io.BytesIO()), mode="w") as archive:
        info = tarfile.TarInfo("a.jsonl")
        info.size = len(content)
        archive.addfile(info, io.BytesIO(content))
    return packed.getvalue()


# Files that hold no data


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (packed(b""), "is empty"),
        (b"\x1f\x8b", "is a damaged gzip file"),
        (b"\x1f\x8b\x08\x00 no gzip", "is a damaged gzip file"),
        (packed(packed(GOOD)), "is a binary file"),
        (packed(b"PAR1"), "is a damaged parquet file"),
        (b"PK\x03\x04\x14\x00\x00", "is an archive: unpack it, and name a file in it"),
    ],
    ids=["empty", "gzip_of_nothing", "magic", "gzip", "twice", "parquet", "zip"],
)
def test_non_data_file_is_an_error_that_names_it(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = write(tmp_path, content)

    with pytest.raises(DataError, match=reason) as raised:
        read(path)
    assert str(raised.value).startswith(str(path))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("a.docx", archive_of("[Content_Types].xml", "word/document.xml"), "a text document"),
        ("a.jsonl", archive_of("xl/workbook.xml"), "a spreadsheet: save it as CSV"),
        ("a.zip", archive_of("a.jsonl"), "an archive: unpack it"),
        ("a.jsonl.bz2", bz2.compress(GOOD), "packed by bzip2: unpack it"),
        ("a.jsonl.xz", lzma.compress(GOOD), "packed by xz: unpack it"),
        ("a.jsonl.zst", b"\x28\xb5\x2f\xfd\x04\x00", "packed by zstd: unpack it"),
        ("a.tar.gz", packed(tar_of(GOOD)), "a tar archive: unpack it"),
        ("a.7z", b"7z\xbc\xaf\x27\x1c", "a 7z archive: unpack it"),
        ("a.arrow", b"\xff\xff\xff\xff\x10\x00", "an Arrow file: load it in Python"),
        ("a.pdf", b"%PDF-1.7\n%\xe2", "a PDF: save its text as .txt"),
        ("a.jsonl", b"\n<!DOCTYPE HTML>\n<html>", "a web page: download the data"),
        ("a.json", b"<html><body>", "a web page: download the data"),
        ("a.xml", b'<?xml version="1.0"?>', "XML: write JSON lines"),
        ("a.yaml", b"- prompt: Q\n  completion: A\n", "YAML: write JSON lines"),
    ],
)
def test_file_of_another_kind_is_named_with_the_remedy(
    tmp_path: Path, name: str, content: bytes, said: str
) -> None:
    path = write(tmp_path, content, name)

    with pytest.raises(DataError) as raised:
        read(path)
    assert str(raised.value).startswith(f"{path} is {said}")


@pytest.mark.parametrize("start", ["<html>", "<?xml", "7z", "SQLite format 3", "BZh"])
def test_plain_text_may_start_like_a_file_of_another_kind(tmp_path: Path, start: str) -> None:
    path = write(tmp_path, f"{start} and more".encode(), "a.txt")
    ((_, row),) = read_objects(path, texts=True)
    assert row == {"text": f"{start} and more"}


@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_missing_file_is_an_error_that_names_it_and_its_option(tmp_path: Path, option: str) -> None:
    path = tmp_path / "none.jsonl"

    with pytest.raises(DataError) as raised:
        find_data_files([path], option)
    assert str(raised.value) == f"{path}: no such file: check {option}"


def test_folder_cannot_be_read_as_a_file(tmp_path: Path) -> None:
    with pytest.raises(DataError) as raised:
        read(tmp_path)
    assert str(raised.value) == f"{tmp_path} cannot be read: Is a directory"


@pytest.mark.parametrize("name", ["x" * 300, "a\0b"])
def test_path_that_the_system_refuses_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    path = tmp_path / name

    for refuse in (read, lambda path: find_data_files([path])):
        with pytest.raises(DataError) as raised:
            refuse(path)
        assert str(path) in str(raised.value)


# Folders


def test_file_path_resolves_to_itself(tmp_path: Path) -> None:
    paths = [write(tmp_path, GOOD, name) for name in ("b.jsonl", "a.json", "valid.jsonl")]

    assert find_data_files(paths) == DataFiles(tuple(paths), ())
    assert find_data_files([]) == DataFiles((), ())


@pytest.mark.parametrize("train", ["train.jsonl", "train.json", "train.jsonl.gz", "train.parquet"])
@pytest.mark.parametrize("valid", ["valid.jsonl", "valid.json", "validation.parquet", None])
def test_folder_resolves_to_its_mlx_lm_files(tmp_path: Path, train: str, valid: str | None) -> None:
    for name in (train, valid, "test.jsonl", "notes.txt"):
        if name is not None:
            write(tmp_path, GOOD, name)
    other = write(tmp_path, GOOD, "other.jsonl")

    found = find_data_files([other, tmp_path])

    assert found.train == (other, tmp_path / train)
    assert found.validation == (() if valid is None else (tmp_path / valid,))


def test_folder_without_a_train_file_says_what_was_looked_for(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "valid.jsonl")

    with pytest.raises(DataError) as raised:
        find_data_files([tmp_path])
    said = str(raised.value)
    assert said.startswith(f"{tmp_path} has no file to train on: ")
    for name in ("train.jsonl", "train.json", "train.jsonl.gz", "train.parquet"):
        assert name in said


@pytest.mark.parametrize(
    ("files", "said"),
    [
        (["README.md", "data/train.jsonl"], "its folder data has one: use --data {}/data"),
        (
            ["README.md", "data/train-00000-of-00001.parquet"],
            "its folder data has some: name them, as {}/data/train-00000-of-00001.parquet",
        ),
        (["dataset_dict.json", "train/data-0.arrow"], "{} is a data set of save_to_disk: load it"),
        (["state.json", "data-0.arrow"], "{} is a data set of save_to_disk: load it"),
    ],
)
def test_folder_whose_data_is_elsewhere_says_where(
    tmp_path: Path, files: list[str], said: str
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write(tmp_path, GOOD, name)

    with pytest.raises(DataError) as raised:
        find_data_files([tmp_path])
    assert said.format(tmp_path) in str(raised.value)


def test_two_train_files_in_a_folder_are_an_error_rather_than_a_choice(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "train.jsonl")
    write(tmp_path, packed(GOOD), "train.jsonl.gz")

    with pytest.raises(DataError, match=r"holds train\.jsonl and train\.jsonl\.gz: "):
        find_data_files([tmp_path])

    (tmp_path / "train.jsonl.gz").unlink()
    for name in ("valid.jsonl", "validation.jsonl"):
        write(tmp_path, GOOD, name)
    with pytest.raises(DataError, match=r"holds validation\.jsonl and valid\.jsonl: "):
        find_data_files([tmp_path])


def test_folder_is_taken_for_data_only(tmp_path: Path) -> None:
    write(tmp_path, GOOD, "train.jsonl")

    with pytest.raises(DataError) as raised:
        find_data_files([tmp_path], "--val-data")
    assert str(raised.value) == f"{tmp_path} is a folder: name a file in it"


def test_file_given_twice_is_an_error_under_any_name(tmp_path: Path) -> None:
    train = write(tmp_path, GOOD, "train.jsonl")
    link = tmp_path / "link.jsonl"
    link.symlink_to(train)
    dotted = tmp_path / "folder" / ".." / "train.jsonl"
    (tmp_path / "folder").mkdir()

    for paths in ([train, train], [train, link], [dotted, train], [tmp_path, train]):
        with pytest.raises(DataError, match="is given twice") as raised:
            find_data_files(paths)
        assert str(paths[-1]) in str(raised.value)


def test_file_to_train_and_to_validate_on_is_given_twice(tmp_path: Path) -> None:
    (tmp_path / "valid.jsonl").symlink_to(write(tmp_path, GOOD, "train.jsonl"))

    with pytest.raises(DataError, match="is given twice, as"):
        find_data_files([tmp_path])


def test_dangling_link_in_a_folder_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").symlink_to(tmp_path / "gone")

    with pytest.raises(DataError, match=r"train\.jsonl is a link to .*gone, which does not exist"):
        find_data_files([tmp_path])


@pytest.mark.parametrize(
    "name", ["train.jsonl", "valid.jsonl", "test.jsonl", "conversations.json", "a.txt", "b/a.md"]
)
def test_link_out_of_a_folder_is_an_error_that_names_it(tmp_path: Path, name: str) -> None:
    private, data = write(tmp_path, GOOD, "private"), tmp_path / "data"
    (data / "b").mkdir(parents=True)
    if name == "valid.jsonl":
        write(data, GOOD, "train.jsonl")
    (data / name).symlink_to(private)
    with pytest.raises(DataError, match="which is outside the folder") as raised:
        held_out_file(data) if name == "test.jsonl" else find_data_files([data], texts=True)
    assert str(raised.value).startswith(f"{data / name} links to {private}, ")


def test_links_within_a_folder_and_of_a_snapshot_are_read(tmp_path: Path) -> None:
    cached = tmp_path / "datasets--org--sums"
    blob, snapshot = cached / "blobs" / "1", cached / "snapshots" / "2"
    for folder in (blob.parent, snapshot):
        folder.mkdir(parents=True)
    write(blob.parent, GOOD, "1")
    (snapshot / "train.jsonl").symlink_to("../../blobs/1")
    (snapshot / "valid.jsonl").symlink_to("rows")
    write(snapshot, GOOD, "rows")
    (tmp_path / "linked").symlink_to(snapshot)
    for folder in (snapshot, tmp_path / "linked"):
        files = find_data_files([folder])
        assert files.all == (folder / "train.jsonl", folder / "valid.jsonl")
