"""Computes the losses of examples without keeping values for a backward pass."""

import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import NamedTuple

import mlx.core as mx
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from mlxtune.backend.device import allocator
from mlxtune.backend.device.default_device import on_cpu
from mlxtune.backend.forward.forward import Forward
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.step.micro_batches import MicroBatches
from mlxtune.backend.step.runner import GraphRunner
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.core.data.encode import Example, forward_tokens, predicted_tokens
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import EvaluationMemory
from mlxtune.core.steps.memory_plan import MARGIN
from mlxtune.core.steps.memory_terms import BatchLoad, load_of
from mlxtune.core.steps.micro_batch import BLOCK_EXAMPLES, MicroBatch, PaddedBatch, rows_of
from mlxtune.core.steps.pack import Pack, StepLengths

# The maximum number of tokens in a batch, the number of operations per parameter and token, and the
# maximum number of operations in a batch. Such a batch takes about a second on a fast GPU, or ten
# seconds on two CPU cores, and may delay Ctrl-C for as long.
_MAX_TOKENS, _FLOPS_PER_PARAMETER = 16384, 2
_MAX_GPU_FLOPS, _MAX_CPU_FLOPS = 1e13, 1e12

_Floats = npt.NDArray[np.float64]
Keys = Callable[[PaddedBatch | Pack], mx.array | None]
# Receives the indices of a batch's examples, their numbers of tokens, and the tokens' losses.
_Store = Callable[[Sequence[int], Sequence[int], _Floats], None]


