"""Nothing in the package opens, links, locks or removes a file except through core/files."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from tests.sources import PACKAGE, tree_of

ROOM = PACKAGE / "core" / "files"

# Modules whose functions all count, except functions that neither change nor open a file.
MODULES = {"shutil", "tempfile", "fcntl"}
LOOKING = {"shutil.which", "shutil.disk_usage", "tempfile.gettempdir"}
OF_OS = {
    *("open", "fdopen", "remove", "unlink", "rename", "renames", "replace", "link", "symlink"),
    *("truncate", "ftruncate", "rmdir", "removedirs", "mkdir", "makedirs", "chmod", "chown"),
    *("fchmod", "fchown", "lchmod", "lchown", "mkfifo", "mknod", "utime", "lockf"),
}
OF_OTHERS = {("io", "open"), ("io", "FileIO"), ("gzip", "open"), ("gzip", "GzipFile")}
OF_OTHERS |= {(module, "open") for module in ("bz2", "lzma", "codecs", "tarfile", "shelve", "dbm")}
# Methods of a path. `replace` is separate: a path's method takes one argument, a string's method
# two.
OF_PATHS = {
    *("open", "read_text", "read_bytes", "write_text", "write_bytes", "touch", "unlink", "rename"),
    *("rmdir", "symlink_to", "hardlink_to", "link_to", "mkdir", "chmod", "lchmod"),
}

EXCEPTIONS = {
    ("config/config_file.py", "path.open"): "the layer below core, which reads 64 KB of --config",
    ("hub/upload.py", "resources.files(...).joinpath(...).read_text"): "package data, which may "
    "be in an archive",
    ("core/data/template.py", "resources.files(...).joinpath(...).read_text"): "the same",
    ("core/data/sources/rows.py", "archive.open"): "a file of an archive that core/files opened",
    ("cli/__init__.py", "os.open"): "gives the null device the numbers of closed streams",
    ("cli/__init__.py", "open"): "an object for the stream that is open already",
    ("benchmark/bench_helper.py", "os.fdopen"): "a copy of stdout",
    ("cli/__init__.py", "io.FileIO"): "the same",
    ("backend/text/tokenizer_helper.py", "Path(...).read_bytes"): "a script of a limited process, "
    "which imports nothing of mlxtune",
    ("rewards/reward_helper.py", "os.open"): "the null device and the current folder",
    ("rewards/reward_helper.py", "os.fdopen"): "a copy of stdin",
    ("rewards/reward_helper.py", "open"): "objects for streams that are open already",
}


def operations(tree: ast.AST) -> Iterator[str]:
    """Yield the operations in the code that could open or change a file."""
    nodes = list(ast.walk(tree))
    names = dict(imported(nodes))
    for node in nodes:
        if isinstance(node, ast.Name) and node.id == "open" and "open" not in names:
            yield "open"
        elif isinstance(node, ast.Name) and node.id in names:
            module, _, name = names[node.id].rpartition(".")
            if changes(module, name):
                yield names[node.id]
        elif isinstance(node, ast.Attribute):
            module = names.get(node.value.id, "") if isinstance(node.value, ast.Name) else ""
            if changes(module, node.attr):
                yield f"{module}.{node.attr}"
            elif module in ("", "pathlib") and node.attr in OF_PATHS:
                yield shown(node)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute):
            function = node.func
            if function.attr == "replace" and len(node.args) == 1 and not node.keywords:
                yield shown(function)


def imported(nodes: Iterable[ast.AST]) -> Iterator[tuple[str, str]]:
    """Yield each imported name and its full name."""
    for node in nodes:
        if isinstance(node, ast.Import):
            for each in node.names:
                yield each.asname or each.name.partition(".")[0], each.name
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            for each in node.names:
                yield each.asname or each.name, f"{node.module}.{each.name}"


def changes(module: str, name: str) -> bool:
    if module in MODULES:
        return f"{module}.{name}" not in LOOKING
    return (module == "os" and name in OF_OS) or (module, name) in OF_OTHERS


def shown(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return f"{shown(node.func)}(...)"
    if isinstance(node, ast.Attribute):
        return f"{shown(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else f"({type(node).__name__})"


# A file without any of these words has no operation and is not parsed.
WORDS = MODULES | OF_OS | OF_PATHS | {name for _, name in OF_OTHERS}
MENTIONED = re.compile(rf"\b(?:{'|'.join(sorted(WORDS))})\b")


def test_only_core_files_opens_links_locks_or_removes_files() -> None:
    found = {
        (str(path.relative_to(PACKAGE)), operation)
        for path in PACKAGE.rglob("*.py")
        if not path.is_relative_to(ROOM)
        if MENTIONED.search(path.read_text(encoding="utf-8"))
        for operation in operations(tree_of(path))
    }
    assert sorted(found - EXCEPTIONS.keys()) == []
    # An exception that is no longer needed must be removed.
    assert sorted(EXCEPTIONS.keys() - found) == []


@pytest.mark.parametrize(
    ("code", "operation"),
    [
        ("open('a')", "open"),
        ("f = open", "open"),
        ("import os\nos.open('a', 0)", "os.open"),
        ("import os as o\no.unlink('a')", "os.unlink"),
        ("from os import link as x\nx('a', 'b')", "os.link"),
        ("import shutil\nshutil.rmtree('a')", "shutil.rmtree"),
        ("from shutil import rmtree\nrmtree('a')", "shutil.rmtree"),
        ("import tempfile\nwith tempfile.TemporaryFile(): pass", "tempfile.TemporaryFile"),
        ("import fcntl\nfcntl.flock(1, fcntl.LOCK_EX)", "fcntl.flock"),
        ("import gzip\ngzip.open('a')", "gzip.open"),
        ("from pathlib import Path\nPath('a').unlink()", "Path(...).unlink"),
        ("p.write_text('')", "p.write_text"),
        ("(p / 'a').mkdir()", "(BinOp).mkdir"),
        ("p.replace(q)", "p.replace"),
        ("list(map(Path.unlink, paths))", "Path.unlink"),
    ],
)
def test_code_that_bypasses_the_wrapper_is_found(code: str, operation: str) -> None:
    assert operation in set(operations(ast.parse(code)))
    assert MENTIONED.search(code)


@pytest.mark.parametrize(
    "code",
    [
        "text.replace('a', 'b')",
        "import dataclasses\ndataclasses.replace(a, b=1)",
        "import os\nos.getcwd()",
        "import shutil\nshutil.which('ls')",
        "from mlxtune.core.files.reading import open_regular\nopen_regular(p)",
    ],
)
def test_code_without_file_operations_yields_none(code: str) -> None:
    assert list(operations(ast.parse(code))) == []
