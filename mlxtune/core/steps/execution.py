"""How a step is computed: its operations, micro-batches and recomputation."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from mlxtune.core.steps.memory_terms import BatchLoad, MemoryUse
from mlxtune.core.steps.micro_batch import MicroBatch, padded_micro_batches
from mlxtune.core.steps.pack import StepLengths, packed_micro_batches
from mlxtune.core.steps.rounding import NOT_ROUNDED, Rounding


class StepOperations(Protocol):
    """The operations that compute a step; core reads only how they use memory."""

    memory: MemoryUse


@dataclass(frozen=True)
class Execution:
    """How a step is computed. No field changes the step's loss or gradient beyond float rounding.

    `operations` compute the step. `micro_batch_tokens` limits the number of tokens that run through
    the model together. `separate_head` runs the head on supervised positions only, `loss_chunk` at
    a time. `packs` lays examples end to end instead of padding them, and runs shared prefixes once.
    `recompute` keeps only the input of each layer, and runs the layer again in the backward pass.
    `fixed_cost` is the cost of a micro-batch beyond its tokens, in units of one token's time.
    `rounding` is applied to packed sequences.
    """

    operations: StepOperations
    micro_batch_tokens: int = 2048
    separate_head: bool = True
    packs: bool = True
    recompute: bool = False
    loss_chunk: int = 256
    fixed_cost: int = 32
    rounding: Rounding = NOT_ROUNDED

    def micro_batches(self, lengths: StepLengths) -> list[MicroBatch]:
        if self.packs:
            return packed_micro_batches(
                lengths, self.micro_batch_tokens, self.fixed_cost, self.rounding
            )
        return padded_micro_batches(lengths.forward, self.micro_batch_tokens, self.fixed_cost)

    def rounded(self, load: BatchLoad) -> BatchLoad:
        """Return the load of one example, with the padding of its sequence."""
        if not self.packs:
            return load
        added = self.rounding.padding(load.tokens, self.micro_batch_tokens)
        width = self.rounding.rounded_width(load.width + added)
        return replace(load, tokens=load.tokens + added, width=width)
