"""Output names that the file system refuses are found before any work."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import InspectConfig, TrainConfig
from mlxtune.errors import ConfigError
from tests.attacks.test_files import snapshot
from tests.command import Cli

LONG = "a" * 300
NAMES = {
    "long": f"{LONG}.safetensors",
    "long in bytes": "é" * 130,
    "long folder": f"{LONG}/adapters.safetensors",
    "long folder in a new one": f"new/{LONG}/adapters.safetensors",
    "long behind dots": f"new/../{LONG}/adapters.safetensors",
    "long path": "/".join(["b" * 200] * 25),
}
OPTIONS = ["--output", "--checkpoint-dir"]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", OPTIONS)
def test_name_is_refused_before_training(
    train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
) -> None:
    from mlxtune.commands import train as recipe

    monkeypatch.setattr(recipe, "prepare_run", _not_reached)
    before = snapshot(tmp_path)
    error = train(option, f"{tmp_path}/{NAMES[name]}").error
    assert "cannot be written: File name too long: choose another" in error
    assert error.endswith(f"choose another {option}")
    assert snapshot(tmp_path) == before


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("option", ["--html", "--dump"])
def test_name_is_refused_before_inspecting(
    inspect: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, name: str
) -> None:
    from mlxtune.session import session

    monkeypatch.setattr(session, "load_dataset", _not_reached)
    error = inspect(option, f"{tmp_path}/{NAMES[name]}").error
    assert error.endswith("cannot be written: File name too long: choose another --html or --dump")


@pytest.mark.parametrize("refused", [":", "?", "*", "trailing "])
@pytest.mark.parametrize("option", OPTIONS)
def test_character_that_the_file_system_refuses_is_found_by_trying(
    train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, option: str, refused: str
) -> None:
    """exFAT and network file systems refuse some characters."""
    from mlxtune.commands import train as recipe

    monkeypatch.setattr(recipe, "prepare_run", _not_reached)
    touch, mkdir = Path.touch, Path.mkdir

    def check(path: Path) -> None:
        if refused in str(path):
            raise OSError(errno.EINVAL, "Invalid argument")

    monkeypatch.setattr(Path, "touch", lambda path, *a, **o: [check(path), touch(path, *a, **o)])
    monkeypatch.setattr(Path, "mkdir", lambda path, *a, **o: [check(path), mkdir(path, *a, **o)])
    before = snapshot(tmp_path)
    assert "Invalid argument" in train(option, tmp_path / f"a{refused}b").error
    assert snapshot(tmp_path) == before


def _not_reached(*_arguments: Any, **_options: Any) -> None:
    raise AssertionError("work began")


@pytest.mark.parametrize("name", ["a\0.safetensors", "a\0/b", "a\ud800.safetensors"])
@pytest.mark.parametrize("option", ["output", "checkpoint_dir", "cache_dir", "html", "dump"])
def test_name_that_no_command_line_has_is_refused(option: str, name: str) -> None:
    """Such a name can come from a config file."""
    kind = InspectConfig if option in ("html", "dump") else TrainConfig
    with pytest.raises(
        ConfigError, match=r"(without null characters|must be text in UTF-8), not '"
    ):
        kind("model", data="chat.jsonl", **{option: name})
