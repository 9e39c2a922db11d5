"""The options that --auto chooses: from facts alone, in a run, and their record."""

from __future__ import annotations

import dataclasses
import json
import shlex
from pathlib import Path
from typing import Any

import pytest

from mlxtune.cli.options import build_config
from mlxtune.cli.table import COMMANDS
from mlxtune.config import TrainConfig
from mlxtune.config.fields import explicit_options
from mlxtune.session.auto import AutoFacts, choose_options, command_line, with_auto_options
from mlxtune.session.session import TrainingSession
from mlxtune.views.console import RunConsole
from tests.command import Cli
from tests.configs import config
from tests.models import sums, write_chat, write_model

FACTS = AutoFacts(rows=800, validates=True, parameters=600_000_000, needed=512, fitting=10**6)


def settled(options: TrainConfig) -> TrainingSession[TrainConfig]:
    session = TrainingSession(options, RunConsole(quiet=True), explicit_options(options))
    return with_auto_options(session)


def test_auto_chooses_prints_and_records_what_is_not_given(
    train: Cli, output: Path, chat: Path
) -> None:
    outcome = train("--auto", "--rank", 8, "--max-steps", 1, quiet=False)
    (line,) = [each for each in outcome.err.splitlines() if each.startswith("Auto")]
    about = json.loads((output.parent / "checkpoints" / "run.json").read_text())
    assert line.split(maxsplit=1)[1] == about["auto"]
    assert about["auto"].startswith("mlxtune train --model-path ")
    assert " parameters, and 99% of the supervised tokens within the first " in outcome.err
    saved = about["config"]
    assert (saved["targets"], saved["rank"], saved["alpha"]) == (["all"], 8, 16.0)
    assert (saved["epochs"], saved["val_steps"], saved["auto"]) == (3, 1, False)


def test_auto_of_a_file_and_of_python_are_the_same(
    train: Cli, model: Path, chat: Path, tmp_path: Path
) -> None:
    (tmp_path / "run.yaml").write_text("auto: true\nlr: 0.001\n")
    outcome = train("--config", tmp_path / "run.yaml", "--dry-run", quiet=False)
    assert " --lr 0.001 " in outcome.err
    found = settled(TrainConfig(str(model), (str(chat),), auto=True, lr=0.001)).config
    assert (found.lr, found.targets, found.rank) == (0.001, ("all",), 16)


def test_auto_makes_room_for_the_supervised_tokens(tmp_path: Path) -> None:
    model = write_model(tmp_path / "model", "qwen3", max_position_embeddings=8192)
    rows = [[("user", "Count."), ("assistant", "one two three " * 100)] for _ in range(6)]
    data = write_chat(tmp_path / "long.jsonl", [*rows, *sums(4)])
    session = settled(TrainConfig(str(model), (str(data),), auto=True, no_cache=True))
    assert session.config.max_seq_len > 512
    assert f"--max-seq-len {session.config.max_seq_len}" in session.command


def test_auto_counts_weighted_rows(tmp_path: Path, model: Path) -> None:
    data = write_chat(tmp_path / "chat.jsonl", sums(20))
    numbers = []
    for weight in ("", "=10"):
        options = TrainConfig(str(model), (f"{data}{weight}",), auto=True, val_split=0.1)
        found = settled(options).config
        numbers.append((found.epochs, found.val_steps))
    # 18 rows in steps of 4 are 5 steps an epoch; with the weight, they are 45.
    assert numbers == [(3, 2), (3, 14)]


# From facts alone


def chosen(given: tuple[str, ...] = (), **facts: Any) -> dict[str, Any]:
    return choose_options(dataclasses.replace(FACTS, **facts), config(), given)


def test_choice_for_a_usual_run() -> None:
    assert chosen() == {
        "targets": ("all",),
        "rank": 16,
        "alpha": 32.0,
        "lr": 4e-4,
        "max_seq_len": 512,
        "epochs": 1,
        "val_steps": 20,
        "patience": 5,
    }


@pytest.mark.parametrize(
    ("rows", "epochs", "val_steps"),
    [(20, 3, 2), (160, 3, 12), (204, 2, 11), (396, 2, 20), (400, 1, 10), (10**6, 1, 25_000)],
)
def test_epochs_make_100_steps_in_three_passes_and_ten_validations(
    rows: int, epochs: int, val_steps: int
) -> None:
    found = chosen(rows=rows)
    assert (found["epochs"], found["val_steps"]) == (epochs, val_steps)
    assert "val_steps" not in chosen(rows=rows, validates=False)


@pytest.mark.parametrize(
    ("parameters", "rate"),
    [(260_000, 5e-3), (4 * 10**9, 2e-4), (8 * 10**9, 2e-4), (70 * 10**9, 7e-5), (10**12, 5e-5)],
)
def test_smaller_models_take_higher_rates(parameters: int, rate: float) -> None:
    assert chosen(parameters=parameters)["lr"] == rate


def test_objectives_of_preferences_take_a_twentieth_of_the_rate() -> None:
    assert choose_options(FACTS, config(objective="dpo"), ())["lr"] == 2e-5


def test_length_is_limited_by_the_data_and_the_memory() -> None:
    assert chosen(needed=2048)["max_seq_len"] == 2048
    assert chosen(needed=2048, fitting=1500)["max_seq_len"] == 1500
    assert chosen(needed=2048, fitting=0)["max_seq_len"] == 2  # the plan then gives the reason


def test_options_set_by_the_user_stay() -> None:
    given = config(rank=4, epochs=2, batch_size=8)
    found = choose_options(FACTS, given, explicit_options(given))
    assert not found.keys() & {"rank", "epochs"}
    assert (found["alpha"], found["val_steps"]) == (8.0, 20)


def test_command_line_gives_the_same_options() -> None:
    run = config(
        lr=5e-3,
        alpha=32.0,
        targets=("all",),
        field=("prompt=a", "completion=b"),
        output="out-1.0",
        quiet=True,
    )
    words = shlex.split(command_line(run))
    assert words[:2] == ["mlxtune", "train"]
    assert words[words.index("--alpha") + 1] == "32"
    command = next(each for each in COMMANDS if each.name == "train")
    flags = command.make_context("train", words[2:]).params
    for name in ("config", "dry_run", "resume"):
        flags.pop(name)
    fields = {field.name for field in dataclasses.fields(TrainConfig)}
    values = {name: value for name, value in flags.items() if name in fields}
    assert build_config(TrainConfig, None, values) == run


def test_copy_of_a_config_keeps_the_given_rank() -> None:
    given = dataclasses.replace(config(rank=8, auto=True), output="elsewhere")
    assert not {"rank", "output"} & choose_options(FACTS, given, explicit_options(given)).keys()
