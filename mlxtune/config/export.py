"""Options of the commands that export and import adapters."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mlxtune.config.fields import Checked
from mlxtune.config.options import option
from mlxtune.config.paths import as_path

_PROMPTS = "Data to take the prompts of the proof from; default: the run's own, or built-in ones."
_PROOF_DTYPE = "Dtype of the proof; auto is the model's own on a GPU, else float32."
_OVERWRITE = "Replace an earlier result."
_BASE = "Folder of the base model; default: the one that the adapter names."
_JSON = "Print the certificate as JSON; docs/export.md describes it."


@dataclasses.dataclass(frozen=True)
class OutgoingConfig(Checked):
    """What `fuse` and `export` share. Raises ConfigError, with every problem at once."""

    adapter: str = option("adapter", "", required=True)
    output: str = option("export_output", "")
    model_path: str | None = option("model_path", None, _BASE, required=False)
    data: tuple[str, ...] = option("data", (), _PROMPTS, required=False)
    trust_remote_code: bool = option("trust_remote_code", False)
    dtype: str = option("dtype", "auto", _PROOF_DTYPE)
    overwrite: bool = option("overwrite", False, _OVERWRITE)
    json: bool = option("json", False, _JSON)
    quiet: bool = option("quiet", False)

    @property
    def output_path(self) -> Path:
        """The folder to write."""
        return as_path(self.output)


@dataclasses.dataclass(frozen=True)
class FuseConfig(OutgoingConfig):
    """Options of `mlxtune fuse`. Raises ConfigError, with every problem at once."""

    dequantize: bool = option("dequantize", False)


@dataclasses.dataclass(frozen=True)
class ExportConfig(OutgoingConfig):
    """Options of `mlxtune export`. Raises ConfigError, with every problem at once."""

    format: str = option("export_format", "")


@dataclasses.dataclass(frozen=True)
class ImportConfig(Checked):
    """Options of `mlxtune import`. Raises ConfigError, with every problem at once."""

    adapter: str = option(
        "adapter", "", "Adapter of mlx-lm or PEFT: its folder, or its weights.", required=True
    )
    output: str = option("export_output", "")
    model_path: str | None = option("model_path", None, _BASE, required=False)
    trust_remote_code: bool = option("trust_remote_code", False)
    overwrite: bool = option("overwrite", False, _OVERWRITE)
    quiet: bool = option("quiet", False)

    @property
    def output_path(self) -> Path:
        """The folder to write."""
        return as_path(self.output)
