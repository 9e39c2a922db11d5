"""The commands of docs/first-boot.md exist, and what could go wrong in them is simulated.

Elsewhere: kernels that raise (tests/backend/measure/test_kernel_proofs.py), a busy machine, Ctrl-C
and a proof that fails (tests/recipes/test_prove.py), no fused attention for a gradient
(tests/backend/mixers/test_attention.py), a machine without a library (tests/test_package.py).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from mlxtune.cli import COMMANDS
from tests.command import Cli, finish, start
from tests.paths import DATA, DOCS, ROOT

QWEN, ROWS = DATA / "demo-qwen3", DATA / "bookings.jsonl"
# Sockets between processes of one machine stay.
NO_NETWORK = """
import socket
def refuse(self, address, real=socket.socket.connect):
    if self.family != socket.AF_UNIX:
        raise OSError(101, "Network is unreachable")
    return real(self, address)
def unknown(*args, **options):
    raise socket.gaierror(-2, "Name or service not known")
socket.socket.connect = refuse
socket.getaddrinfo = unknown
"""


def commands() -> list[str]:
    """The commands of the page's table, in order."""
    rows = re.findall(r"(?m)^\| (\d+) \| (.*?) \|", (DOCS / "first-boot.md").read_text("utf-8"))
    assert [int(number) for number, _ in rows] == list(range(1, 11))
    return [cell for _, cell in rows]


def test_every_command_option_and_file_of_the_page_exists() -> None:
    by_name = {each.name: each for each in COMMANDS}
    found = [line for cell in commands() for line in re.findall(r"`(mlxtune [^`]+)`", cell)]
    assert len(found) >= 9
    for line in found:
        _, name, *rest = line.split()
        options = {option for each in by_name[name].params for option in each.opts}
        assert {each for each in rest if each.startswith("--")} <= options, line
        for path in (each for each in rest if each.startswith("data/")):
            assert (ROOT / path).exists(), line


@pytest.fixture
def no_network(tmp_path: Path) -> dict[str, str]:
    """An environment whose Python processes reach no other machine."""
    folder = tmp_path / "no-network"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def test_demo_trains_without_a_network(no_network: dict[str, str], tmp_path: Path) -> None:
    code = "import urllib.request; urllib.request.urlopen('https://example.com')"
    refused = subprocess.run([sys.executable, "-c", code], env=no_network, capture_output=True)
    assert b"Name or service not known" in refused.stderr
    options = ["--targets", "all", "--max-steps", 1, "--val-split", 0, "--samples", 0, "--no-cache"]
    output = ["--output", tmp_path / "run" / "adapters.safetensors", "--quiet"]
    data = ["--model-path", QWEN, "--data", ROWS]
    outcome = finish(start("train", *data, *options, *output, env=no_network))
    assert outcome.code == 0, outcome.err
    assert (tmp_path / "run" / "adapters.safetensors").exists()


@pytest.mark.slow
def test_proof_needs_no_network(no_network: dict[str, str], tmp_path: Path) -> None:
    path = tmp_path / "proof.json"
    process = start("doctor", "--prove", "--share", path, env=no_network)
    outcome = finish(process, timeout=600)
    assert outcome.code == 0, outcome.out
    shared = json.loads(path.read_text(encoding="utf-8"))
    assert not any(each["passed"] is False for each in shared["checks"])


def test_half_the_memory_makes_smaller_micro_batches_and_no_other_step(cli: Cli) -> None:
    def plan(limit: float) -> dict[str, object]:
        more = ("--targets", "all", "--no-cache", "--json", "--memory-limit", limit)
        outcome = cli("plan", "--model-path", QWEN, "--data", ROWS, *more)
        assert outcome.code == 0, outcome.err
        return dict(json.loads(outcome.out))

    whole, half = plan(0.04), plan(0.02)
    tokens = [each["micro_batch_tokens"] for each in (whole, half)]
    assert (tokens[1] < tokens[0]) or half["grad_checkpoint"]  # type: ignore[operator]
    assert half["memory"]["peak"] <= 0.02e9 < whole["memory"]["peak"]  # type: ignore[index]
    assert half["data"]["steps"] == whole["data"]["steps"]  # type: ignore[index]
