"""The recipe of a run, from the options to the adapter: the one place where all rooms meet.

What it needs is imported in the functions, so that `import mlxtune` and `mlxtune --help` stay
light: the backend brings mlx, the core numpy.
"""

from __future__ import annotations

import platform
from contextlib import closing
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.config import TrainConfig
from mlxtune.dataset import Dataset, Reader, check_outputs, data_files, load_dataset
from mlxtune.errors import DataError, OutputError
from mlxtune.plan import choose_plan, confirm, execution, first_steps, keep_speed_of, work_of

if TYPE_CHECKING:
    from mlxtune.backend.model import BaseModel
    from mlxtune.backend.pipeline import InstructPipeline
    from mlxtune.console import RunConsole
    from mlxtune.core.ledger import Ledger
    from mlxtune.core.memory_plan import MemoryPlan, Work
    from mlxtune.core.trainer import InstructTrainer, InstructTrainResult

STOPPING = "stopping after this step; press Ctrl-C again to stop at once"


@dataclass(frozen=True)
class TrainResult:
    """What a run gave. `adapter` is the file written; None, like `training`, after a dry run.

    `ledgers` account for the rows of each data file, those of validation files last.
    """

    training: InstructTrainResult | None
    adapter: Path | None
    checkpoint_dir: Path
    ledgers: list[Ledger]
    peak_memory_gb: float


def train(config: TrainConfig, *, dry_run: bool = False) -> TrainResult:
    """Fine-tune a model as the options say, and write the adapter.

    With `dry_run`, everything up to the first step is done and the plan is printed.

    Raises a child of MlxTuneError for what options, files or the model cause, and
    TrainingInterrupted, with the state saved, after Ctrl-C.
    """
    from mlxtune.backend import forward, memory
    from mlxtune.console import RunConsole
    from mlxtune.core import report
    from mlxtune.core.checkpoint import LEDGER
    from mlxtune.core.trainer import InstructTrainer
    from mlxtune.interrupt import stop_on_interrupt

    console = RunConsole(quiet=config.quiet, log_every=config.log_every, peak_gb=memory.peak_gb)
    folder = check_paths(config)
    forward.load_ahead(folder)

    # The data first: what is wrong with it is known before minutes of loading.
    with closing(console):
        dataset = load_dataset(config, Reader(config, folder, console.on_encoding))
    say_findings(dataset, console)

    # Then what it takes: what does not fit is known before the weights are read.
    base = open_model(config, folder, console)
    limit = memory.find_limits(config.memory_limit).memory
    work = work_of(config, first_steps(config, dataset), dataset)
    plan = choose_plan(config, base, work, limit)
    load_model(base, console)
    pipeline, confirmed = build_pipeline(config, base, work, plan, console)

    with stop_on_interrupt(lambda: console.warn(STOPPING)) as should_stop:
        trainer = InstructTrainer(
            pipeline,
            dataset.corpus,
            config.training(),
            validation=dataset.validation,
            run_config=asdict(config),
            observer=console,
            should_stop=should_stop,
        )
        if dataset.validation is None:
            dataset.hold_out(trainer.val_rows.indices)
        say_plan(config, dataset, trainer, confirmed, console)
        result = None
        if not dry_run:
            result = trainer.train({LEDGER: [ledger.as_dict() for ledger in dataset.ledgers]})

    if result is not None:
        if result.best_epoch is not None:
            pipeline.load(trainer.best_folder)
        pipeline.write(config.output_path)
        keep_speed_of(config, plan, base.dtype, result.steps)
        predicted = confirmed.peak.total / memory.GB
        for line in report.summary_lines(result, config, memory.peak_gb(), predicted):
            console.say("Done", line)
        console.say("Try it", report.usage_line(result, config), copyable=True)
    return TrainResult(
        training=result,
        adapter=None if dry_run else config.output_path,
        checkpoint_dir=config.checkpoint_path,
        ledgers=dataset.ledgers,
        peak_memory_gb=memory.peak_gb(),
    )


def check_paths(config: TrainConfig) -> Path:
    """Find out before any work whether the files can be read and written.

    Returns the model's folder. Raises ModelError, DataError or OutputError.
    """
    from mlxtune.backend import model
    from mlxtune.core.checkpoint import ADAPTER_CONFIG, check_writable

    folder = model.find_folder(config.model_path)
    model.read_config(folder)
    output = config.output_path
    if output.name == ADAPTER_CONFIG:
        raise OutputError(f"{output}: is written beside the adapter: choose another --output")
    read = [*data_files(config), *folder.iterdir()]
    check_outputs([output, output.with_name(ADAPTER_CONFIG)], read, "--output")
    check_writable(config.checkpoint_path, "--checkpoint-dir")
    return folder


def open_model(config: TrainConfig, folder: Path, console: RunConsole) -> BaseModel:
    """Set the memory limits, then open the model, whose weights are not read yet."""
    from mlxtune.backend import memory, model

    console.say("Memory", memory.set_limits(config.memory_limit).describe())
    return model.open_base(folder, config.dtype)


def load_model(base: BaseModel, console: RunConsole) -> None:
    """Read the weights."""
    from mlxtune.backend import model

    model.read_weights(base)
    console.say("Model", base.describe())


def build_pipeline(
    config: TrainConfig, base: BaseModel, work: Work, plan: MemoryPlan, console: RunConsole
) -> tuple[InstructPipeline, MemoryPlan]:
    """Apply LoRA and set up the optimizer, to run as planned.

    Returns the plan too, made again if the model is run otherwise than its shapes say.
    """
    from mlxtune.backend.pipeline import InstructPipeline

    pipeline = InstructPipeline(
        base.model,
        config.pipeline(),
        micro_batch_tokens=plan.way.micro_batch_tokens,
        how=execution(config, base.parameters, plan.way),
        base_model=config.model_path,
        provenance={"model_type": base.model_type, "dtype": base.dtype, "versions": versions()},
        warn=console.warn,
    )
    console.say("LoRA", pipeline.lora.describe())
    confirmed = confirm(config, pipeline, work, plan)
    pipeline.micro_batch_tokens = confirmed.way.micro_batch_tokens
    return pipeline, confirmed


def say_findings(dataset: Dataset, console: RunConsole) -> None:
    """Warn of what is worth a look in the data. Raises DataError for what is refused."""
    from mlxtune.core import report

    for file in dataset.files:
        for warning in file.skipped.warnings():
            console.warn(warning)
    for finding in dataset.findings:
        if finding.level == "error":
            raise DataError(report.finding_line(finding))
        console.warn(report.finding_line(finding))


def say_plan(
    config: TrainConfig,
    dataset: Dataset,
    trainer: InstructTrainer,
    plan: MemoryPlan,
    console: RunConsole,
) -> None:
    """Say where the rows and tokens went, and what will be done with them."""
    from mlxtune.core import report, run_plan

    for ledger in dataset.ledgers:
        console.say("Data", report.rows_line(ledger))
        console.say("", report.tokens_line(ledger))
    console.say("Template", report.template_line(dataset.template, config))
    console.say("Plan", report.plan_line(trainer))
    console.say("", run_plan.micro_batches_line(plan))
    console.say("", run_plan.peak_line(plan))


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import importlib.metadata

    packages = ("mlxtune", "mlx", "mlx-lm", "transformers", "numpy")
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in packages
    }
