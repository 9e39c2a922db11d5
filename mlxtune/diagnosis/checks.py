"""Judges the results of `mlxtune doctor --prove` by tolerances, in pure functions.

A check whose `passed` is None has no verdict: it only reports, or ran out of time.
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from mlxtune.core.formatting import byte_size

SCHEMA_VERSION = 1
# The largest accepted differences from the plain path in float32: of the loss, relative to the
# plain path's, and of gradients, relative to their largest entry.
LOSS_TOLERANCE, GRADIENT_TOLERANCE = 1e-5, 1e-4
# In 16 bits, the lowest accepted cosine between a matrix's gradient and its float32 gradient, and
# the largest accepted deviation from 1 of the ratio of their norms.
COSINE_TOLERANCE, NORM_TOLERANCE = 0.999, 0.03
# The largest accepted error of a product, as a multiple of the error that rounding explains.
MATMUL_TOLERANCE = 1.0
# The largest accepted excess of a measured peak, as a fraction of its prediction; that for GPUs
# is a guess, not based on measurements.
MEMORY_MARGIN, GPU_MEMORY_MARGIN = 0.15, 0.5
# Kinds of checks.
GRADIENTS, MATMULS, DTYPE = "gradients", "products", "16 bits"
BYTES, MEMORY = "bytes", "memory"
SPEED, PEER, CACHE = "speed", "mlx-lm", "cache"
# The `expected` of checks that ran out of time.
_END = "completion"
# The consequence of a failed check, and the remedy, by kind.
_ADVICE = {
    GRADIENTS: "a step would learn something wrong here: train nothing that matters, update MLX "
    "and the system, and report the problem",
    MATMULS: "this device computes wrong products: train nothing that matters, update MLX and the "
    "system, and report the problem",
    DTYPE: "training in 16 bits would learn something wrong here: train with --dtype float32, "
    "update MLX and the system, and report the problem",
    BYTES: "a run that is repeated or resumed gives a different adapter here: runs still learn; "
    "report the problem",
    MEMORY: "plans predict less memory than runs take: lower --memory-limit by the difference, and "
    "report the problem",
    SPEED: "the speed of steps could not be measured: report the problem",
    PEER: "mlxtune and mlx-lm learn different things here: train nothing that matters, and "
    "report the problem",
}
# Gradients by the name of their matrix, and a step's loss with its gradients.
Gradients = Mapping[str, npt.NDArray[Any]]
Step = tuple[float, Gradients]


@dataclass(frozen=True)
class ProofCheck:
    """The result of a check; `values` are its numbers and hashes for JSON."""

    kind: str
    name: str
    expected: str
    found: str
    passed: bool | None
    values: Mapping[str, Any] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def advice(self) -> str:
        """The failure, its consequence and the remedy; empty unless the check failed."""
        if self.passed is not False:
            return ""
        return f"{self.name}: {self.found}, expected {self.expected}: {_ADVICE[self.kind]}"

    def taking(self, seconds: float) -> Self:
        """Return the check with the time that it took."""
        return replace(self, seconds=round(seconds, 3))


@dataclass(frozen=True)
class MachineProof:
    """The checks of a machine, with facts on the machine, its device and its package versions."""

    checks: Sequence[ProofCheck]
    machine: Mapping[str, Any]
    device: Mapping[str, Any]
    versions: Mapping[str, str]
    seconds: float

    @property
    def passed(self) -> bool:
        """Whether no check failed."""
        return not self.failures

    @property
    def failures(self) -> list[ProofCheck]:
        """The checks that failed."""
        return [check for check in self.checks if check.passed is False]

    @property
    def unfinished(self) -> list[ProofCheck]:
        """The checks that ran out of time."""
        return [check for check in self.checks if check.expected == _END]

    def as_dict(self) -> dict[str, Any]:
        """Return the proof for JSON; docs/doctor.md describes it."""
        return {"schema_version": SCHEMA_VERSION, "passed": self.passed, **asdict(self)}


def check_step(
    name: str, dtype: str, step: Step, expected: Step, packing_problem: str = ""
) -> ProofCheck:
    """Compare a step's gradients, and in float32 its loss, with the plain path's in float32."""
    if dtype == "float32":
        loss = abs(step[0] / expected[0] - 1)
        return check_gradients(name, loss, _largest_difference(step[1], expected[1]))
    return check_dtype(name, *_cosine_and_ratio(step[1], expected[1]), packing_problem)


def _largest_difference(gradients: Gradients, expected: Gradients) -> float:
    """Return the largest difference, relative to the largest expected entry."""
    largest = max(np.abs(value).max() for value in expected.values())
    # Unlike NumPy's max, Python's may ignore a NaN.
    apart = np.max([np.abs(gradients[name] - value).max() for name, value in expected.items()])
    return float(apart / largest)


def _cosine_and_ratio(gradients: Gradients, expected: Gradients) -> tuple[float, float]:
    """Return the lowest cosine of a matrix's two gradients, and the norm ratio farthest from 1."""
    cosines, ratios = [], []
    for name, value in expected.items():
        other = gradients[name]
        norm, wanted = float(np.linalg.norm(other)), float(np.linalg.norm(value))
        with np.errstate(invalid="ignore"):
            cosines.append(np.divide((other * value).sum(dtype=np.float64), norm * wanted))
        ratios.append(norm / wanted)
    # NumPy's argmax and min pick a NaN if there is one.
    farthest = ratios[int(np.argmax(np.abs(np.array(ratios) - 1)))]
    return float(np.min(cosines)), farthest


