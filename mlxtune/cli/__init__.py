"""The `mlxtune` command: builds a config, calls a command's function, and sets the exit status."""

import io
import os
import select
import signal
import sys
import warnings
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NoReturn, TextIO

import click
from click.shell_completion import shell_complete

import mlxtune
from mlxtune.cli.table import COMMANDS
from mlxtune.config.known_names import COMMANDS as COMMAND_EQUIVALENTS
from mlxtune.core.machine.gpu_faults import fault_error, fault_of
from mlxtune.core.machine.installation import installed_version
from mlxtune.errors import (
    ConfigError,
    Interrupted,
    MlxTuneError,
    OutputError,
    TrainingInterrupted,
    printable,
)
from mlxtune.session.interrupt import interrupt_on_signal
from mlxtune.start import unguard

_STDIN, _STDOUT, _STDERR = range(3)
DONE, FAILED, MISUSED = 0, 1, 2
EXIT_CODES = {
    DONE: "done",
    FAILED: "a file, a model or a run failed; verify: a check failed; doctor: training is "
    "impossible here, or --prove found a difference",
    MISUSED: "invalid options",
    129: "the terminal was closed; the run was saved",
    130: "Ctrl-C; the run was saved",
    143: "SIGTERM; the run was saved",
}
# The variable in which shells pass a completion request, under the name that click expects.
_COMPLETION_VARIABLE = "_MLXTUNE_COMPLETE"
_INTERRUPT_MESSAGE = "mlxtune: interrupted"


class _OrderedGroup(click.Group):
    """A group whose help lists its commands in their usual order of use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self.commands)

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        """Return the command. For another tool's command, raises UsageError with a suggestion."""
        if (
            args
            and args[0] not in self.commands
            and (equivalent := COMMAND_EQUIVALENTS.get(args[0]))
        ):
            raise click.UsageError(f"no command {args[0]}: use {equivalent}", ctx)
        return super().resolve_command(ctx, args)


