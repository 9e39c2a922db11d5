"""Rules for the sizes of folders and modules, which import contracts cannot express."""

from __future__ import annotations

import ast
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

from tests.paths import ROOT
from tests.sources import PACKAGE, tree_of

MOST_MODULES = 16
FEWEST_LINES = 80
# Folders that may have short modules, as each command, format or tracker has its own file.
ONE_FILE_EACH = ("commands/", "backend/adapters/formats/", "tracking/")
SCRIPTS = ("worker", "_child", "probe", "__main__")


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def test_no_folder_has_too_many_modules() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in modules():
        counts[str(path.parent.relative_to(PACKAGE))] += 1
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}


def imported(path: Path) -> Iterator[Path]:
    """Yield the package's files that a file imports, including imports within functions."""
    for node in ast.walk(tree_of(path)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            found = ROOT / f"{name.replace('.', '/')}.py"
            if found.is_relative_to(PACKAGE) and found.exists():
                yield found


def test_short_module_has_several_users() -> None:
    users: dict[Path, set[Path]] = defaultdict(set)
    for path in PACKAGE.rglob("*.py"):
        for other in imported(path):
            users[other].add(path)
    short = {
        name: lines
        for path in modules()
        if len(users[path]) < 2
        and not (name := path.relative_to(PACKAGE).as_posix()).startswith(ONE_FILE_EACH)
        and not path.stem.endswith(SCRIPTS)
        and (lines := len(path.read_text(encoding="utf-8").splitlines())) < FEWEST_LINES
    }
    assert short == {}, "merge each into the module whose subject it is"
