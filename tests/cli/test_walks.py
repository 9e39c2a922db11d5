"""docs/architecture.md lists the files that process a row."""

from __future__ import annotations

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: split
import inspect
import re
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from tests.command import Cli
from tests.models import CHATML, sums, write_chat
from tests.paths import ROOT

MOST = 20
# Modules that need not be listed, with their roles.
ASIDE = {
    "core/data/cache.py": "wraps reading, rendering and tokenising",
    "core/data/contents.py": "looks for problems in the words of a row",
    "core/data/places.py": "names the place of a row",
    "core/data/sources/tables.py": "reads CSV and TSV instead",
    "core/data/findings.py": "looks for problems in all rows",
    "core/data/inspection.py": "shows what of a row carries loss",
    "core/data/preferences.py": "tells rows of preferences from others",
    "core/data/ledger.py": "counts rows and tokens",
    "core/data/sources/expansion.py": "limits what a file unpacks to",
    "core/data/template.py": "names the turns that carry loss, and the built-in templates",
    "backend/text/tokenizer_trial.py": "tries the tokenizer before any row",
    "backend/text/generate.py": "answers prompts",
}


@contextmanager
def executed() -> Iterator[set[str]]:
    """Yield a set that collects the package's files in which a function runs."""
    package, files = f"{ROOT / 'mlxtune'}/", set()

    def note(frame: FrameType, event: str, argument: object) -> None:
        # Count functions only: modules and class bodies run at import.
        if event == "call" and frame.f_code.co_flags & inspect.CO_OPTIMIZED:
            path = frame.f_code.co_filename
            if path.startswith(package):
                files.add(path.removeprefix(package))

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield files
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def test_row_passes_the_files_that_are_listed_and_no_more(
    train: Cli, broken: Path, tmp_path: Path
) -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    _, _, walk = text.partition("\n| hop | where |")
    listed = set(re.findall(r"`([a-z_/]+\.py)`", walk.partition("\n\n")[0]))
    assert len(listed) <= MOST
    (broken / "chat_template.jinja").write_text(CHATML)
    chat = write_chat(tmp_path / "chat.jsonl", sums(8))
    with executed() as files:
        options = ("--max-steps", 1, "--no-cache", "--quiet")
        assert train("--model-path", broken, "--data", chat, *options).code == 0
    # The child runs in another process, which is not traced.
    assert listed - files == {"backend/text/template_child.py"}
    of_rows = {each for each in files if each.startswith(("core/data/", "backend/text/"))}
    assert of_rows - listed <= ASIDE.keys()
