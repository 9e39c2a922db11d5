"""`mlxtune fuse`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import FuseConfig


class _FuseCommand(ConfigCommand):
    config = FuseConfig


@click.command(
    cls=_FuseCommand,
    epilog="Example: mlxtune fuse --adapter out --output fused-model",
)
def fuse(config: str | None, debug: bool, **options: Any) -> None:
    """Put an adapter into its base model's weights: a model folder of its own, proved equal."""
    checked = merged(FuseConfig, config, options)

    from mlxtune.recipes.fuse import show

    show(checked)
