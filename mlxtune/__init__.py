"""LoRA fine-tuning of MLX language models.

    import mlxtune
    result = mlxtune.train(model_path="…", data="chat.jsonl", rank=16)
    inspection = mlxtune.inspect(model_path="…", data=[{"prompt": "…", "completion": "…"}])

Options are keywords, or fields of a config such as `TrainConfig`; help() of a config describes the
options. `data` may be paths or rows: dictionaries in a list, another iterable or a
`datasets.Dataset`.

Also public: `StepHistory` and `TrainingMetrics` of mlxtune.core.run.metrics, `StepProfiler` of
mlxtune.core.run.profile, `reserve` and `reservations` of mlxtune.core.machine.reservation, and
`NF4Linear`, `quantize` and `dequantize` of mlxtune.backend.models.nf4.

Commands and their results are imported on first use, so that `import mlxtune` and `mlxtune --help`
need neither mlx nor numpy, and `mlxtune.core` works where mlx is not installed. If mlx's CPU wheel
for Linux is installed, importing mlxtune loads a fast BLAS, which must be loaded before mlx.
"""

# isort: off
import mlxtune.start  # noqa: F401

# isort: on

import importlib
from typing import TYPE_CHECKING, Any

from mlxtune.config import (
    BenchConfig,
    DemoConfig,
    EvalConfig,
    ExportConfig,
    FuseConfig,
    GenerateConfig,
    ImportConfig,
    InspectConfig,
    InstructConfig,
    InstructTrainingConfig,
    PlanConfig,
    TrainConfig,
)
from mlxtune.core.machine.blas import has_cpu_wheel, load_blas
from mlxtune.core.machine.installation import UNINSTALLED, installed_version
from mlxtune.errors import (
    ConfigError,
    DataError,
    GpuError,
    MemoryLimitError,
    MlxTuneError,
    ModelError,
    NonFiniteLossError,
    OutputError,
    TrainingInterrupted,
    WorkerError,
)

if TYPE_CHECKING:
    from mlxtune.backend.step.pipeline import InstructPipeline
    from mlxtune.benchmark.bench import bench
    from mlxtune.commands.demo import demo
    from mlxtune.commands.evaluate import evaluate
    from mlxtune.commands.export import export
    from mlxtune.commands.fuse import fuse
    from mlxtune.commands.generate import generate
    from mlxtune.commands.import_adapter import import_adapter
    from mlxtune.commands.inspect import inspect
    from mlxtune.commands.plan import plan
    from mlxtune.commands.push import push
    from mlxtune.commands.report import report
    from mlxtune.commands.runs import runs
    from mlxtune.commands.train import TrainResult, resume, train
    from mlxtune.commands.verify import verify
    from mlxtune.core.data.encode import Example
    from mlxtune.core.data.inspection import Inspection
    from mlxtune.core.evaluation.outcome import Evaluation
    from mlxtune.core.run.metrics import InstructTrainResult
    from mlxtune.core.training.trainer import InstructTrainer
    from mlxtune.diagnosis.doctor import doctor
    from mlxtune.diagnosis.prove import prove
    from mlxtune.session.verified_output import ExportResult

__all__ = [
    "BenchConfig",
    "ConfigError",
    "DataError",
    "DemoConfig",
    "EvalConfig",
    "Evaluation",
    "Example",
    "ExportConfig",
    "ExportResult",
    "FuseConfig",
    "GenerateConfig",
    "GpuError",
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
    "PlanConfig",
    "TrainConfig",
    "TrainResult",
    "TrainingInterrupted",
    "WorkerError",
    "bench",
    "demo",
    "doctor",
    "evaluate",
    "export",
    "fuse",
    "generate",
    "import_adapter",
    "inspect",
    "plan",
    "prove",
    "push",
    "report",
    "resume",
    "runs",
    "train",
    "verify",
]

_COMMANDS = (
    *("demo", "evaluate", "export", "fuse", "generate", "import_adapter", "inspect"),
    *("plan", "push", "report", "runs", "train", "verify"),
)
_LAZY_MODULES = {
    "Evaluation": "mlxtune.core.evaluation.outcome",
    "Example": "mlxtune.core.data.encode",
    "ExportResult": "mlxtune.session.verified_output",
    "Inspection": "mlxtune.core.data.inspection",
    "InstructPipeline": "mlxtune.backend.step.pipeline",
    "InstructTrainResult": "mlxtune.core.run.metrics",
    "InstructTrainer": "mlxtune.core.training.trainer",
    "TrainResult": "mlxtune.commands.train",
    "bench": "mlxtune.benchmark.bench",
    "resume": "mlxtune.commands.train",
    **{name: f"mlxtune.commands.{name}" for name in _COMMANDS},
    **{name: f"mlxtune.diagnosis.{name}" for name in ("doctor", "prove")},
}


if has_cpu_wheel():
    load_blas()


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return installed_version() or UNINSTALLED
    if name not in _LAZY_MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_LAZY_MODULES[name]), name)


def __dir__() -> list[str]:
    return sorted(__all__)
