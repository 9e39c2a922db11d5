"""The recipe of a run, from the options to the adapter: the one place where all rooms meet.

What it needs is imported in the functions, so that `import mlxtune` and `mlxtune --help` stay
light: the backend brings mlx, the core numpy.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxtune.config import TrainConfig, user_cache
from mlxtune.setup.dataset import Dataset, Reader, load_dataset, say_findings
from mlxtune.setup.judge import judge
from mlxtune.setup.memory import choose_plan, first_steps, keep_speed_of, work_of
from mlxtune.setup.model import build_pipeline, open_model, read_weights, say_other_base
from mlxtune.setup.preflight import check_paths, lock_folder, reserve_memory
from mlxtune.setup.run_metadata import about_run, provenance_of
from mlxtune.tracking import check_trackers, trackers_of

if TYPE_CHECKING:
    from mlxtune.backend.model.loading import BaseModel
    from mlxtune.backend.step.pipeline import InstructPipeline
    from mlxtune.core.data.corpus import CorpusRows
    from mlxtune.core.data.ledger import Ledger
    from mlxtune.core.steps.memory_plan import MemoryPlan
    from mlxtune.core.training.evaluation import Evaluation
    from mlxtune.core.training.metrics import InstructTrainResult
    from mlxtune.core.training.observer import TrainingObserver
    from mlxtune.core.training.profile import Profiler
    from mlxtune.core.training.run_folder import ResumePoint
    from mlxtune.core.training.trainer import InstructTrainer
    from mlxtune.terminal.console import RunConsole

STOPPING = "stopping after this step; press Ctrl-C again to stop at once"


@dataclass(frozen=True)
class TrainResult:
    """What a run gave. `adapter` is the file written; None, like `training`, after a dry run.

    `ledgers` account for the rows of each data file, those of validation files last. `evaluation`
    says whether the adapter helped on the validation rows, where there are any.
    """

    training: InstructTrainResult | None
    adapter: Path | None
    checkpoint_dir: Path
    ledgers: list[Ledger]
    peak_memory_gb: float
    evaluation: Evaluation | None = None


def train(
    config: TrainConfig,
    *,
    dry_run: bool = False,
    resume: ResumePoint | None = None,
    stop_after: int | None = None,
) -> TrainResult:
    """Fine-tune a model as the options say, and write the adapter.

    With `dry_run`, everything up to the first step is done and the plan is printed. With `resume`,
    which `mlxtune.resume` finds, training goes on from there. After step `stop_after` it ends as if
    Ctrl-C had been pressed.

    Raises a child of MlxTuneError for what options, files or the model cause, and
    TrainingInterrupted, with the state saved, after Ctrl-C.
    """
    from mlxtune.backend.model import memory
    from mlxtune.core.reports import run_text
    from mlxtune.core.training.run_folder import ABOUT, LEDGER
    from mlxtune.setup.interrupt import stop_on_interrupt
    from mlxtune.terminal.console import RunConsole

    check_trackers(config.trackers)
    console = RunConsole(quiet=config.quiet, log_every=config.log_every, peak_gb=memory.peak_gb)
    folder, run = check_paths(config), config.checkpoint_path
    result = None
    with ExitStack() as held:
        # A folder that is not there yet is made when there is something to put into it.
        if not dry_run and run.is_dir():
            lock_folder(config, resume, held)
        setup = prepare(config, folder, console, None if dry_run else held, resume)
        dataset = setup.dataset
        with stop_on_interrupt(lambda: console.warn(STOPPING)) as asked:
            trainer = make_trainer(
                config, setup, console, lambda: asked() or trainer.progress.step == stop_after
            )
            say_plan(config, dataset, trainer, setup.plan, console)
            if resume is not None:
                compare(resume, trainer, console)
            if not dry_run:
                if not run.is_dir():
                    lock_folder(config, resume, held)
                ledgers = [ledger.as_dict() for ledger in dataset.ledgers]
                result = trainer.train(
                    {LEDGER: ledgers},
                    beside={ABOUT: setup.about(config, trainer, resume)},
                    resume=resume,
                )
        evaluation, peak_gb = None, memory.peak_gb()
        if result is not None:
            finish(config, setup, trainer, result, console)
            peak_gb, rows = memory.peak_gb(), trainer.val_rows
            # The model is loaded anew, with the adapter as it was written: one is in memory.
            del setup, trainer
            memory.release()
            evaluation = conclude(config, folder, rows, dataset.paths_of(rows), console)
            console.say("Try it", run_text.usage_line(result, config), copyable=True)
    return TrainResult(
        training=result,
        adapter=None if dry_run else config.output_path,
        checkpoint_dir=run,
        ledgers=dataset.ledgers,
        peak_memory_gb=peak_gb,
        evaluation=evaluation,
    )


def conclude(
    config: TrainConfig, folder: Path, rows: CorpusRows, paths: Sequence[str], console: RunConsole
) -> Evaluation | None:
    """Judge the adapter on the rows that were validated with, and write the run's page."""
    try:
        return judge(config, folder, rows, paths, console) if rows else None
    finally:  # also where the person does not wait for the verdict
        from mlxtune.core.reports.run_page import write_page

        if (page := write_page(config.checkpoint_path, console.warn)) is not None:
            console.say("Report", str(page))


