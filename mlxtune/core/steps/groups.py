"""Which examples of a step run through the model together, and which shared prefix runs once.

An example runs up to the prediction of its last supervised token. If examples start with the same
tokens, none of which carries loss, these may run once, as the prefix of their group:

    prefix  S S S S S S     rest  a b c d .      `.` is padding: a width is that of the widest rest
                                  e f . . .
                                  g h i j k
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from operator import itemgetter

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import run_length

# Examples planned together: the time is quadratic in them, and more gain little.
_AT_ONCE = 256
# Lengths of the shared prefix that make examples a family; each is tried.
_FAMILIES_TRIED = 8

_Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class StepCost:
    """The cost of running, in units of one token's time.

    `fixed` is the cost of each pass through the model beyond its tokens; a prefix is a separate
    pass. Widths are rounded up and prefixes down to a multiple of `width_multiple`, so that there
    are fewer shapes.
    """

    fixed: int = 32
    width_multiple: int = 1

    def of(self, group: Group) -> int:
        """Return the cost of a group."""
        return group.tokens + self.fixed * (2 if group.prefix else 1)

    def width(self, tokens: int) -> int:
        """Return a rest's tokens, rounded up."""
        return -(-tokens // self.width_multiple) * self.width_multiple

    def prefix(self, tokens: int) -> int:
        """Return how many of the shared tokens are run as a prefix."""
        return tokens // self.width_multiple * self.width_multiple


@dataclass(frozen=True, slots=True)
class Group:
    """The examples of a micro-batch, as indices into those of the step.

    The first `prefix` tokens of all are run once, 0 for none. Each then runs `width` tokens: those
    of the widest rest, rounded up; the longest comes first. If `packed`, they stand in order in one
    line of `width` tokens instead.
    """

    examples: tuple[int, ...]
    prefix: int
    width: int
    packed: bool = False

    @property
    def lines(self) -> int:
        """The lines of `width` tokens."""
        return 1 if self.packed else len(self.examples)

    @property
    def tokens(self) -> int:
        """The tokens that run through the model, padding included."""
        return self.prefix + self.lines * self.width

    def padding(self, examples: Sequence[Example]) -> int:
        """Return how many of the tokens are padding; `examples` are all of the step."""
        if self.packed:
            return 0
        return sum(self.prefix + self.width - run_length(examples[i]) for i in self.examples)


def plan_step(
    examples: Sequence[Example],
    max_tokens: int,
    cost: StepCost,
    share_prefixes: bool = True,
    keyed: bool = False,
) -> list[Group]:
    """Group the examples of a step so that it takes little time; the largest group comes first.

    Each example stands in exactly one group. A group runs at most `max_tokens` tokens, except for a
    single longer example, which stands alone. With `keyed`, only examples of equal `key` share a
    prefix. The plan is a function of the arguments.
    """
    contexts = [_context(example) if share_prefixes else example.tokens[:0] for example in examples]
    groups: list[Group] = []
    for chosen, shared in neighbours(examples, contexts, keyed):
        runs = [run_length(examples[i]) for i in chosen]
        planner = _Planner(runs, list(map(cost.prefix, shared)), max_tokens, cost)
        groups += (planner.group(places, chosen) for places in planner.plan())
    return sorted(groups, key=lambda group: (-group.tokens, group.examples))


def _context(example: Example) -> _Tokens:
    """Return the tokens that may be run as a prefix: none of them predicts a supervised token."""
    supervised = example.assistant_mask[1:]
    first = int(supervised.argmax()) if supervised.any() else 0
    return example.tokens[:first]


def neighbours(
    examples: Sequence[Example], texts: Sequence[_Tokens], keyed: bool
) -> Iterator[tuple[list[int], list[int]]]:
    """Yield parts of a step, in an order in which neighbours share the most of their texts.

    A part has the indices of its examples, and how many tokens each shares with the next; with
    `keyed`, none if their `key` differs.
    """
    keys = [example.key if keyed else 0 for example in examples]
    # As big-endian bytes, tokens sort in their own order, and a text before its continuations.
    bytes_of = [text.astype(">u4").tobytes() for text in texts]
    runs = [run_length(example) for example in examples]
    order = sorted(range(len(examples)), key=lambda i: (keys[i], bytes_of[i], -runs[i], i))
    for start in range(0, len(order), _AT_ONCE):
        chosen = order[start : start + _AT_ONCE]
        yield (
            chosen,
            [
                common_tokens(texts[i], texts[j]) if keys[i] == keys[j] else 0
                for i, j in pairwise(chosen)
            ],
        )


def common_tokens(a: _Tokens, b: _Tokens) -> int:
    """Return how many tokens two texts share from the first on."""
    shortest = min(len(a), len(b))
    differs = a[:shortest] != b[:shortest]
    return int(differs.argmax()) if differs.any() else shortest


def cheapest_cut(size: int, costs: Callable[[int], Iterable[float]]) -> tuple[float, list[range]]:
    """Cut a sequence into parts at the least total cost; return that, and the parts, last first.

    `costs(start)` yields the cost of the part of 1, 2, … items from `start` on, up to the longest
    that is allowed.
    """
    least, begin = [0.0] + [math.inf] * size, [0] * (size + 1)
    for start in range(size):
        for end, cost in enumerate(costs(start), start + 1):
            if least[start] + cost < least[end]:
                least[end], begin[end] = least[start] + cost, start
    parts, end = [], size
    while end:
        parts.append(range(begin[end], end))
        end = begin[end]
    return least[size], parts


# An outline of places: their number, the tokens of the longest, the first and the last.
_Outline = tuple[int, int, int, int]


@dataclass(slots=True)
class _Part:
    """A group under construction, and its cost."""

    places: list[int]
    outline: _Outline
    takes: float


class _Planner:
    """Plans examples in the order of their contexts, each named by its place in that order.

    `runs` are the tokens that each runs, `neighbours` those that each shares with the next.
    """

    def __init__(
        self, runs: list[int], neighbours: list[int], max_tokens: int, cost: StepCost
    ) -> None:
        self._runs = runs
        self._neighbours = neighbours
        self._max_tokens = max_tokens
        self._cost = cost
        # What the places i to j share, as [i][j - i]: what i and j share, since those between start
        # with it too.
        self._shared = [[0, *accumulate(neighbours[i:], min)] for i in range(len(runs))]

    def plan(self) -> list[list[int]]:
        """Return groups of places: the cheapest cut of several orders, then improved."""
        cuts = [self._cut(order) for order in self._orders()]
        return self._improved(min(cuts, key=itemgetter(0))[1])

    def group(self, places: Sequence[int], examples: Sequence[int]) -> Group:
        """Return a group of places; `examples` names the example in each."""
        _, prefix = self._layout(*self._weigh(places)[0])
        longest_first = sorted(places, key=lambda place: (-self._runs[place], examples[place]))
        width = self._cost.width(self._runs[longest_first[0]] - prefix)
        return Group(tuple(examples[place] for place in longest_first), prefix, width)

    def _weigh(self, places: Sequence[int]) -> tuple[_Outline, float]:
        """Return the outline of places and their cost as a group."""
        if not places:
            return (0, 0, len(self._runs), 0), 0.0
        longest = max(self._runs[place] for place in places)
        outline = (len(places), longest, min(places), max(places))
        return outline, self._layout(*outline)[0]

    def _layout(self, count: int, longest: int, first: int, last: int) -> tuple[float, int]:
        """Return the cost of a group, infinite if it is too long, and its best prefix."""
        cost, takes, prefix = self._cost, math.inf, 0
        tokens = count * cost.width(longest)
        if tokens <= self._max_tokens or count == 1:
            takes = cost.fixed + tokens
        shared = self._shared[first][last - first]
        if shared:
            tokens = shared + count * cost.width(longest - shared)
            if tokens <= self._max_tokens and 2 * cost.fixed + tokens < takes:
                takes, prefix = 2 * cost.fixed + tokens, shared
        return takes, prefix

    def _orders(self) -> Iterator[list[int]]:
        """Yield orders of the places whose neighbours may make good groups. The first is by length.
        Each other has first the families that share a prefix, then the places that share it with
        none, both by length.
        """
        places = sorted(range(len(self._runs)), key=lambda place: -self._runs[place])
        yield places
        candidates = []
        for shared in set(self._neighbours) - {0}:
            # The family of each place, by number; its members share this many tokens.
            families = [0, *accumulate(int(common < shared) for common in self._neighbours)]
            saved = shared * (len(places) - 1 - families[-1])
            candidates.append((-saved, shared, families))
        for _, _, families in sorted(candidates)[:_FAMILIES_TRIED]:
            members = Counter(families)
            yield sorted(
                places,
                key=lambda place: families[place] if members[families[place]] > 1 else len(places),
            )

    def _cut(self, order: Sequence[int]) -> tuple[float, list[list[int]]]:
        """Cut an order into groups of neighbours at the least cost; return that, and the groups."""

        def costs(start: int) -> Iterator[float]:
            longest, first, last = 0, len(order), 0
            for count, place in enumerate(order[start:], 1):
                longest = max(longest, self._runs[place])
                first, last = min(first, place), max(last, place)
                takes, _ = self._layout(count, longest, first, last)
                if takes == math.inf:  # and so it is with more of them
                    return
                yield takes

        least, parts = cheapest_cut(len(order), costs)
        return least, [[order[i] for i in part] for part in parts]

    def _improved(self, groups: list[list[int]]) -> list[list[int]]:
        """Move single places to other groups, or to new ones, as long as that lowers the cost."""
        parts = [_Part(places, *self._weigh(places)) for places in groups]
        parts.append(_Part([], *self._weigh([])))
        home = {place: part for part in parts for place in part.places}
        moved = True
        while moved:
            moved = False
            for place, run in enumerate(self._runs):
                own = home[place]
                rest = [other for other in own.places if other != place]
                outline, takes = self._weigh(rest)
                least, to = own.takes - takes, own
                for part in parts:
                    count, longest, first, last = part.outline
                    more, _ = self._layout(
                        count + 1, max(longest, run), min(first, place), max(last, place)
                    )
                    if more - part.takes < least and part is not own:
                        least, to = more - part.takes, part
                if to is own:
                    continue
                if not to.places:
                    parts.append(_Part([], to.outline, to.takes))
                own.places, own.outline, own.takes = rest, outline, takes
                to.places.append(place)
                to.outline, to.takes = self._weigh(to.places)
                home[place], moved = to, True
        return [part.places for part in parts if part.places]
