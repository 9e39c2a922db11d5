"""Counts of the package's structure: importers, names that occur twice, lines.

`python -m tests.long.structure` prints the table, and with `--names` what each number counts.
"""

from __future__ import annotations

import argparse
import ast
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from tests.paths import ROOT
from tests.sources import PACKAGE, nodes_of, tree_of

# Files that a process is started with: nothing imports them.
SCRIPTS = ("_helper", "__main__")
OPERATIONS = ("geglu", "head_losses", "rms_norm", "swiglu", "tanh")
# Each command, and each helper, has these functions; each implementation, one of each operation.
ONE_EACH = {*("main", "prepare", "serve"), *OPERATIONS}


def files() -> list[Path]:
    return sorted(PACKAGE.rglob("*.py"))


def modules() -> list[Path]:
    return [path for path in files() if path.name != "__init__.py"]


def short(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def length(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def imported(path: Path) -> Iterator[Path]:
    """Yield the package's modules that a file imports, including imports within functions."""
    for node in nodes_of(path):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        for name in names:
            found = ROOT / f"{name.replace('.', '/')}.py"
            if found.is_relative_to(PACKAGE) and found.exists():
                yield found


@cache
def importers() -> dict[Path, set[Path]]:
    """Return, for each module, the files of the package that import it."""
    users: dict[Path, set[Path]] = defaultdict(set)
    for path in files():
        for other in imported(path):
            users[other].add(path)
    return users


def single_importers() -> dict[str, int]:
    """Return the modules that exactly one file imports, with their lines; scripts do not count."""
    users = importers()
    return {
        short(path): length(path)
        for path in modules()
        if len(users[path]) == 1 and not path.stem.endswith(SCRIPTS)
    }


def twin_names() -> dict[str, list[str]]:
    """Return the names that several modules or packages have, each with their paths."""
    named: dict[str, list[str]] = defaultdict(list)
    for path in files():
        if path.name != "__init__.py":
            named[path.stem].append(short(path))
        elif path.parent != PACKAGE:
            named[path.parent.name].append(f"{short(path.parent)}/")
    return {name: places for name, places in sorted(named.items()) if len(places) > 1}


def twin_definitions() -> dict[str, list[str]]:
    """Return the names that several public classes or functions have, each with their modules."""
    named: dict[str, list[str]] = defaultdict(list)
    for path in files():
        for node in tree_of(path).body:
            is_function = isinstance(node, ast.FunctionDef) and not node.name.startswith("_")
            if isinstance(node, ast.ClassDef) or (is_function and node.name not in ONE_EACH):
                named[node.name].append(short(path))
    return {name: places for name, places in sorted(named.items()) if len(places) > 1}


def without_tests() -> list[str]:
    """Return the modules that no file of tests is named after, in the folder that mirrors theirs.

    `test_pack.py` and `test_pack_laws.py` are named after `pack.py`.
    """
    tests = ROOT / "tests"
    return [
        short(path)
        for path in modules()
        if not any((tests / short(path)).parent.glob(f"test_{path.stem}*.py"))
    ]


@dataclass(frozen=True)
class Function:
    """A function's place and its lines, without decorators."""

    name: str
    lines: int


def functions() -> list[Function]:
    return [
        Function(f"{short(path)}:{node.name}", (node.end_lineno or node.lineno) - node.lineno + 1)
        for path in files()
        for node in nodes_of(path)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
    ]


def import_lines() -> int:
    """Return the number of lines that import statements take in the package."""
    return sum(
        (node.end_lineno or node.lineno) - node.lineno + 1
        for path in files()
        for node in nodes_of(path)
        if isinstance(node, ast.Import | ast.ImportFrom)
    )


def lines_of(folder: Path) -> int:
    return sum(map(length, folder.rglob("*.py")))


def table() -> dict[str, object]:
    """Return each count of the structure by its name."""
    package, single = lines_of(PACKAGE), single_importers()
    longest = max(functions(), key=lambda each: each.lines)
    largest = max(modules(), key=length)
    return {
        "lines of the package": f"{package:,}",
        "lines of the tests": f"{lines_of(ROOT / 'tests'):,}",
        "import lines": f"{import_lines():,} ({import_lines() / package:.1%})",
        "modules": len(modules()),
        "modules with one importer": len(single),
        "modules without a test file of their name": len(without_tests()),
        "names of modules and packages that occur twice": len(twin_names()),
        "names of classes and functions that occur twice": len(twin_definitions()),
        "longest module": f"{short(largest)}, {length(largest)}",
        "longest function": f"{longest.name}, {longest.lines}",
    }


def rooms() -> Iterator[str]:
    """Yield a line on each folder of the package: its modules, lines and single importers."""
    single = Counter(Path(name).parent.as_posix() for name in single_importers())
    counted: dict[str, list[int]] = defaultdict(list)
    for path in modules():
        counted[short(path.parent)].append(length(path))
    for room, lines in sorted(counted.items()):
        yield f"{room:<32}{len(lines):>4}{sum(lines):>8,}{single[room]:>4}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--names", action="store_true", help="also print what was counted")
    for name, value in table().items():
        print(f"{name:<48}{value}")
    if not parser.parse_args().names:
        return
    print("\nmodules with one importer")
    users = importers()
    for name, lines in sorted(single_importers().items(), key=lambda each: each[1]):
        (user,) = users[PACKAGE / name]
        print(f"{lines:>6}  {name} <- {short(user)}")
    print("\nmodules without a test file of their name", *without_tests(), sep="\n  ")
    for title, twins in (("names", twin_names()), ("classes and functions", twin_definitions())):
        print(f"\n{title} that occur twice")
        for name, places in twins.items():
            print(f"  {name}: {', '.join(places)}")
    print("\nfolder                       modules   lines  one importer")
    print(*rooms(), sep="\n")


if __name__ == "__main__":
    main()
