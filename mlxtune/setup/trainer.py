"""The trainer of a run, with its observers and its profiler."""

from __future__ import annotations

from collections.abc import Callable

from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.step.profile import PipelineMeter
from mlxtune.config import RunParts
from mlxtune.core.training.observer import Observers
from mlxtune.core.training.profile import StepProfiler
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.setup.dataset import Dataset
from mlxtune.terminal.console import RunConsole
from mlxtune.tracking import trackers_of


def make_trainer(
    parts: RunParts,
    pipeline: InstructPipeline,
    dataset: Dataset,
    console: RunConsole,
    should_stop: Callable[[], bool],
) -> InstructTrainer:
    """Make the trainer, and count the rows that it holds out in the ledgers."""
    run = parts.run
    observer = Observers([console, *trackers_of(run, parts.options, console.warn)])
    profiler = None
    if run.profile_interval:
        profiler = StepProfiler(
            run.profile_interval,
            PipelineMeter(pipeline),
            run.checkpoint_path,
            on_record=observer.on_profile,
            on_problem=observer.on_problem,
        )
    trainer = InstructTrainer(
        pipeline,
        dataset.corpus,
        parts.training,
        validation=dataset.validation,
        sources=[ledger.path for ledger in dataset.ledgers],
        run_config=parts.options,
        observer=observer,
        should_stop=should_stop,
        profiler=profiler,
    )
    if dataset.validation is None:
        dataset.hold_out(trainer.val_rows.indices)
    return trainer
