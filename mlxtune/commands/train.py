"""`mlxtune train`: trains an adapter, in a new run or a resumed run."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np
import numpy.typing as npt
from rich.console import Console

from mlxtune.backend.adapters.adapter_folder import check_beside
from mlxtune.backend.device import allocator
from mlxtune.backend.workers.launch import join_run
from mlxtune.config import TrainConfig
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.evaluation.outcome import Evaluation
from mlxtune.core.evaluation.verdict import JudgedRows
from mlxtune.core.files.hashing import base_fingerprint
from mlxtune.core.files.writing import write_json
from mlxtune.core.machine.conditions import ConditionsPoller, Sensors
from mlxtune.core.run import run_folder, trained_rows
from mlxtune.core.run.metrics import InstructTrainResult, StepRecord
from mlxtune.core.run.profile import StepProfiler
from mlxtune.core.run.saving import check_space
from mlxtune.core.run.stored_run import Run
from mlxtune.core.run.summary import RunView
from mlxtune.core.training.machine_monitor import MachineMonitor
from mlxtune.core.training.observer import Callbacks, Observers, TrainingObserver
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.session.arguments import ResolvedOptions, takes_resolved, with_rows
from mlxtune.session.interrupt import stop_on_interrupt
from mlxtune.session.judge import ValidationAnswers, judge
from mlxtune.session.memory_planning import save_run_speed
from mlxtune.session.prepared_run import RunParts, prepare_run, print_plan
from mlxtune.session.resuming import check_unchanged, find_run, print_resume
from mlxtune.session.run_records import about_result, about_run, write_adapter
from mlxtune.session.run_session import RunSession, lock_folder, open_run, trained_identities
from mlxtune.tracking import TrackingObserver, check_trackers
from mlxtune.views import run_text
from mlxtune.views.console import RunConsole
from mlxtune.views.pages.run_page import ResultCard, write_page

if TYPE_CHECKING:
    from mlxtune.session.rewarding import RunRewards


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. After a dry run, `training` and `adapter`, the written file, are None.

    `ledgers` account for the rows of each data file, validation files last. `evaluation` says
    whether the adapter helped on the validation rows, if there are any. A notebook shows the result
    as a card with the loss curve, which `run` describes, because another run may have replaced the
    files.
    """

    training: InstructTrainResult | None = field(repr=False)
    adapter: Path | None
    checkpoint_dir: Path
    ledgers: list[Ledger] = field(repr=False)
    peak_memory_gb: float
    evaluation: Evaluation | None = field(default=None, repr=False)
    model_path: str = ""
    run: Run | None = field(default=None, repr=False, compare=False)

    def _repr_html_(self) -> str | None:
        card = self._card()
        return None if card is None else card.html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        card = self._card()
        printer.text(repr(self) if card is None else card.text())

    def _card(self) -> ResultCard | None:
        if self.run is None:
            return None
        usage = run_text.python_usage(self.model_path, str(self.adapter))
        return ResultCard(replace(self.run, evaluation=self.evaluation), usage)


@dataclass(frozen=True)
class RunMode:
    """How a command starts a run, beside the run's options.

    With `dry_run`, the run ends before its first step. After step `stop_after`, it stops as on
    Ctrl-C; if it ends first, it writes checkpoints but no adapter. `observers` receive the run's
    events on the first worker. With `live`, the model also answers up to `samples` validation rows
    after each validation, for the live page.
    """

    dry_run: bool = False
    stop_after: int | None = None
    observers: Sequence[TrainingObserver] = ()
    live: bool = False


@dataclass(frozen=True)
class TrainedRun:
    """A run whose adapter is written: its records, and the rows on which to judge the adapter.

    `initial_hash` is the hash of the adapter from which the run started, if any.
    """

    training: InstructTrainResult
    records: Run
    judged: JudgedRows
    rewards: "RunRewards | None"
    initial_hash: str | None
    total_steps: int


@takes_resolved(TrainConfig)
def train(
    options: ResolvedOptions[TrainConfig],
    *,
    dry_run: bool = False,
    stop_after: int | None = None,
    observers: Sequence[TrainingObserver] = (),
    live: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
    on_validation: Callable[[int, float], None] | None = None,
) -> TrainResult:
    """Fine-tune a model as the options say, and write the adapter.

    With `dry_run`, print the plan and stop before the first step. `RunMode` describes `stop_after`,
    `observers` and `live`. `on_step` gets the record of each step, and `on_validation` the step (0
    before training) and the loss of each validation.

    Raises a subclass of MlxTuneError for errors in options, files or the model, and
    TrainingInterrupted, with the state saved, after Ctrl-C.
    """
    observers = (*observers, Callbacks(on_step, on_validation))
    return run_training(options, RunMode(dry_run, stop_after, observers, live))


