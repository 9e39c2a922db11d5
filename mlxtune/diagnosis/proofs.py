"""Every way to compute a step, measured for `mlxtune doctor --prove`, and a base that it makes."""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_flatten, tree_unflatten
from mlx_lm.models import qwen3

from mlxtune.backend.device import memory
from mlxtune.backend.device.device import finish, on_cpu
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.memory.measure import measure
from mlxtune.backend.memory.shapes import model_shapes
from mlxtune.backend.models import loading
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.config.limits import CONFIG
from mlxtune.core.data.encode import Example
from mlxtune.core.files.files import copy_file, make_folder, write_json
from mlxtune.core.files.ours import entries
from mlxtune.core.files.sizes import read_value
from mlxtune.core.steps.execution import Execution, load_of, predict
from mlxtune.core.steps.rounding import NOT_ROUNDED
from mlxtune.diagnosis.apart import cosine_and_ratio, largest_difference

# Large enough for the CPU's kernels to be chosen, whatever the model.
_LARGE = 10**9
_ONE_STEP, _SMALL_CHUNK = 10**6, 16
_DROPOUT = 0.3
_TIMED_ROWS = 4
# The base that is made: the width of its heads, and its quantisation.
_HEAD, _GROUP, _BITS = 64, 64, 4
# Quantised products are some 20 times slower than float32 on the CPU; a GPU needs work to do.
_CPU_WIDTH, _GPU_WIDTH = 256, 1024
# The shapes that steps are timed in; a way to round them is one more entry.
SHAPES: Mapping[str, Callable[[Execution], Execution]] = {
    "shapes as they are": lambda execution: replace(execution, rounding=NOT_ROUNDED),
    "shapes rounded": lambda execution: execution,
}

