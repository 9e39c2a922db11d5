"""Records of steps and epochs, for tests that need only a few of their values."""

from __future__ import annotations

from typing import Any

from mlxtune.core.evaluation.outcome import perplexity
from mlxtune.core.run.metrics import InstructEpochMetrics, StepRecord


def step_record(step: int, **changes: Any) -> StepRecord:
    """Return a step of the first epoch with these values changed, and the perplexity to match."""
    values = {
        "step": step,
        "epoch": 1,
        "loss": 2.0,
        "learning_rate": 1e-4,
        "grad_norm": 0.5,
        "tokens": 100,
        "supervised_tokens": 50,
        "rows": 4,
        "seconds": 0.1,
        **changes,
    }
    implied = {
        "perplexity": perplexity(values["loss"]),
        "is_of_rows": bool(values.get("metrics")),
    }
    return StepRecord(**{**implied, **values})


def epoch_metrics(epoch: int, val_loss: float | None, **changes: Any) -> InstructEpochMetrics:
    """Return an epoch with these values changed, and the perplexities to match."""
    values = {
        "epoch": epoch,
        "train_loss": 2.0,
        "val_loss": val_loss,
        "val_perplexity": None if val_loss is None else perplexity(val_loss),
        "learning_rate": 1e-4,
        "epoch_time_ms": 12,
        "samples_per_sec": 3.5,
        **changes,
    }
    return InstructEpochMetrics(**{"train_perplexity": perplexity(values["train_loss"]), **values})
