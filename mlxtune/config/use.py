"""Options of the commands that run a model and its adapter after training."""

from __future__ import annotations

import dataclasses
from typing import Any

from mlxtune.config.data import DataConfig
from mlxtune.config.fields import Checked
from mlxtune.config.options import option
from mlxtune.config.step import quantization_problems

_SEED = "Sampling seed; default: a new one each time."


@dataclasses.dataclass(frozen=True)
class UseConfig(Checked):
    """Which model is used, with which adapter and which prompt format."""

    model_path: str = option("model_path", "")
    adapter: str | None = option("adapter", None)
    template: str = option("template", "auto")
    thinking: str = option("thinking", "auto")
    merge_system: bool = option("merge_system", False)
    memory_limit: float = option("memory_limit", 24.0)
    dtype: str = option("dtype", "auto")
    quantize: str | None = option("use_quantize", None)
    double_quant: bool = option("double_quant", False)
    trust_remote_code: bool = option("trust_remote_code", False)
    max_new_tokens: int = option("max_new_tokens", 256)
    quiet: bool = option("quiet", False)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        return problems + quantization_problems(
            self.quantize, "auto", double_quant=self.double_quant
        )

    def reading(self, **options: Any) -> DataConfig:
        """Return the options that read data as `train` reads it, with `options`."""
        # Prompts come without a data file; EvalConfig has its own data.
        changes = {"data": getattr(self, "data", ("none",)), "val_split": 0.0}
        return self.part(DataConfig, **changes | options)


@dataclasses.dataclass(frozen=True)
class EvalConfig(UseConfig):
    """Options of an evaluation, for the command and for `mlxtune.recipes.evaluate`.

    Every row of the data is evaluated; in a folder, those of its `test` or else its `valid` file.
    Without an adapter, only the base model is evaluated.

    Raises ConfigError, with every problem at once.
    """

    data: tuple[str, ...] = option(
        "data",
        (),
        "Data to evaluate: .jsonl, .json, .jsonl.gz or .parquet, or a folder with test.jsonl or "
        "valid.jsonl; may be repeated.",
    )
    max_seq_len: int = option("max_seq_len", 512)
    format: str = option("format", "auto")
    field: tuple[str, ...] = option("field", ())
    turns: str = option("turns", "all", "Assistant turns to score.")
    strict: bool = option("strict", False)
    cache_dir: str | None = option("cache_dir", None)
    no_cache: bool = option("no_cache", False)
    generate: bool = option("generate", False)
    seed: int = option("seed", 42, "Seed of the bootstrap for the confidence interval.")
    json: bool = option("json", False, "Print JSON for programs.")

    def contradictions(self) -> list[str]:
        return super().contradictions() + self.reading().contradictions()


@dataclasses.dataclass(frozen=True)
class _AskConfig(UseConfig):
    system: str | None = option("system", None)
    temperature: float = option("temperature", 0.0)
    top_k: int = option("top_k", 0)
    top_p: float = option("top_p", 1.0)
    stop: tuple[str, ...] = option("stop", ())
    seed: int | None = option("seed", None, _SEED)


@dataclasses.dataclass(frozen=True)
class GenerateConfig(_AskConfig):
    """Options of one answer, for the command and for `mlxtune.recipes.generate`.

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
    """Options of a conversation in the terminal.

    Raises ConfigError, with every problem at once.
    """
