"""`mlxtune generate`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import GenerateConfig


class _GenerateCommand(ConfigCommand):
    config = GenerateConfig


@click.command(
    cls=_GenerateCommand,
    epilog="Example: mlxtune generate --model-path data/demo-qwen3 --adapter . "
    "--prompt 'A table for two, Sunday at noon. Ida Park'",
)
def generate(config: str | None, debug: bool, **options: Any) -> None:
    """Answer a prompt, a conversation or standard input, behind the prompt that training has."""
    checked = merged(GenerateConfig, config, options)

    from mlxtune.recipes.generate import show

    show(checked)
