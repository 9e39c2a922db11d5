"""For tests, makes configs with the required options, returns problems, and stops runs."""

from __future__ import annotations

from typing import Any

import pytest

from mlxtune.config import TrainConfig
from mlxtune.errors import ConfigError

REQUIRED = {"model_path": "data/demo", "data": "chat.jsonl"}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**REQUIRED | changes)


def train_to(made: TrainConfig, step: int) -> None:
    """Train until the run stops after a step, as on Ctrl-C. Raises TrainingInterrupted."""
    from mlxtune.commands.train import RunMode, run_training
    from mlxtune.session.arguments import resolve_options

    run_training(resolve_options(made), RunMode(stop_after=step))


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        config(**changes)
    return raised.value.problems