def check_gradients(name: str, loss: float, gradient: float) -> ProofCheck:
    """Judge the relative differences of loss and gradients from the plain path's."""
    return ProofCheck(
        kind=GRADIENTS,
        name=name,
        expected=f"≤ {LOSS_TOLERANCE:.0e}, {GRADIENT_TOLERANCE:.0e}",
        found=f"{loss:.0e}, {gradient:.0e}",
        # A NaN is never within a tolerance.
        passed=loss <= LOSS_TOLERANCE and gradient <= GRADIENT_TOLERANCE,
        values={"loss_difference": _finite(loss), "gradient_difference": _finite(gradient)},
    )


def check_dtype(name: str, cosine: float, norm: float, packing_problem: str = "") -> ProofCheck:
    """Judge 16-bit gradients by the lowest cosine with float32 gradients and the worst norm ratio.

    A step that could not pack its examples fails too, because the proof's models allow packing.
    """
    right = cosine >= COSINE_TOLERANCE and abs(norm - 1) <= NORM_TOLERANCE
    unpacked = f", not packed: {packing_problem}" if packing_problem else ""
    return ProofCheck(
        kind=DTYPE,
        name=name,
        expected=f"≥ {COSINE_TOLERANCE}, ±{NORM_TOLERANCE:.0%}",
        found=f"{cosine:.5f}, {norm - 1:+.1%}{unpacked}",
        # A NaN is never within a tolerance.
        passed=right and not unpacked,
        values={"cosine": _finite(cosine), "norm_ratio": _finite(norm)},
    )


def check_matmul(name: str, ratio: float, tokens: int, inner: int, columns: int) -> ProofCheck:
    """Judge a product by `ratio`, its largest error as a multiple of what rounding explains.

    The factors are a (`tokens`, `inner`) and an (`inner`, `columns`) matrix.
    """
    return ProofCheck(
        kind=MATMULS,
        name=name,
        expected=f"≤ {MATMUL_TOLERANCE:g} x rounding",
        found=f"{ratio:.1g}, {tokens} x {inner}",
        # A NaN is never within a tolerance.
        passed=ratio <= MATMUL_TOLERANCE,
        values={
            **{"rounding_ratio": _finite(ratio)},
            **{"rows": tokens, "inner": inner, "columns": columns},
        },
    )


