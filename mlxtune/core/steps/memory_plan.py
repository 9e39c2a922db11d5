"""Predicts a step's memory, plans the step within the limit, and suggests remedies."""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

from mlxtune.core.formatting import byte_size
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import head_queued_bytes, queued_bytes
from mlxtune.core.steps.memory_terms import (
    BatchLoad,
    Factors,
    MemoryCorrection,
    ModelShapes,
    Prediction,
    load_of,
    lora_bytes,
    moment_bytes,
)
from mlxtune.core.steps.pack import StepLengths

# The largest expected relative error of a prediction: plans leave this fraction of the predicted
# peak free if they can.
MARGIN = 0.15
# The range of the real peak, relative to an estimate from sizes only.
ESTIMATE_RANGE = (0.7, 1.4)
# The numbers to try of tokens in a micro-batch, and of supervised positions in a chunk of the head.
_TOKENS = [1, *sorted(base << power for base in (64, 96) for power in range(14))]
_CHUNKS = (256, 64, 16)
# The factors by which a step takes longer: if layers are recomputed, and (assumed) for each
# reduction of the head's chunk to a quarter. So plans use smaller chunks only if needed to fit, and
# prefer them to recomputing layers.
_RECOMPUTE_FACTOR, _CHUNK_FACTOR = 4 / 3, 1.15
# Never suggest a --max-seq-len below this.
_MIN_LENGTH = 16
# The number of bits of a weight with --quantize 4, and the number of weights that share a scale and
# a bias.
_BITS, _QUANTIZATION_GROUP = 4, 64
# The largest number of examples in the sample from which a plan is chosen.
_MAX_SAMPLED_EXAMPLES = 256


@dataclass(frozen=True)
class MemoryPlan:
    """A plan of how to run a step, and the step's cost.

    `limit` and `estimate`, the peak estimated from sizes only, are in bytes; `time` is in units of
    one token's time. The other fields describe the sampled steps: `padding_fraction` is the
    fraction of padding in the tokens that run; `forward_fraction` is the number of tokens that run,
    divided by the data's number of tokens.
    """

    shapes: ModelShapes
    execution: Execution
    peak: Prediction
    limit: int
    estimate: int
    time: float
    micro_batches_per_step: float
    padding_fraction: float
    forward_fraction: float

    def fits(self, load: BatchLoad) -> bool:
        """Return whether a micro-batch takes no more memory than estimated, by its sizes only."""
        unmeasured = replace(self.shapes, measured=None)
        return predict(unmeasured, self.execution, load).total <= self.estimate


