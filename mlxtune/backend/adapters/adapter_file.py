"""An adapter file in mlx-lm's layout, with its config and the run that wrote it.

A command finds the adapter once and passes the `AdapterFile` on, so that each file is read once.
"""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import mlx.core as mx

from mlxtune.backend.adapters.adapter_folder import (
    LEAVES,
    OWN_CONFIG,
    find_adapter,
    is_valid_scale,
    paths_in_layers,
    read_adapter_config,
    read_arrays,
    tensor_header,
    valid_dropout,
)
from mlxtune.config.limits import ADAPTER_CONFIG_LIMITS, parse_json
from mlxtune.config.lora_config import alpha_of
from mlxtune.core.files.reading import file_hash, read_json
from mlxtune.core.files.tensor_files import TensorHeader, TensorInfo
from mlxtune.core.formatting import join_few
from mlxtune.core.run.checkpoint import ADAPTER, ADAPTER_CONFIG, METADATA
from mlxtune.errors import ModelError, one_line

# The dtypes of adapters, as a safetensors header names them; MLX reads no 64-bit floats.
_FLOATS = ("F16", "BF16", "F32")
# No training writes values beyond this, but damaged bytes of floats often are.
_MAX_VALUE = 1e12


@dataclass(frozen=True)
class AdapterInfo:
    """The contents of adapter_config.json. `mlxtune` has the entries that only mlxtune writes."""

    kind: str
    rank: int
    scale: float
    dropout: float
    num_layers: int | None
    model: str
    mlxtune: Mapping[str, Any]


@dataclass(frozen=True)
class Origin:
    """The checkpoint that an adapter belongs to: its metadata, and the folder of its run.

    Without a checkpoint, `metadata` is empty and `run` is None.
    """

    metadata: Mapping[str, Any]
    run: Path | None

    @property
    def working_directory(self) -> str:
        """The folder in which the run was started; empty if it is unknown."""
        return str(self.metadata.get("working_directory") or "")


@dataclass(frozen=True)
class AdapterFile:
    """An adapter file with its header, info and origin.

    Each property reads its file on the first use. Errors are ModelError. They are not kept, so a
    broken file is read again.
    """

    path: Path

    @classmethod
    def find(cls, path: str, option: str = "--adapter") -> Self:
        """Return the adapter at a path, as `find_adapter` finds it, with its header read.

        Raises ModelError, which names the option.
        """
        adapter = cls(find_adapter(path, option))
        try:
            _ = adapter.header
        except ModelError as error:
            raise ModelError(f"{error.with_flags}: check {option}") from error
        return adapter

    @property
    def config_path(self) -> Path:
        """The path of the adapter's adapter_config.json."""
        return self.path.with_name(ADAPTER_CONFIG)

    @property
    def header(self) -> TensorHeader:
        """The file's header."""
        return self._opened[1]

    @cached_property
    def _opened(self) -> tuple[tuple[int, ...] | None, TensorHeader]:
        """The header, and the state of the file before its header was read."""
        return _state_of(self.path), tensor_header(self.path)

    @property
    def has_changed(self) -> bool:
        """Whether the file was replaced or written since its header was read."""
        return _state_of(self.path) != self._opened[0]

    @property
    def tensors(self) -> Mapping[str, TensorInfo]:
        """The tensors in the header, whose dtypes and shapes are checked."""
        tensors = self.header.tensors
        for name, info in tensors.items():
            if info.dtype not in _FLOATS or len(info.shape) > 3 or not all(info.shape):
                raise ModelError(
                    f"{self.path}: {name:.100} is {info.dtype} of shape {info.shape}: an adapter "
                    "has one to three dimensions of floats of 16 or 32 bits: save it again as such"
                )
        return tensors

    @cached_property
    def info(self) -> AdapterInfo:
        """The adapter's settings, from its checked config."""
        return _info_of(self._config(), self.config_path)

    def _config(self) -> dict[str, Any]:
        """Return the adapter's config.

        The config in the file's metadata overrides adapter_config.json, which may describe another
        adapter in the folder.
        """
        own = self._own_config()
        try:
            return read_adapter_config(self.config_path) | own
        except ModelError:
            if own:
                return own
            raise

    def _own_config(self) -> dict[str, Any]:
        with suppress(ValueError):  # Errors surface when the tensors are read.
            own = self.header.metadata.get(OWN_CONFIG, "{}")
            config = parse_json(own.encode(), ADAPTER_CONFIG_LIMITS, self.path.name)
            if isinstance(config, dict):
                return config
        return {}

    @cached_property
    def origin(self) -> Origin:
        """The checkpoint that the adapter belongs to.

        It is the adapter's own folder, or a folder in `checkpoints` next to the adapter that has
        the same adapter.
        """
        weights = self.path
        for folder in [weights.parent, *sorted(weights.parent.glob("checkpoints/*"))]:
            try:
                same = folder / ADAPTER == weights or (
                    # Reading a pipe or device might never end.
                    (folder / ADAPTER).is_file()
                    and (folder / ADAPTER).stat().st_size == weights.stat().st_size
                    and file_hash(folder / ADAPTER) == file_hash(weights)
                )
                if same and (folder / METADATA).is_file():
                    return Origin(read_json(folder / METADATA), folder.parent)
            except (OSError, ValueError):
                continue
        return Origin({}, None)

    def module_names(self) -> list[str]:
        """Return the modules that the adapter's tensors belong to, sorted.

        Raises ModelError for missing or unexpected tensors, and for a rank that differs from the
        config's, before anything of that rank is allocated.
        """
        info, tensors = self.info, self.tensors
        modules = sorted({name.rpartition(".")[0] for name in tensors})
        needed = {f"{module}.{leaf}" for module in modules for leaf in LEAVES[info.kind]}
        if extra := sorted(tensors.keys() - needed):
            problem = f"has {join_few(extra, 3)}"
        else:
            problem = f"lacks {join_few(sorted(needed - tensors.keys()), 3)}"
        if not tensors or needed != tensors.keys():
            raise ModelError(f"{self.path} is not a {info.kind} adapter: it {problem:.200}")
        for module in modules:
            # A is (in, rank), or (experts, rank, in).
            shape = tensors[f"{module}.lora_a"].shape
            if len(shape) not in (2, 3) or shape[1] != info.rank:
                raise ModelError(
                    f"{self.config_path} gives rank {info.rank}, but {module:.200} has A of shape "
                    f"{tuple(shape)}: config and adapter do not belong together"
                )
        return modules

    @property
    def targets(self) -> list[str]:
        """The paths of the adapter's modules in their layers, as --targets names them, sorted."""
        return paths_in_layers(self.module_names())

    def read_tensors(self) -> dict[str, mx.array]:
        """Return the tensors in float32. Raises ModelError, for example for NaN values."""
        _ = self.tensors
        # MLX does not check the header (mlx#3363, mlx#3409), so the file must have the header that
        # was checked.
        if self.has_changed and tensor_header(self.path) != self.header:
            raise ModelError(f"{self.path} has changed since it was opened: run the command again")
        arrays = {
            name: value.astype(mx.float32) for name, value in read_arrays(self.path)[0].items()
        }
        if broken := [name for name, value in arrays.items() if not mx.isfinite(value).all()]:
            raise ModelError(f"{self.path} has NaN or infinite values in {join_few(broken)}")
        if broken := [name for name, value in arrays.items() if mx.abs(value).max() > _MAX_VALUE]:
            raise ModelError(
                f"{self.path} has values beyond {_MAX_VALUE:g} in {join_few(broken)}: it is "
                "damaged: copy or write it again"
            )
        return arrays


