"""Running the backward pass layer by layer."""

from __future__ import annotations

import gc
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest
from mlx.utils import tree_flatten

from mlxtune.backend.cpu import CPU
from mlxtune.backend.cpu.kernel_layers import BackwardReads, KernelLayers
from mlxtune.backend.forward.intercept import Intercepted
from mlxtune.backend.forward.layer_calls import LayerPasses, Layerwise, Recompute, run_again
from mlxtune.backend.forward.operations import MLX
from mlxtune.backend.lora.lora_layers import DropoutKeys
from mlxtune.backend.memory.shapes import model_shapes
from mlxtune.backend.models.loading import load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.graph_memory import queued_bytes
from mlxtune.core.steps.memory_terms import BatchLoad
from tests.backend.cpu.compared import assert_close, random
from tests.backend.step.executions import (
    SPLIT,
    assert_same,
    computed,
    fixed_step,
    fresh,
    model_folder,
)
from tests.models import write_model

PASSES: dict[str, Callable[[], LayerPasses]] = {
    "recompute": Recompute,
    "kernels with recompute": lambda: KernelLayers(keep_matmuls=False),
    "kernels": lambda: KernelLayers(keep_matmuls=True),
}


class Gain(nn.Module):  # type: ignore[misc]
    def __init__(self, seed: int) -> None:
        super().__init__()
        self.gain = random(4, seed=seed)

    def __call__(self, x: mx.array) -> mx.array:
        return x * self.gain


class Layer(nn.Module):  # type: ignore[misc]
    """A layer that counts its calls; `trained` makes the layer's gain trainable."""

    def __init__(self, seed: int, trained: bool = True) -> None:
        super().__init__()
        self.weight = random(4, 4, seed=seed)
        self.out = Gain(seed + 50)
        self.freeze()
        if trained:
            self.out.unfreeze()
        self.calls: list[int] = []

    def __call__(self, x: mx.array, mask: Any = None) -> mx.array:
        self.calls.append(1)
        return x + self.out(mx.tanh(x @ self.weight))


class Stack(nn.Module):  # type: ignore[misc]
    def __init__(self, *trained: bool) -> None:
        super().__init__()
        self.layers = [Layer(i, kind) for i, kind in enumerate(trained)]

    def __call__(self, x: mx.array) -> mx.array:
        for layer in self.layers:
            x = layer(x, None)
        return x


def gradients(stack: Stack, running: Any) -> tuple[mx.array, dict[str, mx.array]]:
    def loss(parameters: dict[str, Any]) -> mx.array:
        stack.update(parameters)
        with running():
            return stack(random(2, 3, 4, seed=99)).square().sum()

    parameters = stack.trainable_parameters()
    value, found = mx.value_and_grad(loss)(parameters)
    stack.update(parameters)
    flat = {k: v for k, v in tree_flatten(found) if isinstance(v, mx.array)}
    mx.eval(value, flat)
    return value, flat


@contextmanager
def plainly() -> Iterator[None]:
    yield


@pytest.mark.parametrize("passes", PASSES)
@pytest.mark.parametrize("trained", [(True, True, True), (False, True, False, True), (True,)])
def test_gradients_stay_the_same(trained: tuple[bool, ...], passes: str) -> None:
    expected_value, expected = gradients(Stack(*trained), plainly)
    stack = Stack(*trained)
    layerwise = Layerwise(stack, DropoutKeys(), PASSES[passes]())
    value, found = gradients(stack, layerwise.running)
    assert_close(value, expected_value, 1e-6)
    assert found.keys() == expected.keys() != set()
    for name in expected:
        assert_close(found[name], expected[name], 1e-6)


@pytest.mark.parametrize("passes", PASSES)
def test_layers_below_the_first_trained_are_not_recomputed(passes: str) -> None:
    stack = Stack(False, False, True, False)
    layerwise = Layerwise(stack, DropoutKeys(), PASSES[passes]())
    gradients(stack, layerwise.running)
    assert [len(layer.calls) for layer in stack.layers] == [1, 1, 2, 2]


def test_outside_of_running_nothing_differs() -> None:
    stack = Stack(True, True)
    layerwise = Layerwise(stack, DropoutKeys(), KernelLayers(keep_matmuls=False))
    gradients(stack, plainly)
    assert [len(layer.calls) for layer in stack.layers] == [1, 1]
    gradients(stack, layerwise.running)
    gradients(stack, plainly)
    assert [len(layer.calls) for layer in stack.layers] == [4, 4]