def check_same_bytes(
    name: str, expected: str, digest: str, *, promised: bool, stopped_after: int | None = None
) -> ProofCheck:
    """Judge whether two adapters with these SHA-256 hashes are the same.

    Different hashes fail only if equal bytes are `promised`. `stopped_after` is the step after
    which the run was stopped and resumed.
    """
    equal = expected == digest
    where = "" if stopped_after is None else f", from step {stopped_after}"
    hashes = {"expected_sha256": expected, "found_sha256": digest}
    return ProofCheck(
        kind=BYTES,
        name=name,
        expected="equal" if promised else "–",
        found=("equal" if equal else "not equal") + where,
        passed=equal or (False if promised else None),
        values=hashes | {"stopped_after": stopped_after},
    )


def check_memory(name: str, predicted: int, measured: int, margin: float) -> ProofCheck:
    """Judge a measured peak in bytes, which may exceed the prediction by the fraction `margin`."""
    return ProofCheck(
        kind=MEMORY,
        name=name,
        expected=f"{byte_size(predicted)} +{margin:.0%}",
        found=f"{byte_size(measured)} ({measured / predicted - 1:+.0%})",
        passed=measured <= predicted * (1 + margin),
        values={"predicted": predicted, "measured": measured, "margin": margin},
    )


def check_speed(name: str, tokens_per_s: float) -> ProofCheck:
    """Report the speed of steps without judging it: other programs may slow them down."""
    speed = f"{tokens_per_s:,.0f} tokens per second"
    return ProofCheck(SPEED, name, "–", speed, None, {"tokens_per_s": tokens_per_s})


def check_peer(benchmark: Mapping[str, Any]) -> list[ProofCheck]:
    """Report the speed relative to mlx-lm's, and judge whether the losses agree.

    `benchmark` is the JSON of `mlxtune bench`. If mlx-lm failed, the losses are not compared.
    """
    contestants = (benchmark["ours"], benchmark["theirs"])
    ours, theirs = (
        contestant.get("real_tokens_per_s", {}).get("median") for contestant in contestants
    )
    ratio = theirs and benchmark["ratio"]["real_tokens_per_s"]
    speed = ProofCheck(
        kind=PEER,
        name="real tokens a second",
        expected=f"mlx-lm {theirs:,.0f}" if theirs else "–",
        found=f"{ours:,.0f} ({ratio:.2f}x)" if theirs else contestants[1]["failed"],
        passed=None,
        values={"tokens_per_s": ours, "peer_tokens_per_s": theirs, "ratio": ratio},
    )
    if not theirs:
        return [speed]
    apart = benchmark["loss_difference"]
    first, largest = apart["first"], apart["largest"]
    losses = ProofCheck(
        kind=PEER,
        name="losses of these steps",
        expected=f"≤ {apart['first_tolerance']:.0e}, {apart['tolerance']:.0e}",
        found="not finite" if first is None else f"{first:.0e}, {largest:.0e}",
        passed=benchmark["losses_agree"],
        values={"first_difference": first, "largest_difference": largest},
    )
    return [speed, losses]


def check_cache(benchmark: Mapping[str, Any]) -> list[ProofCheck]:
    """Report what the limit of MLX's cache costs, if `mlxtune bench`, on a GPU, has timed it."""
    ratio = benchmark["cache_ratio"]
    if ratio is None:
        return []
    name, speedup = "limited, beside a large cache", f"{ratio:.2f}x the speed"
    return [ProofCheck(CACHE, name, "–", speedup, None, {"ratio": ratio})]


def failed_check(kind: str, name: str, error: str) -> ProofCheck:
    """Return a failed check for an error."""
    return ProofCheck(kind, name, "no error", error, passed=False)


def unfinished_check(kind: str, name: str, error: str) -> ProofCheck:
    """Return a check that ran out of time, perhaps on a busy machine: it has not failed."""
    problem = f"{error}: run this command again while nothing else runs"
    return ProofCheck(kind, name, _END, problem, passed=None)


def _finite(value: float) -> float | None:
    """Return a number for JSON: None for NaN and infinity, which JSON lacks."""
    return value if abs(value) < float("inf") else None
