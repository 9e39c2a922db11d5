"""`mlxtune chat`."""

from mlxtune.cli.options import config_command
from mlxtune.config import ChatConfig


@config_command(ChatConfig, example="mlxtune chat --model-path data/demo-qwen3 --adapter .")
def chat(config: ChatConfig) -> None:
    """Chat with a model in the terminal.

    /base and /adapter switch between models; /save keeps the conversation as training data.
    """
    from mlxtune.recipes.chat import chat as run

    run(config)
