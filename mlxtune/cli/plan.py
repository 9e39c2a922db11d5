"""`mlxtune plan`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import PlanConfig


class _PlanCommand(ConfigCommand):
    config = PlanConfig


@click.command(
    cls=_PlanCommand,
    epilog="Example: mlxtune plan --model-path data/demo-qwen3 --data data/bookings.jsonl",
)
def plan(config: str | None, debug: bool, **options: Any) -> None:
    """Say what training would take of memory, steps and time, with no weights read."""
    checked = merged(PlanConfig, config, options)

    from mlxtune.recipes.plan import show

    show(checked)
