"""`mlxtune export`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import ExportConfig


class _ExportCommand(ConfigCommand):
    config = ExportConfig


@click.command(
    cls=_ExportCommand,
    epilog="Example: mlxtune export --format gguf --adapter out --output for-ollama",
)
def export(config: str | None, debug: bool, **options: Any) -> None:
    """Write an adapter as mlx-lm, PEFT or llama.cpp load it, proved equal to what was trained."""
    checked = merged(ExportConfig, config, options)

    from mlxtune.recipes.export import show

    show(checked)
