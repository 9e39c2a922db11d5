"""The command: builds a config, calls a recipe, prints, and is the only place that exits.

Exit codes: 0 done, 1 a file, model or run failed, 2 options are wrong, 130 Ctrl-C, 143 SIGTERM.
"""

from __future__ import annotations

import dataclasses
import os
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click

from mlxtune.config import (
    BenchConfig,
    DataConfig,
    InspectConfig,
    PlanConfig,
    TrainConfig,
    load_config_file,
)
from mlxtune.errors import ConfigError, MlxTuneError, TrainingInterrupted, printable
from mlxtune.options import OPTIONS, SECTIONS, field_types, flag

Config = TypeVar("Config", bound=DataConfig)


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; what a person can mend ends in one line on stderr."""
    warnings.formatwarning = lambda message, *_: f"warning: {' '.join(str(message).split())}\n"
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        # Not through click's own main(), which turns every KeyboardInterrupt into its Abort.
        with command.make_context("mlxtune", arguments) as context:
            command.invoke(context)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        _exit(error.format_message(), 2)
    except (MlxTuneError, click.ClickException) as error:
        if "--debug" in arguments:
            raise
        usage = isinstance(error, ConfigError | click.UsageError)
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        _fail(message, 2 if usage else 1)
    except TrainingInterrupted as interrupt:
        saved = "nothing to save"
        if interrupt.checkpoint:
            run = shlex.quote(str(interrupt.checkpoint.parent))
            saved = f"saved to {interrupt.checkpoint}; go on with mlxtune train --resume {run}"
        _exit(f"mlxtune: {interrupt}; {saved}", 128 + interrupt.signal)
    except KeyboardInterrupt:
        _exit("mlxtune: interrupted", 130)
    except BrokenPipeError:
        # What reads the output has seen enough; Python would say so again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
    sys.exit(0)


def _fail(message: str, code: int) -> NoReturn:
    _exit(f"mlxtune: error: {' '.join(message.split())}", code)


def _exit(message: str, code: int) -> NoReturn:
    # A name from a file may hold what a terminal would act on; the terminal itself may be gone.
    with suppress(OSError):
        click.echo(printable(message), err=True)
    sys.exit(code)


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(package_name="mlxtune", message="%(prog)s %(version)s")
def command() -> None:
    """Fine-tune MLX language models with LoRA."""


def config_options(config: type) -> list[click.Option]:
    """Return a click option for each field of a config.

    Values stay text, or None where not given: the config converts and checks all of them at once.
    """
    types = field_types(config)
    return [
        click.Option(
            [flag(field.name)],
            is_flag=types[field.name] is bool,
            multiple=OPTIONS[field.metadata["option"]].several,
            default=None,
            metavar=_metavar(field.name, types[field.name]),
            help=field.metadata["help"] + _default_text(field),
        )
        for field in dataclasses.fields(config)
    ]


def _metavar(name: str, annotation: Any) -> str | None:
    bounds = OPTIONS[name]
    if bounds.choices:
        return "|".join(bounds.choices)
    if annotation is bool:
        return None
    kinds = {"int": "N", "int | None": "N", "float": "X"}
    return bounds.metavar or kinds.get(str(getattr(annotation, "__name__", annotation)), "PATH")


def _default_text(field: dataclasses.Field[Any]) -> str:
    if field.metadata["bounds"].required:
        return "  [required]"
    if field.default is None or field.default is False or field.default == ():
        return ""
    default = ",".join(field.default) if isinstance(field.default, tuple) else field.default
    return f"  [default: {default:g}]" if isinstance(default, float) else f"  [default: {default}]"


class _ConfigCommand(click.Command):
    """A command with an option for each field of a config, and help in sections."""

    config: type

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        shared: list[click.Parameter] = [
            click.Option(
                ["--config"], metavar="PATH", help="YAML or TOML file of options; flags win."
            ),
            click.Option(["--debug"], is_flag=True, help="Show the traceback of an error."),
        ]
        self.params = [*config_options(self.config), *self.params, *shared]

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options section by section; those of the command itself close the last."""
        records = {option.name: option.get_help_record(ctx) for option in self.get_params(ctx)}
        names = {
            section: [name for name in options if name in records]
            for section, options in SECTIONS.items()
        }
        names["Run"].extend(str(name) for name in records if name not in OPTIONS)
        for section, members in names.items():
            if rows := [row for name in members if (row := records[name])]:
                with formatter.section(section):
                    formatter.write_dl(rows)


