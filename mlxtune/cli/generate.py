"""`mlxtune generate`."""

from mlxtune.cli.options import config_command
from mlxtune.config import GenerateConfig


@config_command(
    GenerateConfig,
    example="mlxtune generate --model-path data/demo-qwen3 --adapter . "
    "--prompt 'A table for two, Sunday at noon. Ida Park'",
)
def generate(config: GenerateConfig) -> None:
    """Answer a prompt or a conversation.

    The model sees it exactly as training shows it. Without --prompt or --messages, standard input
    is read.
    """
    from mlxtune.recipes.generate import show

    show(config)
