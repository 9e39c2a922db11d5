"""LoRA fine-tuning of MLX language models.

    from mlxtune import TrainConfig, train
    result = train(TrainConfig(model_path="…", data="chat.jsonl"))

    from mlxtune import InspectConfig, inspect
    found = inspect(InspectConfig(model_path="…", data="chat.jsonl"))

Most names are imported on first use, so that `import mlxtune` and `mlxtune --help` start without
mlx and numpy, and `mlxtune.core` works where mlx is not installed.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

# Bound at once: a later `import mlxtune.train` would otherwise put the module in its place.
from mlxtune.doctor import doctor
from mlxtune.evaluate import evaluate
from mlxtune.export import ExportResult, export
from mlxtune.fuse import fuse
from mlxtune.generate import generate
from mlxtune.import_adapter import import_adapter
from mlxtune.inspect import inspect
from mlxtune.report import report
from mlxtune.resume import resume
from mlxtune.runs import runs
from mlxtune.train import TrainResult, train
from mlxtune.verify import verify

if TYPE_CHECKING:
    from mlxtune.backend.pipeline import InstructPipeline
    from mlxtune.config import (
        EvalConfig,
        ExportConfig,
        FuseConfig,
        GenerateConfig,
        ImportConfig,
        InspectConfig,
        InstructConfig,
        InstructTrainingConfig,
        TrainConfig,
    )
    from mlxtune.core.encode import Example
    from mlxtune.core.evaluation import Evaluation
    from mlxtune.core.inspection import Inspection
    from mlxtune.core.trainer import InstructTrainer, InstructTrainResult
    from mlxtune.errors import (
        ConfigError,
        DataError,
        MemoryLimitError,
        MlxTuneError,
        ModelError,
        NonFiniteLossError,
        OutputError,
        TrainingInterrupted,
    )

__all__ = [
    "ConfigError",
    "DataError",
    "EvalConfig",
    "Evaluation",
    "Example",
    "ExportConfig",
    "ExportResult",
    "FuseConfig",
    "GenerateConfig",
    "ImportConfig",
    "InspectConfig",
    "Inspection",
    "InstructConfig",
    "InstructPipeline",
    "InstructTrainResult",
    "InstructTrainer",
    "InstructTrainingConfig",
    "MemoryLimitError",
    "MlxTuneError",
    "ModelError",
    "NonFiniteLossError",
    "OutputError",
    "TrainConfig",
    "TrainResult",
    "TrainingInterrupted",
    "doctor",
    "evaluate",
    "export",
    "fuse",
    "generate",
    "import_adapter",
    "inspect",
    "report",
    "resume",
    "runs",
    "train",
    "verify",
]

_ROOMS = {
    "mlxtune.backend.pipeline": ("InstructPipeline",),
    "mlxtune.config": (
        "EvalConfig",
        "GenerateConfig",
        "ExportConfig",
        "FuseConfig",
        "ImportConfig",
        "InspectConfig",
        "InstructConfig",
        "InstructTrainingConfig",
        "TrainConfig",
    ),
    "mlxtune.core.encode": ("Example",),
    "mlxtune.core.evaluation": ("Evaluation",),
    "mlxtune.core.inspection": ("Inspection",),
    "mlxtune.core.trainer": ("InstructTrainer", "InstructTrainResult"),
    "mlxtune.errors": (
        "ConfigError",
        "DataError",
        "MemoryLimitError",
        "MlxTuneError",
        "ModelError",
        "NonFiniteLossError",
        "OutputError",
        "TrainingInterrupted",
    ),
}
_ROOM_OF = {name: room for room, names in _ROOMS.items() for name in names}


def __getattr__(name: str) -> Any:
    if name not in _ROOM_OF:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_ROOM_OF[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
