"""Print a version's section of CHANGELOG.md, as the text of its release.

    python .github/release_notes.py v0.1.0

Fails unless the tag is the version in pyproject.toml and its section has a date.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def release_notes(tag: str, version: str, changelog: str) -> str:
    """Return the text below the version's heading. Raises ValueError."""
    if tag != f"v{version}":
        raise ValueError(f"the tag is {tag}, and pyproject.toml has {version}: tag v{version}")
    sections = re.split(r"(?m)^## ", changelog)
    found = [each for each in sections if each.startswith(f"[{version}]")]
    if len(found) != 1:
        raise ValueError(f"CHANGELOG.md has {len(found)} sections [{version}]: write one")
    heading, _, notes = found[0].partition("\n")
    if not re.fullmatch(rf"\[{re.escape(version)}\] - \d{{4}}-\d\d-\d\d", heading.strip()):
        raise ValueError(f"CHANGELOG.md, {heading}: give it a date, as [{version}] - 2026-01-31")
    if not notes.strip():
        raise ValueError(f"CHANGELOG.md, {heading}: has no text")
    return notes.strip() + "\n"


def main() -> None:
    """Print the notes of the tag, or exit with the reason why there are none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    try:
        sys.stdout.write(release_notes(sys.argv[1], project["version"], changelog))
    except ValueError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
