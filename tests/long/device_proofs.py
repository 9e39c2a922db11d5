"""The table of docs/devices/*.json, which `mlxtune doctor --prove --share` wrote.

The files come from strangers: a value without the documented type and size is an error.
`measured_pages` puts the table into docs/devices.md.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tests.paths import DOCS

FOLDER = DOCS / "devices"
MAX_SIZE, MAX_CHARS, MAX_CHECKS = 200_000, 80, 200
PACKAGES = ("mlxtune", "mlx", "mlx-lm")
COLUMNS = (
    *("device", "kind", "memory, GB", "system", "mlxtune, mlx, mlx-lm", "checks", "failed"),
    *("16 bits, lowest cosine", "peak / predicted", "speed relative to mlx-lm"),
)


class BadProofError(Exception):
    """A file does not contain what `--share` writes."""


def table(files: Iterable[Path]) -> str:
    """Return a table with a row for each file. Raises BadProofError, which names the file."""
    rows = [list(COLUMNS), ["---"] * len(COLUMNS)]
    for file in sorted(files):
        try:
            rows.append(row(read(file)))
        except (BadProofError, KeyError, TypeError, ValueError, RecursionError) as error:
            raise BadProofError(f"{file.name}: {error!r}") from None
    return "\n".join(f"| {' | '.join(cells)} |" for cells in rows)


def read(file: Path) -> dict[str, Any]:
    """Return a shared proof. Raises BadProofError."""
    if file.stat().st_size > MAX_SIZE:
        raise BadProofError(f"more than {MAX_SIZE:,} bytes")
    found = json.loads(file.read_text(encoding="utf-8"))
    if not isinstance(found, dict) or found.get("schema_version") != 1:
        raise BadProofError("not a proof of schema version 1")
    checks = found["checks"]
    if not isinstance(checks, list) or not 1 <= len(checks) <= MAX_CHECKS:
        raise BadProofError(f"needs 1 to {MAX_CHECKS} checks")
    return found


def row(proof: dict[str, Any]) -> list[str]:
    """Return the cells of a proof's row. Raises BadProofError."""
    checks, device, machine = proof["checks"], proof["device"], proof["machine"]
    if any(check["passed"] not in (True, False, None) for check in checks):
        raise BadProofError("a check's `passed` is not true, false or null")
    failed = [f"{check['kind']}: {check['name']}" for check in checks if check["passed"] is False]
    peaks = [
        number(check["values"]["measured"]) / number(check["values"]["predicted"])
        for check in checks
        if check["kind"] == "memory" and check["values"]
    ]
    cosines = [
        number(check["values"]["cosine"])
        for check in checks
        if check["kind"] == "16 bits" and check["values"]
    ]
    ratios = [check["values"].get("ratio") for check in checks if check["kind"] == "mlx-lm"]
    speed = next((number(ratio) for ratio in ratios if ratio is not None), None)
    return [
        text(device["name"]),
        text(device["kind"]),
        f"{number(machine['memory']) / 1e9:.0f}",
        text(machine["system"]),
        ", ".join(text(proof["versions"][name]) for name in PACKAGES),
        str(len(checks)),
        ", ".join(map(text, failed)) or "none",
        f"{min(cosines):.5f}" if cosines else "",
        f"{max(peaks):.2f}" if peaks else "",
        f"{speed:.1f}×" if speed is not None else "",
    ]


def number(value: Any) -> float:
    """Return a value that must be a finite number above 0, as a float. Raises BadProofError."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise BadProofError("a value is not a number")
    if not (math.isfinite(value) and value > 0):
        raise BadProofError("a number is not finite and above 0")
    return float(value)


def text(value: Any) -> str:
    """Return a string without markup, for a cell. Raises BadProofError."""
    if not isinstance(value, str) or not 0 < len(value) <= MAX_CHARS:
        raise BadProofError(f"a value is not a string of 1 to {MAX_CHARS} characters")
    plain = re.sub(r"[^A-Za-z0-9 .,:+()-]", "", value)
    # Some sites turn a word with a dot into a link, and a word between colons into a picture.
    plain = re.sub(r"\.(?=[A-Za-z])|:(?! )", " ", plain).strip()
    if not plain:
        raise BadProofError("a string has no character that the page may show")
    return plain
