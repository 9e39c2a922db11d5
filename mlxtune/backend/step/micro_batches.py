"""Examples split into micro-batches, and what is tried after a fault of the GPU."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeVar

import mlx.core as mx

from mlxtune.backend.device import memory
from mlxtune.backend.device.recovery import retried
from mlxtune.backend.forward.forward import Forward
from mlxtune.core.data.encode import Example
from mlxtune.core.machine.gpu_faults import Fault, fault_error
from mlxtune.core.steps.batch import MicroBatch, collate, run_length
from mlxtune.core.steps.groups import Group
from mlxtune.core.steps.pack import Pack, pack
from mlxtune.core.text import byte_size
from mlxtune.errors import one_line

Result = TypeVar("Result")


class MicroBatches:
    """Splits what a `Forward` runs into micro-batches, by its execution.

    With `keyed`, only examples of equal key share tokens. After a fault of the GPU, a pass is tried
    again: `max_tokens` is halved where memory ran out, or where the GPU stopped a command that took
    too long and `shorten`, which makes the evaluations of a pass shorter, returns False. `warn` is
    called each time; `remedy` is what an error advises where not even one example fits. Not where
    the workers `run_alike`: the others wait for this one within the pass.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        keyed: bool = False,
        remedy: str,
        warn: Callable[[str], None],
        shorten: Callable[[], bool] = lambda: False,
        run_alike: bool = False,
    ) -> None:
        self.max_tokens = forward.execution.micro_batch_tokens
        self._forward = forward
        self._keyed = keyed
        self._remedy = remedy
        self._warn = warn
        self._shorten = shorten
        self._run_alike = run_alike
        self._warned_of_limit = False
        # Loading is not part of a pass.
        memory.start_peak()

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
        """Return which examples make a micro-batch of at most so many tokens."""
        execution = replace(self._forward.execution, micro_batch_tokens=max_tokens)
        return execution.plan(examples, keyed=self._keyed)

    def run(self, examples: Sequence[Example], compute: Callable[[], Result]) -> Result:
        """Return what `compute` gives, which runs `of(examples)` and changes nothing if it fails.

        It is called again after a fault of the GPU that there is an answer to. Raises
        MemoryLimitError or GpuError after any other.
        """
        return retried(compute, partial(self._change, examples))

    def warn_of_limit(self) -> None:
        """Warn once of a pass that took more than the limit, which changes nothing by itself.

        The peak includes buffers in flight, whose number depends on timing.
        """
        used, limit = memory.last_peak_bytes(), mx.get_memory_limit()
        if used > limit and not self._warned_of_limit:
            self._warned_of_limit = True
            self._warn(
                f"{byte_size(used)} were in use, more than the limit of {byte_size(limit)}: "
                "lower --memory-limit if the machine swaps"
            )

    def _change(self, examples: Sequence[Example], fault: Fault, text: str) -> None:
        """Change what may let a pass succeed after a fault; raise if nothing is left to change."""
        what = fault.meaning
        if self._run_alike:
            out = fault is Fault.OUT_OF_MEMORY
            raise fault_error(fault, text, "on this worker", "lower --memory-limit" if out else "")
        if not fault.asks_for_less:
            self._warn(f"{what} ({one_line(text)}): trying again")
        elif fault is not Fault.OUT_OF_MEMORY and self._shorten():
            self._warn(f"{what}: shorter evaluations from here on; to avoid it, {fault.remedy}")
        elif self.halve(examples):
            self._warn(f"{what}: micro-batches of up to {self.max_tokens:,} tokens from here on")
        else:
            one = f"with one example of up to {max(map(len, examples)):,} tokens at a time"
            remedy = self._remedy if fault is Fault.OUT_OF_MEMORY else ""
            raise fault_error(fault, text, one, remedy)

    def halve(self, examples: Sequence[Example]) -> bool:
        """Halve the bound from the largest micro-batch of several; return whether there is one."""
        if self._run_alike:
            return False
        groups = [group for group, _ in self.of(examples)]
        several = [group.tokens for group in groups if len(group.examples) > 1]
        if several:
            self.max_tokens = max(several) // 2
        return bool(several)