Gradients = dict[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Way:
    """A way to compute a step, with or without dropout."""

    name: str
    execution: Execution
    dropout: float = 0.0


def ways() -> list[Way]:
    """Return the ways that this device has.

    Where layers are recomputed, there are also dropout, several micro-batches and small chunks of
    the head.
    """
    kinds = ("plain", "gpu", "cpu") if on_cpu() else ("plain", "gpu")
    found = []
    for kind in kinds:
        execution = replace(best_execution(_LARGE, kind=kind), micro_batch_tokens=_ONE_STEP)
        found.append(Way(kind, execution))
        if kind == "plain":
            continue
        small = replace(execution, recompute=True, loss_chunk=_SMALL_CHUNK, micro_batch_tokens=256)
        found.append(Way(f"{kind}, recomputed", small, _DROPOUT))
    return found


def gradient_differences(
    folder: Path, examples: Sequence[Example]
) -> Iterator[tuple[str, float, float]]:
    """Yield each way, and how far its loss and its gradients are from the plain ones in float32.

    The plain path runs one example at a time through the model as mlx-lm has it, on dequantised
    weights. Losses are relative, gradients are relative to their largest entry.
    """
    plain = replace(best_execution(0, kind="plain"), micro_batch_tokens=1)
    references = {
        dropout: _computed(folder, examples, Way("", plain, dropout), "dequantized")
        for dropout in (0.0, _DROPOUT)
    }
    for way in ways():
        loss, gradients, _ = _computed(folder, examples, way, "auto")
        expected_loss, expected, _ = references[way.dropout]
        apart = largest_difference(gradients, expected)
        yield way.name, abs(loss / expected_loss - 1), apart


def write_reference(folder: Path, examples: Sequence[Example], path: Path) -> None:
    """Write the gradients of the plain path in float32, on dequantised weights."""
    plain = Way("", replace(best_execution(0, kind="plain"), micro_batch_tokens=1))
    found: dict[str, Any] = _computed(folder, examples, plain, "dequantized")[1]
    np.savez(path, **found)


def dtype_differences(
    folder: Path, examples: Sequence[Example], reference: Path
) -> Iterator[tuple[str, float, float, str]]:
    """Yield each 16-bit dtype and way, and how far its gradients are from the reference in float32.

    That is the least cosine of a matrix's gradient, and the ratio of norms that is farthest from 1.
    Last comes why packing was refused, empty if it was not.
    """
    with np.load(reference) as arrays:
        expected = dict(arrays)
    for dtype in ("bfloat16", "float16"):
        for kind in ("plain", "gpu"):
            execution = replace(best_execution(0, kind=kind), micro_batch_tokens=_ONE_STEP)
            _, found, problem = _computed(folder, examples, Way("", execution), "auto", dtype)
            yield f"{dtype}, {kind}", *cosine_and_ratio(found, expected), problem


def timed_steps(folder: Path, examples: Sequence[Example]) -> Iterator[tuple[str, float]]:
    """Yield each choice of shapes, and its speed in real tokens/s: the second time that steps run.

    The model computes in its own dtype on a GPU.
    """
    config = InstructConfig(targets=("all",), lora_rank=8)
    steps = [examples[i : i + _TIMED_ROWS] for i in range(0, len(examples), _TIMED_ROWS)]
    for name, change in SHAPES.items():
        base = loading.load_base(folder, "auto")
        execution = change(best_execution(base.parameters, base.dtype))
        pipeline = InstructPipeline(base.model, config, execution=execution)
        for _ in range(2):
            began = time.perf_counter()
            for step in steps:
                pipeline.train_batch(step)
            finish()
        seconds = time.perf_counter() - began
        yield name, sum(len(example.tokens) for example in examples) / seconds


def _computed(
    folder: Path, examples: Sequence[Example], way: Way, compute: str, dtype: str = "float32"
) -> tuple[float, Gradients, str]:
    """Return loss and gradients of a step, with seeded LoRA matrices, and why it is not packed."""
    base = loading.load_base(folder, dtype, quantized_compute=compute)
    config = InstructConfig(targets=("all",), lora_rank=8, dropout=way.dropout)
    pipeline = InstructPipeline(base.model, config, execution=way.execution)
    _fill_lora_b(pipeline)
    result = pipeline.loss_and_gradients(examples, step=1)
    gradients = {name: np.array(value) for name, value in tree_flatten(result.gradients)}
    return result.loss, gradients, pipeline.forward.packing_problem


def _fill_lora_b(pipeline: InstructPipeline) -> None:
    """Give B random values: at zero, as it starts, the gradient of A would be zero too."""
    rng = np.random.default_rng(1)
    filled = [
        (name, mx.array(0.1 * rng.standard_normal(value.shape), dtype=value.dtype))
        for name, value in tree_flatten(pipeline.model.trainable_parameters())
        if name.endswith("lora_b")
    ]
    pipeline.model.update(tree_unflatten(filled))


def memory_peaks(
    folder: Path, examples: Sequence[Example], sizes: Sequence[int], limit: float
) -> Iterator[tuple[int, int, int]]:
    """Yield each size of a micro-batch in tokens, the predicted and the measured peak in bytes.

    `limit` is that of MLX's memory in GB.
    """
    memory.set_limits(limit)
    config = InstructConfig(targets=("all",), lora_rank=8)
    for size in sizes:
        memory.release()
        base = loading.load_base(folder, "auto")
        execution = best_execution(base.parameters, base.dtype)
        execution = replace(execution, micro_batch_tokens=size)
        shapes = model_shapes(base, config, execution.operations.memory)
        pipeline = InstructPipeline(base.model, config, execution=execution)
        # As the loaded model runs.
        execution = pipeline.forward.execution
        plain_head = shapes.plain_head and pipeline.forward.plain_head
        shapes = replace(shapes, plain_head=plain_head)
        shapes = replace(shapes, measured=measure(pipeline, shapes, [execution.recompute]))
        loads = [load_of(group, examples) for group in execution.plan(examples)]
        predicted = max(predict(shapes, execution, load).total for load in loads)
        memory.forget_peak()
        pipeline.train_batch(examples)
        yield size, predicted, memory.peak_bytes()


def write_base(
    like: Path, folder: Path, width: int | None = None, *, quantized: bool = True
) -> None:
    """Write a folder in Qwen 3's shape with seeded weights, `width` wide, as fits the device.

    Weights are in 4 bits if `quantized`, else in bfloat16.
    """
    width = width or (_CPU_WIDTH if on_cpu() else _GPU_WIDTH)
    make_folder(folder)
    for path in entries(like):
        if path.suffix != ".safetensors" and path.name != "config.json":
            copy_file(path, folder / path.name)
    config = read_value(like / "config.json", CONFIG) | {
        "hidden_size": width,
        "intermediate_size": 3 * width,
        "num_attention_heads": width // _HEAD,
        "num_key_value_heads": width // _HEAD // 2,
        "head_dim": _HEAD,
    }
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs.from_dict(config))
    model.set_dtype(mx.bfloat16)
    if quantized:
        nn.quantize(model, group_size=_GROUP, bits=_BITS)
        config["quantization"] = {"group_size": _GROUP, "bits": _BITS}
    weights = dict(tree_flatten(model.parameters()))
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    write_json(folder / "config.json", config)
