"""For tests, makes configs with the required options and a few more, or returns their problems."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtune.config import TrainConfig
from mlxtune.errors import ConfigError

REQUIRED = {"model_path": "data/demo", "data": "chat.jsonl"}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**REQUIRED | changes)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        config(**changes)
    return raised.value.problems
