"""The share of an adapter's gain that remains after its fused weights are quantised again.

A measure is a number that training lowers: the validation loss, or the KL divergence from the
trained model. Its value is `base` without the adapter and `trained` with it. A model with the
value v has lost (v - trained) / (base - trained) of the gain.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# If a storage format loses more than this share of the gain, the next format is tried.
MOST_LOST = 0.1


@dataclass(frozen=True)
class StorageTrial:
    """A storage format, the value measured with it, and the share of the gain that it loses."""

    storage: str
    value: float
    lost: float


@dataclass(frozen=True)
class Retention:
    """The gain lost by quantising the weights again. `tried` ends with the storage in use.

    `base` and `trained` are the measure's values without and with the adapter, in `unit`.
    """

    measure: str
    unit: str
    base: float
    trained: float
    tried: tuple[StorageTrial, ...]

    @property
    def chosen(self) -> StorageTrial:
        """The trial of the storage in use."""
        return self.tried[-1]

    def line(self) -> str:
        """Return the retention as a line of text."""
        gain = f"{self.base:.4g} {self.unit} without the adapter, {self.trained:.4g} with it"
        # The first trial uses the base's own storage, for comparison.
        shown = dict.fromkeys((self.chosen, self.tried[0]))
        trials = [
            f"{each.value:.4g} stored {each.storage} ({each.lost:.0%} of the gain lost)"
            for each in shown
        ]
        return f"{self.measure}: {gain}, {'; '.join(trials)}"


def share_lost(base: float, trained: float, value: float) -> float:
    """Return the share of the gain lost by a model whose measure has the value `value`.

    The share is 1 if the value or the gain is not finite, and 0 if there is no gain.
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
    storages: Sequence[str],
    value_of: Callable[[str], float],
) -> Retention:
    """Measure storage formats in order until one loses at most `MOST_LOST`, or all are measured."""
    tried: list[StorageTrial] = []
    for storage in storages:
        value = value_of(storage)
        tried.append(StorageTrial(storage, value, share_lost(base, trained, value)))
        if tried[-1].lost <= MOST_LOST:
            break
    return Retention(measure, unit, base, trained, tuple(tried))
