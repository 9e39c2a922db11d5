"""The recipe of a run, from the options to the adapter: the one place where all rooms meet.

What it needs is imported in the functions, so that `import mlxtune` and `mlxtune --help` stay
light: the backend brings mlx, the core numpy.
"""

from __future__ import annotations

import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.config import TrainConfig
from mlxtune.errors import DataError, ModelError, OutputError

if TYPE_CHECKING:
    from mlxtune.backend.model import BaseModel
    from mlxtune.backend.pipeline import InstructPipeline
    from mlxtune.console import RunConsole
    from mlxtune.core.encode import Encoder, Example, Ledger
    from mlxtune.core.trainer import InstructTrainer, InstructTrainResult

STOPPING = "stopping after this step; press Ctrl-C again to stop at once"


@dataclass(frozen=True)
class TrainResult:
    """What a run gave. `adapter` is the file written; None, like `training`, after a dry run.

    `ledger` accounts for the rows of the data file, `val_ledger` for those of --val-data.
    """

    training: InstructTrainResult | None
    adapter: Path | None
    checkpoint_dir: Path
    ledger: Ledger
    val_ledger: Ledger | None
    peak_memory_gb: float


def train(config: TrainConfig, *, dry_run: bool = False) -> TrainResult:
    """Fine-tune a model as the options say, and write the adapter.

    With `dry_run`, everything up to the first step is done and the plan is printed.

    Raises a child of MlxTuneError for what options, files or the model cause, and
    TrainingInterrupted, with the state saved, after Ctrl-C.
    """
    from mlxtune.backend import memory
    from mlxtune.console import RunConsole
    from mlxtune.core import report
    from mlxtune.core.checkpoint import LEDGER
    from mlxtune.core.trainer import InstructTrainer
    from mlxtune.interrupt import stop_on_interrupt

    console = RunConsole(quiet=config.quiet, log_every=config.log_every, peak_gb=memory.peak_gb)
    folder = check_paths(config)

    # The data first: what is wrong with it is known before minutes of loading.
    encoder = build_encoder(config, folder)
    corpus, ledger = encode(config.data_path, encoder, config.strict, console)
    validation, val_ledger = encode_validation(config, encoder, console)

    base = load_model(config, folder, console)
    check_corpus(config, base, corpus, validation)
    pipeline = build_pipeline(config, base, console)

    with stop_on_interrupt(lambda: console.warn(STOPPING)) as should_stop:
        trainer = InstructTrainer(
            pipeline,
            corpus,
            config.training(),
            validation=validation,
            run_config=asdict(config),
            observer=console,
            should_stop=should_stop,
        )
        if validation is None:
            ledger.hold_out(len(trainer.val_rows))
        ledgers = [account for account in (ledger, val_ledger) if account is not None]
        say_plan(config, base, ledgers, trainer, console)
        result = None
        if not dry_run:
            result = trainer.train({LEDGER: [account.as_dict() for account in ledgers]})

    if result is not None:
        if result.best_epoch is not None:
            pipeline.load(trainer.best_folder)
        pipeline.write(config.output_path)
        for line in report.summary_lines(result, config, memory.peak_gb()):
            console.say("Done", line)
        console.say("Try it", report.usage_line(result, config), copyable=True)
    return TrainResult(
        training=result,
        adapter=None if dry_run else config.output_path,
        checkpoint_dir=config.checkpoint_path,
        ledger=ledger,
        val_ledger=val_ledger,
        peak_memory_gb=memory.peak_gb(),
    )


def check_paths(config: TrainConfig) -> Path:
    """Find out before any work whether the files can be read and written.

    Returns the model's folder. Raises ModelError, DataError or OutputError.
    """
    from mlxtune.backend import model
    from mlxtune.core.checkpoint import check_writable
    from mlxtune.core.conversation import check_data_file

    folder = model.find_folder(config.model_path)
    model.read_config(folder)
    check_data_file(config.data_path, "--data")
    if config.val_data_path is not None:
        check_data_file(config.val_data_path, "--val-data")
    check_output(config, folder)
    check_writable(config.output_path.parent, "--output")
    check_writable(config.checkpoint_path, "--checkpoint-dir")
    return folder


def check_output(config: TrainConfig, folder: Path) -> None:
    """Raise OutputError when the adapter would take the place of something else."""
    from mlxtune.core.checkpoint import ADAPTER_CONFIG

    output = config.output_path
    if output.is_dir():
        raise OutputError(f"{output}: is a folder: --output takes the name of a file")
    if output.exists() and not output.is_file():
        raise OutputError(f"{output}: is no regular file: choose another --output")
    if output.name == ADAPTER_CONFIG:
        raise OutputError(f"{output}: is written beside the adapter: choose another --output")
    read = {path.resolve() for path in (config.data_path, config.val_data_path) if path}
    read |= {path.resolve() for path in folder.iterdir()}
    for written in (output, output.with_name(ADAPTER_CONFIG)):
        if written.resolve() in read:
            raise OutputError(f"{written}: is read by this run: choose another --output")


