"""Prepares a run: its model, its plan and its pipeline, and the run's records about itself.

The records serve reports and resuming.
"""

import datetime
import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import base_mismatch
from mlxtune.backend.device import allocator, default_device
from mlxtune.backend.forward import operations
from mlxtune.backend.forward.kernels.attention_trial import attention_kernels_problem
from mlxtune.backend.forward.kernels.gate_kernels import gate_kernels_problem
from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.workers.shards import shard_base
from mlxtune.backend.workers.workers import SINGLE_PROCESS, Workers
from mlxtune.config import TrainConfig, user_cache
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.inspection import Distribution
from mlxtune.core.files.hashing import hash_in_background
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.machine.facts import versions
from mlxtune.core.objectives.policy import objective_of
from mlxtune.core.run.metrics import InstructTrainResult
from mlxtune.core.run.run_folder import ABOUT, ResumePoint
from mlxtune.core.run.stored_run import get_str
from mlxtune.core.steps.memory_plan import MemoryPlan, Workload
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import ConfigError
from mlxtune.session import memory_planning
from mlxtune.session.dataset import Dataset
from mlxtune.session.session import RunSession
from mlxtune.session.trained_model import await_result, trained_as
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


def prepare(session: RunSession, cleanup: ExitStack, *, reserves: bool) -> RunParts:
    """Read the data, plan the memory, and load the model.

    With `reserves`, reserve the memory until `cleanup` closes. With `session.resume`, the trainer
    later loads the trained LoRA.
    """
    config, console, workers = session.config, session.console, session.workers
    operations.load_ahead(session.folder)
    # The data comes first, to report its problems before minutes of loading.
    dataset = session.load()
    if config.val_steps and not dataset.rows.validation:
        raise ConfigError(
            ["--val-steps: there are no validation rows: leave it out, or set --val-split above 0"]
        )

    # Memory comes next: a run that does not fit ends before its weights are read.
    base = prepare_base(config, session.release_base(), console, workers)
    if session.initial is not None and (
        other := base_mismatch(session.initial, base, config.base_options())
    ):
        console.warn(f"--init-adapter {other}")
    work = memory_planning.sampled_work(
        config, memory_planning.first_steps(config, dataset), dataset
    )
    if line := memory_planning.truncation_loss_line(config, base, work, dataset):
        console.warn(line)
    base, plan, products = memory_planning.plan_run(
        config, base, work, resume=session.resume, workers=workers
    )
    if reserves:
        memory_planning.reserve_memory(config, plan, cleanup, console)

    model_hash = hash_in_background(session.folder, None if config.no_cache else user_cache())
    loading.read_weights(base)
    console.say("Model", base.describe())
    pipeline, plan = build_pipeline(
        config,
        base,
        work,
        plan,
        console,
        provenance=partial(provenance_of, base, model_hash),
        resume=session.resume,
        workers=workers,
        dataset=dataset,
        initial=session.initial,
    )
    notes = (products, memory_planning.larger_limit(config, plan, work))
    return RunParts(base, pipeline, plan, notes)


def prepare_base(
    config: TrainConfig, base: BaseModel, console: RunConsole, workers: Workers = SINGLE_PROCESS
) -> BaseModel:
    """Set the memory limits, and return the opened model, or this worker's part of it."""
    console.say("Memory", allocator.set_limits(config.memory_limit).describe())
    if workers.shards_model:
        base = shard_base(base, workers.group)
    if slow := loading.slow_products(base):
        console.warn(slow)
    return base


