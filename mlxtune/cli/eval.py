"""`mlxtune eval`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import EvalConfig


class _EvalCommand(ConfigCommand):
    config = EvalConfig


@click.command(
    "eval",
    cls=_EvalCommand,
    epilog="Example: mlxtune eval --model-path data/demo-qwen3 --adapter . "
    "--data data/bookings_test.jsonl",
)
def evaluate(config: str | None, debug: bool, **options: Any) -> None:
    """Say whether an adapter helped: loss with and without it, and how sure that is."""
    checked = merged(EvalConfig, config, options)

    from mlxtune.recipes.evaluate import show

    show(checked)
