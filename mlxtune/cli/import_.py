"""`mlxtune import`."""

import click

from mlxtune.cli.options import config_command
from mlxtune.config import ImportConfig


@config_command(
    ImportConfig,
    example="mlxtune import their-peft-adapter --model-path data/demo-qwen3 --output ours",
    name="import",
)
def import_(config: ImportConfig) -> None:
    """Convert an adapter of mlx-lm or PEFT, to use or train it here."""
    from mlxtune.recipes.import_adapter import show

    show(config)


# The adapter is an argument instead of a flag.
_adapter = click.Argument(["adapter"], metavar="PATH", type=click.Path(), required=False)
import_.params = [_adapter, *(each for each in import_.params if each.name != "adapter")]
