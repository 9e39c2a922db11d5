"""LoRA's initial values: random, PiSSA's, or an adapter's."""

import math
from collections.abc import Collection, Iterator, Mapping
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import numpy.typing as npt
from mlx.utils import tree_unflatten

from mlxtune.backend.adapters.adapter_file import AdapterFile, AdapterInfo, training_options
from mlxtune.backend.adapters.adapter_folder import (
    check_shapes,
    find_adapter,
    layer_and_path,
    paths_in_layers,
)
from mlxtune.backend.adapters.checkpoint_tensors import adapter_tensors
from mlxtune.backend.adapters.file_formats.mlx_lm import read_mlx_lm, tensors_of
from mlxtune.backend.lora.apply import LoRASummary, adapted_modules
from mlxtune.backend.lora.lora_layers import DoRALinear, LoRALinear, PrincipalFactors, hash_of
from mlxtune.backend.lora.targets import choose_targets, rank_of
from mlxtune.backend.models.stored_layers import dequantized_weight
from mlxtune.config import InstructConfig
from mlxtune.config.lora_config import pissa_iterations, scale_of
from mlxtune.core.files.reading import file_hash
from mlxtune.errors import ModelError

# The relative difference that rounding may cause between an adapter's scale and the scale
# in the options.
_SCALE_TOLERANCE = 1e-9
# Oversampling for the randomised SVD: extra directions, which improve convergence.
_OVERSAMPLING = 8

Matrix = npt.NDArray[Any]


def initialize(
    model: nn.Module, lora: LoRASummary, initial: AdapterFile | None = None
) -> str | None:
    """Set LoRA's initial values; return the SHA-256 of the adapter that they come from, if any.

    `initial` is the adapter in `init_adapter`, if the caller has opened it. Raises ModelError if
    the adapter does not fit the options.
    """
    modules, config = adapted_modules(model), lora.config
    for module in modules.values():
        if isinstance(module, DoRALinear):
            module.compute_magnitudes()
    if config.is_pissa:
        init_pissa(modules, config.init, config.seed)
    if config.init_adapter is None:
        return None
    adapter = initial or AdapterFile.find(config.init_adapter, "--init-adapter")
    _start_from(adapter, model, lora)
    return file_hash(adapter.path)


def find_initial(named: str, digest: object, opened: AdapterFile | None = None) -> AdapterFile:
    """Return the adapter from which a run started, which --init-adapter named.

    `digest` is the SHA-256 that `initialize` returned; `opened` is the adapter, if the caller has
    opened it. Raises ModelError if the adapter is missing or has changed.
    """
    adapter = opened or AdapterFile(find_adapter(named, "--init-adapter"))
    try:
        changed = file_hash(adapter.path) != digest
    except OSError as error:
        raise ModelError(
            f"{adapter.path} cannot be read: {error.strerror}: check --init-adapter"
        ) from error
    if changed:
        raise ModelError(
            f"--init-adapter: the run did not start from {adapter.path}: leave the option out to "
            "resume"
        )
    return adapter


def check_initial(adapter: AdapterFile, model: nn.Module, config: InstructConfig) -> None:
    """Raise ModelError if options contradict the adapter that a run starts from.

    `model` has no LoRA yet, and none of its weights are read.
    """
    _check_options(adapter, model, config, choose_targets(model, config))


def _check_options(
    adapter: AdapterFile, model: nn.Module, config: InstructConfig, names: Collection[str]
) -> None:
    """Raise ModelError if options contradict an adapter; `names` are the modules to train."""
    problems = [
        *_disagreements(adapter.info, config, names),
        *_other_targets(adapter, model, names),
    ]
    if problems:
        raise ModelError(
            f"--init-adapter {adapter.path}: {'; '.join(problems)}: leave these options out to use "
            "the adapter's"
        )


def _start_from(adapter: AdapterFile, model: nn.Module, lora: LoRASummary) -> None:
    weights = adapter.path
    _check_options(adapter, model, lora.config, adapted_modules(model))
    check_shapes(weights, adapter.tensors, adapter_tensors(model, lora), adapter.info.model)
    updates = dict(read_mlx_lm(adapter).modules)
    for name, module in adapted_modules(model).items():
        try:
            rank, factor = module.lora_a.shape[1], module.scale / lora.scale
            updates[name] = updates[name].unpadded(rank, factor)
        except ValueError as error:
            raise ModelError(f"{weights}: {name} {error}: check --target-rank") from error
    tensors = [(name, mx.array(value)) for name, value in tensors_of(updates).items()]
    model.update(tree_unflatten(tensors))
    mx.eval(model.trainable_parameters())


def _other_targets(adapter: AdapterFile, model: nn.Module, names: Collection[str]) -> Iterator[str]:
    """Yield a problem if LoRA is on other projections of a model than in an adapter made for it."""
    of_this_model = set(adapter.module_names()) <= {name for name, _ in model.named_modules()}
    targets, wanted = adapter.targets, paths_in_layers(names)
    if of_this_model and targets != wanted:
        yield f"its targets are {', '.join(targets)}, but --targets gives {', '.join(wanted)}"


