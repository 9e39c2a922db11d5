"""How the examples of a step are dealt to the ranks that train together."""

from collections.abc import Sequence


def deal(costs: Sequence[float], ranks: int) -> list[list[int]]:
    """Return which of the items each rank gets, as ascending indices.

    The dearest first, each to the rank that has least so far (Graham, "Bounds on multiprocessing
    timing anomalies", 1969): no rank takes more than 4/3 of the least possible time. A function of
    the arguments, so that all ranks come to the same.
    """
    dealt: list[list[int]] = [[] for _ in range(ranks)]
    totals = [0.0] * ranks
    for i in sorted(range(len(costs)), key=lambda i: (-costs[i], i)):
        least = min(range(ranks), key=lambda rank: (totals[rank], rank))
        dealt[least].append(i)
        totals[least] += costs[i]
    return [sorted(items) for items in dealt]
