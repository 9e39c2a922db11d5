"""The share of an adapter's gain that is left once its weights are quantised again.

A measure is a number that training lowered: the loss on validation rows, or the KL divergence
from the trained model. With its values `base` without the adapter and `trained` with it, a model
whose value is v has lost (v - trained) / (base - trained) of the gain.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The largest share of the gain that may be lost before other storages are tried.
MOST_LOST = 0.1


@dataclass(frozen=True)
class StorageTrial:
    """A way to store the trained projections: its measure, and the share of the gain it loses."""

    storage: str
    value: float
    lost: float


@dataclass(frozen=True)
class Retention:
    """The cost of quantising again. `tried` ends with the storage in use; the values have a `unit`.

    `base` and `trained` are the measure without and with the adapter.
    """

    measure: str
    unit: str
    base: float
    trained: float
    tried: tuple[StorageTrial, ...]

    @property
    def chosen(self) -> StorageTrial:
        """The storage in use."""
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
    """Return the share of the gain that is lost at a value; 1 if the value is not finite."""
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
    """Measure storages in order until one loses at most `MOST_LOST`, or all are measured."""
    tried: list[StorageTrial] = []
    for storage in storages:
        value = value_of(storage)
        tried.append(StorageTrial(storage, value, share_lost(base, trained, value)))
        if tried[-1].lost <= MOST_LOST:
            break
    return Retention(measure, unit, base, trained, tuple(tried))
