"""Groups the examples of a step into padded micro-batches if they cannot be packed.

An example runs up to the token before its last supervised token, and is padded to the width of its
group's widest example.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import forward_tokens

# The number of examples planned together: planning time grows with its square, and planning more
# examples together gains little.
AT_ONCE = 256


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """The examples of a micro-batch, as indices into the step's examples.

    `tokens` counts the tokens that run through the model, padding included. `width` is the length
    of the longest example, to which all examples are padded if they are side by side. `added`
    counts the padding tokens at the end of a packed sequence.
    """

    examples: tuple[int, ...]
    width: int
    tokens: int
    added: int = 0

    def padding(self, examples: Sequence[Example]) -> int:
        """Return the number of padding tokens; `examples` are all examples of the step."""
        without_padding = sum(forward_tokens(examples[i]) for i in self.examples)
        # A sequence runs fewer tokens than its examples have if they share prefixes.
        return max(self.tokens - self.added - without_padding, 0) + self.added


def padded_batches(examples: Sequence[Example], max_tokens: int, fixed: int) -> list[MicroBatch]:
    """Group the examples of a step at minimum cost; the largest group comes first.

    A group costs its tokens plus `fixed`, in units of one token's time. Each example is in exactly
    one group. A group runs at most `max_tokens` tokens, unless it consists of a single, longer
    example. Deterministic for given arguments.
    """
    lengths = [forward_tokens(example) for example in examples]
    order = sorted(range(len(examples)), key=lambda i: (-lengths[i], i))
    micro_batches: list[MicroBatch] = []
    for begin in range(0, len(order), AT_ONCE):
        chosen = order[begin : begin + AT_ONCE]

        def costs(start: int, chosen: Sequence[int] = chosen) -> Iterator[int]:
            width = lengths[chosen[start]]
            for count in range(1, len(chosen) - start + 1):
                if count > 1 and count * width > max_tokens:
                    return
                yield fixed + count * width

        for part in cheapest_cut(len(chosen), costs):
            width = lengths[chosen[part.start]]
            micro_batches.append(
                MicroBatch(tuple(chosen[i] for i in part), width, len(part) * width)
            )
    return sorted(
        micro_batches, key=lambda micro_batch: (-micro_batch.tokens, micro_batch.examples)
    )


def cheapest_cut(size: int, costs: Callable[[int], Iterable[float]]) -> list[range]:
    """Cut a sequence into parts at the least total cost; return the parts in reverse order.

    `costs(start)` yields the costs of parts of 1, 2, … items that begin at `start`, up to the
    longest allowed part.
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
    return parts
