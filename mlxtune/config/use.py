"""Options of the commands that run a model and its adapter, or export and import adapters."""

import dataclasses
from pathlib import Path
from typing import Any

from mlxtune.config.data import DataConfig, ModelConfig, RowsConfig
from mlxtune.config.fields import Checked, as_path
from mlxtune.config.options import option

_PROOF_DTYPE = "Dtype of the proof; auto is the model's own on a GPU, else float32."
_BASE = "Folder of the base model; default: the one that the adapter names."
_JSON = "Print the certificate as JSON; docs/export.md describes it."


@dataclasses.dataclass(frozen=True)
class UseConfig(ModelConfig):
    """Which model is used, with which adapter and which prompt format."""

    adapter: str | None = option("adapter", None)
    template: str = option("template", "auto")
    thinking: str = option("thinking", "auto")
    merge_system: bool = option("merge_system", False)
    quantize: str | None = option("use.quantize", None)
    max_new_tokens: int = option("max_new_tokens", 256)
    quiet: bool = option("quiet", False)

    def reading(self, **options: Any) -> DataConfig:
        """Return the options that read data as `train` reads it, with `options`."""
        # Prompts come without a data file; EvalConfig has its own data.
        changes = {"data": getattr(self, "data", ("none",)), "val_split": 0.0}
        return self.part(DataConfig, **changes | options)


@dataclasses.dataclass(frozen=True)
class EvalConfig(RowsConfig, UseConfig):
    """Options of an evaluation, for the command and for `mlxtune.commands.evaluate`.

    Every row of the data is evaluated; in a folder, those of its `test` or else its `valid` file.
    Without an adapter, only the base model is evaluated.

    Raises ConfigError, with every problem at once.
    """

    data: tuple[str, ...] = option(
        "data",
        (),
        "Data to evaluate: .jsonl, .json, .jsonl.gz or .parquet, a folder with test.jsonl or "
        "valid.jsonl, or owner/name[/config][@revision][:split] on Hugging Face; may be repeated.",
    )
    turns: str = option("turns", "all", "Assistant turns to score.")
    generate: bool = option("generate", False)
    seed: int = option("seed", 42, "Seed of the bootstrap for the confidence interval.")
    json: bool = option("json", False, "Print JSON for programs.")


@dataclasses.dataclass(frozen=True)
class _AskConfig(UseConfig):
    system: str | None = option("system", None)
    temperature: float = option("temperature", 0.0)
    top_k: int = option("top_k", 0)
    top_p: float = option("top_p", 1.0)
    stop: tuple[str, ...] = option("stop", ())
    seed: int | None = option("seed", None, "Sampling seed; default: a new one each time.")


@dataclasses.dataclass(frozen=True)
class GenerateConfig(_AskConfig):
    """Options of one answer, for the command and for `mlxtune.commands.generate`.

    Raises ConfigError, with every problem at once.
    """

    prompt: str | None = option("prompt", None)
    messages: str | None = option("messages", None)
    json: bool = option("json", False, "Print the answer and its figures as JSON.")

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.prompt is not None and self.messages is not None:
            problems += ["--prompt and --messages are both given: leave out one"]
        return problems


@dataclasses.dataclass(frozen=True)
class ChatConfig(_AskConfig):
    """Options of a conversation in the terminal."""


@dataclasses.dataclass(frozen=True)
class _ConvertConfig(Checked):
    adapter: str = option("adapter", "", required=True)
    output: str = option("export.output", "")
    model_path: str | None = option("model_path", None, _BASE, required=False)
    trust_remote_code: bool = option("trust_remote_code", False)
    overwrite: bool = option("overwrite", False, "Replace an earlier result.")
    quiet: bool = option("quiet", False)

    @property
    def output_path(self) -> Path:
        """The folder to write."""
        return as_path(self.output)


@dataclasses.dataclass(frozen=True)
class OutgoingConfig(_ConvertConfig):
    """What `fuse` and `export` share."""

    dtype: str = option("dtype", "auto", _PROOF_DTYPE)
    json: bool = option("json", False, _JSON)


@dataclasses.dataclass(frozen=True)
class FuseConfig(OutgoingConfig):
    """Options of `mlxtune fuse`. Raises ConfigError, with every problem at once."""

    dequantize: bool = option("dequantize", False)
    force: bool = option("force", False)
    gguf: bool = option("gguf", False)


@dataclasses.dataclass(frozen=True)
class ExportConfig(OutgoingConfig):
    """Options of `mlxtune export`. Raises ConfigError, with every problem at once."""

    format: str = option("export.format", "")


@dataclasses.dataclass(frozen=True)
class ImportConfig(_ConvertConfig):
    """Options of `mlxtune import`. Raises ConfigError, with every problem at once."""

    adapter: str = option(
        "adapter", "", "Adapter of mlx-lm or PEFT: its folder, or its weights.", required=True
    )
