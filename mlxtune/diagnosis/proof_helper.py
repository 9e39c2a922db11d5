"""Runs the checks of `mlxtune doctor --prove` that need a model in memory, in a process.

    python -m mlxtune.diagnosis.proof_helper RECORDS JOB PATH...

Appends each check to the file RECORDS, as a line of JSON.
"""

import json
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlxtune.backend.device import allocator
from mlxtune.backend.device.default_device import finish, on_cpu
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.memory.measure import measure
from mlxtune.backend.memory.shapes import model_shapes
from mlxtune.backend.models import loading
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import DataConfig, InstructConfig, TrainConfig
from mlxtune.config.data_config import BaseOptions
from mlxtune.config.limits import CONFIG_LIMITS
from mlxtune.core.data.encode import Example
from mlxtune.core.files.ours import entries
from mlxtune.core.files.reading import read_value
from mlxtune.core.files.writing import append_line, copy_file, make_folder, write_json
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import predict
from mlxtune.core.steps.memory_terms import load_of
from mlxtune.core.steps.pack import StepLengths
from mlxtune.core.steps.rounding import NOT_ROUNDED
from mlxtune.diagnosis import checks
from mlxtune.diagnosis.checks import ProofCheck, Step
from mlxtune.diagnosis.kernel_proof import kernel_checks, on_the_cpu, step_of
from mlxtune.diagnosis.matmuls import matmul_checks
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader

# A parameter count large enough to select the CPU's kernels.
_CPU_KERNEL_PARAMETERS = 10**9
_WHOLE_STEP_TOKENS, _SMALL_CHUNK = 10**6, 16
_DROPOUT = 0.3
# Micro-batch sizes in tokens, and the number of rows that fill the largest.
SIZES, _ROWS = (128, 512, 2048), 24
# The number of timed rows, and the number of rows in a step.
_TIMED_ROWS, _ROWS_PER_STEP = 12, 4
# The base: the width of its heads, and its quantisation.
_HEAD, _GROUP, _BITS = 64, 64, 4
# The base's width: small on the CPU, where quantised matmuls take about 20 times as long as
# float32 matmuls.
_CPU_WIDTH, _GPU_WIDTH = 256, 1024
# The shapes in which steps are timed. Add an entry for each new kind of rounding.
SHAPES: Mapping[str, Callable[[Execution], Execution]] = {
    "shapes as they are": lambda execution: replace(execution, rounding=NOT_ROUNDED),
    "shapes rounded": lambda execution: execution,
}


@dataclass(frozen=True)
class StepVariant:
    """A way to compute a step, with or without dropout."""

    name: str
    execution: Execution
    dropout: float = 0.0


def _variant(kind: str, parameters: int = 0) -> StepVariant:
    """Return the way named `kind`; the CPU's kernels compute only models of enough `parameters`."""
    execution = best_execution(parameters, kind=kind)
    return StepVariant(kind, replace(execution, micro_batch_tokens=_WHOLE_STEP_TOKENS))


def step_variants() -> list[StepVariant]:
    """Return the ways to compute a step on this device.

    Each way except `plain` has a variant with recomputed layers, dropout, several micro-batches
    and small chunks of the head.
    """
    variants = [_variant("plain")]
    for kind in ("gpu", "cpu") if on_cpu() else ("gpu",):
        variant = _variant(kind, _CPU_KERNEL_PARAMETERS)
        variants.append(variant)
        execution = replace(variant.execution, loss_chunk=_SMALL_CHUNK, micro_batch_tokens=256)
        small = replace(execution, recompute=True)
        variants.append(StepVariant(f"{kind}, recomputed", small, _DROPOUT))
    return variants


def gradients(model: Path, data: Path) -> Iterator[ProofCheck]:
    """Compare each way to compute a step with the plain path in float32.

    The plain path runs mlx-lm's unmodified model on dequantised weights, one example at a time.
    """
    examples = _examples(model, data)
    plain = replace(best_execution(0, kind="plain"), micro_batch_tokens=1)
    expected = {
        dropout: _computed(model, examples, StepVariant("", plain, dropout), "dequantized")[0]
        for dropout in (0.0, _DROPOUT)
    }
    for variant in step_variants():
        computed, _ = _computed(model, examples, variant, "auto")
        yield checks.check_step(variant.name, "float32", computed, expected[variant.dropout])


def dtype(model: Path, data: Path) -> Iterator[ProofCheck]:
    """Compare steps in 16-bit dtypes, computed in two ways, with steps in float32.

    The steps in float32 take the plain path on dequantised weights.
    """
    examples = _examples(model, data)
    # Runs on the CPU, because GPUs may round the factors of float32 matmuls.
    with on_the_cpu():
        expected, _ = _computed(model, examples, _variant("plain"), "dequantized")
    for name in ("bfloat16", "float16"):
        for kind in ("plain", "gpu"):
            computed, problem = _computed(model, examples, _variant(kind), "auto", name)
            yield checks.check_step(f"{name}, {kind}", name, computed, expected, problem)


