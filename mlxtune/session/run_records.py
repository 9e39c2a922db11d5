"""The files that a run writes about itself, for reports and resuming, and its adapter."""

import datetime
import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.file_formats.mlx_lm import copy_mlx_lm
from mlxtune.backend.device import allocator, default_device
from mlxtune.backend.lora.apply import LoRASummary
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import TrainConfig
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.inspection import Distribution
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.files.writing import make_folder
from mlxtune.core.machine.facts import versions
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.run.metrics import InstructTrainResult
from mlxtune.core.run.run_folder import ABOUT, RESUMED, ROW_FILES, STARTED_IN, ResumePoint
from mlxtune.core.run.saving import write_adapter_of
from mlxtune.core.run.stored_run import get_str
from mlxtune.core.steps.memory_plan import MemoryPlan
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.session.run_session import RunSession


def about_run(
    session: RunSession,
    base: BaseModel,
    lora: LoRASummary,
    plan: MemoryPlan,
    trainer: InstructTrainer,
) -> dict[str, Any]:
    """Return the content of run.json: options, model, plan and data.

    A resumed run keeps its original command of --auto and start time.
    """
    config, dataset, command = session.config, session.dataset, session.command
    resumed: dict[str, Any] = {}
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    if session.resume is not None:
        resumed[RESUMED] = session.resume.checkpoint.step
        if config.is_rewarded:
            context = session.context
            resumed |= {STARTED_IN: str(context.folder), ROW_FILES: context.files}
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
            **_plan(plan),
        },
        "lengths": _lengths(dataset.rows.corpora),
        **trainer.data_hashes(),
        "hub": dataset.hub,
        "versions": versions(),
        "config": asdict(config),
        "auto": command,
        **resumed,
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
    for name, attribute in (("tokens", "kept"), ("supervised", "supervised")):
        values = np.concatenate([getattr(corpus.counts, attribute) for corpus in corpora])
        lengths[name] = asdict(Distribution.of(values))
    return {"examples": sum(map(len, corpora)), **lengths}


def about_result(
    config: TrainConfig, trainer: InstructTrainer, result: InstructTrainResult
) -> dict[str, Any]:
    """Return the content of result.json, once the adapter is written."""
    last, best = result.epoch_metrics[-1], trainer.progress.best
    loss_of_file = {each.path: each.val_loss for each in (best.files if best else ())}
    return {
        "steps": trainer.progress.step,
        "epochs": last.epoch,
        "stopped_early": result.stopped_early,
        "train_loss": last.train_loss,
        "initial_val_loss": result.initial_val_loss,
        "best_epoch": result.best_epoch,
        "best_step": result.best_step,
        "best_val_loss": result.best_val_loss,
        **({"best_val_loss_of_files": loss_of_file} if loss_of_file else {}),
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


def write_adapter(
    pipeline: InstructPipeline,
    trainer: InstructTrainer,
    output: Path,
    resume: ResumePoint | None,
    result: InstructTrainResult,
) -> None:
    """Write the best checkpoint's adapter or, without validation, the current adapter.

    Raises OutputError.
    """
    unwritten = trainer.unwritten_best
    if result.best_step is None or (unwritten and result.best_step == trainer.progress.step):
        pipeline.write(output)
    elif unwritten is not None:
        write_adapter_of(unwritten, output)
    elif resume is None or result.best_step > resume.progress.step:
        make_folder(output.parent)
        copy_mlx_lm(AdapterFile(trainer.best_folder / ADAPTER), output)
    else:
        # The checkpoint may be untrusted, name the model's old folder, or be on worker 0 alone.
        pipeline.load(trainer.best_folder)
        pipeline.write(output)
