"""The commands of docs/first-boot.md exist, and their possible failures are simulated.

Other tests simulate kernels that raise errors (tests/diagnosis/test_kernel_proof.py) and end a run
(tests/cli/test_gpu_faults.py), a proof on a busy machine, a failing proof, and Ctrl-C
(tests/diagnosis/test_prove.py), memory that another run holds (tests/cli/test_memory_ledger.py), no
fused attention for a gradient (tests/backend/models/mixers/test_attention.py), and a machine
without a library (tests/test_package.py).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import mlx.core as mx
import pytest

from mlxtune.backend.device import default_device
from mlxtune.cli import COMMANDS
from tests.command import Cli, Outcome, finish, start
from tests.diagnosis.test_prove import assert_documented
from tests.paths import DATA, DOCS, ROOT
from tests.slow import long, slow

QWEN, ROWS = DATA / "demo-qwen3", DATA / "bookings.jsonl"
# Python code that blocks the network except for sockets within the machine.
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
    """Return the commands of the page's table, in order."""
    rows = re.findall(r"(?m)^\| (\d+) \| (.*?) \|", (DOCS / "first-boot.md").read_text("utf-8"))
    assert [int(number) for number, _ in rows] == list(range(1, 11))
    return [cell for _, cell in rows]


def test_every_command_option_and_file_of_the_page_exists() -> None:
    by_name = {command.name: command for command in COMMANDS}
    found = [line for cell in commands() for line in re.findall(r"`(mlxtune [^`]+)`", cell)]
    assert len(found) >= 9
    for line in found:
        _, name, *rest = line.split()
        options = {option for param in by_name[name].params for option in param.opts}
        assert {each for each in rest if each.startswith("--")} <= options, line
        for path in (each for each in rest if each.startswith("data/")):
            assert (ROOT / path).exists(), line


@pytest.fixture
def no_network(tmp_path: Path) -> dict[str, str]:
    """Environment variables under which Python processes reach no other machine."""
    folder = tmp_path / "no-network"
    folder.mkdir()
    (folder / "sitecustomize.py").write_text(NO_NETWORK)
    path = os.pathsep.join([str(folder), str(ROOT), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)}


def without_network(no_network: dict[str, str], *arguments: object) -> Outcome:
    outcome = finish(start(*arguments, env=no_network))
    assert "Traceback" not in outcome.err
    return outcome


def test_doctor_needs_no_network(no_network: dict[str, str]) -> None:
    outcome = without_network(no_network, "doctor", "--json")
    assert outcome.code == 0, outcome.err
    assert json.loads(outcome.out)["can_train"] is True


@pytest.mark.slow
def test_plan_of_a_model_on_the_hub_without_a_network_is_one_line(
    no_network: dict[str, str], tmp_path: Path
) -> None:
    environment = no_network | {"HF_HOME": str(tmp_path)}
    data = ["--model-path", "mlx-community/Qwen3-4B-4bit", "--data", ROWS]
    error = without_network(environment, "plan", *data).error
    assert error.startswith(
        "mlx-community/Qwen3-4B-4bit: no such folder, and downloading it failed"
    )


# Runs one check of each kind on one model, without speeds. Kernels are proved by
# tests/diagnosis/test_kernel_proof.py, and many tests show that equal runs write equal bytes.
SHORT_PROOF = """
import sys
from mlxtune.cli import main
from mlxtune.diagnosis import prove

REPEATED = ("demo-gemma3", "16-bit base", "demo-qwen3: run twice", "4-bit base: run twice")
REPEATED += ("demo-qwen3: Ctrl-C, resume", "kernels")
whole = prove.parts

def few(*given):
    kept = [part for part in whole(*given) if part[1] not in REPEATED and part[0] != "mlx-lm"]
    kept = [part for part in kept if part[:2] != ("gradients", "4-bit base")]
    assert len(kept) == len(whole(*given)) - 10
    return kept

prove.parts = few
main(sys.argv[1:])
"""


