"""Prepares a run: its model, its plan and its pipeline."""

from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from typing import Any

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import base_mismatch
from mlxtune.backend.device import allocator
from mlxtune.backend.forward import operations
from mlxtune.backend.forward.kernels.attention_trial import attention_kernels_problem
from mlxtune.backend.forward.kernels.gate_kernels import gate_kernels_problem
from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.workers.shards import shard_base
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config import TrainConfig, user_cache
from mlxtune.config.fields import flag
from mlxtune.core.files.hashing import hash_in_background
from mlxtune.core.objectives.policy import objective_of
from mlxtune.core.run.checkpoint import INITIAL_HASH
from mlxtune.core.run.run_folder import ResumePoint
from mlxtune.core.run.saving import free_space
from mlxtune.core.steps.memory_plan import MemoryPlan, Workload
from mlxtune.core.steps.memory_terms import MemoryCorrection
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import ConfigError
from mlxtune.session import memory_planning
from mlxtune.session.dataset import Dataset
from mlxtune.session.run_records import provenance_of
from mlxtune.session.run_session import RunSession
from mlxtune.session.trained_model import await_result, training_record
from mlxtune.views import plan_text, run_text
from mlxtune.views.console import RunConsole


@dataclass(frozen=True)
class RunParts:
    """The parts of a run: its model, its pipeline and its plan.

    `notes` are lines on the choice of --quantized-compute auto, and on what a larger --memory-limit
    would gain; either may be empty.
    """

    base: BaseModel
    pipeline: InstructPipeline
    plan: MemoryPlan
    notes: tuple[str, str]


def _check_validation_options(session: RunSession) -> None:
    """Raise ConfigError for options that have no effect without validation rows."""
    # A run that is resumed or repeated has a value for every option.
    is_new = session.origin is None
    without = {
        "val_steps": session.config.val_steps,
        "patience": is_new and "patience" in session.explicit_options,
    }
    if problems := [
        f"{flag(name)}: there are no validation rows: leave it out, or set --val-split above 0"
        for name, is_set in without.items()
        if is_set
    ]:
        raise ConfigError(problems)


def prepare_run(session: RunSession, cleanup: ExitStack, *, reserves: bool) -> RunParts:
    """Read the data, plan the memory, and load the model.

    With `reserves`, reserve the memory until `cleanup` closes. With `session.resume`, the trainer
    later loads the trained LoRA.
    """
    config, console, workers = session.config, session.console, session.workers
    operations.load_ahead(session.folder)
    # The data comes first, to report its problems before minutes of loading.
    dataset = session.load()
    if not dataset.rows.validation:
        _check_validation_options(session)

    # Memory comes next: a run that does not fit ends before its weights are read.
    opened = prepare_base(config, session.release_base(), console, workers)
    if session.initial is not None and (
        other := base_mismatch(session.initial, opened, config.base_options())
    ):
        console.warn(f"--init-adapter {other}")
    work = memory_planning.expected_workload(
        config, memory_planning.first_steps(config, dataset), dataset, opened
    )
    if line := memory_planning.truncation_line(config, opened, work, dataset):
        console.warn(line)
    base, predicted_plan, matmul_note = memory_planning.plan_run(
        config, opened, work, resume=session.resume, workers=workers
    )
    del opened  # the run may free its model
    if reserves:
        memory_planning.reserve_memory(config, predicted_plan, cleanup, console)

    model_hash = hash_in_background(session.folder, None if config.no_cache else user_cache())
    loading.read_weights(base)
    console.say("Model", base.describe())
    # A run that is resumed or repeated is planned with the memory of the earlier run.
    origin = session.origin
    recorded = None if origin is None else memory_planning.recorded_memory(origin.run)
    pipeline, plan = build_pipeline(
        config,
        base,
        work,
        predicted_plan,
        console,
        provenance=partial(provenance_of, base, model_hash),
        resume=session.resume,
        recorded=recorded,
        workers=workers,
        dataset=dataset,
        initial=session.initial,
    )
    notes = (matmul_note, memory_planning.larger_limit(config, plan, work))
    return RunParts(base, pipeline, plan, notes)


