"""The certificate of an export: how far its logits are, and may be, from the trained model's.

The export and the trained model see the same tokens: prompts, each followed by the trained model's
greedy answer.

If fused weights are quantised again, they keep a fraction of the adapter's gain, their retention,
by a measure that training lowers: the validation loss, or the KL divergence from the trained model.
Its value is `base` without the adapter and `trained` with it. A model with the value v has lost
(v - trained) / (base - trained) of the gain.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters.storage import Storage
from mlxtune.core.formatting import pluralize
from mlxtune.errors import OutputError

CERTIFICATE = "certificate.json"
# If a storage format loses more than this fraction of the gain, the next format is tried.
MAX_LOST = 0.03

Logits = npt.NDArray[np.float32]


@dataclass
class Comparison:
    """The differences between two models' logits over the prompts added so far."""

    prompts: int = 0
    tokens: int = 0
    largest_difference: float = 0.0
    kl_sum: float = 0.0
    same: int = 0
    generated: int = 0

    def add(self, trained: Logits, written: Logits, generated: int) -> None:
        """Add both models' logits, float32 (T, V), for a prompt and its answer.

        The last `generated` positions predict the answer. A NaN counts as an infinite difference.
        """
        difference = float(np.abs(trained - written).max(initial=0.0))
        if not math.isfinite(difference):
            difference = math.inf
        self.prompts += 1
        self.tokens += len(trained)
        self.largest_difference = max(self.largest_difference, difference)
        self.kl_sum += _divergence(trained, written)
        last = slice(len(trained) - generated, None)
        self.same += int((trained[last].argmax(-1) == written[last].argmax(-1)).sum())
        self.generated += generated

    @property
    def mean_kl(self) -> float:
        """The mean KL(trained || written) over the positions, in nats."""
        return self.kl_sum / self.tokens if self.tokens else 0.0


def _divergence(trained: Logits, written: Logits) -> float:
    """Return the sum of KL(trained || written) over the T positions, in nats, for (T, V) logits."""
    values = []
    for a, b in zip(trained, written, strict=True):  # row by row to save memory
        p, q = _log_softmax(a), _log_softmax(b)
        values.append(float(np.sum(np.exp(p) * (p - q))))
    # Rounding may leave slightly negative values.
    return float(np.maximum(values, 0.0).sum())


def _log_softmax(logits: Logits) -> npt.NDArray[np.float64]:
    shifted = logits.astype(np.float64) - logits.max()
    return np.asarray(shifted - np.log(np.exp(shifted).sum()))


@dataclass(frozen=True)
class WeightCheck:
    """A comparison of a fused model's tensors with the expected tensors.

    `unchanged` counts the tensors that equal the base model's, `fused` the tensors with an update.
    `largest_error` is the largest error of an entry, relative to the largest entry of its tensor.
    `problems` are messages about tensors that differ by more than rounding.
    """

    unchanged: int
    fused: int
    largest_error: float
    problems: tuple[str, ...] = ()


@dataclass(frozen=True)
class StorageTrial:
    """A storage format, the value measured with it, and the fraction of the gain that it loses.

    `bits` and `method` come from a `Storage`.
    """

    storage: str
    bits: int | None
    method: str | None
    value: float
    lost: float


@dataclass(frozen=True)
class Retention:
    """The gain lost by quantising the weights again, with the storage formats that were tried.

    `base` and `trained` are the measure's values without and with the adapter, in `unit`.
    """

    measure: str
    unit: str
    base: float
    trained: float
    tried: tuple[StorageTrial, ...]

    @property
    def selected(self) -> StorageTrial:
        """The trial of the storage in use: the one that loses least, and the smallest of these."""
        return min(self.tried, key=lambda trial: trial.lost)

    def as_dict(self) -> dict[str, Any]:
        """Return the retention in certificate.json, with the storage in use and the gain kept."""
        used = {"bits": self.selected.bits, "method": self.selected.method}
        return asdict(self) | used | {"kept": 1 - self.selected.lost}

    def line(self) -> str:
        """Return the retention as a line of text."""
        gain = f"{self.base:.4g} {self.unit} without the adapter, {self.trained:.4g} with it"
        # The first trial uses the base's own storage, for comparison.
        shown = dict.fromkeys((self.selected, self.tried[0]))
        trials = [
            f"{example.value:.4g} stored {example.storage} ({example.lost:.0%} of the gain lost)"
            for example in shown
        ]
        return f"{self.measure}: {gain}, {'; '.join(trials)}"


