"""`mlxtune import`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, config_command
from mlxtune.config import ImportConfig


class _Path(click.Argument):
    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:  # type: ignore[override]
        """Leave the argument out of the options: the usage line shows it."""
        return None


class _ImportCommand(ConfigCommand):
    """Takes the adapter as an argument instead of a flag."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        flags = [each for each in self.params if each.opts != ["--adapter"]]
        self.params = [_Path(["adapter"], metavar="PATH", required=False), *flags]


@config_command(
    ImportConfig,
    example="mlxtune import their-peft-adapter --model-path data/demo-qwen3 --output ours",
    name="import",
    cls=_ImportCommand,
)
def import_(config: ImportConfig) -> None:
    """Convert an adapter of mlx-lm or PEFT, to use or train it here."""
    from mlxtune.recipes.import_adapter import show

    show(config)
