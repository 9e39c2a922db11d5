"""The options of each command as frozen dataclasses, for flags, config files and Python.

Each field takes its help, its effect and its bounds from mlxtune.config.options.
"""

from mlxtune.config.data import DataConfig, InspectConfig, user_cache
from mlxtune.config.demo import DemoConfig, demo_file
from mlxtune.config.fields import as_path
from mlxtune.config.training import (
    BenchConfig,
    InstructConfig,
    InstructTrainingConfig,
    PlanConfig,
    RunConfig,
    RunParts,
    StepConfig,
    TrainConfig,
)
from mlxtune.config.use import (
    ChatConfig,
    EvalConfig,
    ExportConfig,
    FuseConfig,
    GenerateConfig,
    ImportConfig,
    UseConfig,
)

__all__ = [
    "BenchConfig",
    "ChatConfig",
    "DataConfig",
    "DemoConfig",
    "EvalConfig",
    "ExportConfig",
    "FuseConfig",
    "GenerateConfig",
    "ImportConfig",
    "InspectConfig",
    "InstructConfig",
    "InstructTrainingConfig",
    "PlanConfig",
    "RunConfig",
    "RunParts",
    "StepConfig",
    "TrainConfig",
    "UseConfig",
    "as_path",
    "demo_file",
    "user_cache",
]
