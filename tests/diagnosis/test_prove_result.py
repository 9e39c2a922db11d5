"""The table of `doctor --prove`, and the JSON to share, which does not reveal the owner."""

from __future__ import annotations

import json
import re
from io import StringIO
from typing import Any

import pytest
from rich.console import Console

from mlxtune.diagnosis import checks
from mlxtune.diagnosis.checks import MachineProof
from mlxtune.diagnosis.prove import shareable, show_proof

WIDE_CHECK = checks.check_gradients("demo-gemma3: cpu, recomputed", 1e-7, 2e-7).taking(12.34)


def shown(*found: checks.ProofCheck) -> list[str]:
    device = {"kind": "Metal", "name": "Apple M9", "memory_limit": 1}
    proof = MachineProof(found, {}, device, {}, 71.4)
    console = Console(file=StringIO(), width=80)
    show_proof(proof, console)
    return [line.rstrip() for line in console.file.getvalue().splitlines()]  # type: ignore[attr-defined]


def test_each_check_is_one_line_of_80_columns_below_its_heading() -> None:
    lines = shown(
        WIDE_CHECK,
        checks.check_matmul("8 bits, group 64, bfloat16", 0.002, 1024, 2048, 2048).taking(0.1),
        checks.check_same_bytes(
            "demo-qwen3: kill -9, resume", "a", "a", promised=True, stopped_after=12
        ).taking(100.5),
        checks.check_memory("4-bit base: 2,048 tokens", 219_000_000, 241_000_000, 0.15).taking(3.1),
    )
    assert [re.split(":|  +≤ 1 x", line)[0].strip() for line in lines[1:]] == [
        "loss and gradients",
        "demo-gemma3",
        "products in real sizes",
        "8 bits, group 64, bfloat16",
        "bytes of the adapter",
        "demo-qwen3",
        "peak memory",
        "4-bit base",
        "4 checks, nothing failed, in 71 s on Apple M9 (Metal)",
    ]
    assert lines[2].split()[-5:] == ["1e-04", "1e-07,", "2e-07", "pass", "12.3"]


def test_failure_stands_out_and_asks_for_the_json() -> None:
    failed = checks.failed_check(checks.GRADIENTS, "demo-qwen3", "killed by signal 6: \x1b[2J")
    lines = shown(WIDE_CHECK, failed)
    assert any("FAIL" in line and "demo-qwen3" in line for line in lines)
    assert "\x1b" not in "".join(lines)
    assert lines[-1].startswith(
        "1 of 2 checks failed, in 71 s on Apple M9 (Metal): attach the output"
    )


# To share

NAMES = ("Annas-MacBook.local", "anna", "x")


def shared(error: str, **machine: Any) -> dict[str, Any]:
    found = [
        checks.failed_check(checks.MEMORY, "4-bit base", error),
        checks.check_same_bytes("run twice", "ab" * 32, "cd" * 32, promised=True),
        checks.check_dtype("16-bit base: bfloat16, gpu", 0.9995, 1.01),
    ]
    described = {"system": "Debian GNU/Linux 12", "processor": "x86_64", "memory": 10**10}
    device = {"kind": "CPU", "name": "AMD EPYC", "memory_limit": 1}
    versions = {"mlx": "0.32.4"}
    return shareable(MachineProof(found, described | machine, device, versions, 1.0), NAMES)


@pytest.mark.parametrize(
    "error",
    [
        "/Users/anna/My models/wedding cannot be loaded",
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
