"""`mlxtune plan`."""

from mlxtune.cli.options import config_command
from mlxtune.config import PlanConfig


@config_command(
    PlanConfig, example="mlxtune plan --model-path data/demo-qwen3 --data data/bookings.jsonl"
)
def plan(config: PlanConfig) -> None:
    """Predict the memory, steps and time of a run.

    No weights are read.
    """
    from mlxtune.recipes.plan import show

    show(config)
