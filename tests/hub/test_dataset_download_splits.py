"""Finding the splits of a repository's files, in the layouts that are common on the hub."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtune.errors import DataError
from mlxtune.hub.dataset_download import choose_splits, converted_splits, own_splits
from mlxtune.hub.dataset_name import dataset_name

GSM8K = {
    "main": {"train": ["main/train/0000.parquet"], "test": ["main/test/0000.parquet"]},
    "socratic": {"train": ["socratic/train/0000.parquet"], "test": ["socratic/test/0000.parquet"]},
}


def chosen(text: str, splits: Any, **options: Any) -> tuple[str, dict[str, Any]]:
    name = dataset_name(text)
    assert name is not None
    return choose_splits(name, splits, **options)


def test_parquet_branch_has_a_folder_for_each_configuration_and_split() -> None:
    files = [file for by_split in GSM8K.values() for each in by_split.values() for file in each]
    assert converted_splits([".gitattributes", *files]) == GSM8K


def test_parquet_branch_with_part_of_the_data_has_none() -> None:
    assert converted_splits(["default/partial-train/0000.parquet", "default/test/0.parquet"]) == {}


@pytest.mark.parametrize(
    ("files", "configs", "splits"),
    [
        (["train.jsonl", "README.md"], None, {"default": {"train": ["train.jsonl"]}}),
        (["anything.jsonl"], None, {"default": {"train": ["anything.jsonl"]}}),
        (
            ["data/train-00000-of-00002.parquet", "data/train-00001-of-00002.parquet"],
            None,
            {
                "default": {
                    "train": [
                        "data/train-00000-of-00002.parquet",
                        "data/train-00001-of-00002.parquet",
                    ]
                }
            },
        ),
        (
            ["train_sft-00000-of-00001.parquet"],
            None,
            {"default": {"train_sft": ["train_sft-00000-of-00001.parquet"]}},
        ),
        (
            ["chat_dev.jsonl", "chat.Train.jsonl", "evaluation/x.jsonl", "retrained.jsonl"],
            None,
            {
                "default": {
                    "validation": ["chat_dev.jsonl"],
                    "train": ["chat.Train.jsonl"],
                    "test": ["evaluation/x.jsonl"],
                }
            },
        ),
        (
            ["main/train-0.parquet", "socratic/train-0.parquet"],
            [
                {"config_name": "main", "data_files": [{"split": "train", "path": "main/*"}]},
                {"config_name": "socratic", "data_files": "socratic/train-*"},
            ],
            {
                "main": {"train": ["main/train-0.parquet"]},
                "socratic": {"train": ["socratic/train-0.parquet"]},
            },
        ),
        (["train.parquet", "dataset_infos.json"], None, {"default": {"train": ["train.parquet"]}}),
        (["train.txt", "README.md"], None, {}),
        (["x.jsonl"], [None, 3, {"data_files": 7}], {"default": {"train": ["x.jsonl"]}}),
    ],
)
def test_own_files_are_split_as_the_card_says_or_by_their_names(
    files: list[str], configs: Any, splits: Any
) -> None:
    assert own_splits(files, configs) == splits


def test_name_without_split_gives_train_and_validation_data() -> None:
    splits = {"default": {"train": ["a"], "validation": ["b"], "test": ["c"]}}
    assert chosen("o/n", splits) == ("default", {"train": ["a"], "validation": ["b"]})
    assert chosen("o/n:test", splits) == ("default", {"test": ["c"]})
    assert chosen("o/n", splits, held_out=True) == ("default", {"test": ["c"]})
    del splits["default"]["test"]
    assert chosen("o/n", splits, held_out=True) == ("default", {"validation": ["b"]})


@pytest.mark.parametrize(
    ("text", "splits", "message"),
    [
        ("o/n", GSM8K, "o/n: has several configurations (main, socratic): name one, as o/n/main"),
        (
            "o/n/x:train",
            GSM8K,
            "o/n/x:train: has no configuration 'x' (main, socratic): name one, as o/n/main:train",
        ),
        (
            "o/n/main:val",
            GSM8K,
            "o/n/main:val has no split 'val' (test, train): name one, as o/n/main:test",
        ),
        (
            "o/n",
            {"default": {"test": ["a"]}},
            "o/n has no split 'train' (test): name one, as o/n:test",
        ),
        (
            "o/n@v1",
            {},
            "o/n@v1 has no JSON lines, CSV or parquet to read: download it, convert it to JSON "
            "lines, and name the file",
        ),
    ],
)
def test_missing_split_is_an_error_that_lists_the_others(
    text: str, splits: Any, message: str
) -> None:
    with pytest.raises(DataError) as raised:
        chosen(text, splits)
    assert str(raised.value) == message


def test_single_configuration_needs_no_name() -> None:
    assert chosen("o/n", {"en": {"train": ["a"]}}) == ("en", {"train": ["a"]})