def test_only_these_instances_change() -> None:
    stack, other = Stack(True, True), Stack(True, True)
    call = Layer.__call__
    Layerwise(stack, DropoutKeys(), Recompute())
    assert Layer.__call__ is call
    assert all(type(layer) is Layer for layer in other.layers)
    assert all(isinstance(layer, Intercepted) for layer in stack.layers)
    assert all(isinstance(layer, Layer) for layer in stack.layers)
    names = [name for name, _ in tree_flatten(other.parameters())]
    assert [name for name, _ in tree_flatten(stack.parameters())] == names
    trained = [name for name, _ in tree_flatten(other.trainable_parameters())]
    assert [name for name, _ in tree_flatten(stack.trainable_parameters())] == trained


def test_layers_keep_their_parameters() -> None:
    """A layer's parameters are replaced only while it runs as a function."""
    stack = Stack(True, True)
    layerwise = Layerwise(stack, DropoutKeys(), Recompute())

    def loss(parameters: dict[str, Any]) -> mx.array:
        stack.update(parameters)
        given = dict(tree_flatten(stack.trainable_parameters()))
        with layerwise.running():
            total = stack(random(2, 3, 4)).sum()
        for name, value in tree_flatten(stack.trainable_parameters()):
            assert value is given[name]
        return total

    mx.grad(loss)(stack.trainable_parameters())


def test_error_stops_the_runner() -> None:
    stack = Stack(True)
    layerwise = Layerwise(stack, DropoutKeys(), KernelLayers(keep_matmuls=False))
    with pytest.raises(RuntimeError, match="stop"), layerwise.running():
        raise RuntimeError("stop")
    gradients(stack, plainly)
    assert len(stack.layers[0].calls) == 1


class _Several(Layer):
    """A layer with more inputs and outputs than hidden states, as in Gemma 4 and Hunyuan."""

    def __call__(self, x: mx.array, mask: Any = None, shared: Any = None) -> Any:
        mixed = self.out(mx.tanh(x @ self.weight))
        keys = mixed if shared is None else shared[0]
        return x + mixed + keys, (keys, 7)


class _Sharing(Stack):
    def __init__(self, *trained: bool) -> None:
        super().__init__(*trained)
        self.layers = [_Several(i, kind) for i, kind in enumerate(trained)]

    def __call__(self, x: mx.array) -> mx.array:
        shared = None
        for layer in self.layers:
            x, shared = layer(x, None, shared)  # type: ignore[call-arg]
        assert shared is not None
        assert shared[1] == 7
        return x


@pytest.mark.parametrize("passes", ["recompute", "kernels with recompute"])
def test_layers_that_hand_on_more_than_hidden_states(passes: str) -> None:
    _, expected = gradients(_Sharing(True, True, True), plainly)
    stack = _Sharing(True, True, True)
    layerwise = Layerwise(stack, DropoutKeys(), PASSES[passes]())
    _, found = gradients(stack, layerwise.running)
    for name in expected:
        assert_close(found[name], expected[name], 1e-6)


@pytest.mark.parametrize(
    ("architecture", "targets", "expected"),
    [
        ("qwen3", ("q_proj", "v_proj"), BackwardReads(False, False, False)),
        ("qwen3", ("o_proj",), BackwardReads(True, False, False)),
        ("llama", ("down_proj",), BackwardReads(False, True, False)),
        ("qwen2", ("all",), BackwardReads(True, True, False)),
        # A norm reads the last product's output.
        ("gemma3_text", ("q_proj", "v_proj"), BackwardReads(False, False, True)),
        ("gemma2", ("q_proj", "v_proj"), BackwardReads()),
    ],
)
def test_layer_keeps_the_inputs_of_its_backward_pass(
    architecture: str, targets: tuple[str, ...], expected: BackwardReads
) -> None:
    how = replace(SPLIT, operations=CPU)
    pipeline = fresh(model_folder(architecture), how, tokens=10_000, targets=targets)
    plain = fresh(model_folder(architecture), tokens=1, targets=targets)
    assert_same(computed(pipeline, fixed_step()), computed(plain, fixed_step()))
    assert {BackwardReads.of(layer) for layer in pipeline.model.layers} == {expected}