@dataclass(frozen=True)
class Setup:
    """What a run is made of. `plan` is `planned`, made again where the model is run otherwise."""

    dataset: Dataset
    base: BaseModel
    pipeline: InstructPipeline
    planned: MemoryPlan
    plan: MemoryPlan

    def about(
        self, config: TrainConfig, trainer: InstructTrainer, resume: ResumePoint | None
    ) -> dict[str, Any]:
        """Return what the run writes down of itself."""
        made = (self.base, self.pipeline, self.plan, trainer, self.dataset)
        return about_run(config, *made, resumed=resume is not None)


def prepare(
    config: TrainConfig,
    folder: Path,
    console: RunConsole,
    held: ExitStack | None,
    resume: ResumePoint | None = None,
) -> Setup:
    """Read the data, plan the memory, reserve it for as long as `held` lives, and load the model.

    Without `held`, nothing is reserved. With `resume`, what LoRA began as is left to the trainer.
    """
    from mlxtune.backend.model import memory
    from mlxtune.backend.step import forward
    from mlxtune.core.machine.hashing import ModelHash

    forward.load_ahead(folder)
    # The data first: what is wrong with it is known before minutes of loading.
    with closing(console):
        dataset = load_dataset(config, Reader(config, folder, console.on_encoding))
    say_findings(dataset, console)

    # Then what it takes: what does not fit is known before the weights are read.
    base = open_model(config, folder, console)
    if config.init_adapter is not None and resume is None:
        say_other_base(config.init_adapter, config, base, console)
    limit = memory.find_limits(config.memory_limit).memory
    work = work_of(config, first_steps(config, dataset), dataset)
    planned = choose_plan(config, base, work, limit)
    if held is not None:
        reserve_memory(config, planned, held, console)
    model_hash = ModelHash(folder, None if config.no_cache else user_cache())
    read_weights(base, console)
    provenance = partial(provenance_of, base, model_hash)
    pipeline, plan = build_pipeline(config, base, work, planned, console, provenance, resume)
    return Setup(dataset, base, pipeline, planned, plan)


def make_trainer(
    config: TrainConfig, setup: Setup, console: RunConsole, should_stop: Callable[[], bool]
) -> InstructTrainer:
    """Make the trainer, and tell the ledgers which rows it holds out."""
    from mlxtune.core.training.observer import Observers
    from mlxtune.core.training.trainer import InstructTrainer

    dataset = setup.dataset
    observer = Observers([console, *trackers_of(config, console.warn)])
    trainer = InstructTrainer(
        setup.pipeline,
        dataset.corpus,
        config.training(),
        validation=dataset.validation,
        sources=[ledger.path for ledger in dataset.ledgers],
        run_config=asdict(config),
        observer=observer,
        should_stop=should_stop,
        profiler=make_profiler(config, setup.pipeline, observer),
    )
    if dataset.validation is None:
        dataset.hold_out(trainer.val_rows.indices)
    return trainer


