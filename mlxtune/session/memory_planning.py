"""Fits the steps of a run into memory: chooses a plan, confirms it and reserves its memory.

A plan says how steps are computed: its `execution`. Only this module chooses it, in three stages,
each with one more fact:

    choose_plan  sizes of the opened model, and the device's fastest operations
    plan_run     the faster form of matmuls with quantised weights, timed with the largest
                 micro-batch of the plan
    confirm      what the loaded model supports, and its measured memory; the pipeline then
                 computes by this plan
"""

import datetime
import json
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.backend.device import allocator, default_device
from mlxtune.backend.forward.operations import best_execution
from mlxtune.backend.memory.measure import measure
from mlxtune.backend.memory.shapes import model_shapes
from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.sampling import sampling_memory
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config import InstructConfig, TrainConfig, user_cache
from mlxtune.core.data.cache import cache_key
from mlxtune.core.data.encode import Example
from mlxtune.core.data.inspection import truncation_report
from mlxtune.core.files.reading import read_json
from mlxtune.core.machine import reservation
from mlxtune.core.machine.facts import versions
from mlxtune.core.objectives.policy import expected_samples
from mlxtune.core.run.metrics import StepRecord
from mlxtune.core.run.run_folder import ABOUT, ResumePoint
from mlxtune.core.run.run_plan import LongestFit, read_measured, save_measured, save_speed, speed_of
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.core.steps import memory_plan, order
from mlxtune.core.steps.execution import Execution
from mlxtune.core.steps.memory_plan import MemoryPlan, Workload, sample_steps
from mlxtune.core.steps.memory_terms import BatchLoad, MemoryCorrection, ModelShapes
from mlxtune.core.steps.pack import StepLengths
from mlxtune.errors import MemoryLimitError, MlxTuneError, OutputError
from mlxtune.session.dataset import Dataset
from mlxtune.views import plan_text
from mlxtune.views.console import RunConsole

# A larger micro-batch must save at least this fraction of time on the CPU, where it rarely does.
_CPU_TOLERANCE = 0.05
# The values of `recompute` that --grad-checkpoint allows.
_RECOMPUTE_CHOICES = {"on": (True,), "off": (False,), "auto": (False, True)}
# The context length of a model whose config gives none.
_MAX_LENGTH = 1 << 20


def first_epoch(config: TrainConfig, dataset: Dataset) -> list[list[int]]:
    """Return the row indices of each step of the first epoch, in the trainer's order."""
    rows = dataset.rows.train
    return order.steps_of(rows, config.batch_size, config.order, config.seed, 1)


def first_steps(config: TrainConfig, dataset: Dataset | None) -> list[StepLengths]:
    if dataset is None:
        return []
    rows, keyed = dataset.rows.train, config.dropout > 0
    epoch = first_epoch(config, dataset)
    steps: Iterable[list[Example]] = map(rows.examples_of, epoch)
    if config.is_rewarded:
        size, longest = config.group_size, config.max_new_tokens
        steps = (expected_samples(examples, size, longest) for examples in steps)
    return sample_steps(StepLengths.of(examples, keyed=keyed) for examples in steps)


def expected_workload(
    config: TrainConfig,
    steps: Sequence[StepLengths],
    dataset: Dataset | None = None,
    base: BaseModel | None = None,
) -> Workload:
    """Return the work to plan: steps, and the single examples that need the most memory.

    Looks for these examples in the whole data set or else in the steps. Without data and steps, the
    work is one example of --max-seq-len tokens. `base` is needed for answers that it samples.
    """
    sizes = [size for step in steps for size in zip(step.tokens, step.supervised, strict=True)]
    if dataset is not None:
        lengths, supervised = expected_lengths(config, dataset, answers=1)
        sizes = list(zip(lengths.tolist(), supervised.tolist(), strict=True))
    sampling = 0, 0
    if config.is_rewarded and base is not None:
        prompt = max((tokens - answer for tokens, answer in sizes), default=config.max_seq_len)
        rows = max(config.batch_size, len(dataset.rows.validation) if dataset else 0)
        sampling = sampling_memory(base, prompt, config.max_new_tokens, rows * config.group_size)
    sizes = sizes or [(config.max_seq_len, config.max_seq_len)]
    extremes = {max(sizes), max(sizes, key=lambda size: size[::-1])}
    return Workload(
        steps=steps,
        alone=tuple(
            BatchLoad.single(length, supervised) for length, supervised in sorted(extremes)
        ),
        sampling=sampling,
    )


def expected_lengths(
    config: TrainConfig, dataset: Dataset, answers: int
) -> tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]:
    """Return each example's tokens and supervised tokens, int32 (E,).

    Where the model samples answers, an example has that number of the longest ones, not its own.
    """
    lengths, supervised = dataset.corpus.lengths, dataset.corpus.supervised
    if not config.is_rewarded:
        return lengths, supervised
    sampled = np.full_like(supervised, answers * config.max_new_tokens)
    return lengths - supervised + sampled, sampled


