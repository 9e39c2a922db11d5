"""Estimates the peak memory of a micro-batch."""

from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import head_in_flight, in_flight
from mlxtune.core.steps.memory_terms import BatchLoad, Factors, Measured, ModelShapes, Prediction


def predict(shapes: ModelShapes, execution: Execution, load: BatchLoad) -> Prediction:
    """Return a micro-batch's peak memory: estimated, and corrected if passes were measured."""
    memory, size = execution.operations.memory, shapes.itemsize
    measured = shapes.measured or Measured()
    # Layers that run again keep only their inputs.
    in_kept = Factors() if execution.recompute else measured.kept
    in_working = measured.again if execution.recompute else measured.working
    kept = in_kept.of(memory.kept(shapes, execution, load), size)
    working = in_working.of(memory.in_layer(shapes, execution, load), size)
    # In float32: the LoRA matrices, their two moments, and two gradients.
    weights, optimizer = shapes.weights + 4 * shapes.trainable, 4 * 4 * shapes.trainable
    queued = in_flight(shapes, load)
    in_layer = kept + queued + working + size * memory.unseen(shapes, execution, load)
    in_head = size * memory.in_head(shapes, execution, load)
    queued_head = max(queued, head_in_flight(shapes, execution, load))
    return max(
        Prediction(weights, optimizer, in_layer, 0),
        Prediction(weights, optimizer, kept, in_head + queued_head),
        key=lambda moment: moment.total,
    )