@pytest.mark.parametrize("member", [{"dora": True}, {"dropout": 0.3}, {"init": "pissa"}])
def test_members_of_the_family_read_what_they_scale_and_drop(member: dict[str, Any]) -> None:
    options = {"targets": ("o_proj", "down_proj"), **member}
    pipeline = fresh(model_folder("qwen3"), replace(SPLIT, operations=CPU), 10_000, **options)
    assert_same(
        computed(pipeline, fixed_step()),
        computed(fresh(model_folder("qwen3"), **options), fixed_step()),
    )
    reads = BackwardReads.of(pipeline.model.layers[0])
    assert reads == BackwardReads(last="dora" in member)


def test_quantized_products_of_mlx_read_their_inputs() -> None:
    folder, how = model_folder("qwen3", 4), replace(SPLIT, operations=CPU)
    options = {"targets": ("q_proj",), "quantized_compute": "quantized"}
    pipeline = fresh(folder, how, 10_000, **options)
    assert_same(computed(pipeline, fixed_step()), computed(fresh(folder, **options), fixed_step()))
    assert BackwardReads.of(pipeline.model.layers[0]) == BackwardReads()


def matmuls(recompute: bool, tmp_path: Path) -> int:
    """Return the number of matrix products in the graph of a step's gradients."""
    how = Execution(MLX, recompute=recompute)
    made = fresh(model_folder("qwen3"), how, 10_000, dropout=0.3)
    made.model.train()
    batch = next(batch for _, batch in made._engine.micro_batches.iterate(fixed_step()))
    inputs = made._engine.inputs(batch, 1)
    given = (made.forward.trained.values(), inputs, mx.array(1.0))
    mx.eval(given, inputs.arrays)
    gradients = made.forward.gradients(*given)[1]
    mx.export_to_dot(str(tmp_path / "graph"), *(value for _, value in tree_flatten(gradients)))
    return (tmp_path / "graph").read_text().count('"Matmul"')


def test_layers_run_again_in_the_backward_pass(tmp_path: Path) -> None:
    once, twice = (matmuls(recompute, tmp_path) for recompute in (False, True))
    layers = 2
    # Recomputing a layer repeats seven projections, each with two products of LoRA.
    assert twice - once >= layers * 7 * 3


@pytest.mark.parametrize("operations", [MLX, CPU], ids=["MLX", "CPU"])
@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_leave_the_models_own_parameters(operations: Any, recompute: bool) -> None:
    made = fresh(model_folder("qwen3"), Execution(operations, recompute=recompute), 10_000)
    (_, batch), *_ = made._engine.micro_batches.iterate(fixed_step())
    before = made.forward.trained.values()
    made.forward.gradients(before, made._engine.inputs(batch, 1), mx.array(1.0))
    assert all(made.forward.trained.values()[name] is value for name, value in before.items())


def test_layer_that_runs_again_waits_for_its_gradient() -> None:
    inputs, graph = [], io.StringIO()

    def layer(x: mx.array) -> list[mx.array]:
        inputs.append(x)
        return [mx.exp(x)]

    run_again(layer, [mx.ones(2)], [mx.sin(mx.ones(2))])
    mx.export_to_dot(graph, inputs[0])
    assert "Sin" in graph.getvalue()


def test_recomputing_keeps_only_the_input_of_a_layer(tmp_path: Path) -> None:
    sizes = {"hidden_size": 128, "intermediate_size": 384, "head_dim": 32}
    config = InstructConfig(lora_rank=4, targets=("all",))
    mask = np.ones(257, dtype=np.uint8)
    step = [Example(i, np.arange(i, i + 257, dtype=np.int32), mask) for i in range(2)]
    held = []
    for layers in (2, 8):
        folder = write_model(tmp_path / str(layers), "qwen3", num_hidden_layers=layers, **sizes)
        base = load_base(folder, "float32")
        shapes = model_shapes(base, config, MLX.memory)
        pipeline = InstructPipeline(base.model, config, execution=Execution(MLX, recompute=True))
        parameters = [value for _, value in tree_flatten(base.model.trainable_parameters())]
        mx.eval(parameters)
        # Free other tests' memory before the measurement.
        gc.collect()
        mx.synchronize()
        before = mx.get_active_memory()
        mx.reset_peak_memory()
        pipeline.train_batch(step)
        # Subtract two moments, the gradients and the new parameters.
        held.append(
            mx.get_peak_memory() - before - 4 * sum(parameter.nbytes for parameter in parameters)
        )
    # With eight layers, more operations may be queued than with two.
    queued = queued_bytes(shapes, BatchLoad(2, 256, 512, 512))
    assert held[1] - held[0] < 6 * 1.5 * 4 * 512 * 128 + queued
