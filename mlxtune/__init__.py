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
from mlxtune.recipes.doctor import doctor
from mlxtune.recipes.evaluate import evaluate
from mlxtune.recipes.export import export
from mlxtune.recipes.fuse import fuse
from mlxtune.recipes.generate import generate
from mlxtune.recipes.import_adapter import import_adapter
from mlxtune.recipes.inspect import inspect
from mlxtune.recipes.report import report
from mlxtune.recipes.resume import resume
from mlxtune.recipes.runs import runs
from mlxtune.recipes.train import TrainResult, train
from mlxtune.recipes.verify import verify
from mlxtune.setup.proof import ExportResult

if TYPE_CHECKING:
    from mlxtune.backend.step.pipeline import InstructPipeline
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
    from mlxtune.core.data.encode import Example
    from mlxtune.core.data.inspection import Inspection
    from mlxtune.core.training.evaluation import Evaluation
    from mlxtune.core.training.metrics import InstructTrainResult
    from mlxtune.core.training.trainer import InstructTrainer
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
    "mlxtune.backend.step.pipeline": ("InstructPipeline",),
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
    "mlxtune.core.data.encode": ("Example",),
    "mlxtune.core.training.evaluation": ("Evaluation",),
    "mlxtune.core.data.inspection": ("Inspection",),
    "mlxtune.core.training.metrics": ("InstructTrainResult",),
    "mlxtune.core.training.trainer": ("InstructTrainer",),
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
