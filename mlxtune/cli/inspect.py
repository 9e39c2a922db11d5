"""`mlxtune inspect`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import InspectConfig


class _InspectCommand(ConfigCommand):
    config = InspectConfig


@click.command(
    cls=_InspectCommand,
    epilog="Example: mlxtune inspect --model-path data/demo-qwen3 --data data/bookings.jsonl",
)
def inspect(config: str | None, debug: bool, **options: Any) -> None:
    """Show data as a model will see it, and what is wrong with it, before any training."""
    checked = merged(InspectConfig, config, options)

    from mlxtune.recipes.inspect import show

    show(checked)
