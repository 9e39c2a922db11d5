"""`mlxtune doctor --prove` reports every failure, and leaves no files behind."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.files.processes import HelperError, HelperTimeoutError
from mlxtune.core.machine import facts
from mlxtune.core.machine.facts import Device
from mlxtune.diagnosis import doctor
from mlxtune.diagnosis import prove as recipe
from mlxtune.diagnosis.checks import (
    ProofCheck,
    check_dtype,
    check_gradients,
    check_matmul,
    check_memory,
    check_same_bytes,
    check_speed,
    failed_check,
)
from mlxtune.diagnosis.workbench import Workbench
from mlxtune.errors import ModelError
from mlxtune.views.first_result import COMPILING, SECONDS, FirstResult
from tests.command import Cli, finish, start
from tests.paths import DOCS
from tests.views.test_first_result import Clock

# The installed packages are read once.
PACKAGES = cache(doctor.packages)
DEVICE = Device("Metal", "Apple M9", 10**10, 10**10, 10**10)
HASH = "ab" * 32
GRADIENT = check_gradients("gpu", 1e-7, 2e-7).taking(0.5)
IN_16_BITS = check_dtype("bfloat16, gpu", 0.9995, 0.99).taking(0.5)
MATMUL = check_matmul("products, bfloat16", 0.25, 1024, 2048, 2048).taking(0.5)
FAILED = failed_check("gradients", "attention with sinks", "NYI").taking(1.0)
STEPS = check_speed("shapes as they are", 1000.0).taking(0.5)
PEAK = check_memory("128 tokens", 1000, 1100, 0.5).taking(0.5)
BENCH = {
    "ours": {"real_tokens_per_s": {"median": 300.0}},
    "theirs": {"real_tokens_per_s": {"median": 100.0}, "failed": None},
    "ratio": {"real_tokens_per_s": 3.0},
    "cache_ratio": 0.9,
    "losses_agree": True,
    "loss_difference": {
        **{"first": 2e-7, "largest": 3e-7},
        **{"first_tolerance": 1e-4, "tolerance": 1e-3},
    },
}


@pytest.fixture
def fakes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """Fake results of the workbench, for tests to change; no processes run."""
    values: dict[str, Any] = {
        "gradients": [GRADIENT],
        "kernels": [GRADIENT],
        "products": [MATMUL],
        "kernels16": [IN_16_BITS],
        "dtype": [IN_16_BITS],
        "memory": [PEAK],
        "steps": [STEPS],
        "trained": HASH,
        "resumed": (HASH, 2),
        "bench": BENCH,
        "device": (DEVICE, ""),
    }

    def give(name: str) -> Any:
        if isinstance(values[name], BaseException):
            raise values[name]
        return values[name]

    def measure(self: Workbench, job: str, *_: Path) -> Iterator[ProofCheck]:
        assert list(tmp_path.glob("mlxtune-prove-*")) == [self.scratch]
        yield from give(job)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr(Workbench, "measure", measure)
    monkeypatch.setattr(Workbench, "model", lambda self, name: Path(name))
    monkeypatch.setattr(Workbench, "train", lambda self, name, run="": give("trained"))
    monkeypatch.setattr(Workbench, "resumed", lambda self, name, stop: give("resumed"))
    monkeypatch.setattr(Workbench, "bench", lambda self, name, *timed: give("bench"))
    monkeypatch.setattr(doctor, "read_device", lambda: give("device"))
    monkeypatch.setattr(doctor, "packages", PACKAGES)
    return values


def documented() -> dict[str, dict[str, set[str]]]:
    """Return the keys and types in each table of docs/doctor.md that describes the JSON."""
    text = (DOCS / "doctor.md").read_text(encoding="utf-8").partition("\n## JSON of `--prove`\n")[2]
    tables: dict[str, dict[str, set[str]]] = {}
    name = ""
    for line in text.splitlines():
        if bold := re.match(r"\*\*`([\w -]+)`\*\*", line):
            name = bold[1]
        if line.startswith("| `"):
            key, types = (cell.strip() for cell in line.split("|")[1:3])
            tables.setdefault(name, {})[key.strip("`")] = set(types.split(" or "))
    return tables


TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"} | {
    dict: "object",
    list: "list",
}


def assert_documented(proof: dict[str, Any]) -> None:
    """Compare the keys and types of the JSON with docs/doctor.md."""
    tables = documented()

    def compare(value: dict[str, Any], name: str) -> None:
        assert value.keys() == tables[name].keys(), name
        for key, types in tables[name].items():
            assert TYPES[type(value[key])] in types, f"{name}.{key}: {value[key]!r}"

    compare(proof, "proof")
    compare(proof["machine"], "machine")
    compare(proof["device"], "device")
    assert proof["versions"].keys() >= {"python", "mlx", "mlx-lm"}
    for check in proof["checks"]:
        compare(check, "check")
        if check["values"]:
            found = check["values"].keys()
            name = "losses" if "first_difference" in found else check["kind"]
            compare(check["values"], name)


@pytest.mark.usefixtures("fakes")
def test_json_is_as_documented_and_the_table_goes_to_stderr(cli: Cli) -> None:
    outcome = cli("doctor", "--prove", "--json")
    assert outcome.code == 0
    proof = json.loads(outcome.out)
    assert_documented(proof)
    assert {check["kind"] for check in proof["checks"]} == {
        "gradients",
        "products",
        "16 bits",
        "bytes",
        "memory",
        "speed",
        "mlx-lm",
        "cache",
    }
    assert proof["passed"] is True
    assert "nothing failed" in outcome.err
    lines = outcome.err.splitlines()
    assert sum("demo-gemma3: gpu: 1e-07" in line for line in lines) == 1
    assert not any(line.split()[:2] == ["check", "expected"] for line in lines)


@pytest.mark.usefixtures("fakes")
@pytest.mark.parametrize("one", [True, False])
def test_checks_are_printed_once_where_stdout_and_stderr_are_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, one: bool
) -> None:
    paths = [tmp_path / name for name in (("both", "both") if one else ("out", "err"))]
    with paths[0].open("a") as out, paths[1].open("a") as err:
        monkeypatch.setattr("sys.stdout", out)
        monkeypatch.setattr("sys.stderr", err)
        recipe.main(as_json=False)
    lines = [line for path in {*paths} for line in path.read_text().splitlines()]
    headers = [line for line in lines if line.split()[:2] == ["check", "expected"]]
    assert len(headers) == (0 if one else 1)
    assert sum("demo-gemma3: gpu: 1e-07" in line for line in lines) == 1
    assert sum("nothing failed" in line for line in lines) == 1


@pytest.mark.parametrize(
    ("part", "value", "failures"),
    [
        ("gradients", [GRADIENT, replace(GRADIENT, passed=False)], 3),
        ("resumed", ("other", 2), 2),
        ("kernels", [FAILED, GRADIENT], 1),
        ("products", [check_matmul("products, bfloat16", 1.01, 1024, 2048, 2048)], 1),
        ("kernels16", [FAILED, IN_16_BITS], 1),
        ("dtype", [check_dtype("bfloat16, gpu", 0.998, 1.0), IN_16_BITS], 2),
        ("memory", [check_memory("128 tokens", 1000, 1600, 0.5)], 1),
        ("bench", BENCH | {"losses_agree": False}, 1),
    ],
)
def test_unequal_results_fail_and_exit_1(
    cli: Cli, fakes: dict[str, Any], part: str, value: Any, failures: int
) -> None:
    fakes[part] = value
    outcome = cli("doctor", "--prove", "--json")
    assert outcome.code == 1
    proof = json.loads(outcome.out)
    assert [check["passed"] for check in proof["checks"]].count(False) == failures
    assert_documented(proof)
    assert f"{failures} of {len(proof['checks'])} checks failed" in outcome.err


def test_failure_prints_what_it_means_and_what_to_do(cli: Cli, fakes: dict[str, Any]) -> None:
    fakes["kernels"] = [FAILED]
    outcome = cli("doctor", "--prove")
    assert outcome.code == 1
    (line,) = [each for each in outcome.out.splitlines() if each.startswith("attention with sinks")]
    assert "NYI" in line
    assert "report the problem" in line


@pytest.mark.parametrize("part", ["gradients", "kernels", "trained", "resumed", "memory", "bench"])
def test_busy_machine_is_not_a_failure(cli: Cli, fakes: dict[str, Any], part: str) -> None:
    fakes[part] = HelperTimeoutError("did not end within 300 seconds")
    fakes["steps"] = [check_speed("shapes as they are", 0.01)]
    outcome = cli("doctor", "--prove", "--json")
    assert outcome.code == 0
    late = [
        check for check in json.loads(outcome.out)["checks"] if check["expected"] == "completion"
    ]
    assert late
    assert f"nothing failed, {len(late)} did not end in time" in outcome.err


def test_run_that_writes_other_bytes_the_second_time_fails(
    cli: Cli, fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Workbench, "train", lambda self, name, run="straight": HASH + run)
    fakes["resumed"] = (HASH + "straight", 2)
    outcome = cli("doctor", "--prove")
    assert outcome.code == 1
    failed = [line for line in outcome.out.splitlines() if "FAIL" in line]
    assert [line.split("  ")[1] for line in failed] == [
        "demo-qwen3: run twice",
        "4-bit base: run twice",
    ]
    # CUDA's kernels add in no fixed order.
    fakes["device"] = (replace(DEVICE, kind="CUDA"), "")
    assert cli("doctor", "--prove").code == 0


@pytest.mark.parametrize(
    ("part", "failed", "passed"),
    [
        ("gradients", 3, 11),
        ("kernels", 1, 13),
        ("products", 1, 13),
        ("kernels16", 1, 13),
        ("steps", 1, 14),
        ("dtype", 2, 12),
        ("trained", 4, 10),
        ("resumed", 2, 12),
        ("memory", 1, 13),
        ("bench", 1, 13),
    ],
)
def test_error_fails_its_checks_and_the_others_still_run(
    cli: Cli, fakes: dict[str, Any], part: str, failed: int, passed: int
) -> None:
    fakes[part] = HelperError("killed by signal 6: [METAL] Command buffer failed")
    outcome = cli("doctor", "--prove", "--json")
    assert outcome.code == 1
    proof = json.loads(outcome.out)
    assert_documented(proof)
    found = [check["passed"] for check in proof["checks"]]
    assert (found.count(False), found.count(True)) == (failed, passed)
    errors = {check["found"] for check in proof["checks"] if check["passed"] is False}
    assert errors == {str(fakes[part])}
    assert "Traceback" not in outcome.err


def test_check_from_before_a_crash_is_kept() -> None:
    def crashing() -> Iterator[ProofCheck]:
        yield check_same_bytes("first", "a", "a", promised=True)
        raise RuntimeError("broke")

    first = FirstResult(lambda: None)
    checks = list(recipe.carry_out([("bytes", "part", crashing)], lambda text: None, lambda: first))
    assert [(check.name, check.passed) for check in checks] == [("first", True), ("part", False)]
    assert checks[1].found == "broke"


@pytest.mark.parametrize(("device", "lines"), [("Metal", 1), ("CPU", 0)])
def test_part_that_takes_long_on_a_gpu_may_be_compiling(
    cli: Cli,
    fakes: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    device: str,
    lines: int,
) -> None:
    clock = Clock()
    fakes["device"] = (replace(DEVICE, kind=device), "")

    def bench(*_: Any) -> Any:
        clock.pass_by(SECONDS)
        return BENCH

    monkeypatch.setattr(Workbench, "bench", bench)
    monkeypatch.setattr(FirstResult.__init__, "__defaults__", (clock.start,))
    outcome = cli("doctor", "--prove")
    assert outcome.code == 0
    # Each part waits for its first check, and only the last one is late.
    assert (clock.started, clock.waiting) == (15, 0)
    assert outcome.err.count(COMPILING) == lines


def test_interrupt_ends_with_130_and_leaves_no_folder(
    cli: Cli, fakes: dict[str, Any], tmp_path: Path
) -> None:
    fakes["trained"] = KeyboardInterrupt()
    assert cli("doctor", "--prove").code == 130
    assert not list(tmp_path.iterdir())


def test_piped_proof_prints_each_check_as_it_ends(
    cli: Cli, fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch, capfd: Any
) -> None:
    before: list[str] = []

    def bench(*_: Any) -> Any:
        before.extend(capfd.readouterr().err.splitlines())
        return BENCH

    monkeypatch.setattr(Workbench, "bench", bench)
    assert cli("doctor", "--prove").code == 0
    # The benchmark is the last part.
    assert len(before) == 14
    assert before[0] == (
        "gradients   pass  demo-qwen3: gpu: 1e-07, 2e-07, expected ≤ 1e-05, 1e-04, 0.5 s"
    )


def test_finished_proof_leaves_no_folder(fakes: dict[str, Any], tmp_path: Path) -> None:
    seen: list[str] = []
    recipe.prove(seen.append)
    assert seen[0] == "1/15 gradients: demo-qwen3"
    assert not list(tmp_path.iterdir())
    fakes["memory"] = RuntimeError()
    assert not recipe.prove().passed
    assert not list(tmp_path.iterdir())


def test_mlx_that_does_not_start_is_an_error(cli: Cli, fakes: dict[str, Any]) -> None:
    fakes["device"] = (None, "it was killed by signal 6")
    outcome = cli("doctor", "--prove")
    assert outcome.error.startswith("MLX does not start: it was killed by signal 6")
    with pytest.raises(ModelError):
        recipe.prove()


@pytest.mark.slow
def test_interrupt_from_a_terminal_leaves_no_process_and_no_folder(tmp_path: Path) -> None:
    process = start("doctor", "--prove", env={**os.environ, "TMPDIR": str(tmp_path)})
    while not list(tmp_path.glob("mlxtune-prove-*/*/stderr")):
        assert process.poll() is None
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 130
    assert outcome.err.splitlines()[-1] == "mlxtune: interrupted"
    assert not list(tmp_path.iterdir())


def test_shared_file_holds_neither_names_nor_paths(
    cli: Cli, fakes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(recipe.platform, "node", lambda: "annas-macbook.local")
    monkeypatch.setattr(recipe.getpass, "getuser", lambda: "anna")
    monkeypatch.setattr(Path, "home", lambda: Path("/Users/anna"))
    fakes["memory"] = HelperError("anna: /Users/anna/My models/wedding on annas-macbook.local")
    path = tmp_path / "proof.json"
    outcome = cli("doctor", "--prove", "--share", path)
    assert outcome.code == 1
    assert f"{path} has no names or paths" in outcome.out + outcome.err
    text = path.read_text(encoding="utf-8")
    for secret in ("anna", "Users", "wedding", HASH, tmp_path.name, "/", "\\\\"):
        assert secret not in text
    shared = json.loads(text)
    assert shared["device"]["name"] == "Apple M9"
    assert shared["versions"]["mlx"]
    assert {check["passed"] for check in shared["checks"]} >= {True, False}
    in_16_bits = next(each["values"] for each in shared["checks"] if each["kind"] == "16 bits")
    assert in_16_bits == IN_16_BITS.values


def test_user_without_a_name_shares_a_proof(
    cli: Cli, fakes: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nameless() -> str:
        raise KeyError("getpwuid(): uid not found: 1234")

    monkeypatch.setattr(recipe.getpass, "getuser", nameless)
    path = tmp_path / "proof.json"
    assert cli("doctor", "--prove", "--share", path).code == 0
    assert json.loads(path.read_text(encoding="utf-8"))["passed"] is True


def test_release_of_a_kernel_keeps_its_numbers_only(
    fakes: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    system = {"name": "Debian", "release": "6.18.44-annas-build", "memory": facts.Memory()}
    monkeypatch.setattr(facts, "read_system", lambda: system)
    assert recipe.prove().machine["system"] == "Debian 6.18.44"


def test_share_without_prove_and_a_folder_as_its_file_are_one_line(
    cli: Cli, tmp_path: Path
) -> None:
    assert "--share writes the result of --prove" in cli("doctor", "--share", "x.json").error
    assert "is a folder" in cli("doctor", "--prove", "--share", tmp_path).error