def prepare_base(
    config: TrainConfig, base: BaseModel, console: RunConsole, workers: Workers = SINGLE_PROCESS
) -> BaseModel:
    """Set the memory limits, and return the opened model, or this worker's part of it."""
    console.say("Memory", allocator.set_limits(config.memory_limit).describe())
    if workers.shards_model:
        base = shard_base(base, workers.group)
    if slow := loading.slow_matmuls(base):
        console.warn(slow)
    return base


def build_pipeline(
    config: TrainConfig,
    base: BaseModel,
    work: Workload,
    estimate: MemoryPlan,
    console: RunConsole,
    *,
    provenance: Callable[[], Mapping[str, Any]] = dict,
    resume: ResumePoint | None = None,
    recorded: MemoryCorrection | None = None,
    workers: Workers = SINGLE_PROCESS,
    dataset: Dataset | None = None,
    initial: AdapterFile | None = None,
) -> tuple[InstructPipeline, MemoryPlan]:
    """Apply LoRA, set up the optimizer, and return the plan of the loaded model.

    `estimate` is the plan of the opened model. `provenance` returns the facts about the model that
    checkpoints record. The plan uses the memory `recorded` by an earlier run, or else cached or new
    measurements. Adapters record facts about the rows of `dataset`. `initial` is the adapter
    that training starts from, if it is already open.
    """
    checkpoint_metadata = {} if resume is None else resume.checkpoint.metadata
    plain_text, rows = (dataset.is_plain_text, dataset.rows) if dataset else (False, None)
    adapter_record = training_record(config, plain_text, base.folder, rows)
    pipeline = InstructPipeline(
        base.model,
        config.pipeline_config(),
        execution=estimate.execution,
        base_model=config.model_path,
        fresh=resume is None,
        initial=initial,
        initial_hash=checkpoint_metadata.get(INITIAL_HASH),
        provenance=provenance,
        base_record=loading.base_record(base) | adapter_record,
        warn=console.warn,
        workers=workers,
        objective=objective_of(config),
    )
    console.say("LoRA", pipeline.lora.describe())
    await_result(console)
    for warning in pipeline.lora.warnings():
        console.warn(warning)
    if problem := pipeline.forward.packing_problem:
        console.say("Packing", f"off, so examples are padded: {problem}")
    problems = {"SwiGLU": gate_kernels_problem(), "Attention": attention_kernels_problem()}
    for name, problem in problems.items():
        if problem:
            console.say(name, f"by MLX's operations, not our kernels: {problem}")
    plan = memory_planning.confirm(config, base, pipeline, work, estimate, recorded, workers)
    return pipeline, plan


def print_plan(session: RunSession, parts: RunParts, trainer: InstructTrainer) -> None:
    """Print how many rows and tokens are used, the plan of training, and unusable checkpoints."""
    config, dataset, console = session.config, session.dataset, session.console
    for ledger in dataset.ledgers:
        console.say("Data", run_text.rows_line(ledger))
        console.say("", run_text.tokens_line(ledger))
    line = run_text.template_line(dataset.template, config, added=dataset.template_added)
    console.say("Template", line)
    console.say("Plan", run_text.plan_line(trainer))
    plan, steps = parts.plan, (trainer.total_steps, trainer.steps_per_epoch, config.max_steps)
    lines = (
        plan_text.few_steps_line(*steps, config if session.auto_chose_epochs else None),
        plan_text.large_rate_line(config.peak_rate),
        plan_text.micro_batches_line(plan),
        plan_text.peak_line(plan),
        plan_text.free_line(plan, allocator.free_now()),
        plan_text.disk_line(
            parts.pipeline.lora.checkpoint_bytes, free_space(config.checkpoint_path)
        ),
        *parts.notes,
    )
    for line in filter(None, lines):
        console.say("", line)
    for folder, why in session.resume.skipped.items() if session.resume else ():
        console.warn(f"{folder} cannot be used: {why}")
