"""Examples split into micro-batches that fit the memory, smaller ones where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import TracebackType

import mlx.core as mx

from mlxtune.backend.model import memory
from mlxtune.backend.step.forward import Forward
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import MicroBatch, collate
from mlxtune.core.steps.groups import Group
from mlxtune.core.steps.pack import Pack, pack
from mlxtune.errors import MemoryLimitError, MlxTuneError


class Attempt:
    """A context in which memory may run out: the error is suppressed and sets `ran_out`."""

    ran_out = False

    def __enter__(self) -> Attempt:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> bool:
        if isinstance(error, RuntimeError | MemoryError) and not isinstance(error, MlxTuneError):
            self.ran_out = memory.is_out_of_memory(error)
        return self.ran_out


class MicroBatches:
    """Splits what a `Forward` runs into micro-batches, by its execution.

    With `keyed`, only examples of equal key share a prefix. `max_tokens` is halved, and `warn`
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
        groups = execution.plan(examples, keyed=self._keyed)
        prefixed = any(group.prefix for group in groups)
        if prefixed and not self._forward.shares_prefixes:
            groups = replace(execution, share_prefixes=False).plan(examples, keyed=self._keyed)
        for group in groups:
            chosen = [examples[i] for i in group.examples]
            if group.packed:
                yield group, pack(chosen, keyed=self._keyed)
            else:
                yield group, collate(chosen, group.prefix, group.width)

    def start_peak(self) -> None:
        """Start `peak` anew."""
        self._peak = 0
        memory.start_peak()

    def peak(self) -> int:
        """Return the most bytes that MLX has held since `start_peak`."""
        return max(self._peak, memory.last_peak_bytes())

    def attempts(self, examples: Sequence[Example]) -> Iterator[Attempt]:
        """Yield attempts at running examples, in smaller micro-batches while memory runs out.

            for attempt in micro_batches.attempts(examples):
                with attempt:
                    result = run(micro_batches.of(examples))

        Raises MemoryLimitError when it runs out in micro-batches of one example.
        """
        attempt = Attempt()
        yield attempt
        while attempt.ran_out:
            mx.clear_cache()
            if not self._halve(examples, "memory ran out"):
                tokens = max(map(len, examples))
                raise MemoryLimitError(
                    f"memory ran out with one example of up to {tokens:,} tokens at a time: "
                    f"{self._remedy}"
                )
            attempt = Attempt()
            yield attempt
        if memory.over_limit():
            over = f"{memory.last_peak_gb():.2f} GB were in use"
            self._peak = self.peak()
            memory.start_peak()
            if not self._halve(examples, over) and not self._warned_of_single:
                self._warned_of_single = True
                self._warn(
                    f"{over} with one example at a time, more than the memory limit: "
                    "this continues, but may be slow or fail"
                )

    def _halve(self, examples: Sequence[Example], why: str) -> bool:
        """Halve the bound from the largest micro-batch of several; return whether there is one."""
        groups = [group for group, _ in self.of(examples)]
        several = [group.tokens for group in groups if len(group.examples) > 1]
        if not several:
            return False
        self.max_tokens = max(several) // 2
        self._warn(f"{why}: micro-batches of up to {self.max_tokens:,} tokens from here on")
        return True
