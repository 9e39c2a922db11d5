"""Model folders with glob patterns as names, and tokenizer files other than tokenizer.json."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.text.tokenizer import try_tokenizer
from mlxtune.errors import ModelError
from tests.command import Cli
from tests.slow import slow


@pytest.mark.parametrize("name", ["br[1]m", slow("a*"), slow("wh?t"), slow("[!x]")])
def test_folder_whose_name_is_a_pattern_is_a_folder_like_any_other(
    cli: Cli, model: Path, chat: Path, tmp_path: Path, name: str
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / name / "model"))
    data = Path(shutil.copy(chat, folder.parent))
    output = folder.parent / "out" / "adapters.safetensors"
    options = ["--output", output, "--max-steps", 1, "--samples", 0, "--val-split", 0, "--quiet"]
    outcome = cli("train", "--model-path", folder, "--data", data, *options)
    assert (outcome.code, outcome.err) == (0, "")
    # The config records the model's real name.
    config = json.loads((output.parent / "adapter_config.json").read_text())
    assert config["model"] == str(folder)


def with_tokenizers(folder: Path, chosen: Any, **files: dict[str, Any]) -> Path:
    """Write changed copies of tokenizer.json; transformers may load the files in `chosen`."""
    good = json.loads((folder / "tokenizer.json").read_text())
    for name, changes in files.items():
        (folder / f"{name}.json").write_text(json.dumps(good | changes))
    config = json.loads((folder / "tokenizer_config.json").read_text())
    config["fast_tokenizer_files"] = chosen
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


GROWS = {
    "normalizer": {
        "type": "Sequence",
        "normalizers": [{"type": "Replace", "pattern": {"String": "a"}, "content": "aa"}] * 33,
    }
}


@pytest.mark.parametrize("name", ["tokenizer.1.0", "tokenizer.5.0.0", "my-tokenizer.0"])
def test_every_tokenizer_that_may_be_loaded_is_tried(broken: Path, name: str) -> None:
    chosen = ["tokenizer.json", f"{name}.json"]
    with_tokenizers(broken, chosen, **{name: GROWS})
    with pytest.raises(ModelError, match=f"{name}.json: its normalizer turns a character into"):
        try_tokenizer(broken)


@pytest.mark.parametrize(
    "chosen",
    [
        ["/tmp/tokenizer.1.json"],
        ["../tokenizer.1.json"],
        ["tokenizer.1/../../x.json"],
        [["tokenizer.1.json"]],
        {"../tokenizer.1.json": 1},
        "../tokenizer.1.json",
        7,
        [None],
    ],
    ids=str,
)
def test_tokenizer_elsewhere_is_refused(
    inspect: Cli, broken: Path, chat: Path, chosen: Any
) -> None:
    with_tokenizers(broken, chosen)
    error = inspect("--model-path", broken).error
    assert "but that is not a file in its folder: remove fast_tokenizer_files" in error


def test_sound_choice_of_tokenizers_is_used(inspect: Cli, broken: Path) -> None:
    with_tokenizers(broken, ["tokenizer.json", "tokenizer.1.0.json"], **{"tokenizer.1.0": {}})
    assert inspect("--model-path", broken).code == 0
