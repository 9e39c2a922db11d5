"""`mlxtune eval`."""

from mlxtune.cli.options import config_command
from mlxtune.config import EvalConfig


@config_command(
    EvalConfig,
    example="mlxtune eval --model-path data/demo-qwen3 --adapter . --data data/bookings_test.jsonl",
    name="eval",
)
def evaluate(config: EvalConfig) -> None:
    """Measure whether an adapter helped on held-out data.

    Compares the loss with and without it on the same rows, with a confidence interval.
    """
    from mlxtune.recipes.evaluate import show

    show(config)
