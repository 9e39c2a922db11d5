"""Divides a step among workers, and estimates how fast it runs on several machines."""

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

# Seconds that a message between machines takes over TCP, with the system's overhead.
_LATENCY = 1e-4


@dataclass(frozen=True)
class Scaling:
    """A step on `workers` machines with links of `gbps` Gbit/s.

    `dearest` is the fraction of the step's cost that falls on the most loaded machine. `exchanges`
    all-reduces sum `exchanged` bytes in total: gradients and, if the workers share the model,
    partial results. `step_s` is the time of a step on one machine, if known.
    """

    workers: int
    gbps: float
    dearest: float
    exchanged: int
    step_s: float | None = None
    exchanges: int = 1

    @property
    def exchange_s(self) -> float:
        """The time in seconds that the exchanges take on a ring.

        Each machine sends (n - 1) / n of the bytes twice, in 2 (n - 1) messages per exchange
        (Patarasu, Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
        2009).
        """
        sent = 8 * self.exchanged / self.workers / (self.gbps * 1e9)
        return 2 * (self.workers - 1) * (_LATENCY * self.exchanges + sent)

    @property
    def speedup(self) -> float | None:
        """An upper bound on the speedup over one machine: small parts are less efficient."""
        if self.step_s is None:
            return None
        return self.step_s / (self.dearest * self.step_s + self.exchange_s)

    @property
    def least_step_s(self) -> float:
        """The time in seconds per step on one machine beyond which several machines are faster."""
        return self.exchange_s / (1 - self.dearest) if self.dearest < 1 else float("inf")

    def as_dict(self) -> dict[str, Any]:
        return asdict(self) | {"exchange_s": self.exchange_s, "speedup": self.speedup}


def balance(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Return the indices of each worker's items, ascending.

    Items are dealt in order of decreasing cost, each to the worker with the least cost so far
    (Graham, "Bounds on multiprocessing timing anomalies", 1969): the step takes at most 4/3 of the
    least possible time. The result is deterministic, so that all workers agree.
    """
    balanced: list[list[int]] = [[] for _ in range(workers)]
    totals = [0.0] * workers
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(workers), key=lambda worker: (totals[worker], worker))
        balanced[least].append(i)
        totals[least] += costs[i]
    return [sorted(items) for items in balanced]


def busiest_fraction(steps: Iterable[Sequence[float]], workers: int) -> float:
    """Return the fraction of all costs that falls on each step's most loaded worker."""
    max_load = total = 0.0
    for costs in steps:
        max_load += max(sum(costs[i] for i in items) for items in balance(costs, workers))
        total += sum(costs)
    return max_load / total if total else 1.0


def busiest_items(costs: Sequence[float], workers: int) -> list[int]:
    """Return the items of the worker whose items cost most."""
    return max(balance(costs, workers), key=lambda items: sum(costs[i] for i in items))
