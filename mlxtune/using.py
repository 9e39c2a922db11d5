"""A model, with its adapter where there is one, loaded to be used by eval, generate and chat.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxtune.config import UseConfig

if TYPE_CHECKING:
    from mlxtune.backend.adapted import Adapted
    from mlxtune.backend.model import BaseModel
    from mlxtune.console import RunConsole


@dataclass(frozen=True)
class Used:
    """A model and the adapter on it, if there is one, which can be taken off and put back."""

    base: BaseModel
    adapted: Adapted | None

    @property
    def model(self) -> Any:
        """The model as it stands."""
        return self.base.model

    def use_adapter(self, on: bool) -> None:
        """Have the model run with its adapter, or as the base model."""
        if self.adapted is not None:
            self.adapted.use_adapter(on)


def find_model(config: UseConfig) -> Path:
    """Return the model's folder; what is missing of it or the adapter is known before any work.

    Raises ModelError.
    """
    from mlxtune.backend import adapted, model_folder

    folder = model_folder.find_folder(config.model_path)
    model_folder.read_config(folder, trust_remote_code=config.trust_remote_code)
    if config.adapter is not None:
        adapted.read_adapter_config(adapted.find_adapter(config.adapter))
    return folder


def load_model(config: UseConfig, folder: Path, console: RunConsole) -> Used:
    """Set the memory limits, load the model, and put the adapter on it. Raises ModelError."""
    from mlxtune.backend import adapted, memory, model

    console.say("Memory", memory.set_limits(config.memory_limit).describe())
    trust = config.trust_remote_code
    used = Used(model.load_base(folder, config.dtype, trust_remote_code=trust), None)
    console.say("Model", used.base.describe())
    if config.adapter is not None:
        used = Used(used.base, adapted.load_adapted(used.base, config.adapter))
        assert used.adapted is not None
        console.say("Adapter", f"{used.adapted.weights}: {used.adapted.lora.describe()}")
    return used