def build_pipeline(
    config: TrainConfig,
    base: BaseModel,
    work: Workload,
    plan: MemoryPlan,
    console: RunConsole,
    *,
    provenance: Callable[[], Mapping[str, Any]] = dict,
    resume: ResumePoint | None = None,
    workers: Workers = SINGLE_PROCESS,
    dataset: Dataset | None = None,
    initial: AdapterFile | None = None,
) -> tuple[InstructPipeline, MemoryPlan]:
    """Apply LoRA, set up the optimizer, and choose the plan again for the loaded model.

    `provenance` returns the facts about the model that checkpoints record. The new plan uses the
    memory that the resumed run recorded, or else cached or new measurements. Adapters record facts
    about the rows of `dataset`. `initial` is the adapter that training starts
    from, if it is already open.
    """
    resumed = {} if resume is None else resume.checkpoint.metadata
    plain_text, rows = (dataset.plain_text, dataset.rows) if dataset else (False, None)
    trained = trained_as(config, plain_text, rows)
    pipeline = InstructPipeline(
        base.model,
        config.pipeline_config(),
        execution=plan.execution,
        base_model=config.model_path,
        fresh=resume is None,
        initial=initial,
        initial_hash=resumed.get("init_adapter_hash"),
        provenance=provenance,
        base_record=loading.base_record(base) | trained,
        warn=console.warn,
        workers=workers,
        objective=objective_of(vars(config)),
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
    recorded = None if resume is None else memory_planning.recorded_memory(config.checkpoint_path)
    confirmed = memory_planning.confirm(config, base, pipeline, work, plan, recorded, workers)
    pipeline.run_as(confirmed.execution, confirmed.peak.total)
    return pipeline, confirmed


def about_run(session: RunSession, parts: RunParts, trainer: InstructTrainer) -> dict[str, Any]:
    """Return the content of run.json: options, model, plan and data.

    A resumed run keeps its original command of --auto and start time.
    """
    config, dataset, command = session.config, session.dataset, session.command
    base, lora = parts.base, parts.pipeline.lora
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    if session.resume is not None:
        with suppress(OSError, ValueError):
            earlier = read_json(config.checkpoint_path / ABOUT)
            started = get_str(earlier, "started_at") or started
            command = get_str(earlier, "auto")
    return {
        "format": 1,
        "started_at": started,
        "device": default_device.device_name(),
        "model": {
            "path": config.model_path,
            "type": base.model_type,
            "description": base.describe(),
            "dtype": base.dtype,
            "parameters": base.parameters,
        },
        "lora": {
            "description": lora.describe(),
            "trainable_parameters": lora.trainable_parameters,
        },
        "template": dataset.template,
        "plan": {
            "steps": trainer.total_steps,
            "steps_per_epoch": trainer.steps_per_epoch,
            "rows_train": len(trainer.train_rows),
            "rows_validation": len(trainer.val_rows),
            **_plan(parts.plan),
        },
        "lengths": _lengths(dataset.rows.corpora),
        **trainer.data_hashes(),
        "hub": dataset.hub,
        "versions": versions(),
        "config": asdict(config),
        "auto": command,
    }


def _plan(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "micro_batch_tokens": plan.execution.micro_batch_tokens,
        "micro_batches_per_step": round(plan.micro_batches_per_step, 3),
        "padding_share": round(plan.padding_fraction, 4),
        "run_share": round(plan.forward_fraction, 4),
        "grad_checkpoint": plan.execution.recompute,
        "loss_chunk": plan.execution.loss_chunk,
        "memory": {"limit": plan.limit, "peak": plan.peak.total, **asdict(plan.peak)},
        "measured": None if plan.shapes.measured is None else asdict(plan.shapes.measured),
    }


def _lengths(corpora: Sequence[Corpus]) -> dict[str, Any]:
    lengths = {}
    for name, attribute in (("tokens", "lengths"), ("supervised", "supervised")):
        values = np.concatenate([getattr(corpus, attribute) for corpus in corpora])
        lengths[name] = asdict(Distribution.of(values))
    return {"examples": sum(map(len, corpora)), **lengths}


def about_result(
    config: TrainConfig, trainer: InstructTrainer, result: InstructTrainResult
) -> dict[str, Any]:
    """Return the content of result.json, once the adapter is written."""
    last, best = result.epoch_metrics[-1], trainer.progress.best
    files = {each.path: each.val_loss for each in (best.files if best else ())}
    return {
        "steps": trainer.progress.step,
        "epochs": last.epoch,
        "stopped_early": result.stopped_early,
        "train_loss": last.train_loss,
        "initial_val_loss": result.initial_val_loss,
        "best_epoch": result.best_epoch,
        "best_step": result.best_step,
        "best_val_loss": result.best_val_loss,
        **({"best_val_loss_of_files": files} if files else {}),
        "total_time_ms": result.total_time_ms,
        "peak_memory": allocator.peak_bytes(),
        # Relative to the run's folder, so that folder and adapter can be moved together.
        "adapter": os.path.relpath(config.output_path, config.checkpoint_path),
        "sha256": file_hash(config.output_path),
    }


def provenance_of(base: BaseModel, model_hash: Future[str]) -> dict[str, Any]:
    """Return the facts, other than options and data, on which a result depends."""
    return {
        "model_type": base.model_type,
        "dtype": base.dtype,
        "quantized_compute": base.quantized_compute,
        "base_hash": model_hash.result(),
        "versions": versions(),
        "working_directory": str(Path.cwd()),
    }
