"""`mlxtune train`: trains an adapter, in a new run or a resumed run."""

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import numpy.typing as npt
from rich.console import Console

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import base_mismatch, check_base
from mlxtune.backend.adapters.files import check_beside, check_known, check_replaceable
from mlxtune.backend.adapters.formats.mlx_lm import copy_mlx_lm
from mlxtune.backend.device import memory
from mlxtune.backend.forward import operations
from mlxtune.backend.models import loading, model_folder
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.workers.launch import WorkerRun, join_run
from mlxtune.config import DemoConfig, TrainConfig, as_path, user_cache
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.evaluation.outcome import Evaluation
from mlxtune.core.evaluation.verdict import JudgedRows
from mlxtune.core.files.hashing import base_fingerprint, hash_in_background
from mlxtune.core.files.writing import (
    check_outputs,
    check_writable,
    make_folder,
    same_place,
    write_json,
)
from mlxtune.core.machine.conditions import ConditionsWatch, Sensors, kept_awake
from mlxtune.core.run import run_folder
from mlxtune.core.run.checkpoint import ADAPTER, ADAPTER_CONFIG
from mlxtune.core.run.metrics import InstructTrainResult, StepRecord
from mlxtune.core.run.profile import StepProfiler
from mlxtune.core.run.progress import progress_of
from mlxtune.core.run.run_folder import ABOUT, LEDGER, RESULT, TRAINED_ROWS, ResumePoint
from mlxtune.core.run.stored_run import Run
from mlxtune.core.run.summary import RunView
from mlxtune.core.run.trained_rows import (
    NO_ROWS,
    as_bytes,
    identities_of,
    read_trained_rows,
    rows_behind,
)
from mlxtune.core.training.observer import Callbacks, Observers, TrainingObserver
from mlxtune.core.training.surroundings import Surroundings
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import ConfigError, OutputError, resume_command
from mlxtune.session.auto import with_auto
from mlxtune.session.dataset import (
    Reader,
    data_files,
    load_dataset,
    report_findings,
    with_hub_data,
)
from mlxtune.session.interrupt import stop_on_interrupt
from mlxtune.session.judge import ValidationAnswers, judge
from mlxtune.session.keywords import takes_options, with_rows
from mlxtune.session.memory import (
    choose_plan,
    cut_loss_line,
    first_steps,
    larger_limit,
    planned_work,
    reserve_memory,
    save_run_speed,
)
from mlxtune.session.model import build_pipeline, open_model
from mlxtune.session.quantized_compute import settle_products
from mlxtune.session.resuming import check_resumed, find_run
from mlxtune.session.run_metadata import RunParts, about_result, about_run, provenance_of
from mlxtune.tracking import TrackingObserver, check_trackers
from mlxtune.views import plan_text, run_text
from mlxtune.views.console import RunConsole
from mlxtune.views.pages.run_page import ResultCard, write_page

# Suffixes of files in formats that `train` does not write.
_OTHER_FILES = (".bin", ".csv", ".gguf", ".json", ".jsonl", ".npz", ".pt", ".pth", ".txt", ".yaml")


@dataclass(frozen=True)
class TrainResult:
    """The result of a run. After a dry run, `training` and `adapter`, the written file, are None.

    `ledgers` account for the rows of each data file, validation files last. `evaluation` says
    whether the adapter helped on the validation rows, if there are any. A notebook shows the result
    as a card with the loss curve.
    """

    training: InstructTrainResult | None = field(repr=False)
    adapter: Path | None
    checkpoint_dir: Path
    ledgers: list[Ledger] = field(repr=False)
    peak_memory_gb: float
    evaluation: Evaluation | None = field(default=None, repr=False)
    model_path: str = ""

    def _repr_html_(self) -> str | None:
        card = self._card()
        return None if card is None else card.html()

    def _repr_pretty_(self, printer: Any, cycle: bool) -> None:
        card = self._card()
        printer.text(repr(self) if card is None else card.text())

    def _card(self) -> ResultCard | None:
        """Build the card from this result, because another run may have replaced the files."""
        if self.training is None:
            return None
        run = Run(
            self.checkpoint_dir,
            about={"config": {"model_path": self.model_path}},
            result={"stopped_early": self.training.stopped_early, "adapter": str(self.adapter)},
            evaluation=self.evaluation,
            ledgers=self.ledgers,
            progress=progress_of(self.training),
        )
        return ResultCard(run, run_text.python_usage(self.model_path, str(self.adapter)))


