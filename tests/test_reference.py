"""The pages generated from the code are up to date."""

from __future__ import annotations

import ast
import dataclasses
import importlib.util
import re
from types import ModuleType

import click
import pytest

import mlxtune
from mlxtune.cli import COMMANDS
from mlxtune.cli.options import ConfigCommand
from mlxtune.config.fields import flag
from tests.paths import ROOT
from tests.sources import PACKAGE, tree_of

AGAIN = "out of date: run python docs/make_reference.py"


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("maker", ROOT / "docs" / "make_reference.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_reference_matches_the_code(maker: ModuleType) -> None:
    assert maker.REFERENCE.read_text(encoding="utf-8") == maker.reference(), AGAIN


def test_architecture_lists_the_modules_of_the_package(maker: ModuleType) -> None:
    text = maker.ARCHITECTURE.read_text(encoding="utf-8")
    assert text == maker.architecture(text), AGAIN


def test_reference_holds_every_command_option_and_name(maker: ModuleType) -> None:
    text = maker.reference()
    for command in COMMANDS:
        assert f"\n### `mlxtune {command.name}`\n" in text
        if isinstance(command, ConfigCommand):
            arguments = {each.name for each in command.params if isinstance(each, click.Argument)}
            for field in dataclasses.fields(command.config):
                assert field.name in arguments or f"\n| `{flag(field.name)}` |" in text
    for name in mlxtune.__all__:
        assert f"\n### `{name}`\n" in text
    assert "| `--epochs` | whole number, at least 1 | `1` | Passes over the training rows." in text
    assert "at 0x" not in text


def test_links_within_the_reference_lead_somewhere(maker: ModuleType) -> None:
    text = maker.reference()
    headings = re.findall(r"(?m)^#+ (.+)$", text)
    anchors = {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}
    assert set(re.findall(r"\(#([\w-]+)\)", text)) <= anchors


def test_architecture_lists_every_module_once_and_no_other(maker: ModuleType) -> None:
    text = maker.ARCHITECTURE.read_text(encoding="utf-8")
    listed, folder = [], ""
    for line in text.splitlines():
        if found := re.fullmatch(r"### `(mlxtune/[\w/]*)`", line):
            folder = found[1]
            listed.append(folder + "__init__.py")
        elif found := re.match(r"\| `([\w.]+\.py)` \| \S", line):
            listed.append(folder + found[1])
    package = ROOT / "mlxtune"
    assert sorted(listed) == sorted(str(p.relative_to(ROOT)) for p in package.rglob("*.py"))


def test_every_table_of_modules_has_whole_summaries(maker: ModuleType) -> None:
    lines = maker.modules().splitlines()
    for line, after in zip(lines, [*lines[1:], ""], strict=True):
        assert not line.startswith("| --- ") or after.startswith("| `"), "a table without modules"
        assert not line.endswith(": |"), line


def test_every_module_has_a_docstring() -> None:
    for path in PACKAGE.rglob("*.py"):
        docstring = ast.get_docstring(tree_of(path))
        assert docstring, f"{path}: has no docstring"


def test_architecture_and_guide_name_only_files_that_exist() -> None:
    for page in ("architecture.md", "guide.md"):
        text = (ROOT / "docs" / page).read_text(encoding="utf-8")
        named = set(re.findall(r"`((?:mlxtune|tests|docs|data)/[\w./*-]+)`", text))
        missing = [name for name in sorted(named) if not list(ROOT.glob(name.rstrip("/")))]
        assert missing == [], page
        linked = set(re.findall(r"\]\((?!http)([\w./-]+)", text))
        assert [name for name in linked if not (ROOT / "docs" / name).exists()] == [], page
