"""Options of commands that run a model, or convert an adapter."""

import dataclasses
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxtune.config.data_config import FORMATS, DataConfig, ModelConfig, ReadingConfig, RowsConfig
from mlxtune.config.fields import CheckedConfig, as_path, flag, reuse_option
from mlxtune.config.limits import check_pattern
from mlxtune.config.objective_config import (
    REWARD_NAMES,
    REWARD_OBJECTIVES,
    ObjectiveConfig,
    RewardedConfig,
)
from mlxtune.config.option import COMMAND, EXPORT, FILES, GENERATION, RUN
from mlxtune.config.train_config import TrainConfig
from mlxtune.errors import shorten

_WEIGHTS = (".safetensors", ".gguf")
# The file with the weights in the folder of an export, by format.
_MAIN_FILES = {
    "mlx-lm": "adapters.safetensors",
    "peft": "adapter_model.safetensors",
    "gguf": "adapter.gguf",
    "flat": "adapter.safetensors",
}
# llama.cpp's names of types, such as Q4_K_M, IQ2_XXS and BF16.
_GGUF_TYPE = re.compile(r"[A-Za-z]+[0-9]+(_[A-Za-z0-9]+)*")


@dataclasses.dataclass(frozen=True)
class UseConfig(ModelConfig):
    """The model, its adapter and its prompt format."""

    model_path: str | None = reuse_option(  # type: ignore[assignment]
        ModelConfig,
        "model_path",
        None,
        "Folder of the base model; default: the base that --adapter names.",
        required=False,
    )
    adapter: str | None = FILES.option(
        None, "Adapter file, its folder, or a run's folder.", COMMAND
    )
    quantize: str | None = RUN.option(
        None,
        "Quantise the weights while loading; default: as in training.",
        COMMAND,
        choices=("none", *FORMATS),
    )
    max_new_tokens: int = GENERATION.option(
        256, "Maximum length of an answer in tokens.", COMMAND, at_least=1, at_most=10**9
    )

    def contradictions(self) -> Iterator[str]:
        if self.model_path is None and self.adapter is None:
            yield "--model-path is required, or an --adapter, which names its base model"

    def reading_config(self, **options: Any) -> ReadingConfig:
        """Return the options for reading prompts as `train` does, changed by `options`."""
        return self.part(ReadingConfig, **options)


@dataclasses.dataclass(frozen=True)
class EvalConfig(ObjectiveConfig, RowsConfig, UseConfig):
    """Options of an evaluation, for `mlxtune eval` and `mlxtune.commands.evaluate`.

    The command evaluates every row of the data. In a folder, it reads the test file or, if there is
    none, the validation file. Without an adapter, it evaluates only the base model.

    Raises ConfigError, which lists every problem.
    """

    data: tuple[str, ...] = reuse_option(
        DataConfig,
        "data",
        help="Data to evaluate: .jsonl, .json, .csv or .tsv (also .gz), or .parquet; a folder "
        "with test.jsonl or valid.jsonl; or owner/name[/config][@revision][:split] on "
        "Hugging Face; may be repeated.",
    )
    against: str | None = FILES.option(
        None, "Another adapter, with which to compare --adapter on the same rows.", COMMAND
    )
    turns: str = reuse_option(DataConfig, "turns", help="Assistant turns to score.")
    generate: bool = GENERATION.option(
        False, "Also answer the last turn of each row greedily, and count exact matches.", COMMAND
    )
    match: str = GENERATION.option(
        "exact",
        "With --generate, also count answers that match the expected answer: as equal JSON, by "
        "containing it, or because a pattern (or its first group) finds the same text in both.",
        COMMAND,
        metavar="exact|json|contains|regex=PATTERN",
    )
    reward: tuple[str, ...] = reuse_option(
        RewardedConfig,
        "reward",
        help="Compare rewards of greedy and sampled answers instead of losses: "
        f"{REWARD_NAMES}; may be repeated.",
    )
    reward_timeout: float = reuse_option(RewardedConfig, "reward_timeout")
    temperature: float = reuse_option(
        RewardedConfig, "temperature", help="Temperature of the sampled answers with --reward."
    )
    top_p: float = reuse_option(
        RewardedConfig,
        "top_p",
        help="With --reward, sample from the likeliest tokens with this total probability.",
    )
    seed: int = reuse_option(
        DataConfig,
        "seed",
        help="Seed of the bootstrap for the confidence interval, and of sampled answers.",
    )
    json: bool = RUN.option(False, "Print JSON for programs.", COMMAND)

    def data_config(self, **options: Any) -> DataConfig:
        """Return the options for reading data as `train` does, changed by `options`."""
        return self.part(DataConfig, **{"val_split": 0.0} | options)

    def contradictions(self) -> Iterator[str]:
        if self.is_rewarded and not self.reward:
            yield f"--objective {self.objective} compares rewards: give --reward"
        yield from self._reward_problems()
        if self.against is not None and self.adapter is None:
            yield "--against compares two adapters: give --adapter"
        if self.match != "exact" and not self.generate:
            yield "--match counts answers: add --generate"
        if self.match.startswith("regex="):
            try:
                check_pattern(self.match.removeprefix("regex="))
            except ValueError as problem:
                yield f"--match {shorten(self.match)} {problem}"
        elif self.match not in ("exact", "json", "contains"):
            yield f"--match {shorten(self.match)} must be exact, json, contains or regex=PATTERN"

    def _reward_problems(self) -> Iterator[str]:
        if not self.reward:
            for name in ("reward_timeout", "temperature", "top_p"):
                if getattr(self, name) != getattr(RewardedConfig, name):
                    yield f"{flag(name)} goes with --reward: leave it out"
            return
        if self.adapter is None:
            yield "--reward compares answers before and after training: give --adapter"
        if self.objective not in ("sft", *REWARD_OBJECTIVES):
            yield f"--reward compares no preferences: leave out --objective {self.objective}"
        if self.generate:
            yield "--reward already counts exact answers: leave out --generate"


