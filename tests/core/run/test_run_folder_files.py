"""A run writes only the files that the reference names."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from mlxtune.core.run import run_folder
from tests.command import Cli, files_in

ROOT = Path(__file__).parents[3]
REFERENCE = (ROOT / "docs/reference.md").read_text(encoding="utf-8")
_, _, SECTION = REFERENCE.partition("## Files of a run")
RUN_FILES = dict(re.findall(r"(?m)^\| `(.+?)` \| (.+) \|$", SECTION.partition("\n## ")[0]))

# Files that only some options write.
ON_REQUEST = {entry for entry, content in RUN_FILES.items() if "with --" in content}


def entry_of(path: str) -> str | None:
    """Return the entry of the reference that describes a file."""
    return next((entry for entry in RUN_FILES if re.fullmatch(pattern(entry), path)), None)


def pattern(entry: str) -> str:
    escaped = re.escape(entry).replace("…", ".*")
    alternatives = re.sub(r"\\\{(.*?)\\\}", lambda m: f"({m[1].replace(',', '|')})", escaped)
    return alternatives.replace(r"\-N", r"\-\d+")


def test_run_writes_only_the_documented_files(train: Cli, output: Path) -> None:
    for _ in range(2):  # the second run archives the first
        assert train("--save-steps", 2, "--keep", 5).code == 0
    left = {path: entry_of(path) for path in files_in(output.parent)}
    nowhere = [path for path, entry in left.items() if entry is None]
    assert nowhere == [], "describe them in docs/make_reference.py"
    assert set(left.values()) == set(RUN_FILES) - ON_REQUEST


def test_every_file_that_a_later_run_moves_is_documented() -> None:
    moved = {f"checkpoints/{name}" for name in run_folder._RUN_FILES}
    assert {path for path in moved if entry_of(path) is None} == set()


@pytest.mark.parametrize(
    ("path", "entry"),
    [
        ("checkpoints/step-40/metadata.json", "checkpoints/{best,epoch-N,step-N}/metadata.json"),
        ("checkpoints/previous-2/best/metadata.json", "checkpoints/previous-N/…"),
        ("checkpoints/step-x/metadata.json", None),
        ("checkpoints/step-1/metadata.json.tmp", None),
        ("checkpoints/metricsXjsonl", None),
    ],
)
def test_file_belongs_to_the_entry_that_names_it(path: str, entry: str | None) -> None:
    assert entry_of(path) == entry
