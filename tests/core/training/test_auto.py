"""The options that --auto chooses, from facts alone."""

from __future__ import annotations

import dataclasses
import shlex
from typing import Any

import pytest

from mlxtune.cli.commands import COMMANDS
from mlxtune.cli.options import merged
from mlxtune.config import TrainConfig
from mlxtune.config.fields import given_options
from mlxtune.core.training.auto import Facts, choose, command_line
from tests.configs import config

FACTS = Facts(rows=800, validates=True, parameters=600_000_000, needed=512, fitting=10**6)


def chosen(given: tuple[str, ...] = (), **facts: Any) -> dict[str, Any]:
    return choose(dataclasses.replace(FACTS, **facts), config(), given)


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
    assert choose(FACTS, config(objective="dpo"), ())["lr"] == 2e-5


def test_length_is_what_the_data_needs_and_the_memory_allows() -> None:
    assert chosen(needed=2048)["max_seq_len"] == 2048
    assert chosen(needed=2048, fitting=1500)["max_seq_len"] == 1500
    assert chosen(needed=2048, fitting=0)["max_seq_len"] == 2  # the plan then gives the reason


def test_given_options_stay() -> None:
    given = config(rank=4, epochs=2, batch_size=8)
    found = choose(FACTS, given, given_options(given))
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
    fields = {each.name for each in dataclasses.fields(TrainConfig)}
    values = {name: value for name, value in flags.items() if name in fields}
    assert merged(TrainConfig, None, values) == run