@click.group(
    cls=_OrderedGroup,
    commands={str(each.name): each for each in COMMANDS},
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option(
    "--version",
    is_flag=True,
    is_eager=True,
    expose_value=False,
    callback=lambda context, _, value: _print_version(context) if value else None,
    help="Show the versions of mlxtune, mlx and mlx-lm, and exit.",
)
def command() -> None:
    """Fine-tune MLX language models with LoRA."""


def _print_version(context: click.Context) -> NoReturn:
    below = (f"{name} {installed_version(name) or 'missing'}" for name in ("mlx", "mlx-lm"))
    click.echo(f"mlxtune, version {mlxtune.__version__} ({', '.join(below)})")
    context.exit()


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run the command and exit; an error that users can fix becomes one line on stderr."""
    try:
        unguard()
        _main(list(sys.argv[1:] if arguments is None else arguments))
    except KeyboardInterrupt as interrupt:
        _exit_interrupted(interrupt)


def _main(arguments: list[str]) -> NoReturn:
    warnings.formatwarning = lambda message, *_: (
        f"warning: {printable(' '.join(str(message).split()))}\n"
    )
    MlxTuneError.names_flags = True
    open_streams()
    if request := os.environ.get(_COMPLETION_VARIABLE):
        sys.exit(shell_complete(command, {}, "mlxtune", _COMPLETION_VARIABLE, request))
    try:
        # Bypass click's own main(), which turns every KeyboardInterrupt into click's Abort.
        with interrupt_on_signal(), command.make_context("mlxtune", arguments) as context:
            check_current_folder()
            passed = command.invoke(context)
        flush_results()
    except click.exceptions.Exit as done:
        sys.exit(done.exit_code)
    except click.exceptions.NoArgsIsHelpError as error:
        _exit(*error.format_message().splitlines(), code=MISUSED)
    except (MlxTuneError, click.ClickException) as error:
        if "--debug" in arguments:
            raise
        usage = isinstance(error, ConfigError | click.UsageError)
        message = str(error)
        if isinstance(error, click.ClickException):
            message = " ".join(error.format_message().split())
        _fail(message, MISUSED if usage else FAILED)
    except BrokenPipeError:
        # The program that reads stdout has closed it.
        discard_stdout()
        sys.exit(FAILED)
    except TrainingInterrupted as interrupt:
        _exit(f"mlxtune: {interrupt.shell_message}", code=_exit_status(interrupt))
    except Exception as error:
        if (behind := _interrupt_behind(error)) is not None:
            _exit_interrupted(behind)
        # Training turns faults into errors that name a checkpoint. Faults in other stages, such as
        # loading, arrive here.
        fault = fault_of(error) if isinstance(error, RuntimeError | MemoryError) else None
        if fault is None or "--debug" in arguments:
            raise
        _fail(str(fault_error(fault, str(error))), FAILED)
    sys.exit(FAILED if passed is False else DONE)


def _exit_interrupted(interrupt: KeyboardInterrupt) -> NoReturn:
    kept = f"; {interrupt}" if interrupt.args else ""
    _exit(f"{_INTERRUPT_MESSAGE}{kept}", code=_exit_status(interrupt))


def _exit_status(interrupt: KeyboardInterrupt) -> int:
    if isinstance(interrupt, Interrupted | TrainingInterrupted):
        return 128 + interrupt.signal
    return 128 + signal.SIGINT


def _interrupt_behind(error: BaseException) -> KeyboardInterrupt | None:
    """Return the interrupt that caused an error, for example in an import; None if none did."""
    cause = error.__context__
    if cause is None or isinstance(cause, KeyboardInterrupt):
        return cause
    return _interrupt_behind(cause)


def _fail(message: str, code: int) -> NoReturn:
    _exit(f"mlxtune: error: {message}", code=code)


def _exit(*lines: str, code: int) -> NoReturn:
    # Names from files may contain terminal control characters; the terminal may be gone.
    with suppress(OSError):
        for line in lines:
            click.echo(printable(line), err=True)
    with suppress(OSError):
        flush_results()
    # After a Ctrl-C inside `exec`, such as in a dataclass, `python -m` exits by signal even if the
    # interrupt was caught. Another `exec` clears Python's flag.
    exec("")
    sys.exit(code)


# The standard streams, which may be closed, full or slow, and the folders of the process


def open_streams() -> None:
    """Open closed streams on the null device, and report failed writes as our own errors.

    If a stream stayed closed, the next opened file would get the stream's descriptor, and so the
    output that other code writes to the stream.
    """
    for number in (_STDIN, _STDOUT, _STDERR):
        try:
            os.fstat(number)
        except OSError:
            # An opened file takes the lowest free descriptor.
            os.open(os.devnull, os.O_RDONLY if number == _STDIN else os.O_WRONLY)
    if sys.stdin is None:
        sys.stdin = open(_STDIN, encoding="utf-8", closefd=False)  # noqa: SIM115
    # Leave other streams alone: they belong to a test, or to a program that calls main().
    if sys.stdout is sys.__stdout__:
        sys.stdout = _text_stream(_StandardStream(_STDOUT, "w", closefd=False), sys.stdout)
    if sys.stderr is sys.__stderr__:
        sys.stderr = _text_stream(_StandardStream(_STDERR, "w", closefd=False), sys.stderr)


def flush_results() -> None:
    """Flush stdout. If that fails, drop the buffer and raise OutputError or BrokenPipeError."""
    try:
        sys.stdout.flush()
    except BaseException:
        discard_stdout()
        raise


def discard_stdout() -> None:
    """Drop the buffer of stdout, so that Python does not report a failed write again at exit."""
    with suppress(OSError):
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, sys.stdout.fileno())
        os.close(null)
        sys.stdout.flush()


def _text_stream(raw: io.FileIO, before: TextIO | None) -> TextIO:
    # Characters outside the encoding must not crash a command.
    return io.TextIOWrapper(
        io.BufferedWriter(raw),
        encoding="utf-8" if before is None else before.encoding,
        errors="backslashreplace",
        line_buffering=raw.fileno() == _STDERR or raw.isatty(),
    )


class _StandardStream(io.FileIO):
    """Standard output or standard error; only failures of standard output are reported."""

    def write(self, data: Any, /) -> int:
        """Write bytes. Raises OutputError, or BrokenPipeError if nobody reads stdout."""
        try:
            # Wait if a write would block: other programs can make shared streams non-blocking.
            while (written := super().write(data)) is None:
                select.select([], [self], [])
            return written
        except OSError as error:
            if self.fileno() == _STDERR:
                return memoryview(data).nbytes
            if isinstance(error, BrokenPipeError):
                raise
            raise OutputError(
                f"stdout cannot be written: {error.strerror}: redirect it elsewhere"
            ) from error


def check_current_folder() -> None:
    """Raise OutputError if the current folder is deleted or unreadable."""
    try:
        Path.cwd()
    except OSError as error:
        raise OutputError(
            f"the current folder cannot be read: {error.strerror}: change to another one with cd"
        ) from error
