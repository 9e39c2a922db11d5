"""`mlxtune chat`."""

from __future__ import annotations

from typing import Any

import click

from mlxtune.cli.options import ConfigCommand, merged
from mlxtune.config import ChatConfig


class _ChatCommand(ConfigCommand):
    config = ChatConfig


@click.command(
    cls=_ChatCommand,
    epilog="Example: mlxtune chat --model-path data/demo-qwen3 --adapter .",
)
def chat(config: str | None, debug: bool, **options: Any) -> None:
    """Talk with a model; /base and /adapter switch, /save keeps the conversation for train."""
    checked = merged(ChatConfig, config, options)

    from mlxtune.recipes.chat import chat as run

    run(checked)
