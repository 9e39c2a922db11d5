"""docs/devices.md is generated from proofs that users share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long import device_proofs as devices
from tests.long.measured_pages import DEVICES


def proof(**changes: Any) -> dict[str, Any]:
    check = {"kind": "memory", "name": "4-bit base", "passed": True, "seconds": 1.0}
    return {
        "schema_version": 1,
        "machine": {"system": "macOS 15.1", "processor": "Apple M2", "memory": 16 * 10**9},
        "device": {"kind": "Metal", "name": "Apple M2", "memory_limit": 10**10},
        "versions": {"mlxtune": "0.1.0", "mlx": "0.32.4", "mlx-lm": "0.32.2"},
        "checks": [check | {"values": {"predicted": 100, "measured": 120, "margin": 0.5}}],
    } | changes


def page_of(tmp_path: Path, content: Any) -> str:
    file = tmp_path / "mac.json"
    file.write_text(content if isinstance(content, str) else json.dumps(content))
    return devices.table([file])


def test_machine_becomes_a_row(tmp_path: Path) -> None:
    last = page_of(tmp_path, proof()).splitlines()[-1]
    assert last.startswith("| Apple M2 | Metal | 16 | macOS 15.1 | 0.1.0, 0.32.4, 0.32.2 | 1 |")
    assert "| 1.20 |" in last


@pytest.mark.parametrize(
    "content",
    [
        "[",
        "[]",
        "[" * 100_000,
        " " * 300_000,
        proof(schema_version=2),
        proof(checks=[]),
        proof(checks=[{}]),
        proof(checks=proof()["checks"] * 500),
        proof(device={"kind": "Metal", "name": "x" * 100}),
        proof(device={"kind": "Metal", "name": ["Apple"]}),
        proof(machine={"system": "macOS", "memory": "much"}),
        proof(machine={"system": "macOS", "memory": float("inf")}),
        proof(versions={}),
        proof(checks=[proof()["checks"][0] | {"passed": "yes"}]),
        proof(device={"kind": "Metal", "name": "<>"}),
    ],
)
def test_non_proof_file_is_an_error_that_names_it(tmp_path: Path, content: Any) -> None:
    with pytest.raises(devices.BadProofError, match=r"mac\.json"):
        page_of(tmp_path, content)


def test_markup_of_a_stranger_is_removed(tmp_path: Path) -> None:
    name = "M9 | [x](http://evil) <b>`\n# h www.evil.org :bomb: _x_ *y*"
    last = page_of(tmp_path, proof(device={"kind": "Metal", "name": name})).splitlines()[-1]
    assert last.count("|") == 11
    assert not set("<>[]`#/_*") & set(last)
    assert "www." not in last
    assert ":bomb" not in last
    assert "0.32.4" in last


def test_page_has_a_row_for_each_file_and_a_cpu_is_called_one() -> None:
    files = list(devices.FOLDER.glob("*.json"))
    page = DEVICES.read_text(encoding="utf-8")
    assert files
    assert devices.table(files) in page
    assert "| CPU |" in page