def choose_plan(
    config: TrainConfig, base: BaseModel, work: Workload, kind: str = "auto"
) -> MemoryPlan:
    """Choose how to run the steps within the memory limit, with the execution of a `kind`.

    Estimates the memory unless an earlier run measured and cached it. Raises MemoryLimitError if
    not even one example fits.
    """
    allowed, shapes = _execution_and_shapes(config, base, config.pipeline_config(), kind)
    return _choose(config, shapes, allowed, work, allocator.find_limits(config.memory_limit).memory)


def _execution_and_shapes(
    config: TrainConfig, base: BaseModel, lora: InstructConfig, kind: str = "auto"
) -> tuple[Execution, ModelShapes]:
    """Return the model's fastest execution, and the model's shapes with any measured memory."""
    allowed = best_execution(base.parameters, base.dtype, kind, base.model)
    shapes = model_shapes(base, lora, allowed.operations.memory)
    key = memory_key(shapes, allowed, config.dropout, base.dtype)
    return allowed, replace(shapes, measured=read_measured(config.cache_path, key))


def longest_example(config: TrainConfig, base: BaseModel, lora: InstructConfig) -> LongestFit:
    context = base.text_config.get("max_position_embeddings")
    context = context if isinstance(context, int) and context > 0 else _MAX_LENGTH
    allowed, shapes = _execution_and_shapes(config, base, lora)
    limit = allocator.find_limits(config.memory_limit).memory
    values = _RECOMPUTE_CHOICES[config.grad_checkpoint]
    with_activations, recomputed = (
        memory_plan.max_example_length(shapes, allowed, limit, context, [value])
        if value in values
        else 0
        for value in (False, True)
    )
    return LongestFit(with_activations, max(with_activations, recomputed), context)


def confirm(
    config: TrainConfig,
    base: BaseModel,
    pipeline: InstructPipeline,
    work: Workload,
    plan: MemoryPlan,
    recorded: MemoryCorrection | None = None,
    workers: Workers = SINGLE_PROCESS,
) -> MemoryPlan:
    """Choose the plan again from memory measured on the loaded model, and make the pipeline use it.

    Only the loaded model shows whether its head can be split off and whether examples can be packed
    into one sequence. Memory is measured once and cached; a resumed run uses its `recorded` memory.
    Worker 0 decides for all workers. Raises MemoryLimitError if not even one example fits.
    """
    execution = pipeline.forward.supported(plan.execution)
    plain = plan.shapes.plain_head and pipeline.forward.plain_head
    shapes = replace(plan.shapes, plain_head=plain)
    correction = _agree_on(recorded or plan.shapes.measured, workers)
    if correction is None and execution.separate_head:
        modes = _RECOMPUTE_CHOICES[config.grad_checkpoint]
        correction = _agree_on(measure(pipeline, shapes, modes), workers)
        if correction is not None:
            key = memory_key(shapes, execution, config.dropout, base.dtype)
            save_measured(config.cache_path, key, correction)
    shapes = replace(shapes, measured=correction)
    if (shapes, execution) != (plan.shapes, plan.execution):
        plan = _choose(config, shapes, execution, work, plan.limit)
    # Answers shorter than expected share a micro-batch with more others, each beside a copy of its
    # prompt in attention.
    pipeline.run_as(plan.execution, plan.peak.total, plan.fits if config.is_rewarded else None)
    return plan


def _agree_on(measured: MemoryCorrection | None, workers: Workers) -> MemoryCorrection | None:
    text = "" if measured is None else json.dumps(asdict(measured))
    first = workers.all_gather_text(text)[0]
    return MemoryCorrection.of(json.loads(first)) if first else None


def recorded_memory(run: Path) -> MemoryCorrection | None:
    with suppress(OSError, ValueError):
        return MemoryCorrection.of(get_mapping(read_json(run / ABOUT), "plan").get("measured"))
    return None


def _choose(
    config: TrainConfig, shapes: ModelShapes, execution: Execution, work: Workload, limit: int
) -> MemoryPlan:
    allowed = _RECOMPUTE_CHOICES[config.grad_checkpoint]
    tolerance = _CPU_TOLERANCE if default_device.on_cpu() else 0.0
    options: dict[str, Any] = {"recompute_choices": allowed, "tolerance": tolerance}
    plan = memory_plan.choose_memory_plan(shapes, work, execution, limit=limit, **options)
    if plan is None:
        raise MemoryLimitError(memory_plan.why_not(shapes, work, execution, limit, True in allowed))
    return plan


def larger_limit(config: TrainConfig, plan: MemoryPlan, work: Workload) -> str:
    """Return a line on the gain from a larger --memory-limit; empty if there is none."""
    recommended = allocator.find_limits(config.memory_limit).recommended or 0
    most = recommended // allocator.GB
    if most * allocator.GB <= plan.limit:
        return ""
    larger = _choose(config, plan.shapes, plan.execution, work, most * allocator.GB)
    return plan_text.larger_limit_line(plan, larger, most)


