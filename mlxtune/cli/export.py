"""`mlxtune export`."""

from mlxtune.cli.options import config_command
from mlxtune.config import ExportConfig


@config_command(
    ExportConfig, example="mlxtune export --format gguf --adapter out --output for-ollama"
)
def export(config: ExportConfig) -> None:
    """Convert an adapter for mlx-lm, PEFT, llama.cpp or Ollama.

    The result is loaded again and must give the same logits as the trained model.
    """
    from mlxtune.recipes.export import show

    show(config)
