"""The trainer of a run, with its observers and its profiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from mlxtune.config import RunConfig, RunParts
from mlxtune.setup.dataset import Dataset
from mlxtune.tracking import trackers_of

if TYPE_CHECKING:
    from mlxtune.backend.step.pipeline import InstructPipeline
    from mlxtune.core.training.observer import TrainingObserver
    from mlxtune.core.training.profile import Profiler
    from mlxtune.core.training.trainer import InstructTrainer
    from mlxtune.terminal.console import RunConsole


def make_trainer(
    parts: RunParts,
    pipeline: InstructPipeline,
    dataset: Dataset,
    console: RunConsole,
    should_stop: Callable[[], bool],
) -> InstructTrainer:
    """Make the trainer, and count the rows that it holds out in the ledgers."""
    from mlxtune.core.training.observer import Observers
    from mlxtune.core.training.trainer import InstructTrainer

    observer = Observers([console, *trackers_of(parts.run, parts.options, console.warn)])
    trainer = InstructTrainer(
        pipeline,
        dataset.corpus,
        parts.training,
        validation=dataset.validation,
        sources=[ledger.path for ledger in dataset.ledgers],
        run_config=parts.options,
        observer=observer,
        should_stop=should_stop,
        profiler=_make_profiler(parts.run, pipeline, observer),
    )
    if dataset.validation is None:
        dataset.hold_out(trainer.val_rows.indices)
    return trainer


def _make_profiler(
    run: RunConfig, pipeline: InstructPipeline, observer: TrainingObserver
) -> Profiler | None:
    if not run.profile_interval:
        return None
    from mlxtune.backend.step.profile import PipelineMeter
    from mlxtune.core.training.profile import StepProfiler

    return StepProfiler(
        run.profile_interval,
        PipelineMeter(pipeline),
        run.checkpoint_path,
        on_record=observer.on_profile,
        on_problem=observer.on_problem,
    )
