"""Run the property tests on random examples; a default run always uses the same examples.

    python -m tests.long.explore [--seed N] [PATH ...]

Prints its seed first; the same seed tries the same examples again.
"""

from __future__ import annotations

import argparse
import random
import subprocess
import sys
from collections.abc import Sequence

from tests.paths import ROOT


def property_tests() -> list[str]:
    """Return the paths of test modules that use hypothesis, relative to the repository."""
    modules = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in modules if "@given" in path.read_text()]


def arguments(seed: int, paths: Sequence[str]) -> list[str]:
    """Return the pytest command for a seed."""
    options = ["--hypothesis-profile=explore", f"--hypothesis-seed={seed}"]
    return [sys.executable, "-m", "pytest", "-q", *options, *(paths or property_tests())]


def main() -> None:
    """Run the property tests, and exit with pytest's code."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument("paths", nargs="*")
    given = parser.parse_args()
    print(f"seed {given.seed}", flush=True)
    sys.exit(subprocess.run(arguments(given.seed, given.paths), cwd=ROOT).returncode)


if __name__ == "__main__":
    main()
