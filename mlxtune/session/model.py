"""Loads the model of a command: with new LoRA weights to train, or with an adapter to run."""

import dataclasses
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.attach import (
    Adapted,
    base_difference,
    base_mismatch,
    base_options,
    load_adapted,
)
from mlxtune.backend.device import device, memory
from mlxtune.backend.forward.kernels.attention_trial import attention_kernels_problem
from mlxtune.backend.forward.kernels.gate_kernels import gate_kernels_problem
from mlxtune.backend.models import loading, model_folder
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.quantize import format_name
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.backend.text.generate import Answer, Generator, Sampling, Stream, seed
from mlxtune.backend.workers.group import ALONE, Workers
from mlxtune.backend.workers.split import split_base
from mlxtune.config import AnswerConfig, EvalConfig, ObjectiveConfig, TrainConfig, UseConfig
from mlxtune.config.data_config import TEMPLATES, BaseOptions
from mlxtune.core.data.prompt import Prompt
from mlxtune.core.objectives.objective import Objective
from mlxtune.core.run.run_folder import ResumePoint
from mlxtune.core.steps.memory_plan import DataSample, MemoryPlan
from mlxtune.errors import ConfigError, DataError, ModelError, one_line
from mlxtune.session.base import find_base
from mlxtune.session.dataset import Reader, template_text
from mlxtune.session.memory import confirm, recorded_memory
from mlxtune.views.console import RunConsole

# The metadata key that marks an adapter as trained on plain text alone.
_PLAIN_TEXT = "plain_text"
# Options that shape a prompt.
_PROMPT = ("template", "thinking", "merge_system")
_OBJECTIVE = {field.name: field.default for field in dataclasses.fields(ObjectiveConfig)}

U = TypeVar("U", bound=UseConfig)


def await_result(console: RunConsole) -> None:
    """Make the console say that kernels are being compiled if a GPU's first result takes long."""
    if not device.on_cpu():
        console.await_result()


# Training


def open_model(
    config: TrainConfig, folder: Path, console: RunConsole, workers: Workers = ALONE
) -> BaseModel:
    """Set the memory limits and open the model to train, or this worker's part of it.

    Does not read the weights yet.
    """
    console.say("Memory", memory.set_limits(config.memory_limit).describe())
    base = loading.open_base(folder, config.dtype, config.loading())
    if workers.split_model:
        base = split_base(base, workers.group)
    if slow := loading.slow_products(base):
        console.warn(slow)
    return base


def build_pipeline(
    config: TrainConfig,
    base: BaseModel,
    work: DataSample,
    plan: MemoryPlan,
    console: RunConsole,
    provenance: Callable[[], Mapping[str, Any]] = dict,
    resume: ResumePoint | None = None,
    workers: Workers = ALONE,
    *,
    plain_text: bool = False,
    initial: AdapterFile | None = None,
) -> tuple[InstructPipeline, MemoryPlan]:
    """Apply LoRA, set up the optimizer, and choose the plan again for the loaded model.

    `provenance` returns the facts about the model that checkpoints record. The new plan uses the
    memory that the resumed run recorded, or else cached or new measurements. Adapters record
    `plain_text`, which says whether all the data is plain text. `initial` is the adapter that
    training starts from, if it is open.
    """
    resumed = {} if resume is None else resume.checkpoint.metadata
    pipeline = InstructPipeline(
        base.model,
        config.lora(),
        execution=plan.execution,
        base_model=config.model_path,
        fresh=resume is None,
        initial=initial,
        initial_hash=resumed.get("init_adapter_hash"),
        provenance=provenance,
        base_record=loading.base_record(base) | _trained_as(config, plain_text),
        warn=console.warn,
        workers=workers,
        objective=Objective(config.part(ObjectiveConfig)),
    )
    console.say("LoRA", pipeline.lora.describe())
    await_result(console)
    for warning in pipeline.lora.warnings():
        console.warn(warning)
    if problem := pipeline.forward.packing_problem:
        console.say("Packing", f"off, so examples are padded: {problem}")
    problems = {"SwiGLU": gate_kernels_problem(), "Attention": attention_kernels_problem()}
    for name, problem in problems.items():
        if problem:
            console.say(name, f"by MLX's operations, not our kernels: {problem}")
    recorded = None if resume is None else recorded_memory(config.checkpoint_path)
    confirmed = confirm(config, base, pipeline, work, plan, recorded, workers)
    pipeline.engine.losses.limit_memory(confirmed.peak.total)
    return pipeline, confirmed


# Running a model with its adapter


@dataclass(frozen=True)
class LoadedModel:
    """A base model, perhaps with an adapter, which can be switched off and on."""

    base: BaseModel
    adapted: Adapted | None

    def use_adapter(self, on: bool) -> None:
        if self.adapted is not None:
            self.adapted.use_adapter(on)


def find_model(config: UseConfig, adapter: AdapterFile | None) -> Path:
    """Check model and adapter as far as possible without weights; return the model's folder.

    Raises ModelError.
    """
    folder = model_folder.find_folder(str(config.model_path))
    model_folder.read_config(folder, trust_remote_code=config.trust_remote_code)
    _base_options(config, adapter, folder)
    return folder


def as_trained(config: U, adapter: AdapterFile | None, given: Collection[str] = ()) -> U:
    """Return the options with the adapter's base model, prompt options and objective.

    An option takes precedence: a model, any prompt option and, for an evaluation, an objective in
    `given`. Raises ModelError.
    """
    if adapter is None:
        return config
    changes: dict[str, Any] = {}
    if config.model_path is None:
        changes["model_path"] = str(find_base(config, adapter))
    if not _prompt_options(config):
        changes |= _recorded(adapter, "prompt", _PROMPT)
    if isinstance(config, EvalConfig) and "objective" not in given:
        changes |= _recorded(adapter, "objective", _OBJECTIVE.keys() - given)
    try:
        return replace(config, **changes) if changes else config
    except ConfigError as error:
        raise ModelError(f"{adapter.path}: its config is damaged: {one_line(error)}") from error