@dataclasses.dataclass(frozen=True)
class AnswerConfig(UseConfig):
    """Options for sampling answers."""

    system: str | None = GENERATION.option(
        None, "System message before the conversation.", COMMAND, metavar="TEXT"
    )
    temperature: float = GENERATION.option(
        0.0,
        "Sampling temperature; 0 always takes the likeliest token.",
        COMMAND,
        at_least=0,
        at_most=100,
    )
    top_k: int = GENERATION.option(
        0, "Sample from the likeliest K tokens; 0 means all tokens.", COMMAND, at_least=0
    )
    top_p: float = GENERATION.option(
        1.0,
        "Sample from the likeliest tokens with this total probability; 1 means all tokens.",
        COMMAND,
        above=0,
        at_most=1,
    )
    stop: tuple[str, ...] = GENERATION.option(
        (),
        "Text that ends an answer, like the model's own end tokens; may be repeated.",
        COMMAND,
        several=True,
        metavar="TEXT",
    )
    seed: int | None = reuse_option(
        DataConfig, "seed", None, "Sampling seed; default: a new seed each time."
    )


@dataclasses.dataclass(frozen=True)
class ChatConfig(AnswerConfig):
    """Options of a conversation in the terminal."""

    both: bool = GENERATION.option(
        False, "Answer with the base model and with the adapter, side by side.", COMMAND
    )

    def contradictions(self) -> Iterator[str]:
        if self.both and self.adapter is None:
            yield "--both compares the base model with an adapter: pass --adapter"