class LossEvaluator:
    """Computes the losses of examples, in the largest batches that memory and time allow.

    The device computes a batch while the next is prepared, and never holds two batches. Batches are
    no smaller than `training`, the present micro-batches of training, unless memory runs out for
    those. `other_bytes` are in use besides the model; `parameters` counts the model's parameters.
    """

    def __init__(
        self,
        forward: Forward,
        training: MicroBatches,
        runner: GraphRunner,
        parameters: int,
        workers: Workers,
        other_bytes: int,
    ) -> None:
        self._workers = workers
        self._forward = forward
        self._runner = runner
        self.training = training
        self._max_tokens = max_batch_tokens(parameters)
        # The largest batch, in tokens, once memory has run out in an evaluation.
        self._halved_tokens = sys.maxsize
        self._memory = evaluation_memory(forward)
        weights = sum(array.nbytes for _, array in tree_flatten(forward.model.parameters()))
        self._bytes_in_use = weights + other_bytes
        self._free_bytes = mx.get_memory_limit() / (1 + MARGIN) - self._bytes_in_use

    def limit_memory(self, most: int) -> None:
        """Limit batches' memory peak to `most` bytes, unless training's micro-batches need more."""
        self._free_bytes = min(self._free_bytes, most - self._bytes_in_use)

    def compute(
        self,
        examples: Sequence[Example],
        on_progress: Callable[[int], None] = lambda done: None,
        keys: Keys = lambda batch: None,
    ) -> _Floats:
        """Return each example's summed cross-entropy over its supervised tokens, float64 (B,).

        `on_progress` is called after each batch with the number of finished examples; an error that
        it raises ends the evaluation. `keys` returns a batch's dropout keys, or None for no
        dropout. Raises MemoryLimitError if even one example takes too much memory.
        """
        losses = np.zeros(len(examples))

        def store(members: Sequence[int], counts: Sequence[int], each: _Floats) -> None:
            losses[members] = _sums(counts, each)

        self._evaluate(examples, store, on_progress, keys)
        return losses if self._workers.world_size == 1 else self._workers.merge(losses)

    def of_tokens(self, examples: Sequence[Example]) -> list[_Floats]:
        """Return the cross-entropy of each example's supervised tokens, float64 (A,).

        Raises the errors of `compute`.
        """
        ends = np.cumsum(list(map(predicted_tokens, examples)), dtype=np.int64)
        losses = np.zeros(ends[-1] if len(ends) else 0)

        def store(members: Sequence[int], counts: Sequence[int], each: _Floats) -> None:
            last = [ends[i] for i in members]
            tokens = map(np.arange, np.subtract(last, counts), last)
            losses[np.concatenate(list(tokens))] = each

        self._evaluate(examples, store)
        if self._workers.world_size > 1:
            losses = self._workers.merge(losses)
        return np.split(losses, ends[:-1]) if len(ends) else []

    def _evaluate(
        self,
        examples: Sequence[Example],
        store: _Store,
        on_progress: Callable[[int], None] = lambda done: None,
        keys: Keys = lambda batch: None,
    ) -> None:
        """Pass the losses of this worker's examples to `store`."""
        order = self._own_order(examples)
        for start in range(0, len(order), BLOCK_EXAMPLES):

            def show(done: int, start: int = start) -> None:
                on_progress(min((start + done) * self._workers.world_size, len(examples)))

            self._evaluate_part(examples, order[start : start + BLOCK_EXAMPLES], store, show, keys)

    def _own_order(self, examples: Sequence[Example]) -> list[int]:
        """Return the indices of this worker's examples, sorted by length to reduce padding.

        Rows stay whole, as their examples may share a prompt.
        """
        workers = self._workers
        rows = rows_of(example.key for example in examples)
        rows.sort(key=lambda row: max(len(examples[i]) for i in row))
        if workers.world_size > 1:
            counts = (map(each, examples) for each in (forward_tokens, predicted_tokens))
            costs = self._forward.facts.costs(*counts)
            mine = workers.own_items([sum(costs[i] for i in row) for row in rows])
            rows = [rows[row] for row in mine]
        return [i for row in rows for i in row]

    def _evaluate_part(
        self,
        examples: Sequence[Example],
        part: Sequence[int],
        store: _Store,
        on_progress: Callable[[int], None],
        keys: Keys,
    ) -> None:
        def read(micro_batch: MicroBatch, counts: Sequence[int], each: _Floats) -> None:
            store([part[i] for i in micro_batch.examples], counts, each)

        selected = [examples[i] for i in part]
        lengths = self.training.lengths(selected)
        for attempt in self._runner.attempts(lengths, self._halve):
            with attempt:
                micro_batches = self._batches_of(lengths).iterate(selected, lengths)
                self._compute(micro_batches, read, on_progress, keys)

    def _halve(self, lengths: StepLengths) -> int | None:
        """Halve the limit of an evaluation's batches, and return it; training's stays."""
        half = self._batches_of(lengths).halved_limit(lengths)
        if half is not None:
            self._max_tokens = self._halved_tokens = half
        return half

    def _batches_of(self, lengths: StepLengths) -> MicroBatches:
        """Return larger micro-batches than training's, if they fit in memory."""
        # Nothing is kept for a backward pass, to which `fits` applies.
        training = replace(self.training, fits=None)
        tokens, least = self._max_tokens, min(training.max_tokens, self._halved_tokens)
        while tokens > least:
            larger = training.limited(tokens)
            divided = larger.divided(lengths)
            if all(self._fits(load_of(micro_batch, lengths)) for micro_batch in divided):
                return larger
            tokens //= 2
        return training.limited(least)

    def _fits(self, load: BatchLoad) -> bool:
        """Return whether a batch fits in memory.

        No batch fits if the model computes the logits of all tokens together.
        """
        execution = self._forward.execution
        return (
            execution.separate_head
            and self._memory.estimate(load, execution.loss_chunk) <= self._free_bytes
        )

    def _compute(
        self,
        micro_batches: Iterable[tuple[MicroBatch, PaddedBatch | Pack]],
        read: Callable[[MicroBatch, Sequence[int], _Floats], None],
        on_progress: Callable[[int], None],
        keys: Keys,
    ) -> None:
        done, waiting = 0, None

        def finish(micro_batch: MicroBatch, batch: PaddedBatch | Pack, each: mx.array) -> None:
            nonlocal done
            read(micro_batch, batch.counts, np.array(each, dtype=np.float64))
            done += len(micro_batch.examples)
            allocator.clear_cache_near_limit()
            on_progress(done)

        for micro_batch, batch in micro_batches:
            outputs = self._runner.outputs_of_stages(micro_batch.tokens)
            each = self._forward.losses(batch, keys(batch), outputs)
            graph = self._runner.graph(micro_batch.tokens, outputs, {}, each)
            # This waits for the previous batch.
            self._runner.start(graph)
            if waiting is not None:
                finish(*waiting)
            waiting = micro_batch, batch, each
        if waiting is not None:
            self._runner.finish(graph)
            finish(*waiting)