def steps(model: Path, data: Path) -> Iterator[ProofCheck]:
    """Report the speed of steps with each entry of SHAPES, in the second of two runs.

    On a GPU, the model computes in its stored dtype.
    """
    examples = _examples(model, data)[:_TIMED_ROWS]
    batches = [examples[i : i + _ROWS_PER_STEP] for i in range(0, len(examples), _ROWS_PER_STEP)]
    for name, change in SHAPES.items():
        base = loading.load_base(model, "auto")
        execution = change(best_execution(base.parameters, base.dtype, model=base.model))
        pipeline = InstructPipeline(base.model, _lora(), execution=execution)
        for _ in range(2):
            began = time.perf_counter()
            for batch in batches:
                pipeline.train_batch(batch)
            finish()
        seconds = time.perf_counter() - began
        yield checks.check_speed(name, sum(len(example.tokens) for example in examples) / seconds)


def memory_peaks(model: Path, data: Path) -> Iterator[ProofCheck]:
    """Compare the predicted and the measured peak memory for each micro-batch size."""
    allocator.set_limits(TrainConfig.memory_limit)
    examples = _examples(model, data)[:_ROWS]
    margin = checks.MEMORY_MARGIN if on_cpu() else checks.GPU_MEMORY_MARGIN
    for size in SIZES:
        allocator.release()
        base = loading.load_base(model, "auto")
        execution = best_execution(base.parameters, base.dtype, model=base.model)
        execution = replace(execution, micro_batch_tokens=size)
        shapes = model_shapes(base, _lora(), execution.operations.memory)
        pipeline = InstructPipeline(base.model, _lora(), execution=execution)
        # The pipeline may have changed the execution to fit the model.
        execution = pipeline.forward.execution
        plain_head = shapes.plain_head and pipeline.forward.plain_head
        shapes = replace(shapes, plain_head=plain_head)
        shapes = replace(shapes, measured=measure(pipeline, shapes, [execution.recompute]))
        lengths = StepLengths.of(examples)
        loads = [load_of(micro_batch, lengths) for micro_batch in execution.micro_batches(lengths)]
        predicted = max(predict(shapes, execution, load).total for load in loads)
        allocator.reset_peaks()
        pipeline.train_batch(examples)
        yield checks.check_memory(f"{size:,} tokens", predicted, allocator.peak_bytes(), margin)


def write_base(like: Path, folder: Path, *, quantized: bool) -> Sequence[ProofCheck]:
    """Write a Qwen 3 model with seeded random weights to a folder; return no checks.

    The width depends on the device. All files except weights and config.json are copied from the
    model folder `like`. The weights are in 4 bits if `quantized`, else in bfloat16.
    """
    width = _CPU_WIDTH if on_cpu() else _GPU_WIDTH
    make_folder(folder)
    for path in entries(like):
        if path.suffix != ".safetensors" and path.name != "config.json":
            copy_file(path, folder / path.name)
    config = read_value(like / "config.json", CONFIG_LIMITS) | {
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
    return ()


JOBS: Mapping[str, Callable[..., Iterable[ProofCheck]]] = {
    "gradients": gradients,
    "kernels": partial(kernel_checks, "float32"),
    "products": matmul_checks,
    "kernels16": partial(kernel_checks, "bfloat16"),
    "dtype": dtype,
    "memory": memory_peaks,
    "steps": steps,
    "base": partial(write_base, quantized=True),
    "dense": partial(write_base, quantized=False),
}


def _lora(dropout: float = 0.0) -> InstructConfig:
    return InstructConfig(targets=("all",), rank=8, alpha=32.0, dropout=dropout)


def _computed(
    folder: Path,
    examples: Sequence[Example],
    variant: StepVariant,
    compute: str,
    dtype: str = "float32",
) -> tuple[Step, str]:
    """Return a step's loss and gradients (see `step_of`), and why packing failed, if it did."""
    base = loading.load_base(folder, dtype, BaseOptions(quantized_compute=compute))
    pipeline = InstructPipeline(base.model, _lora(variant.dropout), execution=variant.execution)
    return step_of(pipeline, examples), pipeline.forward.packing_problem


def _examples(model: Path, data: Path) -> list[Example]:
    """Return all examples of a data file, as `train` encodes them."""
    config = DataConfig(model_path=str(model), data=(str(data),), val_split=0.0, no_cache=True)
    return list(load_dataset(config, Reader(config, model)).corpus)


def main() -> None:
    """Run the job that the command line names, and record its checks."""
    records, job, *paths = sys.argv[1:]
    began = time.perf_counter()
    for check in JOBS[job](*map(Path, paths)):
        now = time.perf_counter()
        append_line(Path(records), json.dumps(asdict(check.taking(now - began))))
        began = now


if __name__ == "__main__":
    main()
