"""The guide: its commands are valid, its messages exist, and its figures are current."""

from __future__ import annotations

import ast
import dataclasses
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import click
import pytest

from mlxtune.cli import COMMANDS
from mlxtune.cli.options import ConfigCommand
from tests.long import check_guide
from tests.long.check_guide import blocks
from tests.sources import PACKAGE, nodes_of

GUIDE = check_guide.GUIDE.read_text(encoding="utf-8")
BY_NAME = {str(command.name): command for command in COMMANDS}


def in_blocks() -> list[str]:
    """Return the mlxtune commands in the guide's code blocks."""
    found = re.findall(r"(?ms)^```sh[^\n]*\n(.*?)^```$", GUIDE)
    return sorted({line for block in found for line in re.findall(r"(?m)^mlxtune .*$", block)})


def in_text() -> list[str]:
    """Return the mlxtune commands in the guide's text and tables, where … replaces a part."""
    return sorted(set(re.findall(r"`(mlxtune [a-z]+ [^`]*)`", GUIDE)))


def typed(line: str) -> tuple[click.Command, dict[str, Any]]:
    """Return the command that a line calls, and its options. Raises UsageError if invalid."""
    name, *words = (word for word in shlex.split(line)[1:] if word != "…")
    command = BY_NAME[name]
    with command.make_context(name, words) as context:
        return command, {k: v for k, v in context.params.items() if v not in (None, ())}


@pytest.mark.parametrize("line", in_blocks())
def test_command_in_a_block_of_the_guide_can_be_typed(line: str) -> None:
    command, given = typed(line)
    if isinstance(command, ConfigCommand):
        fields = {field.name for field in dataclasses.fields(command.config)}
        command.config(**{name: value for name, value in given.items() if name in fields})


@pytest.mark.parametrize("line", in_text())
def test_command_in_the_text_of_the_guide_has_options_that_exist(line: str) -> None:
    typed(line)


def test_guide_covers_the_whole_path_of_a_newcomer() -> None:
    called = [
        word
        for block in blocks(GUIDE)
        for word in re.findall(r"(?m)^mlxtune ([a-z]+)", block.commands)
    ]
    path = ["doctor", "inspect", "plan", "train", "eval", "chat", "fuse", "export"]
    preferences, rewards = ["inspect", "train"], ["train", "train"]
    assert [name for name in called if name in path] == [*path, *preferences, *rewards]


def test_short_form_takes_few_steps_and_validates_on_few_rows() -> None:
    text = "mlxtune train --lr 1\nmlxtune eval\n"
    short = "--max-steps 6 --val-rows 20"
    assert check_guide.shortened(text) == f"mlxtune train --lr 1 {short}\nmlxtune eval\n"
    shorter = check_guide.shortened(
        "mlxtune train --max-steps 60 --val-data data/bookings_test.jsonl\n"
    )
    assert shorter == f"mlxtune train {short}\n"


def test_block_declares_its_output_and_input() -> None:
    text = 'a\n```sh demo writes=x/y,z typed="Hi, you"\none\n```\n```sh\nnot run\n```\n'
    (block,) = blocks(text)
    assert (block.line, block.commands, block.writes) == (2, "one\n", ("x/y", "z"))
    assert block.typed == "Hi, you\n"
    with pytest.raises(ValueError, match="wirtes"):
        list(blocks("```sh demo wirtes=x\n```\n"))


@pytest.mark.parametrize(
    ("commands", "writes", "said"),
    [
        ("true", (), None),
        ("true\nfalse\ntrue", (), "ended with 1"),
        ("touch a", ("a",), None),
        ("touch a", ("b",), "did not write b"),
        ("echo 'Traceback (most recent call last)'", (), "traceback"),
        ("read line; test \"$line\" = 'Hi you'", (), None),
    ],
)
def test_failing_block_is_detected(
    tmp_path: Path, commands: str, writes: tuple[str, ...], said: str | None
) -> None:
    block = check_guide.Block(1, "demo", commands, writes, "Hi you\n")
    problem = check_guide.run(block, tmp_path, {"PATH": "/usr/bin:/bin"})
    assert (problem is None) if said is None else (problem is not None and said in problem)


# Messages


def said_by_the_code() -> set[str]:
    """Every string in the package's code, with … in place of values."""
    texts = set()
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in nodes_of(path):
            if isinstance(node, ast.JoinedStr):
                parts = (p.value if isinstance(p, ast.Constant) else "…" for p in node.values)
                texts.add("".join(map(str, parts)))
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                texts.add(node.value)
    return texts


def messages() -> list[str]:
    """Return the messages in the guide's two tables of messages."""
    tables = re.findall(r"(?ms)^\| message \| what to do \|\n\| --- \| --- \|\n(.*?)\n\n", GUIDE)
    assert len(tables) == 2
    return re.findall(r"(?m)^\| `(.*?)` \|", "\n".join(tables) + "\n")


def test_guide_quotes_only_messages_of_the_code() -> None:
    said, invented = said_by_the_code(), []
    for message in messages():
        parts = [part.strip() for part in message.split("…") if part.strip()]
        pattern = re.compile(".*".join(map(re.escape, parts)), re.DOTALL)
        likely = (text for text in said if all(part in text for part in parts))
        if not any(pattern.search(text) for text in likely):
            invented.append(message)
    assert invented == []


# Figures


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    from tests.long import memory_table  # imports mlx

    return memory_table


@pytest.mark.parametrize("bits", [4, 16])
def test_memory_of_a_model_is_what_the_planner_says_now(maker: ModuleType, bits: int) -> None:
    with maker.on_a_gpu():
        found = maker.predicted("Qwen3 0.6B", bits)
    assert f"| {found.cells()} |" in GUIDE, "out of date: run python -m tests.long.memory_table"
    # The model's own page says 0.6B parameters.
    assert found.parameters == 596_049_920 or bits == 4


def test_larger_models_and_longer_examples_take_more(maker: ModuleType) -> None:
    rows = re.findall(r"(?m)^\| ([\w. ]+) \| (4|16) bits \| (.*) \|$", GUIDE)
    assert {name for name, *_ in rows} == set(maker.MODELS)
    for _, _, cells in rows:
        weights, *peaks = map(float, cells.split(" | ")[:-1])
        assert weights < peaks[0] < peaks[1] < peaks[2]
