"""Splits examples into micro-batches."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from itertools import chain
from typing import Any

from mlxtune.backend.forward.forward import Forward
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import BatchLoad, load_of
from mlxtune.core.steps.micro_batch import MicroBatch, PaddedBatch, collate, rows_of
from mlxtune.core.steps.pack import Pack, StepLengths, pack


@dataclass(eq=False)
class MicroBatches:
    """Splits examples into micro-batches of up to `max_tokens` tokens for a `Forward` to run.

    The limit is the forward's, unless an evaluation sets its own. With `keyed`, only examples with
    equal dropout keys share the tokens of a common prefix. With `whole_rows`, a row's examples run
    together, unless any row is too long. Training's micro-batches that `fits` rejects are halved.
    """

    forward: Forward
    own_limit: int | None = None
    _: KW_ONLY
    keyed: bool = False
    whole_rows: bool = False
    fits: Callable[[BatchLoad], bool] | None = None

    def __post_init__(self) -> None:
        # The last plan and its arguments: building the step asks for the same plan again.
        self._last_division: tuple[Any, list[MicroBatch]] = None, []

    @property
    def _execution(self) -> Execution:
        execution, limit = self.forward.execution, self.own_limit
        return execution if limit is None else replace(execution, micro_batch_tokens=limit)

    @property
    def max_tokens(self) -> int:
        return self._execution.micro_batch_tokens

    def lengths(self, examples: Sequence[Example]) -> StepLengths:
        """Return the lengths of examples, for dividing them into micro-batches."""
        return StepLengths.of(examples, keyed=self.keyed)

    def iterate(
        self, examples: Sequence[Example], lengths: StepLengths | None = None
    ) -> Iterator[tuple[MicroBatch, PaddedBatch | Pack]]:
        """Yield each micro-batch of examples with these lengths, and its arrays."""
        for micro_batch in self.divided(lengths or self.lengths(examples)):
            selected = [examples[i] for i in micro_batch.examples]
            if self.forward.execution.packs:
                yield micro_batch, pack(selected, keyed=self.keyed, padding=micro_batch.added)
            else:
                yield micro_batch, collate(selected, micro_batch.width)

    def fit_into_one(self, lengths: StepLengths) -> bool:
        """Return whether the examples fit into one micro-batch."""
        if sum(lengths.forward) > self.max_tokens:
            return False
        return len(self.divided(lengths)) == 1

    def divided(self, lengths: StepLengths) -> list[MicroBatch]:
        """Return the micro-batches into which examples are split."""
        execution = self._execution
        fits = self.fits if self.own_limit is None else None
        key = execution, lengths, fits
        if key != self._last_division[0]:
            divide = execution.micro_batches
            whole = _whole_row_micro_batches(lengths, divide) if self.whole_rows else None
            divided = divide(lengths) if whole is None else whole
            if fits is not None:
                parts = (_fitting(each, lengths, divide, fits) for each in divided)
                divided = sorted(chain(*parts), key=lambda each: (-each.tokens, each.examples))
            self._last_division = key, divided
        return self._last_division[1]

    def halved_limit(self, lengths: StepLengths) -> int | None:
        """Return half the size in tokens of the largest micro-batch of several examples.

        Returns None without such a micro-batch.
        """
        several = [each.tokens for each in self.divided(lengths) if len(each.examples) > 1]
        return max(several) // 2 if several else None


def _fitting(
    micro_batch: MicroBatch,
    lengths: StepLengths,
    divide: Callable[[StepLengths], list[MicroBatch]],
    fits: Callable[[BatchLoad], bool],
) -> list[MicroBatch]:
    """Halve a micro-batch until its parts fit or are single examples; neighbours stay together."""
    members = micro_batch.examples
    if len(members) == 1 or fits(load_of(micro_batch, lengths)):
        return [micro_batch]
    half, parts = len(members) // 2, list[MicroBatch]()
    for selected in map(sorted, (members[:half], members[half:])):
        for part in divide(lengths.only(selected)):
            part = replace(part, examples=tuple(selected[i] for i in part.examples))
            parts += _fitting(part, lengths, divide, fits)
    return parts


def _whole_row_micro_batches(
    lengths: StepLengths, divide: Callable[[StepLengths], list[MicroBatch]]
) -> list[MicroBatch] | None:
    """First-fit decreasing: put each row, the largest first, where it first fits.

    Returns None if a row does not fit into one micro-batch.
    """

    def together(members: Sequence[int]) -> MicroBatch | None:
        micro_batches = divide(lengths.only(members))
        if len(micro_batches) > 1:
            return None
        return replace(
            micro_batches[0], examples=tuple(members[i] for i in micro_batches[0].examples)
        )

    alone = [together(row) for row in rows_of(lengths.row_ids)]
    filled: list[MicroBatch] = []
    for row in sorted(filter(None, alone), key=lambda micro_batch: -micro_batch.tokens):
        for index, micro_batch in enumerate(filled):
            if (both := together(sorted((*micro_batch.examples, *row.examples)))) is not None:
                filled[index] = both
                break
        else:
            filled.append(row)
    return None if None in alone else sorted(filled, key=lambda each: -each.tokens)
