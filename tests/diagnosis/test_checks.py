"""The checks of `doctor --prove`: when they fail, and the numbers that they report."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from typing import Any

import pytest

from mlxtune.diagnosis import checks
from mlxtune.diagnosis.checks import MachineProof, ProofCheck

SPREAD = {"median": 300.0, "min": 290.0, "max": 310.0}


def benchmark(**changes: Any) -> dict[str, Any]:
    """Return the entries of a benchmark's JSON that the checks use."""
    return {
        "ours": {"real_tokens_per_s": SPREAD},
        "theirs": {"real_tokens_per_s": SPREAD | {"median": 100.0}, "failed": None},
        "ratio": {"real_tokens_per_s": 3.0},
        "losses_agree": True,
        "loss_difference": {
            "first": 2e-7,
            "largest": 3e-7,
            "first_tolerance": 1e-4,
            "tolerance": 1e-3,
        },
    } | changes


@pytest.mark.parametrize(
    ("loss", "gradient", "passed"),
    [
        (1e-5, 1e-4, True),
        (1.1e-5, 0.0, False),
        (0.0, 1.1e-4, False),
        (math.nan, 0.0, False),
        (0.0, math.nan, False),
    ],
)
def test_gradients_pass_within_both_tolerances_only(
    loss: float, gradient: float, passed: bool
) -> None:
    check = checks.check_gradients("demo: gpu", loss, gradient)
    assert check.passed is passed
    # JSON has no NaN.
    json.dumps(check.values, allow_nan=False)


@pytest.mark.parametrize(
    ("found", "promised", "passed"),
    [("a", True, True), ("a", False, True), ("b", True, False), ("b", False, None)],
)
def test_other_bytes_fail_where_equal_ones_are_promised(
    found: str, promised: bool, passed: bool | None
) -> None:
    assert checks.check_same_bytes("run twice", "a", found, promised=promised).passed is passed


def test_stopped_run_reports_where_it_was_resumed() -> None:
    check = checks.check_same_bytes("resume", "a", "b", promised=True, stopped_after=3)
    assert check.found == "not equal, from step 3"


@pytest.mark.parametrize(("measured", "passed"), [(1, True), (1150, True), (1151, False)])
def test_memory_fails_only_beyond_its_margin(measured: int, passed: bool) -> None:
    assert checks.MEMORY_MARGIN == 0.15
    assert checks.check_memory("128 tokens", 1000, measured, 0.15).passed is passed


def test_speed_is_always_reported() -> None:
    slow = benchmark(ratio={"real_tokens_per_s": 0.1})
    speed, losses = checks.check_peer(slow)
    assert speed.passed is None
    assert (speed.expected, speed.found) == ("mlx-lm 100", "300 (0.10x)")
    assert speed.values == {"tokens_per_s": 300.0, "peer_tokens_per_s": 100.0, "ratio": 0.1}
    assert losses.passed is True


@pytest.mark.parametrize("first", [0.5, None])
def test_other_losses_than_those_of_mlx_lm_fail(first: float | None) -> None:
    apart = benchmark()["loss_difference"] | {"first": first, "largest": first}
    _, losses = checks.check_peer(benchmark(losses_agree=False, loss_difference=apart))
    assert losses.passed is False


def test_failing_mlx_lm_does_not_fail_our_checks() -> None:
    failed = {"failed": "killed (signal 9)"}
    (speed,) = checks.check_peer(benchmark(theirs=failed, ratio=None, losses_agree=None))
    assert (speed.passed, speed.found) == (None, "killed (signal 9)")
    assert speed.values["tokens_per_s"] == 300.0


def test_limit_of_the_cache_is_reported_if_it_was_timed() -> None:
    (check,) = checks.check_cache(benchmark(cache_ratio=0.7))
    assert (check.passed, check.found) == (None, "0.70x the speed")
    assert checks.check_cache(benchmark(cache_ratio=None)) == []


def test_speed_of_steps_is_only_reported() -> None:
    check = checks.check_speed("16-bit base: shapes as they are", 1234.5)
    assert (check.passed, check.found) == (None, "1,234 tokens per second")


@pytest.mark.parametrize(
    ("cosine", "norm", "unpacked", "passed"),
    [
        (0.999, 1.029, "", True),
        (0.9989, 1.0, "", False),
        (1.0, 0.96, "", False),
        (math.nan, 1.0, "", False),
        (1.0, math.nan, "", False),
        (1.0, 1.0, "its hidden states differ", False),
    ],
)
def test_16_bits_pass_within_both_tolerances_and_packed(
    cosine: float, norm: float, unpacked: str, passed: bool
) -> None:
    check = checks.check_dtype("demo: bfloat16, gpu", cosine, norm, unpacked)
    assert check.passed is passed
    assert unpacked in check.found
    json.dumps(check.values, allow_nan=False)


FAILED = (
    checks.check_gradients("demo: gpu", 1.0, 1.0),
    checks.check_dtype("demo: bfloat16, gpu", 0.5, 1.0),
    checks.check_matmul("products, bfloat16", 1.1, 1024, 2048, 2048),
    checks.check_matmul("products, bfloat16", float("nan"), 1024, 2048, 2048),
    checks.check_same_bytes("run twice", "a", "b", promised=True),
    checks.check_memory("128 tokens", 100, 1000, 0.15),
    checks.check_peer(benchmark(losses_agree=False))[1],
    checks.failed_check(checks.GRADIENTS, "gated delta rule", "[METAL] failed"),
    checks.failed_check(checks.SPEED, "16-bit base", "[METAL] failed"),
)


@pytest.mark.parametrize("check", FAILED, ids=lambda check: f"{check.kind}: {check.name}")
def test_failed_check_says_what_it_means_and_what_to_do_in_a_line(check: ProofCheck) -> None:
    _, meaning, remedy = check.advice.rsplit(": ", 2)
    assert check.found in check.advice
    assert check.name in check.advice
    assert "\n" not in check.advice
    assert "report the problem" in remedy
    assert meaning
    assert replace(check, passed=True).advice == ""


def test_timed_out_check_is_not_a_failure() -> None:
    late = checks.unfinished_check("mlx-lm", "4-bit base", "did not end within 300 seconds")
    proof = MachineProof([late], {}, {}, {}, 1.0)
    assert proof.passed
    assert proof.unfinished == [late]
    assert "run this command again" in late.found


def test_proof_passes_unless_a_check_fails() -> None:
    def proof(*passed: bool | None) -> MachineProof:
        found = [ProofCheck("bytes", "a", "", "", each) for each in passed]
        return MachineProof(found, {}, {}, {}, 1.0)

    assert proof(True, None).passed
    assert not proof(True, False, None).passed
    assert proof(False, True).as_dict()["passed"] is False
