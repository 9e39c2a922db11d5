"""Make small defects in a copy of the package, one at a time: a test must catch each.

    python -m tests.long.mutants [NAME ...]

Each entry of mutants.toml replaces some text in a module, and its tests run until one fails. Prints
a line per mutant and the number of caught mutants; exits with 1 if any was not caught.

Results: tests/long/README.md. tests/test_mutants.py checks that each text is still in its module.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import NamedTuple

from tests.paths import ROOT, SHARED

# Longer than any of the tests takes, unless a mutant never ends.
_TIMEOUT_SECONDS = 900


class Mutant(NamedTuple):
    """A defect: `after` replaces the only `before` in `module`; `tests` should catch the defect."""

    name: str
    concern: str
    module: str
    before: str
    after: str
    tests: str


_TEXT = Path(__file__).with_suffix(".toml").read_text(encoding="utf-8")
MUTANTS = tuple(Mutant(name, **entry) for name, entry in tomllib.loads(_TEXT).items())


def apply(mutant: Mutant, root: Path) -> None:
    """Make the defect in the copy of the repository at `root`."""
    path = root / "mlxtune" / mutant.module
    text = path.read_text(encoding="utf-8")
    assert text.count(mutant.before) == 1, f"{mutant.name}: its text changed in {mutant.module}"
    path.write_text(text.replace(mutant.before, mutant.after), encoding="utf-8")


def is_caught(mutant: Mutant, root: Path) -> bool:
    """Run the mutant's tests in the copy. Raises RuntimeError if pytest itself fails."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-n", "0", "-m", "not long"]
    try:
        ended = subprocess.run(
            [*command, "-p", "no:cacheprovider", *mutant.tests.split()],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            timeout=_TIMEOUT_SECONDS,
        )
    except subprocess.TimeoutExpired:
        return True
    if ended.returncode > 1:
        raise RuntimeError(f"{mutant.name}: {ended.stdout[-2000:]}{ended.stderr[-2000:]}")
    return ended.returncode == 1


def main(names: list[str]) -> int:
    """Try the named mutants, or all."""
    chosen = [mutant for mutant in MUTANTS if not names or mutant.name in names]
    caught = 0
    with tempfile.TemporaryDirectory() as scratch:
        root = Path(scratch) / "repository"
        shutil.copytree(
            ROOT, root, ignore=shutil.ignore_patterns(".git", "__pycache__", ".*_cache")
        )
        (Path(scratch) / "shared").symlink_to(SHARED)
        for mutant in chosen:
            path, started = root / "mlxtune" / mutant.module, time.monotonic()
            before = path.read_bytes()
            apply(mutant, root)
            try:
                found = is_caught(mutant, root)
            finally:
                path.write_bytes(before)
            caught += found
            state = "caught" if found else "SURVIVED"
            seconds = time.monotonic() - started
            print(f"{mutant.name:<28}{mutant.concern:<14}{state:<10}{seconds:.0f} s", flush=True)
    print(f"{caught} of {len(chosen)} caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
