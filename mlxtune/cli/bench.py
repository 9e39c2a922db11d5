"""`mlxtune bench`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import BenchConfig


class _BenchCommand(ConfigCommand):
    config = BenchConfig


@click.command(
    cls=_BenchCommand,
    epilog="Example: mlxtune bench --model-path data/demo-qwen3 --data data/bookings.jsonl "
    "--against mlx-lm",
)
def bench(config: str | None, debug: bool, **options: Any) -> None:
    """Time training steps and measure their memory, beside another trainer on the same work."""
    checked = merged(BenchConfig, config, options)

    from mlxtune.recipes.bench import show

    show(checked)
