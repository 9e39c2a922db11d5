"""Where modules may stand: what import contracts cannot say of the package's folders."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

from tests.paths import ROOT

PACKAGE = ROOT / "mlxtune"
MOST_MODULES = 16


def modules() -> list[Path]:
    return [path for path in PACKAGE.rglob("*.py") if path.name != "__init__.py"]


def test_no_folder_has_too_many_modules() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in modules():
        counts[str(path.parent.relative_to(PACKAGE))] += 1
    assert {folder: count for folder, count in counts.items() if count > MOST_MODULES} == {}
