"""Measures short passes through a few layers of a loaded model on the device.

The passes' peaks at three lengths correct the size-based estimate of a run's memory: its parts per
token and per attention score, and its fixed part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from math import ceil
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten

from mlxtune.backend.device import allocator
from mlxtune.backend.forward.forward import StepInputs
from mlxtune.backend.forward.intercept import intercept
from mlxtune.backend.forward.layer_calls import first_trained
from mlxtune.backend.step.micro_batches import MicroBatches
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.memory_terms import (
    BatchLoad,
    Entries,
    Factors,
    MemoryCorrection,
    ModelShapes,
    load_of,
)

# The numbers of tokens in the passes. A lazy graph is built ahead of the device, so short passes
# hold relatively more memory than long ones. With kernels that run immediately, short passes do
# not.
_LAZY_LENGTHS, _EAGER_LENGTHS = (64, 192, 512), (32, 96, 256)
# The number of layers of each kind in the passes (two in a lazy graph, which holds arrays of
# neighbouring layers together), and the maximum number of layers. Passes with twice as many layers
# show the memory that layers keep.
_LAZY_LAYERS, _EAGER_LAYERS, _MAX_LAYERS = 2, 1, 4
# The weights of the size-based estimate in a fit to a pass, and to the difference between two
# passes.
_PRIOR, _PRIOR_OF_DIFFERENCE = 0.15, 0.5
# Factors and bytes are rounded up to multiples of these units, so that runs rarely differ. An
# excess below a quarter of a unit is noise.
_FACTOR_UNIT, _BYTES_UNIT, _NOISE = 1 / 16, 1 << 18, 0.25

Floats = npt.NDArray[np.float64]


def measure(
    pipeline: InstructPipeline, shapes: ModelShapes, modes: Sequence[bool]
) -> MemoryCorrection | None:
    """Measure passes in each of the `modes`: True recomputes activations, False keeps them.

    Returns None if the architecture cannot run some of its layers alone, if memory is too small for
    them, or if the device queues graphs: all buffers of such short passes are in flight, so their
    peaks do not show how those of a whole step grow. The pipeline's own mode is restored, and the
    passes leave no trace in the process's peaks.
    """
    if shapes.graphs is not None:
        return None
    forward, measured = pipeline.forward, MemoryCorrection()
    try:
        with allocator.peaks_kept():
            for recompute in modes:
                with forward.running_as(replace(forward.execution, recompute=recompute)):
                    measured = _measure(pipeline, replace(shapes, measured=None), measured)
    # Any error may occur: layers may need unusual arguments, or not fit in memory.
    except Exception:  # noqa: BLE001
        return None
    finally:
        allocator.release()
    return measured


def _measure(
    pipeline: InstructPipeline, shapes: ModelShapes, correction: MemoryCorrection
) -> MemoryCorrection:
    """Measure the pipeline's mode; return `correction` with the mode's factors added."""
    execution = pipeline.forward.execution
    operations = pipeline.forward.operations
    lengths = _LAZY_LENGTHS if operations.lazy else _EAGER_LENGTHS
    layers = _LAZY_LAYERS if operations.lazy else _EAGER_LAYERS
    layers *= _covering(list(pipeline.forward.model.layers)[-shapes.layers :])
    layers = min(layers, _MAX_LAYERS, shapes.layers)
    many = min(layers if execution.recompute else 2 * layers, shapes.layers)
    micro_batches = [_group(pipeline, length) for length in lengths]
    size, loads = shapes.itemsize, [load for load, _ in micro_batches]
    inputs_of_each = [inputs for _, inputs in micro_batches]
    kept_of_each = [
        operations.memory.kept_entries(shapes.with_layers(1), execution, load) for load in loads
    ]
    working = [operations.memory.layer_entries(shapes, execution, load) for load in loads]
    peaks = _peaks(pipeline, many, inputs_of_each)
    if execution.recompute:
        estimates = [many * Factors().of(entries, size) for entries in kept_of_each]
        return replace(correction, again=_fitted(working, peaks - estimates, size))
    if many == layers:
        whole = [
            Entries(one.fixed, one.tokens + many * each.tokens, one.scores + many * each.scores)
            for one, each in zip(working, kept_of_each, strict=True)
        ]
        of_all = _fitted(whole, peaks, size)
        return replace(correction, kept=replace(of_all, fixed=None), working=of_all)
    differences = (peaks - _peaks(pipeline, layers, inputs_of_each)) / (many - layers)
    of_kept = replace(_fitted(kept_of_each, differences, size, _PRIOR_OF_DIFFERENCE), fixed=None)
    left = peaks - [many * of_kept.of(entries, size) for entries in kept_of_each]
    return replace(correction, kept=of_kept, working=_fitted(working, left, size))


def _covering(layers: Sequence[nn.Module]) -> int:
    """Return how many layers, from the last, include every kind; 1 if more than `_MAX_LAYERS`."""
    kinds = [
        str([(name, value.shape) for name, value in tree_flatten(layer.parameters())])
        for layer in layers
    ]
    counts = range(1, _MAX_LAYERS + 1)
    return next((n for n in counts if set(kinds[-n:]) == set(kinds)), 1)


def _peaks(pipeline: InstructPipeline, count: int, inputs_of_each: Sequence[StepInputs]) -> Floats:
    """Return the peak in bytes of each micro-batch's pass through the last `count` layers."""
    forward, model = pipeline.forward, pipeline.forward.model
    layers = list(model.layers)
    active = layers[max(len(layers) - count, first_trained(layers)) :]
    names = {id(module): name for name, module in model.named_modules()}
    own = [
        (f"{names[id(layer)]}.{name}", value)
        for layer in active
        for name, value in tree_flatten(layer.trainable_parameters())
    ]
    parameters, zero, peaks = dict(own), mx.zeros((1,)), []
    model.train()
    allocator.release()
    with _alone(model, active) as shift:
        for inputs in inputs_of_each:

            def loss(
                parameters: Mapping[str, mx.array], added: mx.array, inputs_of_each: StepInputs
            ) -> Any:
                shift[0] = added
                return forward.scaled_loss(parameters, inputs_of_each, mx.array(1.0))[0]

            def compute(inputs: StepInputs = inputs) -> None:
                mx.eval(mx.grad(loss, argnums=(0, 1))(parameters, zero, inputs))

            mx.eval(zero, inputs.tokens, inputs.labels)
            try:
                with forward.watched(lambda _, hidden: [hidden.astype(mx.float32).square().sum()]):
                    peaks.append(allocator.peak_of(compute))
            finally:
                shift.clear()
    return np.array(peaks, dtype=np.float64)


