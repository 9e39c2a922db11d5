"""Rules for every command: help with a valid example, and a fast start."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys

import click
import pytest

from mlxtune.cli import COMMANDS
from mlxtune.cli.options import ConfigCommand
from tests.command import Cli
from tests.paths import ROOT

# Commands without --json: their result is a file, a conversation, or text to read or run.
NEEDS_NO_JSON = [
    "demo",
    "train",
    "watch",
    "serve",
    "generate",
    "chat",
    "fuse",
    "export",
    "import",
    "report",
    "push",
]
each_command = pytest.mark.parametrize("command", COMMANDS, ids=lambda each: str(each.name))


def examples(command: click.Command) -> list[list[str]]:
    """Return the words of each example of a command, starting with `mlxtune`."""
    text = (command.epilog or "").removeprefix("Example: ")
    parts: list[list[str]] = [[]]
    words = shlex.shlex(text, posix=True, punctuation_chars=True)
    words.whitespace_split = True
    for word in words:
        if word in ("|", "&&", ";", "||"):
            parts.append([])
        else:
            parts[-1].append(word)
    return [part for part in parts if part[:1] == ["mlxtune"]]


@each_command
def test_help_says_what_a_command_does_and_shows_an_example(
    cli: Cli, command: click.Command
) -> None:
    outcome = cli(command.name, "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    assert f"Usage: mlxtune {command.name} " in outcome.out
    assert "Example: " in outcome.out
    assert re.match(r"[A-Z]", command.help or "")
    for parameter in command.params:
        if isinstance(parameter, click.Option):
            assert (parameter.help or "").strip(), parameter.name


@each_command
def test_help_example_parses_verbatim(command: click.Command) -> None:
    typed = examples(command)
    assert [words[1] for words in typed].count(str(command.name)) >= 1
    for words in typed:
        # The command's words end before a redirection by < or >.
        end = next((i for i, word in enumerate(words) if word[:1] in "<>"), len(words))
        called = next(each for each in COMMANDS if each.name == words[1])
        with called.make_context(called.name, words[2:end]) as context:
            given = {k: v for k, v in context.params.items() if v not in (None, ())}
        if isinstance(called, ConfigCommand):
            names = called.config.__dataclass_fields__
            called.config(**{k: v for k, v in given.items() if k in names})
        for word in words:
            if word.startswith(("data/", "docs/")):
                assert (ROOT / word).exists(), word


@each_command
def test_program_gets_json_on_stdout(command: click.Command) -> None:
    names = {parameter.name for parameter in command.params}
    assert names & {"json", "as_json"} or command.name in NEEDS_NO_JSON


def test_no_help_loads_anything_slow() -> None:
    code = (
        "import json, sys\n"
        "from mlxtune.cli import COMMANDS, main\n"
        "for each in ['', *(each.name for each in COMMANDS)]:\n"
        "    try: main([each, '--help'] if each else ['--help'])\n"
        "    except SystemExit as done: assert done.code == 0\n"
        "print(json.dumps(list(sys.modules)), file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
    )
    loaded = {name.partition(".")[0] for name in json.loads(process.stderr)}
    slow = {"mlx", "mlx_lm", "transformers", "tokenizers", "numpy", "rich", "torch", "numba"}
    assert not loaded & slow
    assert process.stdout.count("Example: ") == len(COMMANDS)


def test_group_help_fits_each_command_on_one_line(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    listed = [line for line in cli("--help").out.partition("Commands:")[2].split("\n") if line]
    assert len(listed) == len(COMMANDS)
    assert max(map(len, listed)) <= 80
    assert not [line for line in listed if line.endswith("...")]


def test_help_of_the_group_lists_every_command_with_what_it_does(cli: Cli) -> None:
    listed = cli("--help").out.partition("Commands:")[2].split("\n")
    assert [line.split()[0] for line in listed if line.strip()] == [
        str(command.name) for command in COMMANDS
    ]


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: command.name)
def test_option_of_one_value_is_not_given_twice(cli: Cli, command: click.Command) -> None:
    for option in command.params:
        if isinstance(option, click.Option) and not option.is_flag and not option.multiple:
            name = option.opts[0]
            twice = f"{name} is given twice: keep one"
            assert cli(command.name, name, "a", name, "b").error == twice
            assert cli(command.name, f"{name}=a", name, "a").error == twice


def test_option_of_several_values_and_a_switch_may_be_repeated(cli: Cli) -> None:
    outcome = cli("plan", "--data", "a", "--data", "b", "--auto", "--auto", "--quiet")
    assert outcome.error.startswith("--model-path is required")


def test_help_of_train_starts_with_what_most_people_need(cli: Cli) -> None:
    train = next(command for command in COMMANDS if command.name == "train")
    assert isinstance(train, ConfigCommand)
    shown, every = cli("train", "--help").out, cli("train", "--help-all").out
    names = {option.name: option.opts[0] for option in train.params}

    def listed(text: str) -> set[str]:
        return set(re.findall(r"^ +(?:-\w, )?(--[a-z-]+)", text, re.MULTILINE))

    assert listed(shown) == {*(names[each] for each in train.common), "--help", "--help-all"}
    assert len(train.common) == 12
    assert listed(every) == {*names.values(), "--help"}
    assert "Training:" in shown