def _recorded(adapter: AdapterFile, record: str, names: Collection[str]) -> dict[str, Any]:
    """Return the values that the adapter's config records for `names`. Raises ModelError."""
    recorded = adapter.info.mlxtune.get(record)
    known = {} if recorded is None else recorded
    if not isinstance(known, Mapping):
        raise ModelError(f"{adapter.path}: its config is damaged: {record} is not an object")
    return {name: known[name] for name in names if name in known}


def _trained_as(config: TrainConfig, plain_text: bool) -> dict[str, Any]:
    """Return the options of training that the adapter records for later commands."""
    own = ((name, getattr(config, name)) for name in _OBJECTIVE)
    objective = {name: value for name, value in own if value != _OBJECTIVE[name]}
    found = {"objective": objective, _PLAIN_TEXT: plain_text}
    return {"prompt": _prompt_options(config)} | {key: each for key, each in found.items() if each}


def _prompt_options(config: UseConfig | TrainConfig) -> dict[str, Any]:
    """Return the options that shape prompts and differ from their defaults."""
    values = {name: getattr(config, name) for name in _PROMPT}
    if values["template"] not in TEMPLATES:
        values["template"] = template_text(values["template"])  # the file may change
    return {name: value for name, value in values.items() if value != getattr(UseConfig, name)}


def trained_on_text(adapter: AdapterFile | None) -> bool:
    """Return whether the adapter, if any, was trained on plain text alone. Raises ModelError."""
    return adapter is not None and adapter.info.mlxtune.get(_PLAIN_TEXT) is True


def load_model(
    config: UseConfig,
    adapter: AdapterFile | None,
    folder: Path,
    console: RunConsole,
    workers: Workers = ALONE,
) -> LoadedModel:
    """Set the memory limits, and load the model, or this worker's part of it, with its adapter.

    Reports each stage on the console, which then awaits a first result. Raises ModelError.
    """
    console.say("Memory", memory.set_limits(config.memory_limit).describe())
    base = loading.open_base(folder, config.dtype, _base_options(config, adapter, folder))
    if workers.split_model:
        base = split_base(base, workers.group)
    loading.read_weights(base)
    console.say("Model", base.describe())
    await_result(console)
    if adapter is None:
        return LoadedModel(base, None)
    adapted = load_adapted(base, adapter)
    console.say("Adapter", f"{adapter.path}: {adapted.lora.describe()}")
    if config.quantize is None and base.quantize is not None:
        name = format_name(base.quantize, base.double_quant)
        console.say("Base", f"quantised to {name}, as in training")
    elif config.quantize is not None and base_mismatch(adapter, base, _as_stored(config)):
        console.warn("--quantize gives a base other than the one that the adapter was trained on")
    if (problem := base_difference(adapter, base.folder)) is not None:
        console.warn(f"{problem}: answers and losses may differ from those in training")
    return LoadedModel(base, adapted)


def _base_options(config: UseConfig, adapter: AdapterFile | None, folder: Path) -> BaseOptions:
    """Return options that quantise the base as `config` says, or else as in training."""
    if config.quantize is None and adapter is not None:
        return base_options(adapter, folder, _as_stored(config))
    if config.quantize in (None, "none"):
        return _as_stored(config)
    return replace(_as_stored(config), quantize=config.quantize, double_quant=config.double_quant)


def _as_stored(config: UseConfig) -> BaseOptions:
    """Return options that open a base as its folder stores it."""
    return BaseOptions(trust_remote_code=config.trust_remote_code)


# Answering prompts


def check_prompt_length(prompt: Prompt, base: BaseModel, where: str) -> None:
    """Raise DataError for a prompt that is longer than the model's context.

    Without this check, a prompt of a few hundred thousand tokens would take hours and get no
    answer.
    """
    longest = base.text_config.get("max_position_embeddings")
    if isinstance(longest, int) and 0 < longest < len(prompt.ids):
        raise DataError(
            f"{where}: has {len(prompt.ids):,} tokens, but the model reads at most {longest:,}: "
            "shorten it"
        )


def start_generator(config: AnswerConfig, loaded: LoadedModel, reader: Reader) -> Generator:
    if config.seed is not None:
        seed(config.seed)
    return Generator(loaded.base.model, reader.tokenizer, loaded.base.vocab_size)


class Answerers:
    """The base model and the adapter: one of them answers, or both alternate token by token.

    Each keeps a cache of its conversation. The key False stands for the base model, True for the
    adapter.
    """

    def __init__(self, config: AnswerConfig, loaded: LoadedModel, reader: Reader) -> None:
        self._loaded, self._sampling = loaded, config.part(Sampling)
        self._generators = {on: start_generator(config, loaded, reader) for on in (False, True)}

    def answer(
        self, prompts: Mapping[bool, Prompt], should_stop: Callable[[], bool] = lambda: False
    ) -> Iterator[tuple[bool, str | Answer]]:
        """Answer the prompts: yield each model's answer in pieces of text and, last, as an Answer.

        Raises MemoryLimitError, GpuError or ModelError.
        """
        streams: dict[bool, Stream] = {
            on: self._generators[on].stream(prompt, self._sampling, should_stop)
            for on, prompt in prompts.items()
        }
        while streams:
            for on, stream in list(streams.items()):
                self._loaded.use_adapter(on)
                try:
                    yield on, next(stream)
                except StopIteration as end:
                    del streams[on]
                    yield on, end.value
