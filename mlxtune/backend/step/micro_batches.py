"""Examples split into micro-batches that fit the memory, and made smaller where they do not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import TypeVar

import mlx.core as mx

from mlxtune.backend.model import device, memory
from mlxtune.backend.step.forward import Forward
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.batch import MicroBatch, collate, run_length
from mlxtune.core.steps.groups import Group, StepCost, plan_step
from mlxtune.core.steps.pack import Pack, Packed, pack, plan_packs
from mlxtune.errors import MemoryLimitError, MlxTuneError

_Result = TypeVar("_Result")


class MicroBatches:
    """Splits what a `Forward` is to run into micro-batches of up to `max_tokens` padded tokens.

    With `keyed`, only examples of equal key share a prefix. `max_tokens` is halved when a pass
    takes more memory than MLX's limit, which `warn` hears of; `remedy` is what an error advises
    where no less is possible.
    """

    def __init__(
        self,
        forward: Forward,
        *,
        max_tokens: int,
        cost: StepCost,
        keyed: bool = False,
        remedy: str,
        warn: Callable[[str], None],
    ) -> None:
        self.max_tokens = max_tokens
        self.cost = cost
        self._forward = forward
        self._keyed = keyed
        self._remedy = remedy
        self._warn = warn
        self._warned_of_single = False
        # What loading took is no measure of a pass.
        self.start_peak()

    def of(self, examples: Sequence[Example]) -> Iterator[tuple[Group | Packed, MicroBatch | Pack]]:
        """Yield the micro-batches of examples: which of them, and their arrays."""
        max_tokens, cost = self.max_tokens, self.cost
        keyed, shares = self._keyed, self._forward.how.share_prefixes
        if max(map(run_length, examples)) <= self._forward.packs_up_to:
            sharing = {"share": shares, "keyed": keyed}
            for packed in plan_packs(examples, max_tokens, cost.fixed, **sharing):
                yield packed, pack([examples[i] for i in packed.examples], **sharing)
            return
        plan = partial(plan_step, examples, max_tokens, cost, keyed=keyed)
        groups = plan(share_prefixes=shares)
        if any(group.prefix for group in groups) and not self._forward.shares_prefixes:
            groups = plan(share_prefixes=False)
        for group in groups:
            chosen = [examples[i] for i in group.examples]
            yield group, collate(chosen, group.prefix, group.width)

    def start_peak(self) -> None:
        """Have `peak` begin anew."""
        self._peak = 0
        memory.start_peak()

    def peak(self) -> int:
        """Return the most bytes that MLX has held since `start_peak`."""
        return max(self._peak, memory.last_peak_bytes())

    def within_memory(self, examples: Sequence[Example], run: Callable[[], _Result]) -> _Result:
        """Run what takes memory: again in half as large micro-batches for as long as it runs out.

        Raises MemoryLimitError when it runs out in micro-batches of one example.
        """
        while (result := _unless_out_of_memory(run)) is None:
            mx.clear_cache()
            if not self._halve(examples, "memory ran out"):
                tokens = max(map(len, examples))
                raise MemoryLimitError(
                    f"memory ran out with one example of up to {tokens:,} tokens at a time: "
                    f"{self._remedy}"
                )
        if memory.over_limit():
            over = f"{memory.last_peak_gb():.2f} GB were in use"
            self._peak = self.peak()
            memory.start_peak()
            if not self._halve(examples, over) and not self._warned_of_single:
                self._warned_of_single = True
                self._warn(
                    f"{over} with one example at a time, more than the memory limit: "
                    "this goes on, but may be slow or fail"
                )
        return result

    def _halve(self, examples: Sequence[Example], why: str) -> bool:
        """Halve the micro-batches from the largest of the step; tell whether that was possible."""
        groups = [group for group, _ in self.of(examples)]
        if all(len(group.examples) == 1 for group in groups):
            return False
        several = max(group.tokens for group in groups if len(group.examples) > 1)
        self.max_tokens = several // 2
        self._warn(f"{why}: micro-batches of up to {several // 2:,} tokens from here on")
        return True


def _unless_out_of_memory(run: Callable[[], _Result]) -> _Result | None:
    """Return what a function gives; None when memory ran out, what it held being freed."""
    try:
        return run()
    except (RuntimeError, MemoryError) as error:
        if isinstance(error, MlxTuneError) or not memory.is_out_of_memory(error):
            raise
        return None


def step_cost() -> StepCost:
    """Return what a micro-batch takes beyond its tokens on the device in use."""
    return StepCost(fixed=80) if device.on_cpu() else StepCost(fixed=512, width_multiple=32)
