"""Splits examples into micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, field, replace
from itertools import chain

from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_terms import BatchLoad, load_of
from mlxtune.core.steps.micro_batch import MicroBatch, PaddedBatch, collate, rows_of
from mlxtune.core.steps.pack import Pack, StepLengths, pack


@dataclass(frozen=True, eq=False)
class MicroBatches:
    """Splits examples into micro-batches of up to `max_tokens` tokens.

    The model must support all features of `execution`. With `keyed`, only examples with equal
    dropout keys share the tokens of a common prefix. With `whole_rows`, a row's examples run
    together, unless any row is too long. Micro-batches that `fits` rejects are halved.
    """

    execution: Execution
    _: KW_ONLY
    keyed: bool = False
    whole_rows: bool = False
    fits: Callable[[BatchLoad], bool] | None = None
    # The last division and its lengths: building the step asks for the same division again.
    _last: list[tuple[StepLengths, list[MicroBatch]]] = field(default_factory=list, init=False)

    @property
    def max_tokens(self) -> int:
        return self.execution.micro_batch_tokens

    def limited(self, tokens: int) -> MicroBatches:
        """Return micro-batches like these, but of up to `tokens` tokens."""
        return replace(self, execution=replace(self.execution, micro_batch_tokens=tokens))

    def lengths(self, examples: Sequence[Example]) -> StepLengths:
        """Return the lengths of examples, for dividing them into micro-batches."""
        return StepLengths.of(examples, keyed=self.keyed)

    def iterate(
        self, examples: Sequence[Example], lengths: StepLengths | None = None
    ) -> Iterator[tuple[MicroBatch, PaddedBatch | Pack]]:
        """Yield each micro-batch of examples with these lengths, and its arrays."""
        for micro_batch in self.divided(lengths or self.lengths(examples)):
            selected = [examples[i] for i in micro_batch.examples]
            if self.execution.packs:
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
        if not self._last or self._last[0][0] != lengths:
            self._last[:] = [(lengths, self._divide(lengths))]
        return self._last[0][1]

    def _divide(self, lengths: StepLengths) -> list[MicroBatch]:
        divide, fits = self.execution.micro_batches, self.fits
        whole = _whole_row_micro_batches(lengths, divide) if self.whole_rows else None
        divided = divide(lengths) if whole is None else whole
        if fits is None:
            return divided
        parts = (_fitting(each, lengths, divide, fits) for each in divided)
        return sorted(chain(*parts), key=lambda each: (-each.tokens, each.examples))

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
