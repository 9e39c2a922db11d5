"""The choices of --auto from the command, a config file and Python, and their record."""

from __future__ import annotations

import json
from pathlib import Path

from mlxtune import TrainConfig
from mlxtune.config.fields import given_options
from mlxtune.session.auto import with_auto
from mlxtune.views.console import RunConsole
from tests.command import Cli
from tests.models import sums, write_chat, write_model


def test_auto_chooses_prints_and_records_what_is_not_given(
    train: Cli, output: Path, chat: Path
) -> None:
    outcome = train("--auto", "--rank", 8, "--max-steps", 1, quiet=False)
    (line,) = [each for each in outcome.err.splitlines() if each.startswith("Auto")]
    about = json.loads((output.parent / "checkpoints" / "run.json").read_text())
    assert line.split(maxsplit=1)[1] == about["auto"]
    assert about["auto"].startswith("mlxtune train --model-path ")
    assert " parameters, and supervised tokens of which 99% lie within the first " in outcome.err
    config = about["config"]
    assert (config["targets"], config["rank"], config["alpha"]) == (["all"], 8, 16.0)
    assert (config["epochs"], config["val_steps"], config["auto"]) == (3, 1, False)


def test_auto_of_a_file_and_of_python_are_the_same(
    train: Cli, model: Path, chat: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("auto: true\nlr: 0.001\n")
    outcome = train("--config", tmp_path / "run.yaml", "--dry-run", quiet=False)
    assert " --lr 0.001 " in outcome.err
    config = TrainConfig(str(model), (str(chat),), auto=True, lr=0.001)
    settled, _ = with_auto(config, given_options(config), model, RunConsole(quiet=True))
    assert (settled.lr, settled.targets, settled.rank) == (0.001, ("all",), 16)


def test_auto_makes_room_for_the_supervised_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3", max_position_embeddings=8192)
    rows = [[("user", "Count."), ("assistant", "one two three " * 100)] for _ in range(6)]
    data = write_chat(tmp_path / "long.jsonl", [*rows, *sums(4)])
    config = TrainConfig(str(model), (str(data),), auto=True, no_cache=True)
    settled, line = with_auto(config, given_options(config), model, RunConsole(quiet=True))
    assert settled.max_seq_len > 512
    assert f"--max-seq-len {settled.max_seq_len}" in line


def test_auto_counts_a_row_as_often_as_an_epoch_uses_it(tmp_path: Path, model: Path) -> None:
    data = write_chat(tmp_path / "chat.jsonl", sums(20))
    chosen = []
    for weight in ("", "=10"):
        config = TrainConfig(str(model), (f"{data}{weight}",), auto=True, val_split=0.1)
        settled, _ = with_auto(config, given_options(config), model, RunConsole(quiet=True))
        chosen.append((settled.epochs, settled.val_steps))
    # 18 rows in steps of 4 are 5 steps an epoch; with the weight, they are 45.
    assert chosen == [(3, 2), (3, 14)]