def _disagreements(
    info: AdapterInfo, config: InstructConfig, names: Collection[str]
) -> Iterator[str]:
    if (info.kind == "dora") != config.dora:
        yield f"its type is {info.kind}, but --dora is {'on' if config.dora else 'off'}"
    # An adapter file has only one rank, the largest.
    rank = max(rank_of(name, config) for name in names)
    scale = scale_of(config.alpha, rank, rslora=config.rslora)
    if info.rank != rank:
        yield f"its rank is {info.rank}, but --rank and --target-rank give {rank}"
    elif not math.isclose(info.scale, scale, rel_tol=_SCALE_TOLERANCE):
        yield f"its scale is {info.scale:g}, but --alpha {config.alpha:g} gives {scale:g}"


def with_adapter(options: Mapping[str, Any], adapter: AdapterFile) -> dict[str, Any]:
    """Return a run's options, with defaults for LoRA from the adapter that it starts from.

    The defaults are the adapter's rank, alpha, targets, layers and kind. Those in `options` take
    precedence, and `check_initial` reports contradictions. With `rslora`, the scale is expressed as
    alpha / √rank. Raises ModelError if training cannot continue from the adapter.
    """
    info, last = adapter.info, 0
    for name in adapter.module_names():
        if (layer_path := layer_and_path(name)) is None:
            raise ModelError(
                f"{adapter.path} has LoRA on {name:.200}, outside the layers, where mlxtune "
                "cannot train it"
            )
        last = max(last, 1 + layer_path[0])
    rslora = bool(options["rslora"]) if "rslora" in options else None
    return {
        **training_options(info, rslora),
        "targets": adapter.targets,
        # mlx-lm takes a num_layers above the model's number of layers as all layers.
        "num_layers": info.num_layers if (info.num_layers or last) < last else None,
        **options,
    }


def init_pissa(modules: dict[str, nn.Module], init: str, seed: int) -> None:
    """Initialise LoRA with the principal singular vectors of each weight.

    The stored weights do not change: the initial product is subtracted in the forward pass (see
    `PrincipalFactors`), so that a quantised weight is not quantised again, and the written adapter
    applies to the published weights.

    Source: PiSSA, arXiv:2404.02948, equations 2 to 4; singular values are divided by the scale, as
    in PEFT's pissa_init.
    """
    for name, module in modules.items():
        if isinstance(module, LoRALinear):
            weight = np.array(dequantized_weight(module.linear))
            rank, key = module.lora_a.shape[1], hash_of(f"{seed}/{name}", 8)
            u, s, v = principal_svd(weight, rank, pissa_iterations(init), key)
            root = np.sqrt(s / module.scale)
            # Row-major, as a resumed run reads the factors: in another layout, matmuls round
            # differently.
            a, b = (np.ascontiguousarray(x, dtype=np.float32) for x in (v * root, (u * root).T))
            module.lora_a, module.lora_b = mx.array(a), mx.array(b)
            # Separate arrays, because a compiled step takes the trained arrays as its inputs.
            module.principal = PrincipalFactors(mx.array(a), mx.array(b))


def principal_svd(
    weight: Matrix, rank: int, iterations: int | None, seed: int
) -> tuple[Matrix, Matrix, Matrix]:
    """Return the truncated SVD of a weight (out, in): U (out, rank), S (rank,) and V (in, rank).

    Without `iterations`, the SVD is exact, from the float64 eigenvectors of W W^T or W^T W,
    whichever is smaller: this takes an eighth of a full SVD's time. With `iterations`, random
    directions are refined by that many power iterations, arXiv:0909.4061, algorithms 4.4 and 5.1.
    """
    if iterations is not None:
        return _randomized_svd(weight, rank, iterations, seed)
    if weight.shape[0] > weight.shape[1]:
        v, s, u = principal_svd(weight.T, rank, None, seed)
        return u, s, v
    wide = weight.astype(np.float64)
    u = np.linalg.eigh(wide @ wide.T)[1][:, ::-1][:, :rank]
    projected = u.T @ wide
    s = np.linalg.norm(projected, axis=1)
    # If the weight has a lower rank, vectors of zero singular values contribute nothing.
    return u, s, (projected / np.where(s > 0, s, 1)[:, None]).T


def _randomized_svd(
    weight: Matrix, rank: int, iterations: int, seed: int
) -> tuple[Matrix, Matrix, Matrix]:
    random = np.random.default_rng(seed)
    count = min(rank + _OVERSAMPLING, *weight.shape)
    start = random.standard_normal((weight.shape[1], count), dtype=np.float32)
    q = np.linalg.qr(weight @ start)[0]
    for _ in range(iterations):
        q = np.linalg.qr(weight @ np.linalg.qr(weight.T @ q)[0])[0]
    u, s, v = np.linalg.svd(q.T @ weight, full_matrices=False)
    return (q @ u)[:, :rank], s[:rank], v[:rank].T
