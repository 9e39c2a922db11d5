"""The graphs of mlxtune's steps, for counting."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx

from mlxtune.backend.forward.forward import HeadFn, StepInputs
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.core.data.encode import Example
from tests.long.counts import Gradient, Traced, compiled_as_on_gpu
from tests.long.exportable import ExportableVjp


class PipelineGraphs:
    """The graphs of mlxtune's steps, as computed by MLX's operations."""

    def __init__(self, pipeline: InstructPipeline) -> None:
        self._pipeline = pipeline

    def lazy_step(self, examples: Sequence[Example]) -> Any:
        """Return all arrays that a step evaluates on a GPU, without updating the model."""
        pipeline = self._pipeline
        with compiled_as_on_gpu():
            step = pipeline._engine.new_step(examples, learning_rate=pipeline.learning_rate)
            pipeline._engine.build(step)
            return step.take_built().graph.arrays

    def gradients(self, examples: Sequence[Example]) -> Iterator[Gradient]:
        """Yield the gradient of each micro-batch, including the work of custom gradients."""
        forward = self._pipeline.forward
        for inputs in self._inputs(examples):

            def gradient(tokens: mx.array, inputs: StepInputs = inputs) -> Traced:
                parameters = forward.trained.values()
                names, values = zip(*parameters.items(), strict=True)

                def loss(*values: mx.array) -> list[mx.array]:
                    trained = dict(zip(names, values, strict=True))
                    given = replace(inputs, tokens=tokens)
                    return list(forward.scaled_loss(trained, given, mx.array(1.0)))

                vjp = ExportableVjp()
                _, gradients = vjp(loss, values, [mx.array(1.0)])
                return gradients, vjp.tied

            yield gradient, inputs.tokens

    def heads(self, examples: Sequence[Example]) -> Iterator[Any]:
        """Yield the loss of the head for each micro-batch, and its gradient."""
        forward = self._pipeline.forward
        found: list[Any] = []

        def around(head: HeadFn, rows: mx.array) -> list[mx.array]:
            alone = mx.zeros(rows.shape, rows.dtype)
            mx.eval(alone)
            found.append(mx.value_and_grad(lambda rows: head(rows)[0].sum())(alone))
            return [rows.sum()]

        with forward.watched(around):
            for inputs in self._inputs(examples):
                parameters = forward.trained.values()
                forward.scaled_loss(parameters, inputs, mx.array(1.0))
        yield from found

    def _inputs(self, examples: Sequence[Example]) -> Iterator[StepInputs]:
        for _, batch in self._pipeline._engine.micro_batches.iterate(examples):
            yield self._pipeline._engine.inputs(batch, 1)