class _TrainCommand(_ConfigCommand):
    config = TrainConfig


class _InspectCommand(_ConfigCommand):
    config = InspectConfig


class _BenchCommand(_ConfigCommand):
    config = BenchConfig


class _PlanCommand(_ConfigCommand):
    config = PlanConfig


def _merge(kind: type[Config], config: str | None, flags: dict[str, Any]) -> Config:
    """Build a config from a file and flags; flags win. Raises ConfigError, all problems in it."""
    options, problems = _read_options(kind, config, flags)
    try:
        checked = kind(**options)
    except ConfigError as error:
        raise ConfigError(problems + error.problems) from None
    if problems:
        raise ConfigError(problems)
    return checked


def _given(kind: type[Config], config: str | None, flags: dict[str, Any]) -> dict[str, Any]:
    """Return what a file and flags give, unchecked. Raises ConfigError for options unknown."""
    options, problems = _read_options(kind, config, flags)
    if problems:
        raise ConfigError(problems)
    return options


def _read_options(
    kind: type[Config], config: str | None, flags: dict[str, Any]
) -> tuple[dict[str, Any], list[str]]:
    options: dict[str, Any] = {}
    problems: list[str] = []
    if config is not None:
        options, problems = load_config_file(Path(os.path.expanduser(config)), kind)  # noqa: PTH111
    return options | {k: v for k, v in flags.items() if v not in (None, ())}, problems


@command.command(
    cls=_TrainCommand,
    epilog="Example: mlxtune train --model-path data/demo-qwen3 --data data/bookings.jsonl",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[DIR]",
    help="Go on with the run in a folder, by its own options; default: where checkpoints would be.",
)
@click.option("--dry-run", is_flag=True, help="Do everything up to the first step; print the plan.")
def train(
    config: str | None, debug: bool, dry_run: bool, resume: str | None, **options: Any
) -> None:
    """Train a LoRA adapter on chat data."""
    if resume is None:
        checked, found = _merge(TrainConfig, config, options), None
    else:
        from mlxtune.resume import find_run

        checked, found = find_run(resume, _given(TrainConfig, config, options))

    # Imported only now: the recipe loads mlx, and --help must not.
    from mlxtune.train import train as run

    run(checked, dry_run=dry_run, resume=found)


@command.command(
    cls=_InspectCommand,
    epilog="Example: mlxtune inspect --model-path data/demo-qwen3 --data data/bookings.jsonl",
)
def inspect(config: str | None, debug: bool, **options: Any) -> None:
    """Show data as a model will see it, and what is wrong with it, before any training."""
    checked = _merge(InspectConfig, config, options)

    from mlxtune.inspect import show

    show(checked)


@command.command(
    cls=_PlanCommand,
    epilog="Example: mlxtune plan --model-path data/demo-qwen3 --data data/bookings.jsonl",
)
def plan(config: str | None, debug: bool, **options: Any) -> None:
    """Say what training would take of memory, steps and time, with no weights read."""
    checked = _merge(PlanConfig, config, options)

    from mlxtune.plan import show

    show(checked)


@command.command(
    cls=_BenchCommand,
    epilog="Example: mlxtune bench --model-path data/demo-qwen3 --data data/bookings.jsonl "
    "--against mlx-lm",
)
def bench(config: str | None, debug: bool, **options: Any) -> None:
    """Time training steps and measure their memory, beside another trainer on the same work."""
    checked = _merge(BenchConfig, config, options)

    from mlxtune.bench import show

    show(checked)


@command.command(epilog="Example: mlxtune verify out --replay")
@click.argument("run", metavar="RUN")
@click.option("--replay", is_flag=True, help="Train again from the first checkpoint, and compare.")
@click.option("--model-path", default="", metavar="PATH", help="Where the base model is now.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def verify(run: str, replay: bool, model_path: str, as_json: bool, debug: bool) -> None:
    """Check the folder of a run: files, records, adapters against the model; 1 if any is bad."""
    from mlxtune.verify import show

    if not show(run, replay=replay, model_path=model_path, as_json=as_json):
        raise click.exceptions.Exit(1)
