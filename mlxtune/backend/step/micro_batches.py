"""Examples split into micro-batches that fit the memory, smaller ones where they do not."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

import mlx.core as mx

from mlxtune.backend.model import memory
from mlxtune.backend.step.forward import Forward
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import MicroBatch, collate
from mlxtune.core.steps.groups import Group
from mlxtune.core.steps.pack import Pack, pack
from mlxtune.errors import MemoryLimitError

Result = TypeVar("Result")


class MicroBatches:
    """Splits what a `Forward` runs into micro-batches, by its execution.

    With `keyed`, only examples of equal key share tokens. `max_tokens` is halved, and `warn`
    called, when a pass takes more memory than MLX's limit; `remedy` is what an error advises where
    micro-batches cannot be smaller.
    """

    def __init__(
        self, forward: Forward, *, keyed: bool = False, remedy: str, warn: Callable[[str], None]
    ) -> None:
        self.max_tokens = forward.execution.micro_batch_tokens
        self._forward = forward
        self._keyed = keyed
        self._remedy = remedy
        self._warn = warn
        self._warned_of_single = False
        # Loading is not part of a pass.
        self.start_peak()

    def of(self, examples: Sequence[Example]) -> Iterator[tuple[Group, MicroBatch | Pack]]:
        """Yield the micro-batches of examples: which of them, and their arrays."""
        execution = replace(self._forward.execution, micro_batch_tokens=self.max_tokens)
        for group in execution.plan(examples, keyed=self._keyed):
            chosen = [examples[i] for i in group.examples]
            if execution.packs:
                yield group, pack(chosen, keyed=self._keyed)
            else:
                yield group, collate(chosen, group.width)

    def start_peak(self) -> None:
        """Start `peak` anew."""
        self._peak = 0
        memory.start_peak()

    def peak(self) -> int:
        """Return the most bytes that MLX has held since `start_peak`."""
        return max(self._peak, memory.last_peak_bytes())

    def run(self, examples: Sequence[Example], compute: Callable[[], Result]) -> Result:
        """Return what `compute` gives, which runs `of(examples)`.

        It is called again, for smaller micro-batches, while memory runs out. Raises
        MemoryLimitError when that happens in micro-batches of one example.
        """
        while True:
            try:
                result = compute()
                break
            except (RuntimeError, MemoryError) as error:
                if not memory.is_out_of_memory(error):
                    raise
            mx.clear_cache()
            if not self._halve(examples, "memory ran out"):
                tokens = max(map(len, examples))
                raise MemoryLimitError(
                    f"memory ran out with one example of up to {tokens:,} tokens at a time: "
                    f"{self._remedy}"
                )
        if memory.last_peak_bytes() > mx.get_memory_limit():
            over = f"{memory.last_peak_bytes() / memory.GB:.2f} GB were in use"
            self._peak = self.peak()
            memory.start_peak()
            if not self._halve(examples, over) and not self._warned_of_single:
                self._warned_of_single = True
                self._warn(
                    f"{over} with one example at a time, more than the memory limit: "
                    "this continues, but may be slow or fail"
                )
        return result

    def _halve(self, examples: Sequence[Example], why: str) -> bool:
        """Halve the bound from the largest micro-batch of several; return whether there is one."""
        groups = [group for group, _ in self.of(examples)]
        several = [group.tokens for group in groups if len(group.examples) > 1]
        if not several:
            return False
        self.max_tokens = max(several) // 2
        self._warn(f"{why}: micro-batches of up to {self.max_tokens:,} tokens from here on")
        return True
