"""`mlxtune inspect`."""

from mlxtune.cli.options import config_command
from mlxtune.config import InspectConfig


@config_command(
    InspectConfig, example="mlxtune inspect --model-path data/demo-qwen3 --data data/bookings.jsonl"
)
def inspect(config: InspectConfig) -> None:
    """Show the data as the model will see it, and its problems."""
    from mlxtune.recipes.inspect import show

    show(config)