def make_profiler(
    config: TrainConfig, pipeline: InstructPipeline, observer: TrainingObserver
) -> Profiler | None:
    """Return what measures the steps that are to be profiled; None where none are."""
    if not config.profile_interval:
        return None
    from mlxtune.backend.step.profile import PipelineMeter
    from mlxtune.core.training.profile import StepProfiler

    return StepProfiler(
        config.profile_interval,
        PipelineMeter(pipeline),
        config.checkpoint_path,
        on_record=observer.on_profile,
        on_problem=observer.on_problem,
    )


def say_plan(
    config: TrainConfig,
    dataset: Dataset,
    trainer: InstructTrainer,
    plan: MemoryPlan,
    console: RunConsole,
) -> None:
    """Say where the rows and tokens went, and what will be done with them."""
    from mlxtune.core.reports import plan_text, run_text

    for ledger in dataset.ledgers:
        console.say("Data", run_text.rows_line(ledger))
        console.say("", run_text.tokens_line(ledger))
    console.say("Template", run_text.template_line(dataset.template, config))
    console.say("Plan", run_text.plan_line(trainer))
    console.say("", plan_text.micro_batches_line(plan))
    console.say("", plan_text.peak_line(plan))


def compare(resume: ResumePoint, trainer: InstructTrainer, console: RunConsole) -> None:
    """Say where the run goes on. Raises DataError or ModelError where it would be another run."""
    from mlxtune.setup.resuming import changed_versions, check_same

    for folder, why in resume.skipped.items():
        console.warn(f"{folder}: cannot be used: {why}")
    found, ours = resume.checkpoint, trainer.pipeline.describe()
    check_same(resume, ours, trainer.data_hash(), trainer.validation_hash())
    if changed := changed_versions(resume, ours["versions"]):
        console.warn(f"other versions than the run began with: {', '.join(changed)}")
    step = f"step {resume.progress.step} of {trainer.total_steps}"
    console.say("Resume", f"{step}, from {found.folder}")


def finish(
    config: TrainConfig,
    setup: Setup,
    trainer: InstructTrainer,
    result: InstructTrainResult,
    console: RunConsole,
) -> None:
    """Write the adapter, and that the run came to its end; say how. Raises OutputError."""
    from mlxtune.backend.model import memory
    from mlxtune.core.machine.files import file_hash, write_json
    from mlxtune.core.reports import run_text
    from mlxtune.core.training.run_folder import RESULT

    output = config.output_path
    if result.best_epoch is not None:
        setup.pipeline.load(trainer.best_folder)
    setup.pipeline.write(output)
    last = result.epoch_metrics[-1]
    ended = {
        "steps": trainer.progress.step,
        "epochs": last.epoch,
        "stopped_early": result.stopped_early,
        "train_loss": last.train_loss,
        "initial_val_loss": result.initial_val_loss,
        "best_epoch": result.best_epoch,
        "best_val_loss": result.best_val_loss,
        "total_time_ms": result.total_time_ms,
        "peak_memory": memory.peak_bytes(),
        # From the folder it is written in, so that both may be moved together.
        "adapter": os.path.relpath(output, config.checkpoint_path),
        "sha256": file_hash(output),
    }
    write_json(config.checkpoint_path / RESULT, ended)
    keep_speed_of(config, setup.planned, setup.base.dtype, result.steps)
    predicted = setup.plan.peak.total / memory.GB
    for line in run_text.summary_lines(result, config, memory.peak_gb(), predicted):
        console.say("Done", line)
    for line in run_text.quantized_base_lines(config):
        console.say("Base", line)
