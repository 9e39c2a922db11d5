"""Records that a run writes about itself, for reports and for resuming."""

import datetime
import os
from collections.abc import Sequence
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from mlxtune.backend.device import device, memory
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import TrainConfig
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.inspection import Distribution
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.machine.facts import versions
from mlxtune.core.run.metrics import InstructTrainResult
from mlxtune.core.run.run_folder import ABOUT, ResumePoint
from mlxtune.core.run.stored_run import text
from mlxtune.core.steps.memory_plan import MemoryPlan
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.session.dataset import Dataset


@dataclass(frozen=True)
class RunParts:
    """The parts of a run. `plan` is `planned`, chosen again after the model was loaded.

    `larger_limit` is a line on what a larger --memory-limit would gain, and `products` a line on
    the choice of --quantized-compute auto; either may be empty.
    """

    dataset: Dataset
    base: BaseModel
    pipeline: InstructPipeline
    planned: MemoryPlan
    plan: MemoryPlan
    larger_limit: str
    products: str


def about_run(
    config: TrainConfig,
    setup: RunParts,
    trainer: InstructTrainer,
    resume: ResumePoint | None,
    stands_for: str,
) -> dict[str, Any]:
    """Return the content of run.json: options, model, plan and data.

    `stands_for` is the command with the choices of --auto, or empty. A resumed run keeps its
    original command and start time.
    """
    base, pipeline, dataset = setup.base, setup.pipeline, setup.dataset
    started = datetime.datetime.now().astimezone().isoformat(timespec="seconds")
    if resume is not None:
        with suppress(OSError, ValueError):
            earlier = read_json(config.checkpoint_path / ABOUT)
            started = text(earlier, "started_at") or started
            stands_for = text(earlier, "auto")
    return {
        "format": 1,
        "started_at": started,
        "device": device.device_name(),
        "model": {
            "path": config.model_path,
            "type": base.model_type,
            "description": base.describe(),
            "dtype": base.dtype,
            "parameters": base.parameters,
        },
        "lora": {
            "description": pipeline.lora.describe(),
            "trainable_parameters": pipeline.lora.trainable_parameters,
        },
        "template": dataset.template,
        "plan": {
            "steps": trainer.total_steps,
            "steps_per_epoch": trainer.steps_per_epoch,
            "rows_train": len(trainer.train_rows),
            "rows_validation": len(trainer.val_rows),
            **_plan(setup.plan),
        },
        "lengths": _lengths(dataset.rows.corpora),
        "data_hash": trainer.data_hash(),
        "validation_hash": trainer.validation_hash(),
        "hub": dataset.hub,
        "versions": versions(),
        "config": asdict(config),
        "auto": stands_for,
    }


def _plan(plan: MemoryPlan) -> dict[str, Any]:
    return {
        "micro_batch_tokens": plan.execution.micro_batch_tokens,
        "micro_batches_per_step": round(plan.micro_batches_per_step, 3),
        "padding_share": round(plan.padding_share, 4),
        "run_share": round(plan.run_share, 4),
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
        "peak_memory": memory.peak_bytes(),
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