@dataclasses.dataclass(frozen=True)
class GenerateConfig(AnswerConfig):
    """Options for generating an answer, for `mlxtune generate` and `mlxtune.commands.generate`.

    Raises ConfigError, which lists every problem.
    """

    prompt: str | None = GENERATION.option(
        None,
        "The user's message, or plain text to complete if the model has no chat template or its "
        "adapter was trained on plain text; without it or --messages, standard input is read.",
        COMMAND,
        metavar="TEXT",
    )
    messages: str | None = GENERATION.option(
        None,
        "JSON file of a conversation to answer: a list of messages, or an object with 'messages' "
        "and optional 'tools'; - is standard input.",
        COMMAND,
    )
    data: str | None = GENERATION.option(
        None,
        "File of prompts to answer: .jsonl, .json, .csv or .tsv (also .gz), or .parquet, with a "
        "'prompt' or 'messages' in each row; a last answer is left out.",
        COMMAND,
    )
    output: str | None = FILES.option(
        None,
        "With --data, the .jsonl file of answers; if it has some, the others are added.",
        COMMAND,
    )
    overwrite: bool = FILES.option(False, "Answer all prompts of --data again.", COMMAND)
    json: bool = RUN.option(False, "Print the answer and its figures as JSON.", COMMAND)

    def contradictions(self) -> Iterator[str]:
        sources = {"prompt": self.prompt, "messages": self.messages, "data": self.data}
        flags = [f"--{name}" for name, value in sources.items() if value is not None]
        if len(flags) > 1:
            every = "both" if len(flags) == 2 else "all"
            yield f"{' and '.join(flags)} are {every} given: keep one"
        if self.data is not None and self.output is None:
            yield "--data needs a file for its answers: give --output answers.jsonl"
        elif self.data is not None and not str(self.output).endswith(".jsonl"):
            yield f"--output {self.output} must end in .jsonl: name a file such as answers.jsonl"
        if self.data is None and (self.output is not None or self.overwrite):
            yield "--output and --overwrite are for the answers to --data: give both"
        if self.data is not None and self.json:
            yield "--json is for one answer: leave it out with --data"


@dataclasses.dataclass(frozen=True)
class ServeConfig(ModelConfig):
    """Options of `mlxtune serve`. Raises ConfigError, which lists every problem."""

    adapters: tuple[str, ...] = FILES.option(
        (),
        "Runs or adapters to serve, each under the name of its folder.",
        COMMAND,
        path=True,
        several=True,
    )
    name: tuple[str, ...] = FILES.option(
        (),
        "Adapter to serve under another name; may be repeated.",
        COMMAND,
        several=True,
        metavar="NAME=PATH",
    )
    model_path: str | None = reuse_option(  # type: ignore[assignment]
        UseConfig,
        "model_path",
        help="Folder of the base model; default: the base that the first adapter names.",
    )
    quantize: str | None = reuse_option(UseConfig, "quantize")
    max_new_tokens: int = reuse_option(
        UseConfig,
        "max_new_tokens",
        help="Maximum length of an answer in tokens, for requests without max_tokens.",
    )
    host: str = RUN.option("127.0.0.1", "Address to listen at.", COMMAND, metavar="HOST")
    port: int = RUN.option(
        8080, "Port to listen at; 0 takes any free port.", COMMAND, at_least=0, at_most=65535
    )
    api_key: str | None = RUN.option(
        None,
        "Key that requests must have; required with --host, where OPENAI_API_KEY may hold it.",
        COMMAND,
        metavar="KEY",
    )
    allow_origin: tuple[str, ...] = RUN.option(
        (),
        "Site whose pages may ask, such as https://example.org, or * for all; may be repeated.",
        COMMAND,
        several=True,
        metavar="ORIGIN",
    )

    def contradictions(self) -> Iterator[str]:
        if not (self.model_path or self.adapters or self.name):
            yield "nothing to serve: name a run, or a base model with --model-path"
        yield from (
            f"--name {shorten(each)} must be NAME=PATH"
            for each in self.name
            if not all(part.strip() for part in each.partition("="))
        )


@dataclasses.dataclass(frozen=True)
class ImportConfig(CheckedConfig):
    """Options of `mlxtune import`. Raises ConfigError, which lists every problem."""

    adapter: str = reuse_option(
        UseConfig,
        "adapter",
        "",
        "Adapter of mlx-lm or PEFT: its folder, or its weights.",
        required=True,
        argument="an adapter to import, such as their-peft-adapter",
    )
    output: str = EXPORT.option(
        "", "Folder to write, or its main file.", COMMAND, required=True, path=True
    )
    model_path: str | None = reuse_option(
        UseConfig,
        "model_path",
        None,
        "Folder of the base model; default: the base that the adapter names.",
        required=False,
    )
    trust_remote_code: bool = reuse_option(UseConfig, "trust_remote_code")
    overwrite: bool = reuse_option(TrainConfig, "overwrite", help="Replace an earlier result.")
    quiet: bool = reuse_option(UseConfig, "quiet")

    def contradictions(self) -> Iterator[str]:
        output, files = as_path(self.output), self._main_files()
        if output.suffix in _WEIGHTS and output.name not in files:
            yield (
                f"--output {self.output}: the file written is {' or '.join(files)}: "
                "name a folder, or this file in it"
            )

    def _main_files(self) -> tuple[str, ...]:
        return ("adapters.safetensors",)

    @property
    def output_path(self) -> Path:
        """The folder to write; `--output` may name the main file in it."""
        path = as_path(self.output)
        return path.parent if path.suffix in _WEIGHTS else path


