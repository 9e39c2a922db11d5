"""Runs an instrument with the options of `mlxtune bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

from mlxtune.cli import command, main
from mlxtune.cli.options import ConfigCommand, config_option, debug_option, merged
from mlxtune.config import BenchConfig


def run_with_options(
    name: str, run: Callable[[BenchConfig], None], arguments: Sequence[str]
) -> NoReturn:
    """Run with the options in the arguments, and exit as `mlxtune` does."""

    def callback(config: str | None, **flags: Any) -> None:
        run(merged(BenchConfig, config, flags))

    params = [config_option, debug_option]
    command.add_command(
        ConfigCommand(name, config=BenchConfig, callback=callback, help=run.__doc__, params=params)
    )
    main([name, *arguments])