@dataclass(frozen=True)
class Certificate:
    """A written model's comparison with the trained model.

    `tolerance` is the largest logit difference that rounding explains. It is None if the weights
    were quantised again: then the logits need only be finite. `effect` is the adapter's largest
    change to a logit, for comparison. `retention` measures the quality lost by quantising the
    weights again, and is None if they were not quantised again. `quantized` is the type, if any,
    that llama.cpp rounded the weights to after the comparison.
    """

    format: str
    dtype: str
    tolerance: float | None
    effect: float
    comparison: Comparison
    versions: Mapping[str, str]
    files: Mapping[str, str] = field(default_factory=dict)
    weights: WeightCheck | None = None
    retention: Retention | None = None
    quantized: str | None = None

    @property
    def problems(self) -> list[str]:
        """Messages about logits and tensors that differ by more than rounding; empty on a pass."""
        difference = self.comparison.largest_difference
        problems = list(self.weights.problems) if self.weights else []
        if not (math.isfinite(self.effect) and math.isfinite(self.tolerance or 0.0)):
            problems.append("the logits of the trained model itself are not finite")
        elif self.tolerance is None:
            if not math.isfinite(difference):
                problems.append("its logits are not finite")
        elif not difference <= self.tolerance:
            problems.append(
                f"its logits differ by up to {difference:.3g} from those of the trained model, "
                f"but rounding explains only {self.tolerance:.3g}"
            )
        return problems

    def as_dict(self) -> dict[str, Any]:
        """Return the content of certificate.json."""
        compared = self.comparison
        content: dict[str, Any] = {
            "passed": not self.problems,
            "format": self.format,
            "dtype": self.dtype,
            "tolerance": self.tolerance,
            "prompts": compared.prompts,
            "tokens": compared.tokens,
            "largest_difference": compared.largest_difference,
            "adapter_effect": self.effect,
            "mean_kl": compared.mean_kl,
            "greedy_match": {"same": compared.same, "of": compared.generated},
        }
        if self.weights is not None:
            content["weights"] = asdict(self.weights)
            del content["weights"]["problems"]
        if self.retention is not None:
            content["retention"] = self.retention.as_dict()
        if self.quantized is not None:
            content["quantized"] = self.quantized
        return content | {"files": dict(self.files), "versions": dict(self.versions)}

    def lines(self) -> list[str]:
        """Return the certificate as lines of text."""
        compared = self.comparison
        allowed = (
            "the price of quantising the weights again"
            if self.tolerance is None
            else f"rounding explains {self.tolerance:.2g}"
        )
        lines = [
            f"{pluralize(compared.prompts, 'prompt')}, {pluralize(compared.tokens, 'position')}, "
            f"{self.dtype}: logits differ by up to {compared.largest_difference:.2g} ({allowed}; "
            f"the adapter changes them by up to {self.effect:.2g})",
            f"KL {compared.mean_kl:.2g} nats per token; greedy answers agree in {compared.same} of "
            f"{pluralize(compared.generated, 'token')}",
        ]
        if self.tolerance is not None and self.tolerance > self.effect:
            other = "use --dtype float32" if self.weights is None else "also compare weights"
            lines.append(f"rounding may hide the adapter, so logits alone prove little: {other}")
        if self.weights is not None:
            lines.append(
                f"{pluralize(self.weights.fused, 'tensor')} fused, with errors up to "
                f"{self.weights.largest_error:.2g} of the largest weight; "
                f"{self.weights.unchanged} identical to the base model's"
            )
        if self.retention is not None:
            lines.append(self.retention.line())
        if self.quantized is not None:
            lines.append(
                f"the weights were compared before they were rounded to {self.quantized}: "
                "the proof does not cover the rounded weights"
            )
        return lines


def check(certificate: Certificate, target: Path) -> None:
    """Raise OutputError, with the first problem, if a certificate does not pass."""
    if problems := certificate.problems:
        more = f"; and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise OutputError(
            f"{target}: differs from what was trained, so nothing was written: {problems[0]}{more}"
        )


def fraction_lost(base: float, trained: float, value: float) -> float:
    """Return the fraction of the gain lost by a model whose measure has the value `value`.

    The fraction is 1 if the value or the gain is not finite, and 0 if there is no gain.
    """
    gain = base - trained
    if not math.isfinite(value) or not math.isfinite(gain):
        return 1.0
    return max(0.0, (value - trained) / gain) if gain > 0 else 0.0


def try_in_order(
    measure: str,
    unit: str,
    base: float,
    trained: float,
    storages: Sequence[Storage],
    value_of: Callable[[Storage], float | None],
) -> Retention:
    """Measure storage formats in order until one loses at most `MAX_LOST`, or all are measured.

    A format without a value is left out.
    """
    tried: list[StorageTrial] = []
    for storage in storages:
        if (value := value_of(storage)) is None:
            continue
        lost = fraction_lost(base, trained, value)
        tried.append(StorageTrial(storage.name, storage.bits, storage.method, value, lost))
        if tried[-1].lost <= MAX_LOST:
            break
    return Retention(measure, unit, base, trained, tuple(tried))