def run_training(options: ResolvedOptions[TrainConfig], mode: RunMode) -> TrainResult:
    """Train an adapter, and report whether it helped. Raises the errors of `train`."""
    check_trackers(options.config.track)
    with join_run(options.config, _make_console) as worker_run, ExitStack() as cleanup:
        cleanup.enter_context(closing(worker_run.console))
        session = open_run(worker_run, options, cleanup, trains=not mode.dry_run)
        trained = train_adapter(session, mode, cleanup)
        config = session.config
        result = TrainResult(
            training=None,
            adapter=None,
            checkpoint_dir=config.checkpoint_path,
            ledgers=session.dataset.ledgers,
            peak_memory_gb=allocator.peak_gb(),
            model_path=config.model_path,
        )
        if trained is None:
            return result
        # The model is free now: the adapter is read back from its file and judged on a new one.
        allocator.release()
        evaluation = judge_and_report(session, trained)
        print_next(session, trained, evaluation)
        return replace(
            result,
            training=trained.training,
            adapter=config.output_path,
            evaluation=evaluation,
            run=trained.records,
        )


def train_adapter(session: RunSession, mode: RunMode, cleanup: ExitStack) -> TrainedRun | None:
    """Train and write the adapter; None after a dry run, or a run that ends before `stop_after`."""
    config, resume = session.config, session.resume
    parts = prepare_run(session, cleanup, reserves=not mode.dry_run)
    with stop_requests(session) as should_stop, ConditionsPoller(Sensors()) as poller:
        rewards = open_rewards(session, cleanup)
        trainer = make_trainer(session, parts, rewards, mode, should_stop, poller)
        print_plan(session, parts, trainer)
        check_run(session, parts, trainer)
        if resume is not None:
            print_resume(resume, trainer, session.console)
        if mode.dry_run:
            return None
        if not session.is_locked:  # another run may have created the folder in the meantime
            lock_folder(session, cleanup)
        identities = trained_identities(session, trainer.train_rows)
        files = files_at_start(session, parts, trainer, identities)
        write = partial(write_adapter, parts.pipeline, trainer, config.output_path, resume)
        training = trainer.train(
            files, resume=resume, write_adapter=write if mode.stop_after is None else None
        )
    if mode.stop_after is not None:
        return None
    records = finish_run(session, parts, trainer, training, files[run_folder.ABOUT])
    judged = JudgedRows.of(
        trainer.val_rows,
        identities,
        count_candidates(training),
        session.reader.text_hash,
        by_prompt=rewards is not None,
    )
    initial_hash = parts.pipeline.initial_hash
    return TrainedRun(training, records, judged, rewards, initial_hash, trainer.total_steps)


def files_at_start(
    session: RunSession, parts: RunParts, trainer: InstructTrainer, trained: npt.NDArray[np.uint64]
) -> dict[str, Any]:
    """Return the files that a run writes before its first step, by their names.

    `trained` are the identities of all rows that the adapter will have been trained on.
    """
    reference = parts.pipeline.reference_lora_file()
    return {
        **({} if reference is None else {run_folder.REFERENCE_LORA: reference}),
        run_folder.LEDGER: [ledger.as_dict() for ledger in session.dataset.ledgers],
        run_folder.ABOUT: about_run(session, parts.base, parts.pipeline.lora, parts.plan, trainer),
        run_folder.TRAINED_ROWS: trained_rows.as_bytes(trained),
    }


def count_candidates(result: InstructTrainResult) -> int:
    """Return the number of adapters from which training chose the best on the validation rows."""
    return max(sum(validation.step > 0 for validation in result.validations), 1)


def judge_and_report(session: RunSession, trained: TrainedRun) -> Evaluation | None:
    """Report whether the adapter helped on the held-out rows, if any, and write the run's page."""
    folder, console = session.config.checkpoint_path, session.console
    try:
        if not trained.judged.rows:
            return None
        return judge(session, trained.judged, trained.rewards, trained.initial_hash)
    finally:  # also after Ctrl-C during the evaluation
        if session.workers.rank == 0 and (page := write_page(folder, console.warn)):
            console.say("Report", str(page))


def print_next(session: RunSession, trained: TrainedRun, evaluation: Evaluation | None) -> None:
    """Print what to try after a verdict, and how to use the adapter."""
    config, console, steps = session.config, session.console, trained.total_steps
    if evaluation and (line := run_text.next_try_line(evaluation, config, trained.training, steps)):
        console.say("Next", line)
    usage = run_text.usage_line(config, plain_text=session.dataset.is_plain_text)
    console.say("Try it", usage, copyable=True)


def _make_console(config: TrainConfig, log: TextIO | None) -> RunConsole:
    return RunConsole(
        quiet=config.quiet and log is None,
        log_every=config.log_every,
        peak_gb=allocator.peak_gb,
        console=None if log is None else Console(file=log, highlight=False, width=100),
    )


