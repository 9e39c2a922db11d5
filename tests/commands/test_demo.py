"""`mlxtune demo`: its training, its files, and the commands that it recommends."""

from __future__ import annotations

import shlex
from pathlib import Path
from types import SimpleNamespace

import pytest

from mlxtune import DemoConfig
from mlxtune.cli import COMMANDS
from mlxtune.config import TrainConfig
from mlxtune.core.evaluation.outcome import Sample
from mlxtune.views.run_text import next_lines
from tests.command import Cli
from tests.models import write_chat
from tests.paths import DATA, ROOT


def test_demo_is_the_first_command_of_the_readme() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    line = next(each for each in readme.splitlines() if "mlxtune train" in each)
    train = next(command for command in COMMANDS if command.name == "train")
    with train.make_context("train", shlex.split(line.partition("train ")[2])) as context:
        given = {k: v for k, v in context.params.items() if v not in (None, (), False)}
    typed, demo = TrainConfig(**given), DemoConfig(output="adapters.safetensors").training()
    assert demo.model_path == str(DATA / "demo-qwen3") == str(ROOT / typed.model_path)
    assert demo.data == (str(DATA / "bookings.jsonl"),) == (str(ROOT / typed.data[0]),)
    assert (demo.targets, demo.lr, demo.epochs) == (typed.targets, typed.lr, typed.epochs)


def test_demo_shows_an_answer_before_and_after_and_what_is_next(
    cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trained = []
    turns = [("user", "Hello?"), ("assistant", "Hello!")]
    turns = [turns, [*turns, ("user", "Friday?\nFour of us."), ("assistant", "{}")]]
    rows = write_chat(tmp_path / "chat.jsonl", turns)

    def train(config: TrainConfig) -> SimpleNamespace:
        trained.append(config)
        sample = Sample(str(rows), 2, "<|user|>", "{}", "Of course!", '{"people": 4}')
        samples = SimpleNamespace(generated=SimpleNamespace(samples=[sample] * 2))
        return SimpleNamespace(evaluation=samples)

    monkeypatch.setattr("mlxtune.commands.demo.train", train)
    outcome = cli("demo", "--max-steps", 7, "--overwrite")
    assert outcome.code == 0, outcome.err
    assert trained == [DemoConfig(max_steps=7, overwrite=True).training()]
    assert trained[0].output == "mlxtune-demo/adapters.safetensors"
    lines = outcome.err.splitlines()
    assert lines[0] == "Question    Friday? Four of us."
    assert lines[1] == "Before      Of course!"
    assert lines[2] == 'After       {"people": 4}'
    assert lines[3].startswith("Next        ask it: mlxtune generate ")


def test_commands_named_next_can_be_typed() -> None:
    lines = list(next_lines(DemoConfig(output="my demo/a.safetensors").training()))
    for line in lines[:2]:
        name, *words = shlex.split(line.partition("mlxtune ")[2])
        command = next(each for each in COMMANDS if each.name == name)
        with command.make_context(name, words) as context:
            assert context.params["adapter" if name == "generate" else "data"]
    assert "'my demo/a.safetensors'" in lines[0]