@takes_options(TrainConfig)
def train(
    config: TrainConfig,
    *,
    given: Collection[str],
    initial: AdapterFile | None,
    dry_run: bool = False,
    resume: ResumePoint | None = None,
    stop_after: int | None = None,
    observers: Sequence[TrainingObserver] = (),
    live: bool = False,
    on_step: Callable[[StepRecord], None] | None = None,
    on_validation: Callable[[int, float], None] | None = None,
) -> TrainResult:
    """Fine-tune a model as the options say, and write the adapter.

    With `dry_run`, print the plan and stop before the first step. With `resume`, continue from that
    checkpoint, which `mlxtune.resume` finds. After step `stop_after`, stop as on Ctrl-C. On the
    first worker, `observers` receive the events of the run. With `live`, the model also answers up
    to `samples` validation rows after each validation, for the live page. `on_step` gets the record
    of each step, and `on_validation` the step (0 before training) and the loss of each validation.

    Raises a subclass of MlxTuneError for errors in options, files or the model, and
    TrainingInterrupted, with the state saved, after Ctrl-C.
    """
    check_trackers(config.track)
    stands_for = ""
    observers = [*observers, Callbacks(on_step, on_validation)]
    with join_run(config, _console) as worker_run, ExitStack() as held:
        config = with_hub_data(worker_run.config, worker_run.console)
        worker_run = replace(worker_run, config=config)
        console = held.enter_context(closing(worker_run.console))
        folder = check_paths(config)
        if resume is None and not config.overwrite:
            check_known(config.output_path, run_folder.adapters_in(config.checkpoint_path))
        if resume is None:
            config, stands_for = with_auto(config, given, folder, console)
            worker_run = replace(worker_run, config=config)
        result = evaluation = None
        if not (dry_run or config.allow_sleep) and worker_run.first_on_machine:
            held.enter_context(kept_awake())
        # A missing folder is created and locked only just before training starts.
        if is_locked := not dry_run and config.checkpoint_path.is_dir():
            lock_folder(config, resume, held)
        if config.init_adapter is not None and resume is None:
            initial = initial or AdapterFile.find(config.init_adapter, "--init-adapter")
            check_base(initial, folder, other_base=config.other_base)
            check_start_stays(initial, config)
        setup = prepare(folder, worker_run, None if dry_run else held, resume, initial)
        ledgers, plain_text = setup.dataset.ledgers, setup.dataset.plain_text
        with (
            stop_on_interrupt(lambda: console.warn(console.stopping)) as asked,
            ConditionsWatch(Sensors()) as watch,
        ):
            requested = run_folder.StopRequest(
                config.checkpoint_path,
                lambda: console.warn("asked to stop by mlxtune watch: stopping after this step"),
            )
            trainer = make_trainer(
                setup,
                worker_run,
                lambda: asked() or requested(),
                stop_after,
                watch,
                observers,
                live,
            )
            chose_epochs = bool(stands_for) and "epochs" not in given
            print_plan(config, setup, trainer, console, chose_epochs=chose_epochs)
            written = setup.pipeline.lora.written_config
            check_beside(config.output_path, written, base_fingerprint(folder))
            if resume is not None:
                check_resumed(resume, trainer, console)
            check_same_run(worker_run, trainer, resume)
            if not dry_run:
                if not is_locked:  # another run may have created the folder in the meantime
                    lock_folder(config, resume, held)
                before = _trained_before(resume, initial, console.warn)
                trained = np.union1d(identities_of(trainer.train_rows), before)
                records = {
                    LEDGER: [ledger.as_dict() for ledger in ledgers],
                    ABOUT: about_run(config, setup, trainer, resume, stands_for),
                    TRAINED_ROWS: as_bytes(trained),
                }
                result = trainer.train(records, resume=resume)
        peak_gb = memory.peak_gb()
        if result is not None:
            finish(setup, trainer, result, worker_run, resume)
            peak_gb, judged = memory.peak_gb(), JudgedRows.of(trainer.val_rows, trained)
            candidates = sum(each.step > 0 for each in result.validations)
            judged = replace(judged, candidates=max(candidates, 1))
            # Free the model, because the adapter is judged on a newly loaded one.
            del setup, trainer
            memory.release()
            evaluation = _judged(worker_run, folder, judged, initial)
            console.say("Try it", run_text.usage_line(config, plain_text=plain_text), copyable=True)
    return TrainResult(
        training=result,
        adapter=None if dry_run else config.output_path,
        checkpoint_dir=config.checkpoint_path,
        ledgers=ledgers,
        peak_memory_gb=peak_gb,
        evaluation=evaluation,
        model_path=config.model_path,
    )


