"""The options of each command as frozen dataclasses, for flags, config files and Python.

Each option is defined once, as a field of the config closest to its subject.
"""

from mlxtune.config.data_config import DataConfig, InspectConfig, user_cache
from mlxtune.config.fields import as_path, document
from mlxtune.config.objective_config import ObjectiveConfig
from mlxtune.config.train_config import (
    OPTIONS,
    InstructConfig,
    InstructTrainingConfig,
    TrainConfig,
)
from mlxtune.config.trial_config import (
    BenchConfig,
    DemoConfig,
    PlanConfig,
    RewardConfig,
    demo_file,
)
from mlxtune.config.use_config import (
    AnswerConfig,
    ChatConfig,
    EvalConfig,
    ExportConfig,
    FuseConfig,
    GenerateConfig,
    ImportConfig,
    OutgoingConfig,
    ServeConfig,
    UseConfig,
)

__all__ = [
    "OPTIONS",
    "AnswerConfig",
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
    "ObjectiveConfig",
    "OutgoingConfig",
    "PlanConfig",
    "RewardConfig",
    "ServeConfig",
    "TrainConfig",
    "UseConfig",
    "as_path",
    "demo_file",
    "user_cache",
]

for _config in (
    *(BenchConfig, ChatConfig, DataConfig, DemoConfig, EvalConfig, ExportConfig, FuseConfig),
    *(GenerateConfig, ImportConfig, InspectConfig, InstructConfig, InstructTrainingConfig),
    *(PlanConfig, RewardConfig, ServeConfig, TrainConfig),
):
    document(_config)