@dataclasses.dataclass(frozen=True)
class FuseConfig(ImportConfig):
    """Options of `mlxtune fuse`. Raises ConfigError, which lists every problem."""

    adapter: str = reuse_option(UseConfig, "adapter", "", required=True)
    dtype: str = reuse_option(
        UseConfig,
        "dtype",
        help="Dtype of the proof; auto is the model's own on a GPU, else float32.",
    )
    other_base: bool = reuse_option(TrainConfig, "other_base")
    dequantize: bool = EXPORT.option(False, "Dequantise the base model's weights.", COMMAND)
    force: bool = EXPORT.option(
        False, "Quantise the trained projections like the base, however much gain is lost.", COMMAND
    )
    bits: int | None = EXPORT.option(
        None,
        "Bits of the trained projections; default: the fewest that keep what was learned.",
        COMMAND,
        at_least=2,
        at_most=8,
    )
    data: tuple[str, ...] = reuse_option(
        DataConfig,
        "data",
        (),
        "Rows like the training rows, to round and measure on; default: the run's own.",
        required=False,
    )
    gguf: bool = EXPORT.option(False, "Also write model.gguf with llama.cpp's converter.", COMMAND)
    json: bool = RUN.option(
        False, "Print the certificate as JSON; docs/export.md describes it.", COMMAND
    )

    def contradictions(self) -> Iterator[str]:
        yield from super().contradictions()
        if self.bits == 7:
            yield "--bits 7 is not a format of MLX: set 6 or 8"
        if self.bits is not None and (self.dequantize or self.gguf):
            yield "--bits is for quantised weights: leave out --dequantize and --gguf"

    def _main_files(self) -> tuple[str, ...]:
        return ("model.safetensors", *["model.gguf"] * self.gguf)


@dataclasses.dataclass(frozen=True)
class ExportConfig(ImportConfig):
    """Options of `mlxtune export`. Raises ConfigError, which lists every problem."""

    adapter: str = reuse_option(FuseConfig, "adapter")
    format: str = EXPORT.option(
        "",
        "Target: mlx-lm, PEFT and transformers, llama.cpp and Ollama, or a flat safetensors file.",
        COMMAND,
        choices=tuple(_MAIN_FILES),
        meant=(("ollama", "gguf"), ("llama.cpp", "gguf"), ("transformers", "peft")),
        required=True,
    )
    merge: bool = EXPORT.option(
        False, "For gguf, merge base and adapter into a model with llama.cpp's converter.", COMMAND
    )
    quantize: str | None = EXPORT.option(
        None,
        "With --merge, quantise the model with llama-quantize, for example to Q4_K_M.",
        COMMAND,
        metavar="TYPE",
    )
    dtype: str = reuse_option(FuseConfig, "dtype")
    other_base: bool = reuse_option(TrainConfig, "other_base")
    json: bool = reuse_option(FuseConfig, "json")

    def contradictions(self) -> Iterator[str]:
        if self.merge and self.format != "gguf":
            yield "--merge is for --format gguf: mlxtune fuse writes a model folder"
        if self.quantize is not None and not self.merge:
            yield "--quantize is for a merged model: add --merge"
        if self.quantize is not None and not _GGUF_TYPE.fullmatch(self.quantize):
            name = shorten(self.quantize)
            yield f"--quantize must be a type of llama.cpp, such as Q4_K_M, not {name}"

    def _main_files(self) -> tuple[str, ...]:
        return ("model.gguf" if self.merge else _MAIN_FILES[self.format],)


OutgoingConfig = FuseConfig | ExportConfig
