"""The `mlxtune` command: builds a config, calls a recipe, prints, and alone decides to exit."""

from __future__ import annotations

import io
import os
import platform
import shlex
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from typing import NoReturn

import click

from mlxtune.cli.bench import bench
from mlxtune.cli.chat import chat
from mlxtune.cli.completion import VARIABLE, complete, completion
from mlxtune.cli.doctor import doctor
from mlxtune.cli.eval import evaluate
from mlxtune.cli.exit_codes import DONE, FAILED, MISUSED
from mlxtune.cli.export import export
from mlxtune.cli.fuse import fuse
from mlxtune.cli.generate import generate
from mlxtune.cli.import_ import import_
from mlxtune.cli.inspect import inspect
from mlxtune.cli.plan import plan
from mlxtune.cli.report import report
from mlxtune.cli.runs import runs
from mlxtune.cli.train import train
from mlxtune.cli.verify import verify
from mlxtune.errors import ConfigError, MlxTuneError, TrainingInterrupted, printable

# In the order of --help.
COMMANDS = (
    doctor,
    inspect,
    plan,
    train,
    evaluate,
    generate,
    chat,
    report,
    runs,
    verify,
    fuse,
    export,
    import_,
    bench,
    completion,
)


class _InOrder(click.Group):
    """A group whose help lists its commands in their usual order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)


@click.group(
    cls=_InOrder,
    commands={str(each.name): each for each in COMMANDS},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, wanted: _print_versions(context) if wanted else None,
    help="Show the version and exit.",
)
def command() -> None:
    """Fine-tune MLX language models with LoRA."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; errors that a user can fix end in one line on stderr."""
    warnings.formatwarning = lambda message, *_: f"warning: {' '.join(str(message).split())}\n"
    if isinstance(sys.stdout, io.TextIOWrapper):
        # As stderr does: characters that the encoding lacks must not end a command.
        sys.stdout.reconfigure(errors="backslashreplace")
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    if request := os.environ.get(VARIABLE):
        sys.exit(complete(command, request))
    try:
        # Not through click's own main(), which turns every KeyboardInterrupt into its Abort.
        with command.make_context("mlxtune", arguments) as context:
            command.invoke(context)
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        _exit(error.format_message(), MISUSED)
    except (MlxTuneError, click.ClickException) as error:
        if "--debug" in arguments:
            raise
        usage = isinstance(error, ConfigError | click.UsageError)
        message = error.format_message() if isinstance(error, click.ClickException) else str(error)
        _fail(message, MISUSED if usage else FAILED)
    except TrainingInterrupted as interrupt:
        saved = "nothing to save"
        if interrupt.checkpoint:
            run = shlex.quote(str(interrupt.checkpoint.parent))
            saved = f"saved to {interrupt.checkpoint}; resume with mlxtune train --resume {run}"
        _exit(f"mlxtune: {interrupt}; {saved}", 128 + interrupt.signal)
    except KeyboardInterrupt:
        _exit("mlxtune: interrupted", 130)
    except BrokenPipeError:
        # The reader has closed the pipe; Python would report that again when it flushes.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(FAILED)
    sys.exit(DONE)


def _print_versions(context: click.Context) -> NoReturn:
    from importlib import metadata

    versions = []
    for name in ("mlxtune", "mlx", "mlx-lm"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            versions.append(f"{name} not installed")
    click.echo(f"{versions[0]} ({', '.join(versions[1:])}, Python {platform.python_version()})")
    context.exit()


def _fail(message: str, code: int) -> NoReturn:
    _exit(f"mlxtune: error: {' '.join(message.split())}", code)


def _exit(message: str, code: int) -> NoReturn:
    # Names from files may hold terminal control characters; the terminal itself may be gone.
    with suppress(OSError):
        click.echo(printable(message), err=True)
    sys.exit(code)
