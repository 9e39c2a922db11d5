"""Attaches a trained adapter to its base model."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

import mlx.core as mx
import mlx.nn as nn
from mlx.utils import tree_unflatten

from mlxtune.backend.adapters.adapter_file import AdapterFile, AdapterInfo, training_options
from mlxtune.backend.adapters.adapter_folder import check_shapes, other_base_error
from mlxtune.backend.adapters.checkpoint_tensors import trained_tensors
from mlxtune.backend.lora.apply import LoRASummary, lora_layer, summarize
from mlxtune.backend.lora.lora_layers import DoRALinear, DropoutKeys
from mlxtune.backend.lora.targets import PROJECTIONS
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.model_folder import read_config
from mlxtune.backend.models.quantize import (
    FORMATS,
    MLX_FORMATS,
    NF4,
    is_quantized,
    quantization_of,
)
from mlxtune.config import InstructConfig
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.files.hashing import (
    WEIGHTS,
    base_change,
    base_fingerprint,
    base_layout_hash,
    is_fingerprint,
)
from mlxtune.core.files.reading import read_json
from mlxtune.core.formatting import format_name
from mlxtune.errors import ConfigError, ModelError, one_line

# The smallest normal float32; adding less to a weight never changes it.
_MIN_NORMAL = 2.0**-126


@dataclass(frozen=True)
class AdapterSwitch:
    """A model whose adapter can be switched off and on."""

    base: BaseModel
    file: AdapterFile
    lora: LoRASummary
    modules: Mapping[str, nn.Module]
    changes_nothing: bool = False

    def describe(self) -> str:
        """Return a phrase on the rank and the parameters, or on the lack of any effect."""
        if self.changes_nothing:
            return "changes nothing: all its updates are zero"
        config = self.lora.config
        dora = ", DoRA" if config.dora else ""
        return f"rank {config.rank}{dora}, {self.lora.trainable_parameters:,} trained parameters"

    @property
    def model(self) -> nn.Module:
        """The model, with the adapter unless `use_adapter` switched it off."""
        return self.base.model

    def use_adapter(self, on: bool) -> None:
        """Switch the adapter on or off, even for a `Forward` that was built while it was on."""
        selected = [
            (path, module if on else module.linear) for path, module in self.modules.items()
        ]
        self.model.update_modules(tree_unflatten(selected))


def load_adapted(base: BaseModel, adapter: AdapterFile) -> AdapterSwitch:
    """Attach an adapter in mlx-lm's layout to the modules that its tensors name.

    Raises ModelError if the adapter does not fit the base model.
    """
    info, names, dropout_keys = adapter.info, adapter.module_names(), DropoutKeys()
    config, other = _config_of(adapter, names), _other_base(adapter, base.folder)
    bases, modules = dict(base.model.named_modules()), {}
    for name in names:
        if (module := bases.get(name)) is None:
            raise other_base_error(adapter.path, other, f"the model has no {name:.200}")
        if not isinstance(module, PROJECTIONS):
            raise ModelError(
                f"{adapter.path} has LoRA on {name}, which is not a projection: "
                "mlxtune supports LoRA on projections only"
            )
        modules[name] = lora_layer(module, name, info.rank, info.scale, config, dropout_keys)
    base.model.freeze()
    base.model.update_modules(tree_unflatten(list(modules.items())))
    check_shapes(adapter.path, adapter.tensors, trained_tensors(base.model), other)
    tensors = adapter.read_tensors()
    base.model.update(tree_unflatten(list(tensors.items())))
    for module in modules.values():
        if isinstance(module, DoRALinear):
            module.compute_magnitudes()
    base.model.eval()
    summary = summarize(base.model, config)
    return AdapterSwitch(base, adapter, summary, modules, _changes_nothing(info, tensors, names))


def _changes_nothing(
    info: AdapterInfo, tensors: Mapping[str, mx.array], names: Sequence[str]
) -> bool:
    """Return whether no entry of any update exceeds the smallest normal float32."""
    if info.kind != "lora":  # the magnitudes of DoRA may differ from the weights'
        return False
    highest = {name: float(mx.abs(each).max()) for name, each in tensors.items()}
    bounds = (highest[f"{name}.lora_a"] * highest[f"{name}.lora_b"] for name in names)
    return all(info.scale * info.rank * bound < _MIN_NORMAL for bound in bounds)


def _config_of(adapter: AdapterFile, names: list[str]) -> InstructConfig:
    targets = tuple(adapter.targets or names)
    try:
        return InstructConfig(targets=targets, **training_options(adapter.info))
    except ConfigError as error:
        raise ModelError(f"{adapter.config_path}: {one_line(error)}") from error


def base_options(adapter: AdapterFile, folder: Path, options: BaseOptions) -> BaseOptions:
    """Return `options`, changed to quantise a model folder as in an adapter's training.

    They quantise nothing if training used the folder as stored, or if the folder is already
    quantised in the same format, for example by `mlx_lm.convert`. Raises ModelError if the folder
    is quantised in a different format, or if this version does not support the format.
    """
    saved, as_stored = adapter.info.mlxtune, options.as_stored
    quantize, double = saved.get("quantize"), saved.get("double_quant", False)
    if quantize is None:
        return as_stored
    if quantize not in FORMATS or (double and quantize != NF4):
        raise ModelError(
            f"{adapter.config_path}: quantize is {quantize!r:.40}, which this version does not "
            "support: upgrade mlxtune"
        )
    config = read_config(folder, trust_remote_code=options.trust_remote_code)
    if not is_quantized(config):
        return replace(as_stored, quantize=quantize, double_quant=bool(double))
    if quantize == NF4 or quantization_of(config) != MLX_FORMATS[quantize]:
        raise ModelError(
            f"{folder} is quantised, but not to {quantize}, which training used: "
            "name the full-precision model"
        )
    return as_stored


def base_difference(adapter: AdapterFile, folder: Path) -> str | None:
    """Return a message if an adapter was trained on a model other than `folder`'s, else None.

    The result is None if the adapter has no fingerprint of its base: other tools write none. Raises
    ModelError if a file cannot be read.
    """
    info, trained = adapter.info, adapter.info.mlxtune.get("base")
    if not is_fingerprint(trained):
        return None
    if (changed := base_change(trained, base_fingerprint(folder))) is None:
        return None
    named = f", {info.model!r:.100}" if info.model else ""
    return (
        f"{adapter.path} was trained on another base model{named}, not on {folder}, "
        f"whose {changed:.100} differ{'s' * (changed != WEIGHTS)}"
    )


def check_model(adapter: AdapterFile, folder: Path) -> None:
    """Raise ModelError if an adapter was trained on another model, and not only on other weights.

    An adapter without a fingerprint names its model's folder, whose architecture is compared.
    """
    info = adapter.info
    trained, named = info.mlxtune.get("base"), Path(info.model)
    if is_fingerprint(trained):
        other = trained["layout"] != base_layout_hash(folder) and base_difference(adapter, folder)
    else:
        other = _model_type(named) not in (None, _model_type(folder)) and (
            f"{adapter.path} was trained on another base model, {info.model!r:.100}, "
            f"not on {folder}"
        )
    if other:
        raise ModelError(f"{other}: pass the right --model-path")


def _other_base(adapter: AdapterFile, folder: Path) -> str | None:
    """Return the name of an adapter's base; None if that surely has the layout of `folder`'s."""
    trained = adapter.info.mlxtune.get("base")
    same = is_fingerprint(trained) and trained["layout"] == base_layout_hash(folder)
    return None if same else adapter.info.model


def _model_type(folder: Path) -> str | None:
    """Return the architecture in a model's config.json; None if it cannot be read."""
    with suppress(OSError, ValueError, KeyError):
        return str(read_json(folder / "config.json")["model_type"])
    return None


def check_base(adapter: AdapterFile, folder: Path, *, other_base: bool) -> None:
    """Raise ModelError if `base_difference` finds a difference, unless `other_base` is set."""
    if not other_base and (problem := base_difference(adapter, folder)) is not None:
        raise ModelError(f"{problem}: pass the right --model-path, or add --other-base")


def base_mismatch(adapter: AdapterFile, base: BaseModel, options: BaseOptions) -> str | None:
    """Return a warning if `base` is not quantised as in the adapter's training, else None."""
    try:
        trained = base_options(adapter, base.folder, options)
    except ModelError as problem:
        return str(problem)
    if (trained.quantize, trained.double_quant) == (base.quantize, base.double_quant):
        return None
    trained_on, remedy = "the base as stored", "leave out --quantize"
    if trained.quantize is not None:
        trained_on = f"the base quantised to {format_name(trained.quantize, trained.double_quant)}"
        double = " --double-quant" if trained.double_quant else ""
        remedy = f"add --quantize {trained.quantize}{double}"
    return f"{adapter.path} was trained on {trained_on}: {remedy} to use the same base"
