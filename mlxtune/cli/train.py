"""`mlxtune train`."""

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, config_option, debug_option, given, merged
from mlxtune.config import TrainConfig
from mlxtune.errors import ConfigError


@click.command(
    cls=ConfigCommand,
    config=TrainConfig,
    epilog="Example: mlxtune train --model-path data/demo-qwen3 --data data/bookings.jsonl",
)
@click.option(
    "--resume",
    is_flag=False,
    flag_value="",
    metavar="[DIR]",
    type=click.Path(),
    help="Resume the run in a folder with its saved options; default: the checkpoint folder.",
)
@click.option("--dry-run", is_flag=True, help="Stop before the first step, and print the plan.")
@config_option
@debug_option
def train(config: str | None, dry_run: bool, resume: str | None, **options: Any) -> None:
    """Train a LoRA adapter on chat data."""
    if resume is None:
        checked, point = merged(TrainConfig, config, options), None
    else:
        from mlxtune.setup.resuming import find_run

        changes, problems = given(TrainConfig, config, options)
        if problems:
            raise ConfigError(problems)
        checked, point = find_run(resume, changes)

    # Imported only now: the recipe loads mlx, and --help must not.
    from mlxtune.recipes.train import train as run

    run(checked, dry_run=dry_run, resume=point)