@contextmanager
def _alone(model: nn.Module, active: Sequence[nn.Module]) -> Iterator[dict[int, mx.array]]:
    """Make inactive layers return their input, and shift the input of the first active layer.

    The array in the yielded dict is added to that input, so that the backward pass computes the
    gradient of the input, as in the layers above.
    """
    shift: dict[int, mx.array] = {}
    layers, selected = list(model.layers), {id(layer) for layer in active}

    def run(layer: nn.Module, x: mx.array, *args: Any, **options: Any) -> Any:
        if id(layer) not in selected:
            return x
        if layer is active[0]:
            x = x + shift[0].astype(x.dtype)
        return layer(x, *args, **options)

    undo = intercept(model, layers, [run] * len(layers))
    try:
        yield shift
    finally:
        undo()


def _group(pipeline: InstructPipeline, tokens: int) -> tuple[BatchLoad, StepInputs]:
    """Return two examples of about `tokens` tokens in total, as a load and as inputs.

    The examples share a prefix of a quarter of the tokens, and only their last tokens are
    supervised.
    """
    prefix, own = tokens // 4, (tokens - tokens // 4) // 2
    mask = np.zeros(prefix + own + 1, dtype=np.uint8)
    mask[-1] = 1
    start = np.arange(prefix, dtype=np.int32) % 10
    ends = [(np.arange(own + 1, dtype=np.int32) + shift) % 10 for shift in (3, 7)]
    step = [Example(row, np.concatenate([start, end]), mask) for row, end in enumerate(ends)]
    batches = MicroBatches(pipeline.forward.execution).limited(2 * tokens)
    ((micro_batch, batch),) = batches.iterate(step)
    return load_of(micro_batch, batches.lengths(step)), pipeline.step_inputs(batch, 1)


def _fitted(
    estimates: Sequence[Entries], peaks: Floats, itemsize: int, prior: float = _PRIOR
) -> Factors:
    """Return the non-negative factors that fit estimates to peaks with the least relative error."""
    grown = itemsize * np.array(
        [[estimate.tokens, estimate.scores] for estimate in estimates], dtype=float
    )
    ratio = max(peaks[-1], 1.0) / max(float(grown[-1].sum()), 1.0)
    weights = 1 / np.maximum(peaks, peaks.max() / 10)
    terms = np.column_stack([grown, np.ones(len(peaks))]) * weights[:, None]
    # The estimate's ratio of tokens to scores applies where the passes do not determine it.
    rows = np.vstack([terms, prior / ratio * np.eye(2, 3)])
    wanted = np.concatenate([peaks * weights, [prior, prior]])
    free, solution = np.ones(3, dtype=bool), np.full(3, -1.0)
    while (solution < 0).any():
        free &= solution >= 0 if (solution >= 0).any() else free
        solution = np.zeros(3)
        scale = np.maximum(np.abs(rows[:, free]).max(axis=0), 1e-12)
        solution[free] = np.linalg.lstsq(rows[:, free] / scale, wanted, rcond=None)[0] / scale
    tokens, scores = (ceil(each / _FACTOR_UNIT - _NOISE) * _FACTOR_UNIT for each in solution[:2])
    return Factors(tokens, scores, ceil(solution[2] / _BYTES_UNIT - _NOISE) * _BYTES_UNIT)
