"""`mlxtune import`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import ImportConfig


class _Path(click.Argument):
    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:  # type: ignore[override]
        """Have nothing said of it among the options: the usage shows it."""
        return None


class _ImportCommand(ConfigCommand):
    config = ImportConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # What is imported stands behind the command, without a flag.
        flags = [each for each in self.params if each.opts != ["--adapter"]]
        path = _Path(["adapter"], metavar="PATH", required=False)
        self.params = [path, *flags]


@click.command(
    "import",
    cls=_ImportCommand,
    epilog="Example: mlxtune import their-peft-adapter --model-path data/demo-qwen3 --output ours",
)
def import_(config: str | None, debug: bool, **options: Any) -> None:
    """Read an adapter of mlx-lm or PEFT, to use it and to train it further."""
    checked = merged(ImportConfig, config, options)

    from mlxtune.recipes.import_adapter import show

    show(checked)