def truncation_line(config: TrainConfig, base: BaseModel, work: Workload, dataset: Dataset) -> str:
    """Return a line on the supervised tokens that --max-seq-len cuts off; empty if only a few."""
    loss = truncation_report(dataset.files, config.max_seq_len, config.cut)
    if loss is None:
        return ""
    longest = replace(work, alone=(BatchLoad.single(loss.enough, loss.enough),))
    try:
        peak = choose_plan(config, base, longest).peak.total
    except MemoryLimitError:
        peak = None
    return plan_text.truncated_line(loss, config.max_seq_len, peak)


def speed_key(plan: MemoryPlan, dtype: str) -> str:
    """Return the cache key of a measured speed, from model and LoRA shapes, dtype and device."""
    return cache_key([_sizes(plan.shapes), dtype, default_device.device_name()])


def memory_key(shapes: ModelShapes, execution: Execution, dropout: float, dtype: str) -> str:
    """Return the cache key of measured memory: everything that affects the memory."""
    operations = type(execution.operations).__name__
    return cache_key(
        [_sizes(shapes), dtype, default_device.device_name(), operations, dropout > 0, versions()]
    )


def _sizes(shapes: ModelShapes) -> dict[str, Any]:
    """Return the shapes without the measured memory or the layout of the loaded head."""
    sizes = asdict(replace(shapes, measured=None, plain_head=False))
    if shapes.graphs is None:
        del sizes["graphs"]  # Caches from before this field stay valid.
    return sizes


def save_run_speed(
    cache: Path | None, plan: MemoryPlan, dtype: str, steps: Sequence[StepRecord]
) -> None:
    """Cache the speed of a finished run for the next plan."""
    speed = speed_of(steps, str(datetime.date.today()))
    if speed is not None:
        save_speed(cache, speed_key(plan, dtype), speed)


def reserve_memory(
    config: TrainConfig, plan: MemoryPlan, stack: ExitStack, console: RunConsole
) -> None:
    """Reserve the predicted memory among the runs on this machine.

    Raises MemoryLimitError if other runs leave too little memory, unless --wait or --ignore-ledger
    is given.
    """
    folder, owner = user_cache() / "memory", str(config.checkpoint_path.absolute())
    size, capacity = plan.peak.total, allocator.capacity()
    try:
        if config.ignore_ledger:
            lock = reservation.reserve(folder, size, sys.maxsize, owner)
        elif config.wait:
            lock = reservation.reserve_when_free(folder, size, capacity, owner, console.warn)
        else:
            lock = reservation.reserve(folder, size, capacity, owner)
    except OSError as error:
        if isinstance(error, MlxTuneError) and not isinstance(error, OutputError):
            raise
        console.warn(f"{folder}: other runs will not see the memory that this one takes: {error}")
    else:
        stack.callback(lock.release)


def plan_run(
    config: TrainConfig,
    base: BaseModel,
    work: Workload,
    kind: str = "auto",
    resume: ResumePoint | None = None,
    workers: Workers = SINGLE_PROCESS,
) -> tuple[BaseModel, MemoryPlan, str]:
    """Choose the plan of a run, and how to multiply by quantised weights.

    Returns the model with that choice, the plan, and the line of `choose_matmul`. Raises
    MemoryLimitError if not even one example fits.
    """
    plan = choose_plan(config, base, work, kind)
    faster_base, line = choose_matmul(config, base, work, plan, resume, workers)
    if faster_base is not base:
        plan = choose_plan(config, faster_base, work, kind)
    return faster_base, plan, line


def choose_matmul(
    config: TrainConfig,
    base: BaseModel,
    work: Workload,
    plan: MemoryPlan,
    resume: ResumePoint | None = None,
    workers: Workers = SINGLE_PROCESS,
) -> tuple[BaseModel, str]:
    """Apply the choice of --quantized-compute auto; return the model and a line on the choice.

    On a GPU, both ways are timed with as many tokens as a micro-batch can have; a resumed run keeps
    its choice, and worker 0 decides for all workers. The line is empty if nothing was timed.
    """
    if config.quantized_compute != "auto" or base.quantized_compute is None or workers.shards_model:
        return base, ""
    recorded = recorded_matmul({} if resume is None else resume.checkpoint.metadata)
    form, line = base.quantized_compute, ""
    if recorded:
        form = recorded
    elif workers.rank == 0 and (timed := loading.timed_matmuls(base, _tokens(work, plan))):
        form, line = timed.faster, timed.describe()
    form, _, line = workers.all_gather_text(f"{form} {line}")[0].partition(" ")
    return loading.with_matmul_form(base, form), line


def recorded_matmul(metadata: Mapping[str, Any]) -> str:
    """Return the --quantized-compute choice in a checkpoint's metadata, or an empty string."""
    form = metadata.get("quantized_compute")
    return form if form in loading.QUANTIZED_COMPUTE_FORMS else ""


def _tokens(work: Workload, plan: MemoryPlan) -> int:
    """Return the largest number of tokens that a micro-batch of the run can have."""
    steps = [step.tokens for step in work.steps if step]
    if not steps:
        return max(plan.execution.micro_batch_tokens, *(load.tokens for load in work.alone))
    longest = max(map(max, steps))
    return min(max(plan.execution.micro_batch_tokens, longest), max(map(sum, steps)))
