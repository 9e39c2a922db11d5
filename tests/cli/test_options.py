"""Options in YAML and TOML: what is read, and what is said of a file that cannot be."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.cli.options import load_config_file
from mlxtune.config import TrainConfig
from mlxtune.errors import ConfigError
from tests.configs import config


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


YAML = """\
# a comment
model-path: data/demo
data: chat.jsonl
lr: 1e-4          # YAML 1.1 reads this as text
max_seq_len: 64
targets: [q_proj, k_proj]
strict: true
num-layers: null
"""
TOML = """\
model-path = "data/demo"
data = "chat.jsonl"
lr = 1e-4
max_seq_len = 64
targets = ["q_proj", "k_proj"]
strict = true
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.yaml", YAML), ("run.yml", YAML), ("run.toml", TOML), ("run.TOML", "\ufeff" + TOML)],
)
def test_yaml_and_toml_give_the_same_options(tmp_path: Path, name: str, content: str) -> None:
    options, unknown = load_config_file(write(tmp_path, name, content), TrainConfig)

    assert unknown == []
    expected = config(lr=1e-4, max_seq_len=64, targets=("q_proj", "k_proj"), strict=True)
    assert TrainConfig(**options) == expected
    # As the command does it: what is given as a flag wins.
    assert TrainConfig(**options | {"lr": "2e-4"}).lr == 2e-4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "ranck: 4\nepochs: 2\nlearning_speed: 1\nRank: 2\n"),
        ("run.toml", "ranck = 4\nepochs = 2\nlearning_speed = 1\nRank = 2\n"),
    ],
)
def test_unknown_options_are_all_named_with_what_may_have_been_meant(
    tmp_path: Path, name: str, content: str
) -> None:
    path = write(tmp_path, name, content)

    options, unknown = load_config_file(path, TrainConfig)

    assert options == {"epochs": 2}
    assert unknown == [
        f"--config {path} has no option 'ranck' (did you mean rank?)",
        f"--config {path} has no option 'learning_speed'",
        f"--config {path} has no option 'Rank' (did you mean rank?)",
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("run.yaml", "rank: [1", "is not valid YAML"),
        ("run.yaml", "rank: 1\n\trank: 2", "is not valid YAML"),
        ("run.yaml", "[" * 5000, "is not valid YAML"),
        ("run.yaml", "seed: !!int x", "is not valid YAML"),
        ("run.yaml", "seed: !!timestamp x", "is not valid YAML"),
        ("run.toml", "rank = ", "is not valid TOML"),
        ("run.toml", "rank = 1\nrank = 2", "is not valid TOML"),
        ("run.toml", "rank = " + "[" * 5000, "is not valid TOML"),
        ("run.toml", "seed = " + "9" * 5000, "is not valid TOML: a number has too many digits"),
        ("run.toml", "a" + ".a" * 5000 + " = 1", "is not valid TOML: line 1: a key has too many"),
        ("run.yaml", "#" * 70_000, "has more than 64 KB"),
        ("run.yaml", "- rank\n- 8", "must hold names and values"),
        ("run.yaml", "rank", "must hold names and values"),
        ("run.yaml", b"rank: \xff\xfe", "is not text in UTF-8"),
    ],
)
def test_broken_config_file_is_one_line_that_names_it(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    path = write(tmp_path, name, content)

    with pytest.raises(ConfigError, match=reason) as raised:
        load_config_file(path, TrainConfig)
    assert str(raised.value).startswith(f"--config {path} ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "# rank: 4\n"], ids=["empty", "commented_out"])
@pytest.mark.parametrize("name", ["run.yaml", "run.toml"])
def test_config_file_without_options_changes_nothing(
    tmp_path: Path, name: str, content: str
) -> None:
    assert load_config_file(write(tmp_path, name, content), TrainConfig) == ({}, [])


def test_config_file_that_is_missing_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as raised:
            load_config_file(path, TrainConfig)
        assert str(path) in str(raised.value)


def test_wrong_value_in_a_config_file_is_named_by_its_option(tmp_path: Path) -> None:
    options, _ = load_config_file(
        write(tmp_path, "run.yaml", "rank: many\nepochs: null\n"), TrainConfig
    )

    with pytest.raises(ConfigError) as raised:
        config(**options)
    assert raised.value.problems == [
        "--rank must be a whole number, not 'many'",
        "--epochs must be a whole number, not None",
    ]
