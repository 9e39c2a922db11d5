"""A model opened, loaded and given LoRA to train, or loaded with its adapter to run."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mlxtune.config import ChatConfig, GenerateConfig, InstructConfig, StepConfig, UseConfig
from mlxtune.errors import DataError, ModelError
from mlxtune.setup.dataset import Reader

if TYPE_CHECKING:
    from mlxtune.backend.adapters.attach import Adapted
    from mlxtune.backend.model.loading import BaseModel
    from mlxtune.backend.text.generate import Generator, Sampling
    from mlxtune.core.data.prompt import Prompt
    from mlxtune.terminal.console import RunConsole


from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from mlxtune.setup.memory import confirm, execution

if TYPE_CHECKING:
    from mlxtune.backend.model.loading import BaseModel
    from mlxtune.backend.step.pipeline import InstructPipeline
    from mlxtune.core.steps.memory_plan import MemoryPlan, Work
    from mlxtune.core.training.run_folder import ResumePoint


def open_model(step: StepConfig, folder: Path, console: RunConsole) -> BaseModel:
    """Set the memory limits, then open the model, whose weights are not read yet."""
    from mlxtune.backend.model import loading, memory

    console.say("Memory", memory.set_limits(step.memory_limit).describe())
    base = loading.open_base(folder, step.dtype, **step.loading())
    if slow := loading.slow_products(base):
        console.warn(slow)
    return base


def say_other_base(
    adapter: str, base: BaseModel, console: RunConsole, *, trust_remote_code: bool
) -> None:
    """Warn where the adapter to go on from was trained on another base. Raises ModelError."""
    from mlxtune.backend.adapters.attach import base_mismatch
    from mlxtune.backend.adapters.files import find_adapter

    weights = find_adapter(adapter, "--init-adapter")
    if other := base_mismatch(weights, base, trust_remote_code=trust_remote_code):
        console.warn(f"--init-adapter {other}")


def read_weights(base: BaseModel, console: RunConsole) -> None:
    """Read the weights."""
    from mlxtune.backend.model import loading

    loading.read_weights(base)
    console.say("Model", base.describe())


def build_pipeline(
    step: StepConfig,
    lora: InstructConfig,
    base: BaseModel,
    work: Work,
    plan: MemoryPlan,
    console: RunConsole,
    provenance: Callable[[], Mapping[str, Any]] = dict,
    resume: ResumePoint | None = None,
) -> tuple[InstructPipeline, MemoryPlan]:
    """Apply LoRA and set up the optimizer, to run as planned.

    `provenance` is asked for what checkpoints are to say of the model. Returns the plan too, made
    again if the model is run otherwise than its shapes say.
    """
    from mlxtune.backend.model import loading
    from mlxtune.backend.step.pipeline import InstructPipeline

    pipeline = InstructPipeline(
        base.model,
        lora,
        micro_batch_tokens=plan.way.micro_batch_tokens,
        how=execution(step, base.parameters, plan.way),
        base_model=step.model_path,
        begins=resume is None,
        provenance=provenance,
        base_said=loading.base_quantization(base),
        warn=console.warn,
    )
    if resume is not None:
        pipeline.initial_hash = resume.checkpoint.metadata.get("init_adapter_hash")
    console.say("LoRA", pipeline.lora.describe())
    confirmed = confirm(step, pipeline, work, plan)
    pipeline.micro_batch_tokens = confirmed.way.micro_batch_tokens
    return pipeline, confirmed


@dataclass(frozen=True)
class LoadedModel:
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
    from mlxtune.backend.adapters import files
    from mlxtune.backend.model import model_folder

    folder = model_folder.find_folder(config.model_path)
    model_folder.read_config(folder, trust_remote_code=config.trust_remote_code)
    if config.adapter is not None:
        files.read_adapter_config(files.find_adapter(config.adapter))
    how_to_load(config, folder)
    return folder


def how_to_load(config: UseConfig, folder: Path) -> dict[str, Any]:
    """Return the keywords of `load_base` that say how the base is quantised while loading.

    It is as the options say, or else as the adapter was trained. Raises ModelError.
    """
    if config.quantize == "none":
        return {}
    if config.quantize is not None:
        return {"quantize": config.quantize, "double_quant": config.double_quant}
    return _trained_on(config, folder)


def _trained_on(config: UseConfig, folder: Path) -> dict[str, Any]:
    from mlxtune.backend.adapters.attach import base_options
    from mlxtune.backend.adapters.files import find_adapter

    if config.adapter is None:
        return {}
    trust = config.trust_remote_code
    return base_options(find_adapter(config.adapter), folder, trust_remote_code=trust)


def load_model(config: UseConfig, folder: Path, console: RunConsole) -> LoadedModel:
    """Set the memory limits, load the model and report each stage. Raises ModelError."""
    from mlxtune.backend.model import memory

    console.say("Memory", memory.set_limits(config.memory_limit).describe())
    used = load_adapted_model(config, folder)
    console.say("Model", used.base.describe())
    if used.adapted is not None:
        console.say("Adapter", f"{used.adapted.weights}: {used.adapted.lora.describe()}")
        _say_base(config, folder, console)
    return used


def _say_base(config: UseConfig, folder: Path, console: RunConsole) -> None:
    """Say on what the adapter is put, where that is not the folder as it is."""
    from mlxtune.backend.model.quantize import format_name

    how = how_to_load(config, folder)
    if config.quantize is None:
        if how:
            console.say("Base", f"quantised to {format_name(**how)}, as the adapter was trained on")
        return
    try:
        trained = _trained_on(config, folder)
    except ModelError:  # an option was given that does without what the adapter says
        trained = None
    if trained != how:
        console.warn(
            "the adapter is on another base than it was trained on: --quantize says otherwise than "
            "its adapter_config.json"
        )


def load_adapted_model(config: UseConfig, folder: Path) -> LoadedModel:
    """Load the model, and put the adapter on it. Raises ModelError."""
    from mlxtune.backend.adapters import attach
    from mlxtune.backend.model import loading

    trust = config.trust_remote_code
    how = how_to_load(config, folder)
    base = loading.load_base(folder, config.dtype, trust_remote_code=trust, **how)
    if config.adapter is None:
        return LoadedModel(base, None)
    return LoadedModel(base, attach.load_adapted(base, config.adapter))


def asking_reader(config: GenerateConfig | ChatConfig, folder: Path) -> Reader:
    """Return what writes prompts as training has them. Raises ModelError."""
    reader = Reader(config.reading(turns="last"), folder)
    # What is wrong with tokenizer or template is known before minutes of loading.
    _ = reader.encoder
    return reader


def check_fits(prompt: Prompt, used: LoadedModel, where: str) -> None:
    """Raise DataError for a prompt that is longer than what the model reads.

    Its answer would be none, and take hours of a prompt of a few hundred thousand tokens.
    """
    longest = used.base.text_config.get("max_position_embeddings")
    if isinstance(longest, int) and 0 < longest < len(prompt.ids):
        raise DataError(
            f"{where}: has {len(prompt.ids):,} tokens, of which the model reads {longest:,} at "
            "most: shorten it"
        )


def start_generator(
    config: GenerateConfig | ChatConfig, used: LoadedModel, reader: Reader
) -> tuple[Generator, Sampling]:
    """Return what answers, seeded, and how."""
    from mlxtune.backend.text.generate import Generator, Sampling, seed

    if config.seed is not None:
        seed(config.seed)
    sampling = Sampling(
        max_new_tokens=config.max_new_tokens,
        temperature=config.temperature,
        top_k=config.top_k,
        top_p=config.top_p,
        stop=config.stop,
    )
    return Generator(used.model, reader.tokenizer, used.base.vocab_size), sampling


def print_text(text: str) -> None:
    """Print what a model says, as it comes: nothing in it reaches a terminal that acts on it."""
    from mlxtune.core.reports.visible import escape_unencodable, unharmful

    shown = escape_unencodable(unharmful(text), sys.stdout.encoding or "utf-8")
    sys.stdout.write(shown)
    sys.stdout.flush()
