"""Run the commands of docs/guide.md in order on the demo, as a newcomer would.

    python -m tests.long.check_guide             with the installed mlxtune
    python -m tests.long.check_guide --install   in a new environment, made as in the guide
    python -m tests.long.check_guide --short     with runs of a few steps

Blocks of the guide that begin with ```sh install or ```sh demo run in one temporary folder with the
demo's data. Each block must exit with 0 and write the files named in its `writes=`; the text in
`typed=` is its input. Prints the failures and exits with 1 if a block fails.

Results: tests/long/README.md.
"""

from __future__ import annotations

import argparse
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.paths import ROOT

GUIDE = ROOT / "docs" / "guide.md"
# Environment variables that a new environment must not inherit from this one.
_OURS = ("PYTHONPATH", "VIRTUAL_ENV")
# Losses of all validation rows, or answers to them, would take most of the time.
SHORT = "--max-steps 6 --val-rows 20"


@dataclass(frozen=True)
class Block:
    """A block of commands in the guide, its line number, and its attributes."""

    line: int
    kind: str
    commands: str
    writes: tuple[str, ...] = ()
    typed: str = ""


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks to run."""
    for found in re.finditer(r"(?ms)^```sh (install|demo)([^\n]*)\n(.*?)^```$", text):
        said = dict(word.partition("=")[::2] for word in shlex.split(found[2]))
        unknown = said.keys() - {"writes", "typed"}
        if unknown:
            raise ValueError(f"a block has unknown attributes: {', '.join(sorted(unknown))}")
        line = text.count("\n", 0, found.start()) + 1
        writes = tuple(filter(None, said.get("writes", "").split(",")))
        typed = f"{said['typed']}\n" if "typed" in said else ""
        yield Block(line, found[1], found[3], writes, typed)


def shortened(commands: str) -> str:
    """Return the commands with training limited to a few steps, and validation to a few rows."""
    commands = re.sub(r" (--max-steps \d+|--val-data \S+)", "", commands)
    return re.sub(r"(?m)^mlxtune train\b.*$", lambda m: f"{m[0]} {SHORT}", commands)


def run(block: Block, folder: Path, environment: dict[str, str], before: str = "") -> str | None:
    """Run a block; return the problem, or None."""
    script = f"set -e\n{before}{block.commands}"
    print(f"guide.md:{block.line}: {block.commands.strip()}", flush=True)
    started = time.monotonic()
    process = subprocess.run(
        ["bash", "-c", script],
        cwd=folder,
        env=environment,
        input=block.typed,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    print(f"    ended with {process.returncode} after {time.monotonic() - started:.0f} s")
    if process.returncode:
        return f"ended with {process.returncode}:\n{process.stdout}"
    if "Traceback" in process.stdout:
        return f"showed a traceback:\n{process.stdout}"
    missing = [name for name in block.writes if not (folder / name).is_file()]
    return f"did not write {', '.join(missing)}:\n{process.stdout}" if missing else None


def walk(folder: Path, *, install: bool, short: bool) -> list[str]:
    """Run the blocks in a folder, those for installation only if `install`; return the problems."""
    environment = {k: v for k, v in os.environ.items() if not (install and k in _OURS)}
    environment["XDG_CACHE_HOME"] = str(folder / ".cache")
    before = ""
    shutil.copytree(ROOT / "data", folder / "data", ignore=shutil.ignore_patterns("*.py"))
    problems = []
    for block in blocks(GUIDE.read_text(encoding="utf-8")):
        if block.kind == "install":
            if not install:
                continue
            where = f"cd {shlex.quote(str(ROOT))}\n"
            # The guide's own folder name, but inside `folder`.
            made = block.commands.replace(".venv", shlex.quote(str(folder / ".venv")))
            problem = run(Block(block.line, "install", made), folder, environment, where)
            before = f". {shlex.quote(str(folder / '.venv'))}/bin/activate\n"
        else:
            commands = shortened(block.commands) if short else block.commands
            made_shorter = Block(block.line, block.kind, commands, block.writes, block.typed)
            problem = run(made_shorter, folder, environment, before)
        if problem:
            problems.append(f"guide.md:{block.line}: {problem}")
    return problems


def main() -> None:
    """Run the blocks, print the problems, and exit with 1 if there are any."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--install", action="store_true", help="make a new environment first")
    parser.add_argument("--short", action="store_true", help="train for a few steps only")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="mlxtune-guide-") as folder:
        problems = walk(Path(folder), install=given.install, short=given.short)
    print("\n".join(problems) or "all blocks of the guide work", flush=True)
    sys.exit(1 if problems else 0)


if __name__ == "__main__":
    main()
