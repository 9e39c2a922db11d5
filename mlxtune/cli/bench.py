"""`mlxtune bench`."""

from mlxtune.cli.options import config_command
from mlxtune.config import BenchConfig


@config_command(
    BenchConfig,
    example="mlxtune bench --model-path data/demo-qwen3 --data data/bookings.jsonl "
    "--against mlx-lm",
)
def bench(config: BenchConfig) -> None:
    """Time training steps and measure their memory on your data.

    --against times another trainer on the same steps, in separate processes.
    """
    from mlxtune.recipes.bench import show

    show(config)
