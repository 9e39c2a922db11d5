"""Splits examples into micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

from mlxtune.backend.forward.forward import Forward
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import MicroBatch, collate, rows_of, run_length
from mlxtune.core.steps.pack import Pack, pack
from mlxtune.core.steps.padded_groups import Group


@dataclass(eq=False)
class MicroBatches:
    """Splits examples into micro-batches of up to `max_tokens` tokens for a `Forward` to run.

    With `keyed`, only examples with equal dropout keys share the tokens of a common prefix. With
    `whole_rows`, a row's examples run together, unless any row is too long. With `run_alike`,
    `max_tokens` is never halved, because all workers must use the same value.
    """

    forward: Forward
    max_tokens: int
    _: KW_ONLY
    keyed: bool = False
    run_alike: bool = False
    whole_rows: bool = False

    def __post_init__(self) -> None:
        # The last plan, which is asked for again when its step is built, and what it is made from.
        self._last: tuple[Any, list[Group]] = None, []

    def limit(self, max_tokens: int) -> None:
        """Run at most `max_tokens` tokens together from now on."""
        self.max_tokens = max_tokens

    def of(self, examples: Sequence[Example]) -> Iterator[tuple[Group, MicroBatch | Pack]]:
        """Yield the group and the arrays of each micro-batch of examples."""
        for group in self.plan(examples):
            chosen = [examples[i] for i in group.examples]
            if self.forward.execution.packs:
                yield group, pack(chosen, keyed=self.keyed, padding=group.added)
            else:
                yield group, collate(chosen, group.width)

    def is_one(self, examples: Sequence[Example]) -> bool:
        """Return whether the examples fit into one micro-batch."""
        if sum(map(run_length, examples)) > self.max_tokens:
            return False
        return len(self.plan(examples)) == 1

    def plan(self, examples: Sequence[Example]) -> list[Group]:
        """Return the groups of examples that run together."""
        execution = replace(self.forward.execution, micro_batch_tokens=self.max_tokens)
        asked = execution, list(examples)
        if asked != self._last[0]:
            plan = partial(execution.plan, keyed=self.keyed)
            whole = _plan_rows(examples, plan) if self.whole_rows else None
            self._last = asked, plan(examples) if whole is None else whole
        return self._last[1]

    def halve(self, examples: Sequence[Example]) -> bool:
        """Set `max_tokens` to half the size of the largest micro-batch of several examples.

        Returns True; without such a micro-batch, or with `run_alike`, changes nothing and returns
        False.
        """
        if self.run_alike:
            return False
        several = [group.tokens for group in self.plan(examples) if len(group.examples) > 1]
        if several:
            self.limit(max(several) // 2)
        return bool(several)


def _plan_rows(
    examples: Sequence[Example], plan: Callable[[Sequence[Example]], list[Group]]
) -> list[Group] | None:
    """Put each row, the largest first, into the first micro-batch with enough room.

    Returns None if a row does not fit into one micro-batch.
    """

    def together(members: Sequence[int]) -> Group | None:
        groups = plan([examples[i] for i in members])
        if len(groups) > 1:
            return None
        return replace(groups[0], examples=tuple(members[i] for i in groups[0].examples))

    alone = [together(row) for row in rows_of(examples)]
    filled: list[Group] = []
    for row in sorted(filter(None, alone), key=lambda group: -group.tokens):
        for place, group in enumerate(filled):
            if (both := together(sorted((*group.examples, *row.examples)))) is not None:
                filled[place] = both
                break
        else:
            filled.append(row)
    return None if None in alone else sorted(filled, key=lambda each: -each.tokens)
