"""The demo: where its files are, and its options."""

import dataclasses
from pathlib import Path
from typing import Any

from mlxtune.config.fields import Checked
from mlxtune.config.options import option
from mlxtune.config.training import TrainConfig

_PACKAGE = Path(__file__).resolve().parents[1]
# The wheel carries its files in the package; a clone, also if installed as editable, has them here.
_CARRIED, _CLONED = _PACKAGE / "demo", _PACKAGE.parent / "data"
MODEL, DATA = "demo-qwen3", "bookings.jsonl"


def demo_file(name: str) -> Path:
    """Return a file or folder of the demo: a model by its name, or its data."""
    return (_CARRIED if _CARRIED.is_dir() else _CLONED) / name


@dataclasses.dataclass(frozen=True)
class DemoConfig(Checked):
    """Options of the demo: a small model learns to answer a guest's message with JSON.

    `train(DemoConfig().training())` runs it from Python.

    Raises ConfigError, with every problem at once.
    """

    output: str = option("output", "mlxtune-demo/adapters.safetensors")
    max_steps: int | None = option("max_steps", None)
    overwrite: bool = option("overwrite", False)
    quiet: bool = option("quiet", False)

    def training(self) -> TrainConfig:
        """Return the options of the demo's run."""
        own: dict[str, Any] = dataclasses.asdict(self)
        model, data = str(demo_file(MODEL)), str(demo_file(DATA))
        return TrainConfig(model_path=model, data=(data,), targets=("all",), lr=5e-3, **own)