def load_model(config: TrainConfig, folder: Path, console: RunConsole) -> BaseModel:
    """Set the memory limits, then load the model."""
    from mlxtune.backend import memory, model

    console.say("Memory", memory.set_limits(config.memory_limit).describe())
    base = model.load_base(folder, config.dtype)
    console.say("Model", base.describe())
    if memory.over_limit():
        console.warn("the model alone takes more than --memory-limit: training may be slow or fail")
    return base


def build_pipeline(config: TrainConfig, base: BaseModel, console: RunConsole) -> InstructPipeline:
    """Apply LoRA and set up the optimizer."""
    from mlxtune.backend import memory
    from mlxtune.backend.pipeline import InstructPipeline

    pipeline = InstructPipeline(
        base.model,
        config.pipeline(),
        micro_batch_tokens=memory.micro_batch_tokens(
            vocab_size=base.vocab_size,
            hidden_size=base.hidden_size,
            num_layers=base.num_layers,
        ),
        base_model=config.model_path,
        provenance={"model_type": base.model_type, "dtype": base.dtype, "versions": versions()},
    )
    console.say("LoRA", pipeline.lora.describe())
    console.say("", f"micro-batches of up to {pipeline.micro_batch_tokens:,} tokens")
    return pipeline


def build_encoder(config: TrainConfig, folder: Path) -> Encoder:
    """Load the tokenizer and choose the template."""
    from mlxtune.backend.model import read_config
    from mlxtune.backend.tokenizer import load_tokenizer
    from mlxtune.core.encode import Encoder
    from mlxtune.core.template import TEMPLATES, choose_template

    name = choose_template(config.template, read_config(folder)["model_type"])
    return Encoder(TEMPLATES[name], load_tokenizer(folder), config.max_seq_len)


def encode(
    file: Path, encoder: Encoder, strict: bool, console: RunConsole
) -> tuple[list[Example], Ledger]:
    """Read a data file and encode its rows; warn of each that is skipped.

    Raises DataError when no row is left, and with `strict` when one is skipped.
    """
    from mlxtune.core.conversation import SkippedRows, read_conversations

    skipped = SkippedRows(file)
    examples, ledger = encoder.encode(read_conversations(file, skipped), skipped)
    if skipped.total and strict:
        raise DataError(
            f"{skipped.first()}; {skipped.total} of {ledger.rows_read} rows are bad: "
            "mend them, or leave out --strict to skip them"
        )
    if not ledger.rows_read:
        raise DataError(f"{file}: has no rows, only blank lines and comments: add JSON objects")
    if not examples:
        raise DataError(
            f"{file}: none of its {ledger.rows_read} rows can be trained on; "
            f"the first: {skipped.first()}"
        )
    for warning in skipped.warnings():
        console.warn(warning)
    return examples, ledger


def encode_validation(
    config: TrainConfig, encoder: Encoder, console: RunConsole
) -> tuple[list[Example] | None, Ledger | None]:
    """Encode --val-data; without it, return None to split the data, or [] for no validation."""
    if config.val_data_path is None:
        return (None if config.val_split else []), None
    examples, ledger = encode(config.val_data_path, encoder, config.strict, console)
    ledger.hold_out(ledger.rows_train)
    return examples, ledger


def say_plan(
    config: TrainConfig,
    base: BaseModel,
    ledgers: Sequence[Ledger],
    trainer: InstructTrainer,
    console: RunConsole,
) -> None:
    """Say where the rows and tokens went, and what will be done with them."""
    from mlxtune.core import report
    from mlxtune.core.template import choose_template

    for ledger in ledgers:
        console.say("Data", report.rows_line(ledger))
        console.say("", report.tokens_line(ledger))
    template = choose_template(config.template, base.model_type)
    console.say("Template", f"{template}, up to {config.max_seq_len:,} tokens a row")
    console.say("Plan", report.plan_line(trainer))


def check_corpus(
    config: TrainConfig,
    base: BaseModel,
    corpus: Sequence[Example],
    validation: Sequence[Example] | None,
) -> None:
    """Raise DataError or ModelError for what would train nonsense, or nothing."""
    if validation is None and len({example.row for example in corpus}) < 2:
        raise DataError(
            f"{config.data}: one row cannot be both trained on and held out: "
            "add rows or set --val-split 0"
        )
    largest = max(int(example.tokens.max()) for example in (*corpus, *(validation or ())))
    if base.vocab_size and largest >= base.vocab_size:
        raise ModelError(
            f"{config.model_path}: its tokenizer gives token {largest}, but the model knows only "
            f"{base.vocab_size}: they do not belong together"
        )


def versions() -> dict[str, str]:
    """Return the versions that a result depends on."""
    import importlib.metadata

    packages = ("mlxtune", "mlx", "mlx-lm", "transformers", "numpy")
    return {"python": platform.python_version()} | {
        package: importlib.metadata.version(package) for package in packages
    }
