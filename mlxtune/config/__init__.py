"""The options of each command as frozen dataclasses, built from flags, a config file or Python.

Each field takes its help, its effect and its bounds from mlxtune.config.options.
"""

from mlxtune.config.commands import BenchConfig, InspectConfig, PlanConfig
from mlxtune.config.data import DataConfig
from mlxtune.config.export import ExportConfig, FuseConfig, ImportConfig
from mlxtune.config.file import CONFIGS, load_config_file
from mlxtune.config.paths import as_path, user_cache
from mlxtune.config.step import StepConfig
from mlxtune.config.training import (
    InstructConfig,
    InstructTrainingConfig,
    RunConfig,
    RunParts,
    TrainConfig,
)
from mlxtune.config.use import ChatConfig, EvalConfig, GenerateConfig, UseConfig

__all__ = [
    "CONFIGS",
    "BenchConfig",
    "ChatConfig",
    "DataConfig",
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
    "load_config_file",
    "user_cache",
]
