"""The modules of the package, each parsed and walked once in a test process."""

from __future__ import annotations

import ast
import gc
from functools import cache
from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "mlxtune"


@cache
def tree_of(path: Path) -> ast.Module:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    # Otherwise garbage collections in later tests pass over a million nodes.
    gc.freeze()
    return tree


@cache
def nodes_of(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(path)))