def predict(shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Prediction:
    """Return a micro-batch's peak memory: estimated, and corrected if passes were measured."""
    memory, size = execution.operations.memory, shapes.itemsize
    measured = shapes.measured or MemoryCorrection()
    # Layers that run again keep only their inputs.
    in_kept = Factors() if execution.recompute else measured.kept
    in_working = measured.again if execution.recompute else measured.working
    kept = in_kept.of(memory.kept_entries(shapes, execution, load), size)
    working = in_working.of(memory.layer_entries(shapes, execution, load), size)
    matrices, moments = lora_bytes(shapes.trainable), moment_bytes(shapes.trainable)
    # There are two gradients: the step's and the micro-batch's.
    weights, optimizer = shapes.weights + matrices, moments + 2 * matrices
    queued = queued_bytes(shapes, load)
    in_layer = kept + queued + working + size * memory.unmeasured_entries(shapes, execution, load)
    in_head = size * memory.head_entries(shapes, execution, load)
    queued_head = max(queued, head_queued_bytes(shapes, execution, load))
    return max(
        Prediction(weights, optimizer, in_layer, 0),
        Prediction(weights, optimizer, kept, in_head + queued_head),
        key=lambda moment: moment.total,
    )


def sample_steps(steps: Iterable[StepLengths]) -> list[StepLengths]:
    """Return the first steps, or part of a large step, as a sample for the choice of a plan."""
    selected: list[StepLengths] = []
    count = 0
    for step in steps:
        selected.append(step if selected else step.only(range(len(step))[:_MAX_SAMPLED_EXAMPLES]))
        count += len(step)
        if count >= _MAX_SAMPLED_EXAMPLES:
            break
    return selected


@dataclass(frozen=True)
class Workload:
    """What to plan for: the first steps, and the loads of the examples that take most memory.

    `sampling` are the bytes of caches and of logits while answers are sampled, between steps.
    """

    steps: Sequence[StepLengths]
    alone: tuple[BatchLoad, ...]
    sampling: tuple[int, int] = (0, 0)


def predict_sampling(shapes: ModelShapes, work: Workload, limit: int) -> Prediction:
    """Return the peak memory of sampling, which takes no more answers together than fit."""
    weights, moments = shapes.weights + lora_bytes(shapes.trainable), moment_bytes(shapes.trainable)
    caches, logits = work.sampling
    free = int(limit / (1 + MARGIN)) - weights - moments - logits
    return Prediction(weights, moments, max(min(caches, free), 0), logits)


def _candidates(work: Workload) -> list[int]:
    longest = max(load.tokens for load in work.alone)
    largest = max([longest, *(sum(step.forward) for step in work.steps)])
    enough = next((tokens for tokens in _TOKENS if tokens >= largest), _TOKENS[-1])
    # Without steps, only single examples are planned.
    return [tokens for tokens in _TOKENS if tokens <= enough] if work.steps else [enough]


def _chunks(shapes: ModelShapes, execution: Execution) -> tuple[int, ...]:
    """Return the chunk sizes of the head to try: only one if the head holds no logits."""
    logits = execution.operations.memory.holds_logits(shapes)
    return _CHUNKS if logits else (execution.loss_chunk,)


def _plans(
    shapes: ModelShapes,
    work: Workload,
    base: Execution,
    limit: int,
    recompute_choices: Sequence[bool],
) -> Iterator[MemoryPlan]:
    chunks, unmeasured = _chunks(shapes, base), replace(shapes, measured=None)
    sampling = predict_sampling(shapes, work, limit)
    for tokens in _candidates(work):
        sized = replace(base, micro_batch_tokens=tokens)
        steps = [(step, sized.micro_batches(step)) for step in work.steps]
        micro_batches = [(micro_batch, step) for step, divided in steps for micro_batch in divided]
        loads = {
            *(load_of(micro_batch, step) for micro_batch, step in micro_batches),
            *map(sized.rounded, work.alone),
        }
        time = sum(micro_batch.tokens + base.fixed_cost for micro_batch, _ in micro_batches) or 1
        forward = sum(micro_batch.tokens for micro_batch, _ in micro_batches)
        padding = sum(micro_batch.padding(step.forward) for micro_batch, step in micro_batches)
        tokens_of_data = sum(sum(step.tokens) for step in work.steps)
        for recompute, (smaller, chunk) in product(recompute_choices, enumerate(chunks)):
            execution = replace(sized, recompute=recompute, loss_chunk=chunk)
            peaks = [sampling, *(predict(shapes, execution, load) for load in loads)]
            estimates = [predict(unmeasured, execution, load).total for load in loads]
            yield MemoryPlan(
                shapes=shapes,
                execution=execution,
                peak=max(peaks, key=lambda peak: peak.total),
                limit=limit,
                estimate=max(estimates),
                time=time * (_RECOMPUTE_FACTOR if recompute else 1) * _CHUNK_FACTOR**smaller,
                # Without data all counts are 0.
                micro_batches_per_step=len(micro_batches) / max(len(steps), 1),
                padding_fraction=padding / max(forward, 1),
                forward_fraction=forward / max(tokens_of_data, 1),
            )


def choose_memory_plan(
    shapes: ModelShapes,
    work: Workload,
    base_execution: Execution,
    *,
    limit: int,
    recompute_choices: Sequence[bool],
    tolerance: float,
) -> MemoryPlan | None:
    """Choose the plan for a workload, or return None if no plan fits.

    A plan fits if its predicted peak is at most `limit` bytes, if possible with a fraction MARGIN
    of the peak to spare; measurements correct this prediction. Among the fitting plans that are at
    most `tolerance` (a fraction) slower than the fastest, the one with the least memory wins. That
    ranking uses the estimate from sizes alone: measurements vary a little between runs, and another
    plan would round differently. `recompute_choices` lists the allowed values of `recompute`.
    Deterministic for given arguments.
    """
    plans = list(_plans(shapes, work, base_execution, limit, recompute_choices))
    for bound in (limit / (1 + MARGIN), limit):
        if fitting := [plan for plan in plans if plan.peak.total <= bound]:
            enough = min(plan.time for plan in fitting) * (1 + tolerance)
            return min(
                (plan for plan in fitting if plan.time <= enough),
                key=lambda plan: (plan.estimate, plan.time, plan.execution.micro_batch_tokens),
            )
    return None


def least(shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Prediction:
    """Return the least memory that a micro-batch needs, over all chunk sizes of its head."""
    chunked = (replace(execution, loss_chunk=each) for each in _chunks(shapes, execution))
    return min((predict(shapes, each, load) for each in chunked), key=lambda peak: peak.total)


def max_example_length(
    shapes: ModelShapes, base: Execution, limit: int, most: int, recompute_choices: Sequence[bool]
) -> int:
    """Return the length of the longest example that fits if all its tokens are supervised.

    Leaves a fraction MARGIN of the predicted peak free. Returns at most `most` tokens; 0 if not
    even one token fits.
    """

    def needs(tokens: int) -> int:
        work = Workload((), (BatchLoad.single(tokens, tokens),))
        return min(plan.peak.total for plan in _plans(shapes, work, base, limit, recompute_choices))

    return _most(needs, most, int(limit / (1 + MARGIN)))


def why_not(
    shapes: ModelShapes, work: Workload, execution: Execution, limit: int, may_checkpoint: bool
) -> str:
    """Return the reason why not even one example fits, with remedies."""
    execution = replace(execution, recompute=may_checkpoint)
    load = max(work.alone, key=lambda load: least(shapes, execution, load).total)
    needed = least(shapes, execution, load).total
    changes = remedies(shapes, execution, load, limit, may_checkpoint=may_checkpoint)
    return (
        f"one example of {load.tokens:,} tokens needs about {byte_size(needed)}, of which "
        f"{byte_size(shapes.weights)} are the weights, and the limit is {byte_size(limit)}: "
        f"{', or '.join(['raise --memory-limit', *changes])}"
    )


def remedies(
    shapes: ModelShapes,
    execution: Execution,
    load: BatchLoad,
    limit: int,
    *,
    may_checkpoint: bool,
) -> list[str]:
    """Return changes to options that may let one example fit, such as `--max-seq-len 512`."""
    changes = []
    if may_checkpoint:
        execution = replace(execution, recompute=True)
    elif least(shapes, replace(execution, recompute=True), load).total <= limit:
        changes.append("--grad-checkpoint on")

    def shorter(tokens: int) -> int:
        positions = max(load.positions * tokens // load.width, 1)
        return least(shapes, execution, BatchLoad.single(tokens, positions)).total

    def fewer(layers: int) -> int:
        return least(shapes.with_layers(layers), execution, load).total

    if (tokens := _most(shorter, load.width, limit)) >= _MIN_LENGTH:
        changes.append(f"--max-seq-len {tokens}")
    if layers := _most(fewer, shapes.layers, limit):
        changes.append(f"--num-layers {layers}")
    if shapes.stored_itemsize:
        each = _BITS / 8 + 2 * shapes.itemsize / _QUANTIZATION_GROUP
        smaller = replace(shapes, weights=int(shapes.weights * each / shapes.stored_itemsize))
        needed = least(smaller, execution, load).total
        fits = "" if needed <= limit else ", still too much"
        changes.append(f"--quantize 4 (about {byte_size(needed)}{fits})")
    return changes


def _most(needs: Callable[[int], int], most: int, limit: int) -> int:
    """Return the largest number up to `most` for which `needs` is at most `limit`, or 0."""
    return bisect_right(range(1, most + 1), limit, key=needs)
