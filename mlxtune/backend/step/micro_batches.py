"""Examples split into micro-batches."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from mlxtune.backend.forward.forward import Forward
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import MicroBatch, collate, run_length
from mlxtune.core.steps.groups import Group
from mlxtune.core.steps.pack import Pack, pack


class MicroBatches:
    """Splits examples into micro-batches of at most `max_tokens`, by the execution of a `Forward`.

    With `keyed`, only examples of equal key share tokens. Where workers `run_alike`, the bound is
    never halved, as all of them would have to halve it at once.
    """

    def __init__(self, forward: Forward, *, keyed: bool = False, run_alike: bool = False) -> None:
        self.max_tokens = forward.execution.micro_batch_tokens
        self.run_alike = run_alike
        self._forward = forward
        self._keyed = keyed

    def of(self, examples: Sequence[Example]) -> Iterator[tuple[Group, MicroBatch | Pack]]:
        """Yield the micro-batches of examples: which of them, and their arrays."""
        for group in self.plan(examples, self.max_tokens):
            chosen = [examples[i] for i in group.examples]
            if self._forward.execution.packs:
                yield group, pack(chosen, keyed=self._keyed, padding=group.added)
            else:
                yield group, collate(chosen, group.width)

    def is_one(self, examples: Sequence[Example]) -> bool:
        """Return whether the examples make one micro-batch."""
        if sum(map(run_length, examples)) > self.max_tokens:
            return False
        return len(self.plan(examples, self.max_tokens)) == 1

    def plan(self, examples: Sequence[Example], max_tokens: int) -> list[Group]:
        """Return the examples of each micro-batch of at most `max_tokens` tokens."""
        execution = replace(self._forward.execution, micro_batch_tokens=max_tokens)
        return execution.plan(examples, keyed=self._keyed)

    def halve(self, examples: Sequence[Example]) -> bool:
        """Halve the bound from the largest micro-batch of several; return whether there is one."""
        if self.run_alike:
            return False
        groups = [group for group, _ in self.of(examples)]
        several = [group.tokens for group in groups if len(group.examples) > 1]
        if several:
            self.max_tokens = max(several) // 2
        return bool(several)
