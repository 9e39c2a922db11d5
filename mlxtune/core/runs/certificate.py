"""Proof on the way out: how far what was written is from what was trained, and what that allows.

Both models see the same tokens: real prompts, each with the answer that the trained model gives
greedily. Their logits at the same positions are compared.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.core.machine.files import file_hash
from mlxtune.core.text import count
from mlxtune.errors import OutputError

CERTIFICATE = "certificate.json"

Logits = npt.NDArray[np.float32]


@dataclass
class Comparison:
    """What two models' logits have in common so far. `add` takes those of one more prompt."""

    prompts: int = 0
    tokens: int = 0
    largest_difference: float = 0.0
    kl_sum: float = 0.0
    same: int = 0
    generated: int = 0

    def add(self, trained: Logits, written: Logits, generated: int) -> None:
        """Compare float32 (T, V) logits at the same tokens; the last `generated` gave an answer.

        A difference that is not a number counts as infinite.
        """
        difference = float(np.abs(trained - written).max(initial=0.0))
        if not math.isfinite(difference):
            difference = math.inf
        self.prompts += 1
        self.tokens += len(trained)
        self.largest_difference = max(self.largest_difference, difference)
        self.kl_sum += float(_divergences(trained, written).sum())
        last = slice(len(trained) - generated, None)
        self.same += int((trained[last].argmax(-1) == written[last].argmax(-1)).sum())
        self.generated += generated

    @property
    def mean_kl(self) -> float:
        """Mean KL(trained || written) over the positions, in nats."""
        return self.kl_sum / self.tokens if self.tokens else 0.0


def _divergences(trained: Logits, written: Logits) -> npt.NDArray[np.float64]:
    """Return KL(trained || written), (T,) in nats, of (T, V) logits; one row at a time."""
    found = [
        float(np.sum(np.exp(p) * (p - q)))
        for p, q in (
            (_log_softmax(a), _log_softmax(b)) for a, b in zip(trained, written, strict=True)
        )
    ]
    # Rounding may leave a little below zero.
    return np.asarray(np.maximum(found, 0.0))


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


@dataclass(frozen=True)
class WeightCheck:
    """What every tensor of a fused model is, beside what it should be.

    `largest_error` is that of a fused weight, relative to the largest of its matrix; `problems` are
    the tensors that are off by more than rounding, each with why.
    """

    unchanged: int
    fused: int
    largest_error: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class Certificate:
    """How what was written compares with what was trained.

    `tolerance` is the largest difference of a logit that rounding explains; None where the weights
    were quantised again, so that `weights` alone decides. `effect` is how far the adapter moves a
    logit, for scale.
    """

    format: str
    dtype: str
    tolerance: float | None
    effect: float
    comparison: Comparison
    files: Mapping[str, str]
    versions: Mapping[str, str]
    weights: WeightCheck | None = None

    @property
    def problems(self) -> list[str]:
        """What is off by more than rounding, in words."""
        found = self.comparison
        problems = list(self.weights.problems) if self.weights else []
        own = (self.effect, self.tolerance or 0.0)
        if not all(math.isfinite(each) for each in own):
            problems.append("the logits of the trained model itself are not finite")
        elif self.tolerance is None:
            if not math.isfinite(found.largest_difference):
                problems.append("its logits are not finite")
        elif not found.largest_difference <= self.tolerance:
            problems.append(
                f"its logits differ by up to {found.largest_difference:.3g} from those of the "
                f"trained model, where rounding explains {self.tolerance:.3g}"
            )
        return problems

    @property
    def passed(self) -> bool:
        """Tell whether rounding explains every difference."""
        return not self.problems

    def as_dict(self) -> dict[str, Any]:
        """Return what certificate.json holds."""
        found = self.comparison
        said: dict[str, Any] = {
            "passed": self.passed,
            "format": self.format,
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "prompts": found.prompts,
            "tokens": found.tokens,
            "largest_difference": found.largest_difference,
            "adapter_effect": self.effect,
            "mean_kl": found.mean_kl,
            "greedy_match": {"same": found.same, "of": found.generated},
        }
        if self.weights is not None:
            said["weights"] = {
                "unchanged": self.weights.unchanged,
                "fused": self.weights.fused,
                "largest_error": self.weights.largest_error,
            }
        return said | {"files": dict(self.files), "versions": dict(self.versions)}

    def lines(self) -> list[str]:
        """Say it to a person."""
        found = self.comparison
        allowed = (
            "the weights were quantised again, which costs this"
            if self.tolerance is None
            else f"rounding explains {self.tolerance:.2g}"
        )
        lines = [
            f"{count(found.prompts, 'prompt')}, {count(found.tokens, 'position')}, {self.dtype}: "
            f"logits differ by up to {found.largest_difference:.2g} ({allowed}; the adapter moves "
            f"them by up to {self.effect:.2g})",
            f"KL {found.mean_kl:.2g} nats a token; greedy answers agree in {found.same} of "
            f"{count(found.generated, 'token')}",
        ]
        if self.weights is not None:
            lines.append(
                f"{count(self.weights.fused, 'tensor')} fused, off by up to "
                f"{self.weights.largest_error:.2g} of the largest weight, and "
                f"{self.weights.unchanged} equal to the base model's"
            )
        return lines


def hashes(folder: Path) -> dict[str, str]:
    """Return the SHA-256 of every file of a folder by its path in it. Raises OutputError."""
    try:
        return {
            path.relative_to(folder).as_posix(): file_hash(path)
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        }
    except OSError as error:
        raise OutputError(f"{folder}: cannot be read back: {error.strerror}") from error


def check(certificate: Certificate, target: Path) -> None:
    """Raise OutputError, naming the worst, unless a certificate passes."""
    problems = certificate.problems
    if problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise OutputError(
            f"{target}: is not what was trained, so nothing was left there: {problems[0]}{more}"
        )