def _judged(
    worker_run: WorkerRun[RunConsole],
    folder: Path,
    judged: JudgedRows,
    initial: AdapterFile | None,
) -> Evaluation | None:
    """Report whether the adapter helped on the held-out rows, if any, and write the run's page."""
    config, console, workers = worker_run.config, worker_run.console, worker_run.workers
    try:
        if not judged.rows:
            return None
        return judge(config, folder, judged, console, workers, initial)
    finally:  # also after Ctrl-C during the evaluation
        if workers.index == 0 and (page := write_page(config.checkpoint_path, console.warn)):
            console.say("Report", str(page))


def _console(config: TrainConfig, log: TextIO | None) -> RunConsole:
    return RunConsole(
        quiet=config.quiet and log is None,
        log_every=config.log_every,
        peak_gb=memory.peak_gb,
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
    options, found = find_run(str(folder), with_rows(changes))
    return train(options, resume=found, on_step=on_step, on_validation=on_validation)


@takes_options(DemoConfig)
def demo(config: DemoConfig) -> TrainResult:
    """Train mlxtune's own small model to answer a guest's message with JSON.

    Raises the errors of `train`.
    """
    return train(config.training())


def _trained_before(
    resume: ResumePoint | None, initial: AdapterFile | None, warn: Callable[[str], None]
) -> npt.NDArray[np.uint64]:
    """Return the identities of the rows that the adapter was already trained on."""
    if resume is not None:
        # With another --output, the record is in the folder of the run that goes on.
        return read_trained_rows(resume.checkpoint.folder.parent, warn)
    return NO_ROWS if initial is None else rows_behind(initial.path, warn)


def check_paths(config: TrainConfig) -> Path:
    """Check before any work that files can be read and written; return the model's folder.

    Raises ModelError, DataError or OutputError.
    """
    folder = model_folder.find_folder(config.model_path)
    model_folder.read_config(folder, trust_remote_code=config.trust_remote_code)
    output = config.output_path
    if output.name == ADAPTER_CONFIG:
        raise OutputError(f"{output}: is written beside the adapter: choose another --output")
    if same_place(output.parent, folder):
        raise OutputError(f"{output.parent}: is the model's own folder: choose another --output")
    if (named := as_path(config.output)).suffix in _OTHER_FILES and not named.is_dir():
        raise OutputError(
            f"{named}: an adapter is a .safetensors file: name one, or a folder, as --output"
        )
    read = [*data_files(config).all, *folder.iterdir()]
    check_outputs([output, output.with_name(ADAPTER_CONFIG)], read, "--output")
    check_replaceable(output)
    run_folder.check_outside(output, config.checkpoint_path)
    check_writable(config.checkpoint_path, "--checkpoint-dir")
    return folder


def check_start_stays(start: AdapterFile, config: TrainConfig) -> None:
    """Raise ConfigError if a run would replace or move the adapter that it starts from.

    The run's verdict compares with that adapter, and its replay starts there.
    """
    inside = start.path.resolve().is_relative_to(config.checkpoint_path.resolve())
    if inside or same_place(start.path, config.output_path):
        raise ConfigError(
            [
                f"--init-adapter: this run would replace {start.path}, with which its verdict "
                "compares: choose another --output"
            ]
        )


def lock_folder(config: TrainConfig, resume: ResumePoint | None, held: ExitStack) -> None:
    """Lock the run's folder and adapter until `held` closes or this process ends.

    Raises OutputError if another process trains there, or if a new run finds an unfinished run
    there.
    """
    folder = config.checkpoint_path
    for new in (config.output_path.parent, folder):
        if not new.exists():
            held.callback(run_folder.discard_empty, new)
    if (lock := run_folder.lock_output(config.output_path)) is not None:
        held.callback(lock.release)
    held.callback(run_folder.lock_run(folder, new=resume is None).release)
    if resume is None:
        run_folder.check_own(folder)
    if resume is None and not config.overwrite and run_folder.is_unfinished(folder):
        raise OutputError(
            f"{folder}: holds an unfinished run: resume it with {resume_command(folder)}, "
            "or start over with --overwrite"
        )


def prepare(
    folder: Path,
    worker_run: WorkerRun[RunConsole],
    held: ExitStack | None,
    resume: ResumePoint | None,
    initial: AdapterFile | None,
) -> RunParts:
    """Read the data, plan the memory, reserve it until `held` closes, and load the model.

    Without `held`, reserve nothing. With `resume`, the trainer later loads the trained LoRA.
    `initial` is the adapter from which training starts, if any.
    """
    config, console, workers = worker_run.config, worker_run.console, worker_run.workers
    operations.load_ahead(folder)
    # The data comes first, to report its problems before minutes of loading.
    with closing(console), worker_run.in_turn():
        dataset = load_dataset(config, Reader(config, folder, console.on_encoding))
    report_findings(dataset, console)
    if config.val_steps and not dataset.rows.validation:
        raise ConfigError(
            ["--val-steps: there are no validation rows: leave it out, or set --val-split above 0"]
        )

    # Memory comes next: a run that does not fit ends before its weights are read.
    base = open_model(config, folder, console, workers)
    if initial is not None and (other := base_mismatch(initial, base, config.loading())):
        console.warn(f"--init-adapter {other}")
    work = planned_work(config, first_steps(config, dataset), dataset)
    if line := cut_loss_line(config, base, work, dataset):
        console.warn(line)
    planned = choose_plan(config, base, work)
    settled, products = settle_products(config, base, work, planned, resume, workers)
    if settled is not base:
        base, planned = settled, choose_plan(config, settled, work)
    if held is not None:
        reserve_memory(config, planned, held, console)

    model_hash = hash_in_background(folder, None if config.no_cache else user_cache())
    loading.read_weights(base)
    console.say("Model", base.describe())
    provenance = partial(provenance_of, base, model_hash)
    pipeline, plan = build_pipeline(
        *(config, base, work, planned, console, provenance, resume, workers),
        plain_text=dataset.plain_text,
        initial=initial,
    )
    gain = larger_limit(config, plan, work)
    return RunParts(dataset, base, pipeline, planned, plan, gain, products)


def make_trainer(
    setup: RunParts,
    worker_run: WorkerRun[RunConsole],
    should_stop: Callable[[], bool],
    stop_after: int | None,
    watch: ConditionsWatch,
    observers: Sequence[TrainingObserver],
    live: bool,
) -> InstructTrainer:
    config, rows, console = worker_run.config, setup.dataset.rows, worker_run.console
    trackers = [
        TrackingObserver(each, config, console.warn) for each in dict.fromkeys(config.track)
    ]
    first = list(observers) if worker_run.workers.index == 0 else []
    # With several workers, the other workers would wait while the first worker answers.
    if live and config.samples and worker_run.workers.size == 1 and setup.pipeline.objective.is_sft:
        first.append(ValidationAnswers(config, setup.base, rows.validation))
    observer = Observers([console, *trackers, *first, worker_run.last_step])
    profiler = None
    if config.profile_interval:
        profiler = StepProfiler(
            config.profile_interval,
            setup.pipeline.phases,
            config.checkpoint_path,
            on_record=observer.on_profile,
            on_problem=observer.on_problem,
        )
    surroundings = Surroundings(
        lambda: watch.latest, observer, pause_on_battery=config.pause_on_battery, asked=should_stop
    )
    workers, decide = worker_run.workers, None
    if workers.size > 1:
        # Workers can only stop together, after a step.
        decide, should_stop = partial(workers.decide, should_stop), lambda: False
    return InstructTrainer(
        setup.pipeline,
        rows,
        config.training(),
        run_config=asdict(config),
        observer=observer,
        should_stop=should_stop,
        stop_after=stop_after,
        decide=decide,
        profiler=profiler,
        surroundings=surroundings,
        objective=setup.pipeline.objective,
        cache=config.cache_path,
    )


def check_same_run(
    worker_run: WorkerRun[RunConsole], trainer: InstructTrainer, resume: ResumePoint | None
) -> None:
    """Raise WorkerError if another worker has different data, weights, options or versions."""
    hashes = {"data_hash": trainer.data_hash(), "validation_hash": trainer.validation_hash()}
    step = {"step": resume.progress.step if resume else 0}
    described = {**trainer.pipeline.describe(), **hashes, **step}
    worker_run.check_same(asdict(worker_run.config), described)


def print_plan(
    config: TrainConfig,
    setup: RunParts,
    trainer: InstructTrainer,
    console: RunConsole,
    *,
    chose_epochs: bool,
) -> None:
    """Print how many rows and tokens are used, and the plan of training.

    `chose_epochs` says whether --auto chose the number of epochs.
    """
    dataset = setup.dataset
    for ledger in dataset.ledgers:
        console.say("Data", run_text.rows_line(ledger))
        console.say("", run_text.tokens_line(ledger))
    line = run_text.template_line(dataset.template, config, added=dataset.template_added)
    console.say("Template", line)
    console.say("Plan", run_text.plan_line(trainer))
    plan, steps = setup.plan, (trainer.total_steps, trainer.steps_per_epoch, config.max_steps)
    lines = (
        plan_text.few_steps_line(*steps, config if chose_epochs else None),
        plan_text.large_rate_line(config.rate),
        plan_text.micro_batches_line(plan),
        plan_text.peak_line(plan),
        plan_text.free_line(plan, memory.free_now()),
    )
    for line in filter(None, (*lines, setup.products, setup.larger_limit)):
        console.say("", line)


def write_adapter(
    pipeline: InstructPipeline,
    trainer: InstructTrainer,
    result: InstructTrainResult,
    output: Path,
    resume: ResumePoint | None,
) -> None:
    """Write the best checkpoint's adapter or, without validation, the current adapter.

    Raises OutputError.
    """
    if result.best_step is None:
        pipeline.write(output)
    elif resume is None or result.best_step > resume.progress.step:
        make_folder(output.parent)
        copy_mlx_lm(AdapterFile(trainer.best_folder / ADAPTER), output)
    else:
        # The checkpoint may be a stranger's, name the model's old folder, or be on worker 0 alone.
        pipeline.load(trainer.best_folder)
        pipeline.write(output)


def finish(
    setup: RunParts,
    trainer: InstructTrainer,
    result: InstructTrainResult,
    worker_run: WorkerRun[RunConsole],
    resume: ResumePoint | None,
) -> None:
    """Write the adapter and the run's result, and print a summary. Raises OutputError."""
    config, console = worker_run.config, worker_run.console
    write_adapter(setup.pipeline, trainer, result, config.output_path, resume)
    content = about_result(config, trainer, result)
    write_json(config.checkpoint_path / RESULT, content)
    save_run_speed(config.cache_path, setup.planned, setup.base.dtype, result.steps)
    about = {"plan": {"memory": {"peak": setup.plan.peak.total}}}
    run = Run(config.checkpoint_path, about, result=content, progress=progress_of(result))
    before = result.initial_val_loss
    if (line := run_text.risen_loss_line(result.steps, config, before)) is not None:
        console.warn(line)
    for line in run_text.summary_lines(RunView.of(run), config):
        console.say("Done", line)
    for line in run_text.quantized_base_lines(config):
        console.say("Base", line)