def resume(
    folder: str | Path = "",
    *,
    on_step: Callable[[StepRecord], None] | None = None,
    on_validation: Callable[[int, float], None] | None = None,
    **changes: Any,
) -> TrainResult:
    """Resume a run with the run's own options; the result equals that of an uninterrupted run.

    `folder` contains the run's checkpoints or adapter. `changes` are options that differ: `epochs`
    and `max_steps` may grow, and options that do not change the result may change.

    Raises the errors of `train`. Raises ConfigError if a changed option would change the result,
    and OutputError if there is no run to resume.
    """
    options = find_run(str(folder), with_rows(changes))
    return train(options, on_step=on_step, on_validation=on_validation)


@contextmanager
def stop_requests(session: RunSession) -> Iterator[Callable[[], bool]]:
    """Yield a function that returns whether Ctrl-C or `mlxtune watch` asked the run to stop."""
    console = session.console
    asked_by_watch = run_folder.StopRequest(
        session.config.checkpoint_path,
        lambda: console.warn("asked to stop by mlxtune watch: stopping after this step"),
    )
    with stop_on_interrupt(lambda: console.warn(console.stopping)) as interrupted:
        yield lambda: interrupted() or asked_by_watch()


def open_rewards(session: RunSession, cleanup: ExitStack) -> "RunRewards | None":
    """Read the rewards of a run that learns from them."""
    if not session.config.is_rewarded:
        return None
    # Only these runs import the rewards.
    from mlxtune.session.rewarding import RunRewards

    return cleanup.enter_context(RunRewards(session))


def make_trainer(
    session: RunSession,
    parts: RunParts,
    rewards: "RunRewards | None",
    mode: RunMode,
    should_stop: Callable[[], bool],
    poller: ConditionsPoller,
) -> InstructTrainer:
    """Connect the pipeline with its rows, the run's observers and the machine's conditions."""
    config, console, workers = session.config, session.console, session.workers
    rows, pipeline = session.dataset.rows, parts.pipeline
    trackers = [
        TrackingObserver(each, config, console.warn) for each in dict.fromkeys(config.track)
    ]
    first = list(mode.observers) if workers.rank == 0 else []
    # With several workers, the other workers would wait while the first worker answers.
    if mode.live and config.samples and workers.world_size == 1 and pipeline.objective.is_sft:
        first.append(ValidationAnswers(session, parts.base))
    observer = Observers([console, *trackers, *first, session.worker_run.last_step])
    profiler = None
    if config.profile_interval:
        profiler = StepProfiler(
            config.profile_interval,
            pipeline.phases,
            config.checkpoint_path,
            on_record=observer.on_profile,
            on_problem=observer.on_problem,
        )
    monitor = MachineMonitor(lambda: poller.latest, observer, config.pause_on_battery, should_stop)
    return InstructTrainer(
        pipeline,
        rows,
        config.trainer_config(),
        run_config=asdict(config),
        observer=observer,
        should_stop=should_stop,
        stop_after=mode.stop_after,
        profiler=profiler,
        monitor=monitor,
        objective=pipeline.objective,
        cache=config.cache_path,
        source=None if rewards is None else rewards.rollouts(pipeline),
    )


def check_run(session: RunSession, parts: RunParts, trainer: InstructTrainer) -> None:
    """Check a run that is ready to start against its output, its checkpoint and its other workers.

    Raises OutputError, DataError, ModelError or WorkerError.
    """
    written = parts.pipeline.lora.written_config
    check_beside(session.config.output_path, written, base_fingerprint(session.folder))
    check_space(session.config.checkpoint_path, parts.pipeline.lora.checkpoint_bytes)
    if session.resume is not None:
        check_unchanged(session.resume, trainer)
    step = session.resume.progress.step if session.resume else 0
    session.worker_run.check_same(asdict(session.config), {**trainer.describe(), "step": step})


def finish_run(
    session: RunSession,
    parts: RunParts,
    trainer: InstructTrainer,
    result: InstructTrainResult,
    about: Mapping[str, Any],
) -> Run:
    """Write the run's result, print a summary, and return the whole run.

    `about` is the content of run.json. Raises OutputError.
    """
    config, console = session.config, session.console
    content = about_result(config, trainer, result)
    write_json(config.checkpoint_path / run_folder.RESULT, content)
    if not config.is_rewarded:  # the time of those steps includes sampling
        save_run_speed(config.cache_path, parts.plan, parts.base.dtype, result.steps)
    run = Run(
        config.checkpoint_path,
        about,
        result=content,
        ledgers=session.dataset.ledgers,
        progress=trainer.progress,
    )
    before = result.initial_val_loss
    if (line := run_text.risen_loss_line(result.steps, config, before)) is not None:
        console.warn(line)
    for line in run_text.summary_lines(RunView.of(run), config):
        console.say("Done", line)
    for line in run_text.quantized_base_lines(config):
        console.say("Base", line)
    return run
