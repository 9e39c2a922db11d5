"""A shared proof does not reveal its machine's owner."""

from __future__ import annotations

import json
from typing import Any

import pytest

from mlxtune.diagnosis import checks
from mlxtune.diagnosis.checks import MachineProof
from mlxtune.diagnosis.views import shareable

NAMES = ("Annas-MacBook.local", "anna", "x")


def shared(error: str, **machine: Any) -> dict[str, Any]:
    found = [
        checks.failed_check(checks.MEMORY, "4-bit base", error),
        checks.check_bytes("run twice", "ab" * 32, "cd" * 32, promised=True),
        checks.check_dtype("16-bit base: bfloat16, gpu", 0.9995, 1.01),
    ]
    described = {"system": "Debian GNU/Linux 12", "processor": "x86_64", "memory": 10**10}
    device = {"kind": "CPU", "name": "AMD EPYC", "memory_limit": 1}
    versions = {"mlx": "0.32.4"}
    return shareable(MachineProof(found, described | machine, device, versions, 1.0), NAMES)


@pytest.mark.parametrize(
    "error",
    [
        "/Users/anna/My models/wedding: cannot be loaded",
        "~anna/models/wedding",
        "C:\\Users\\anna\\wedding.safetensors",
        "models/wedding on ANNAS-MACBOOK",
        "anna: file:///Users/anna/wedding",
        "[Errno 2] No such file or directory: '/private/var/wedding photos/x'",
    ],
)
def test_errors_lose_their_names_and_paths(error: str) -> None:
    text = json.dumps(shared(error), ensure_ascii=False)
    for secret in ("anna", "wedding", "annas-macbook", "users", "ab" * 32):
        assert secret not in text.lower()
    assert not set("/\\") & set(text)


def test_message_of_mlx_is_kept() -> None:
    message = "killed by signal 6: [METAL] Command buffer execution failed: Impacting x"
    assert shared(message)["checks"][0]["found"] == message


def test_system_keeps_its_name_without_separators() -> None:
    assert shared("")["machine"]["system"] == "Debian GNU Linux 12"
    named = shared("", system="macOS 15.1 anna")
    assert named["machine"]["system"] == "macOS 15.1 …"


def test_numbers_of_checks_are_kept() -> None:
    found = shared("")["checks"]
    assert found[2]["values"] == {"cosine": 0.9995, "norm_ratio": 1.01}
    assert found[1]["values"] == {"stopped_after": None}
