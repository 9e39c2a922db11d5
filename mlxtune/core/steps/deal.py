"""Distributes the examples of a step over the workers that train together."""

from collections.abc import Sequence


def deal(costs: Sequence[float], workers: int) -> list[list[int]]:
    """Return the indices of each worker's items, ascending.

    Items are dealt in order of decreasing cost, each to the worker with the least cost so far
    (Graham, "Bounds on multiprocessing timing anomalies", 1969): the step takes at most 4/3 of the
    least possible time. The result depends on the arguments only, so that all workers agree.
    """
    dealt: list[list[int]] = [[] for _ in range(workers)]
    totals = [0.0] * workers
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(workers), key=lambda worker: (totals[worker], worker))
        dealt[least].append(i)
        totals[least] += costs[i]
    return [sorted(items) for items in dealt]