def max_batch_tokens(parameters: int) -> int:
    """Return the maximum tokens of a batch that a model of this size runs in a few seconds."""
    operations = _MAX_CPU_FLOPS if on_cpu() else _MAX_GPU_FLOPS
    return min(_MAX_TOKENS, int(operations / (_FLOPS_PER_PARAMETER * parameters)))


def _sums(counts: Sequence[int], each: _Floats) -> _Floats:
    """Return the sum of each example's losses; `each` holds the losses of a batch's tokens."""
    sums = np.zeros(len(counts))
    np.add.at(sums, np.repeat(np.arange(len(sums)), counts), each)
    return sums


def evaluation_memory(forward: Forward) -> EvaluationMemory:
    """Return the sizes of a loaded model that decide the memory of its evaluation."""
    facts, dtype = forward.facts, forward.dtype
    lazy = forward.operations.lazy and not on_cpu()
    return EvaluationMemory(
        layers=len(facts.layers),
        widest_layer=facts.widest_layer,
        heads=facts.heads,
        vocab=facts.vocab,
        itemsize=4 if dtype is None else dtype.size,
        in_blocks=forward.plain_head and dtype == mx.float32,
        graphs=allocator.graph_limits() if lazy else None,
    )


class Passes(NamedTuple):
    """The parts of a pass over examples: the runner of its graphs, and losses."""

    runner: GraphRunner
    losses: LossEvaluator


def passes_of(
    forward: Forward,
    parameters: int,
    workers: Workers,
    *,
    remedy: str,
    warn: Callable[[str], None],
    keyed: bool = False,
    whole_rows: bool = False,
    other_bytes: int = 0,
) -> Passes:
    """Return the passes of a model with `parameters` parameters, for training and evaluation.

    Workers that share the model wait for each other within a pass, so none of them halves its
    micro-batches or tries again on its own.
    """
    micro_batches = MicroBatches(forward.execution, keyed=keyed, whole_rows=whole_rows)
    runner = GraphRunner(
        forward, parameters, remedy=remedy, warn=warn, retries=not workers.shards_model
    )
    losses = LossEvaluator(forward, micro_batches, runner, parameters, workers, other_bytes)
    return Passes(runner, losses)


class Evaluator:
    """Computes the losses of one model with the same fast computations as training.

    `execution` is the fastest for the base unless given. An adapter that is switched off and on
    later must be on the model at construction; evaluations then use its current state.
    """

    def __init__(
        self,
        base: BaseModel,
        warn: Callable[[str], None],
        *,
        execution: Execution | None = None,
        workers: Workers = SINGLE_PROCESS,
    ) -> None:
        model, parameters = base.model, base.parameters
        model.eval()
        execution = execution or best_execution(parameters, base.dtype, model=model)
        self.forward = Forward(model, DropoutKeys(), execution, trains=False)
        remedy = "lower --max-seq-len, or use a quantised base"
        self._losses = passes_of(self.forward, parameters, workers, remedy=remedy, warn=warn).losses

    def losses(
        self, examples: Sequence[Example], on_progress: Callable[[int], None] = lambda done: None
    ) -> _Floats:
        """Return the losses of examples; see `LossEvaluator.compute`."""
        return self._losses.compute(examples, on_progress)

    def close(self) -> None:
        """Restore the model's original layers and functions."""
        self.forward.restore_model()
