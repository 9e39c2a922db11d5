"""`mlxtune fuse`."""

from mlxtune.cli.options import config_command
from mlxtune.config import FuseConfig


@config_command(FuseConfig, example="mlxtune fuse --adapter out --output fused-model")
def fuse(config: FuseConfig) -> None:
    """Merge an adapter into its base model.

    Writes a model folder that needs no adapter, and checks that it gives the same logits.
    """
    from mlxtune.recipes.fuse import show

    show(config)