@pytest.mark.parametrize("whole", [slow(False), long(True)], ids=["short", "whole"])
def test_proof_passes_here_and_needs_no_network(
    no_network: dict[str, str], tmp_path: Path, whole: bool
) -> None:
    path = tmp_path / "proof.json"
    scratch = tmp_path / "scratch"
    private = scratch / f"mlxtune.{os.geteuid()}"
    private.mkdir(mode=0o700, parents=True)
    # Functions that MLX compiled before are copied: compiling them takes a minute.
    if (compiled := Path(os.environ.get("TMPDIR", "/none"), "mlx")).is_dir():
        shutil.copytree(compiled, private / "mlx")
    environment = no_network | {"TMPDIR": str(scratch)}
    program = ["-m", "mlxtune"] if whole else ["-c", SHORT_PROOF]
    outcome = subprocess.run(
        [sys.executable, *program, "doctor", "--prove", "--json", "--share", str(path)],
        env=environment,
        capture_output=True,
        text=True,
    )
    assert "Traceback" not in outcome.stderr
    proof = json.loads(outcome.stdout)
    assert_documented(proof)
    assert outcome.returncode == 0, outcome.stderr
    kinds = [check["kind"] for check in proof["checks"]]
    assert kinds.count("gradients") >= (9 if whole else 3)
    assert (kinds.count("bytes"), kinds.count("memory")) == (4 if whole else 1, 3)
    stopped = [check["values"].get("stopped_after") for check in proof["checks"]]
    assert sum(step is not None and 1 <= step < 12 for step in stopped) == (2 if whole else 1)
    # Only MLX's compiled functions stay, in this user's own folder.
    assert {path.name for path in scratch.glob("*/*")} <= {"mlx"}
    assert {path.name for path in scratch.iterdir()} <= {private.name}
    shared = json.loads(path.read_text(encoding="utf-8"))
    assert not any(each["passed"] is False for each in shared["checks"])


@pytest.mark.long
def test_demo_is_trained_judged_and_benched_without_a_network(
    no_network: dict[str, str], tmp_path: Path
) -> None:
    code = "import urllib.request; urllib.request.urlopen('https://example.com')"
    refused = subprocess.run([sys.executable, "-c", code], env=no_network, capture_output=True)
    assert b"Name or service not known" in refused.stderr
    model = ["--model-path", QWEN]
    short = ["--max-steps", 1, "--val-split", 0, "--samples", 0, "--no-cache"]
    adapter = tmp_path / "adapters.safetensors"
    few, judged = tmp_path / "few.jsonl", tmp_path / "judged.jsonl"
    for path, rows in ((few, ROWS), (judged, DATA / "bookings_test.jsonl")):
        path.write_text("".join(rows.read_text().splitlines(keepends=True)[:8]))
    commands = [
        ["train", *model, "--data", few, *short, "--output", adapter],
        ["eval", *model, "--adapter", tmp_path, "--data", judged],
        ["bench", *model, "--data", few, "--against", "mlx-lm", "--steps", 1],
    ]
    for command in commands:
        assert without_network(no_network, *command).code == 0


@pytest.mark.parametrize(("cpu", "metal"), [(False, True), slow(False, False)])
def test_a_run_is_planned_with_metal_and_without(
    cpu: bool, metal: bool, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers the CPU (as in a Mac's virtual machine), Metal, and a GPU without Metal."""
    monkeypatch.setattr(default_device, "on_cpu", lambda: cpu)
    monkeypatch.setattr(mx.metal, "is_available", lambda: metal)
    rounding = default_device.rounding()
    assert (rounding.length, rounding.width) == ((1, 1) if cpu else (64, 32 if metal else 128))
    outcome = cli("plan", "--model-path", QWEN, "--data", ROWS, "--no-cache", "--json")
    assert outcome.code == 0
    assert json.loads(outcome.out)["data"]["steps"] > 0


@pytest.mark.slow
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
