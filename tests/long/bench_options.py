"""Run a measurement script with the options of `mlxtune bench`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import click

from mlxtune.cli import command, main
from mlxtune.cli.options import ConfigCommand, build_config
from mlxtune.config import BenchConfig


def run_with_options(
    name: str, run: Callable[[BenchConfig], None], arguments: Sequence[str]
) -> NoReturn:
    """Call `run` with the config that the arguments give, and exit like `mlxtune`."""

    def callback(config: str | None, **flags: Any) -> None:
        run(build_config(BenchConfig, config, flags))

    params: list[click.Parameter] = [
        click.Option(["--config"], type=click.Path()),
        click.Option(["--debug"], is_flag=True, expose_value=False),
    ]
    command.add_command(
        ConfigCommand(name, config=BenchConfig, callback=callback, help=run.__doc__, params=params)
    )
    main([name, *arguments])
