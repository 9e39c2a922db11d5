"""Measures the steps of a pipeline: phases as they run, layers in a separate pass.

MLX computes nothing until it is asked to, so a border between two phases is an evaluation. It
changes what is evaluated together, not what is computed: the step gives the same bits. Borders
between layers would not leave it so (a graph compiled as a whole has none, and one that is kept
while it is cut takes more memory), hence the layers run once more, after the step.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np

from mlxtune.backend.model import memory
from mlxtune.backend.step.intercept import intercept, put_in_place
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.step.recompute import LayerCall, first_trained
from mlxtune.core.data.encode import Example
from mlxtune.core.machine.gpu_faults import fault_of
from mlxtune.core.training.profile import LayerProfile, PhaseTimer


@dataclass
class _Call:
    """A call of a layer, or of the head, that is to be measured.

    `run` takes `inputs` and gives `outputs`, of which the shapes and dtypes are kept. The gradient
    is computed for the inputs that are `wanted`.
    """

    name: str
    run: Callable[..., list[mx.array]]
    inputs: list[mx.array]
    outputs: list[tuple[tuple[int, ...], mx.Dtype]]
    wanted: list[int]


class PipelineMeter:
    """Measures one pipeline for the profiler."""

    def __init__(self, pipeline: InstructPipeline) -> None:
        self._pipeline = pipeline

    def memory(self) -> tuple[int, int]:
        """Return the bytes in use, and the most that were in use since this was last asked."""
        return int(mx.get_active_memory()), memory.lap_peak()

    def attach(self, timer: PhaseTimer | None) -> None:
        """Measure the phases of the pipeline's next steps; None stops that."""
        self._pipeline.phases.timer = timer

    def layers(self, examples: Sequence[Example], step: int) -> list[LayerProfile]:
        """Run the micro-batches of a step once more, layer by layer; change nothing.

        Each layer runs by itself on the input that it has in the model, forward and backward; the
        gradient that comes into it is made up, as its time does not depend on it. Empty where
        memory runs out.
        """
        profiles: dict[str, LayerProfile] = {}
        model = self._pipeline.model
        parameters = model.trainable_parameters()
        model.train()
        # What this takes is not part of the run's peaks.
        memory.lap_peak()
        try:
            for _, batch in self._pipeline.micro_batches(examples):
                for call in self._calls(self._pipeline.arrays(batch, step)):
                    measured = self._measure(call)
                    before = profiles.get(call.name)
                    profiles[call.name] = before.plus(measured) if before else measured
                memory.relieve_pressure()
        except (RuntimeError, MemoryError) as error:
            if fault_of(error) is None:
                raise
            profiles = {}
        finally:
            model.update(parameters)
            mx.clear_cache()
            mx.reset_peak_memory()
        return list(profiles.values())

    def _calls(self, arrays: dict[str, Any]) -> list[_Call]:
        """Run the model forward, and return the calls of its layers, the head's last."""
        layers, calls = list(self._pipeline.model.layers), list[_Call]()
        numbers = {id(layer): i for i, layer in enumerate(layers)}
        first, dropout = first_trained(layers), self._pipeline.lora.dropout_keys

        def at(layer: nn.Module, *args: Any, **options: Any) -> Any:
            call = LayerCall(layer, dropout, args, options)
            inputs = call.inputs
            own = range(len(call.given), len(inputs))
            number = numbers[id(layer)]
            # Below the first layer that is trained nothing has a gradient, nor does its input.
            wanted = list(own) if number == first else [0, *own] if number > first else []
            outputs = call.run(*inputs)
            # Step by step: the arrays of one layer are freed before the next.
            mx.eval(inputs, outputs)
            shapes = [(each.shape, each.dtype) for each in outputs]
            calls.append(_Call(f"layers.{number}", call.run, inputs, shapes, wanted))
            return call.result(outputs)

        def around(head: Callable[[mx.array], mx.array], rows: mx.array) -> mx.array:
            calls.append(_Call("head", lambda rows: [head(rows)], [rows], [((), mx.float32)], [0]))
            return mx.array(0.0)

        model, forward = self._pipeline.model, self._pipeline.forward
        intercept(model, layers, [at] * len(layers))
        try:
            with forward.watched(around), np.errstate(all="ignore"):
                given = (model.trainable_parameters(), arrays, mx.array(1.0))
                loss = forward.scaled_loss(*given, backward=False)
                mx.eval(loss, [call.inputs for call in calls])
        finally:
            put_in_place(model, list(model.layers), layers)
        return calls

    def _measure(self, call: _Call) -> LayerProfile:
        mx.synchronize()
        mx.reset_peak_memory()
        before, started = int(mx.get_active_memory()), perf_counter()
        # Where layers are computed as they are called, the forward pass ends with the call.
        called = started

        def run(*chosen: mx.array) -> list[mx.array]:
            nonlocal called
            inputs = list(call.inputs)
            for place, array in zip(call.wanted, chosen, strict=True):
                inputs[place] = array
            outputs = call.run(*inputs)
            called = perf_counter()
            return outputs

        with self._pipeline.forward.running(), np.errstate(all="ignore"):
            if call.wanted:
                chosen = [call.inputs[place] for place in call.wanted]
                coming = [mx.full(shape, 1e-3, dtype) for shape, dtype in call.outputs]
                outputs, gradients = mx.vjp(run, chosen, coming)
            else:
                outputs, gradients = run(), []
            traced = perf_counter()
            mx.eval(outputs)
            kept, forward_done = int(mx.get_active_memory()) - before, perf_counter()
            mx.eval(gradients)
        ended = perf_counter()
        return LayerProfile(
            call.name,
            called - started + forward_done - traced,
            traced - called + ended - forward_done if call.wanted else 0.0,
            max(kept, 0),
            max(int(mx.get_peak_memory()) - before, 0),
        )