def _state_of(path: Path) -> tuple[int, ...] | None:
    """Return values that change when a file is replaced or written; None if it cannot be read."""
    with suppress(OSError):
        status = path.stat()
        times = (status.st_mtime_ns, status.st_ctime_ns)
        return (status.st_dev, status.st_ino, status.st_size, *times)
    return None


def _info_of(config: Mapping[str, Any], path: Path) -> AdapterInfo:
    """Return the settings in a config, which was read from `path`. Raises ModelError."""
    parameters = config.get("lora_parameters")
    # The first versions of mlx-lm did not write fine_tune_type, and later versions default to lora.
    kind = config.get("fine_tune_type", "lora")
    if not isinstance(kind, str) or kind not in LEAVES or not isinstance(parameters, Mapping):
        raise ModelError(
            f"{path}: fine_tune_type {kind!r:.40} is not supported: "
            "mlxtune loads lora and dora adapters that have lora_parameters"
        )
    layers, extra = config.get("num_layers"), config.get("mlxtune")
    try:
        rank, scale = parameters["rank"], parameters["scale"]
        # mlx-lm does not check the values, and crashes if they are text.
        if type(rank) is not int or not 0 < rank < 2**31 or not is_valid_scale(scale * 1.0, rank):
            raise ValueError(f"rank {rank!r:.40} and scale {scale!r:.40} are out of range")
    except (KeyError, TypeError, ValueError, OverflowError) as error:
        raise ModelError(
            f"{path}: lora_parameters has no valid rank and scale: {one_line(error)}"
        ) from error
    return AdapterInfo(
        kind=kind,
        rank=rank,
        scale=float(scale),
        dropout=valid_dropout(path, "dropout", parameters.get("dropout")),
        num_layers=layers if isinstance(layers, int) and layers > 0 else None,
        model=str(config.get("model") or ""),
        mlxtune=extra if isinstance(extra, Mapping) else {},
    )


def training_options(info: AdapterInfo, rslora: bool | None = None) -> dict[str, Any]:
    """Return the options that describe an adapter: rank, alpha, target_rank, rslora and dora.

    If `rslora` is given, alpha is converted so that the adapter keeps its scale.
    """
    saved = info.mlxtune
    rslora = saved.get("rslora") is True if rslora is None else rslora
    options = {
        "rank": info.rank,
        "alpha": alpha_of(info.scale, info.rank, rslora=rslora),
        "target_rank": {},
        "rslora": rslora,
        "dora": info.kind == "dora",
    }
    # A PiSSA adapter is written with twice the rank of its options, and resumes as plain LoRA of
    # the doubled rank.
    same = saved.get("init", "lora") == "lora" and rslora == saved.get("rslora", False)
    if same and {"rank", "alpha"} <= saved.keys():
        ranks = saved.get("target_ranks", {})
        options |= {"rank": saved["rank"], "alpha": saved["alpha"], "target_rank": ranks}
    return options
