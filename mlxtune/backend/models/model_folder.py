"""Finds a model's folder, and checks its files before any library reads them."""

import difflib
import glob
import importlib
import os
import re
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import Any, TypeGuard

from mlx_lm import utils as mlx_lm_utils

from mlxtune.backend.models.config_keys import unread_config_keys, with_known_keys
from mlxtune.backend.models.model_config import FORMATS, LAYERS, config_problems, counts
from mlxtune.backend.models.quantize import is_quantized
from mlxtune.config.limits import (
    INDEX_LIMITS,
    TOKENIZER_LIMITS,
    VOCABULARY_LIMITS,
    TooLargeError,
    limits_of,
)
from mlxtune.core.files import reading
from mlxtune.core.files.scratch import linked_folder
from mlxtune.core.files.tensor_files import TensorInfo, read_header
from mlxtune.core.formatting import join_few
from mlxtune.core.run.checkpoint import ADAPTER_CONFIG
from mlxtune.errors import ModelError, one_line, shorten
from mlxtune.hub.client import install_response_checks, reason

# The files that tokenizers and templates need.
_SMALL_FILES = ["*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py"]
_READ_SUFFIXES = (".json", ".jinja", ".model", ".txt", ".safetensors")
# Files that trainers leave beside the weights.
_TRAINER_FILES = ("training_args", "optimizer", "scheduler")
_REPOSITORY = re.compile(r"\w[\w.-]*/\w[\w.-]*")
# Parts of the names of image and sound encoders in multimodal models.
ENCODER_NAME = re.compile(r"vision|visual|audio|speech|image|multi_modal")
_FLOATS = ("F16", "BF16", "F32")
# mlx-lm loads tensors with these names, but drops causal masks, whose names these exclude.
_LOADED_TENSORS = re.compile(r"(?!.*(?:attn|attention)\.bias$).*\.(?:weight|scales|biases|bias)")
# Dtypes of weights that mlx-lm converts with a separate scale, and suffixes of the scale's name.
_SCALED_DTYPES = ("F8_E4M3", "F8_E5M2", "I8")
_SCALE_SUFFIXES = (".weight_scale_inv", ".weight_scale", ".scale")


def is_local(model_path: str) -> bool:
    """Return whether `find_folder` needs no download: the path exists, or is not owner/name."""
    folder = Path(os.path.expanduser(model_path))  # noqa: PTH111
    try:
        return folder.exists() or not _REPOSITORY.fullmatch(model_path)
    except OSError:
        return True  # find_folder reports the reason


class FolderError(ModelError):
    """A path leads to no folder of a model. The `reason` follows the path in other messages."""

    def __init__(self, message: str, reason: str) -> None:
        super().__init__(message)
        self.reason = reason


def find_folder(model_path: str, *, weights: bool = True) -> Path:
    """Return a model's folder, downloaded if `model_path` is owner/name instead of a folder.

    Without `weights`, downloads only the small files. Raises ModelError if no folder is found, or
    if the download fails.
    """
    # Unlike Path.expanduser, this keeps a path with an unknown user's home unchanged.
    folder = Path(os.path.expanduser(model_path))  # noqa: PTH111
    try:
        if folder.is_dir():
            return folder
        is_file = folder.exists()
    except OSError as error:
        unreadable = f"cannot be read: {error.strerror}"
        raise FolderError(f"{model_path} {unreadable}: check --model-path", unreadable) from error
    if is_file:
        problem = f"{model_path} is a file: --model-path takes the folder that contains it"
        raise FolderError(problem, "is a file")
    if not _REPOSITORY.fullmatch(model_path):
        raise FolderError(f"{model_path}: no such folder: check --model-path", "does not exist")
    patterns = mlx_lm_utils.DEFAULT_ALLOW_PATTERNS if weights else _SMALL_FILES
    try:
        install_response_checks()
        # mlx-lm's downloader, which uses ModelScope if the user has enabled it.
        return Path(mlx_lm_utils.snapshot_download(model_path, allow_patterns=patterns))
    except Exception as error:
        problem = (
            f"no such folder{_meant(folder)}, and downloading it failed: {reason(error, 'model')}"
        )
        raise FolderError(f"{model_path}: {problem}", f"cannot be used: {problem}") from error


def _meant(folder: Path) -> str:
    """Return a suggestion if a neighbouring folder has a similar name, else an empty string."""
    try:
        names = [path.name for path in folder.parent.iterdir() if path.is_dir()]
    except OSError:
        return ""
    near = difflib.get_close_matches(folder.name, names, n=1, cutoff=0.8)
    return f" (did you mean {folder.parent / near[0]}?)" if near else ""


def read_config(folder: Path, *, trust_remote_code: bool = False) -> dict[str, Any]:
    """Check a model folder's files, and return its config.json.

    Raises ModelError if a file is broken, mlx-lm does not support the model's type, or the model
    asks to run untrusted code.
    """
    path = folder / "config.json"
    if not path.exists():
        raise ModelError(_not_a_model(folder))
    check_files(folder)
    try:
        config = mlx_lm_utils.load_config(folder)
    except (OSError, ValueError, RecursionError) as error:
        raise ModelError(
            f"{path} is not valid JSON: {one_line(error)}: download it again"
        ) from error
    except (AttributeError, TypeError) as error:
        raise ModelError(
            f"{path} or generation_config.json: is not a JSON object: download it again"
        ) from error
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise ModelError(f"{path} has no model_type: is this a language model's folder?")
    if config.get("model_file") is not None:
        _check_code(path, config["model_file"], trusted=trust_remote_code)
        return config
    architecture = _architecture(path, config)
    config = with_known_keys(config, architecture)
    if unread := unread_config_keys(config, architecture):
        one = len(unread) == 1
        raise ModelError(
            f"{path}: {', '.join(unread[:5])}: mlx-lm's {architecture} does not read "
            f"{'this key' if one else 'these keys'}, so it would be another model: upgrade mlx-lm, "
            f"or remove {'it' if one else 'them'} if nothing depends on {'it' if one else 'them'}"
        )
    return config


def _not_a_model(folder: Path) -> str:
    """Return what a folder without config.json is, and what to do."""
    if (folder / ADAPTER_CONFIG).is_file():
        if "peft_type" in json_object(folder / ADAPTER_CONFIG):
            return f"{folder} is a PEFT adapter, not a model: convert it with mlxtune import"
        return (
            f"{folder} is an adapter, not a model: name its base model as --model-path, and the "
            "adapter as --adapter, or as --init-adapter to train it further"
        )
    # Hugging Face's cache has a folder of each revision in `snapshots`.
    if within := sorted((*folder.glob("*/config.json"), *folder.glob("snapshots/*/config.json"))):
        return f"{folder} has no config.json: name a folder in it, such as {within[0].parent}"
    return f"{folder} has no config.json: {_other_weights(folder) or 'is this a model folder?'}"


def _architecture(path: Path, config: Mapping[str, Any]) -> str:
    """Return the name of mlx-lm's module for a model's type. Raises ModelError if it has none."""
    kind = config["model_type"]
    try:
        special = mlx_lm_utils.MODEL_ARCHITECTURE_REMAPPING
        names = (special.get((kind, each)) for each in _as_list(config.get("architectures")))
        name = next(filter(None, names), mlx_lm_utils.MODEL_REMAPPING.get(kind, kind))
        _ = importlib.import_module(f"mlx_lm.models.{name}").ModelArgs
        return str(name)
    except Exception as error:
        raise ModelError(
            f"{path}: mlx-lm does not support model type {kind!r:.60}: "
            "upgrade mlx-lm, or use another model"
        ) from error


@contextmanager
def without_wildcards(folder: Path) -> Iterator[Path]:
    """Yield a path without wildcards to the folder, because mlx-lm passes the path to glob."""
    if glob.escape(str(folder)) == str(folder):
        yield folder
        return
    scratch = tempfile.gettempdir()
    parent = Path(scratch if glob.escape(scratch) == scratch else "/tmp")
    with linked_folder(folder, parent) as link:
        yield link


def check_auto_map(folder: Path) -> None:
    """Raise ModelError if an auto_map names a file outside the model's folder.

    A file may be in another repository, which is named before `--`: transformers downloads that
    file.
    """
    for name in ("config.json", "tokenizer_config.json"):
        auto_map = json_object(folder / name).get("auto_map")
        entries = auto_map.values() if isinstance(auto_map, dict) else [auto_map]
        for each in (inner for outer in entries for inner in _as_list(outer)):
            if isinstance(each, str):
                _check_code(folder / name, each.rpartition("--")[2], trusted=True)


def _as_list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def _check_code(path: Path, file: Any, *, trusted: bool) -> None:
    """Raise ModelError unless a file of model code is trusted and in the model's folder."""
    if not trusted:
        raise ModelError(
            f"{path}: asks to run {file!r:.100} from its folder: read that file, then add "
            "--trust-remote-code"
        )
    inside = isinstance(file, str) and not PurePosixPath(file).is_absolute()
    if not inside or ".." in PurePosixPath(file).parts:
        raise ModelError(f"{path}: asks to run {file!r:.100}, which is not in its folder")


def check_files(folder: Path) -> None:
    """Raise ModelError if a file is far too large or not regular, or if the config is broken.

    Links to files elsewhere are fine: Hugging Face's cache consists of them.
    """
    for path in (*folder.iterdir(), *folder.glob("additional_chat_templates/*")):
        if path.is_dir() or path.suffix not in _READ_SUFFIXES:
            continue
        if not path.is_file():
            raise ModelError(f"{path} is not a regular file: download it again")
        if reading.is_lfs_pointer(_start(path)):
            raise ModelError(f"{path} is a Git LFS pointer: run git lfs pull in its folder")
        if path.suffix != ".safetensors":
            _check_size(path)
    for name in ("config.json", "tokenizer_config.json"):
        if json_object(folder / name).get("auto_map", "") is None:
            # transformers fails with an error that does not name the key.
            raise ModelError(f"{folder / name}: 'auto_map' is null: remove this key")
    path = folder / "config.json"
    if problems := list(config_problems(json_object(path))):
        raise ModelError(f"{path}: {'; '.join(problems)}: download it again")


def _start(path: Path) -> bytes:
    try:
        return reading.read_start(path, 64)
    except OSError:
        return b""  # the error surfaces where the file is needed


def _check_size(path: Path) -> None:
    """Raise ModelError if a file, or a value in its JSON, exceeds the limit for its kind."""
    limits = limits_of(path.name)
    try:
        if path.suffix != ".json" or limits is TOKENIZER_LIMITS:
            reading.check_file(path, limits)
        elif limits in (INDEX_LIMITS, VOCABULARY_LIMITS):
            reading.check_values(path, limits)
        else:
            reading.read_value(path, limits)
    except TooLargeError as error:
        raise ModelError(
            f"{path} is far larger than such a file should be: {one_line(error)}: download it again"
        ) from error
    except (OSError, ValueError):
        pass  # the error surfaces where the file is needed


def check_weights(folder: Path, config: Mapping[str, Any]) -> None:
    """Raise ModelError unless there are weights with valid headers, and as many tensors as layers.

    Without these checks, mlx-lm could crash, or create layers until memory runs out.
    """
    headers = _tensors(folder)
    if not (tensors := len(headers)):
        others = _other_weights(folder) or "download it again"
        raise ModelError(f"{folder} has no weights (model*.safetensors): {others}")
    if problem := next(weight_problems(headers, config), None):
        reason = why_incomplete(folder, config, problem)
        raise ModelError(
            reason or f"{folder}: its weights are broken: {problem}: download it again"
        )
    for name, count in counts(config, LAYERS):
        if count > tensors:
            raise ModelError(
                f"{folder / 'config.json'}: {name} is {count}, but the weights have only {tensors} "
                "tensors: the two do not belong together: download the model again"
            )


def why_incomplete(folder: Path, config: Mapping[str, Any], problem: str) -> str | None:
    """Return why a folder is not to be loaded, and what to do, if its other files say why.

    Only a folder with a problem is incomplete: mlx-lm converts some formats of other tools, and
    reads no index, which may list files of an earlier version.
    """
    stored = next(_foreign_formats(config), None)
    if stored is not None:
        detail = f" ({problem})" if problem else ""
        return (
            f"{folder} is quantised with {stored:.40}, and mlx-lm cannot load it{detail}: download "
            "the unquantised model, and add --quantize 4 if memory is short, or one made for MLX"
        )
    index = json_object(folder / "model.safetensors.index.json").get("weight_map")
    listed = {name for name in index.values() if isinstance(name, str)} if _is_map(index) else ()
    if missing := sorted(name for name in listed if not (folder / name).exists()):
        names = join_few(map(shorten, missing))
        return f"{folder} lacks {names}, which its index lists: download the rest"
    return None


def _is_map(value: Any) -> TypeGuard[dict[str, Any]]:
    return isinstance(value, dict)


def _foreign_formats(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield the names of formats of quantised weights other than MLX's own."""
    parts = (config, config.get("text_config"))
    for part in (part for part in parts if _is_map(part) and not part.get("quantization")):
        stored = part.get("quantization_config")
        if _is_map(stored) and isinstance(method := stored.get("quant_method"), str):
            yield method


def _other_weights(folder: Path) -> str:
    """Return what to do about weights that MLX does not load, if the folder has any."""
    for ending, kind in ((".gguf", "llama.cpp's"), (".bin", "PyTorch's"), (".pth", "PyTorch's")):
        names = sorted(path.name for path in folder.iterdir() if path.name.endswith(ending))
        if names := [name for name in names if not name.startswith(_TRAINER_FILES)]:
            return (
                f"{names[0]} has weights in {kind} format, which cannot be trained: download the "
                "model in safetensors"
            )
    return ""


def weight_problems(tensors: Mapping[str, TensorInfo], config: Mapping[str, Any]) -> Iterator[str]:
    """Yield problems in the headers of the language model's tensors, with the tensors' names.

    With these problems, MLX or mlx-lm would fail or crash.
    """
    quantized = is_quantized(config)
    for name, info in tensors.items():
        if ENCODER_NAME.search(name) or not _LOADED_TENSORS.fullmatch(name):
            continue
        stem, _, kind = name.rpartition(".")
        dtypes = (*_FLOATS, "U8") if kind == "scales" else (*_FLOATS, "U32", "U8")
        scaled = info.dtype in _SCALED_DTYPES and any(
            stem + scale in tensors for scale in _SCALE_SUFFIXES
        )
        if info.dtype not in dtypes and not scaled:
            yield f"{name:.100} is {info.dtype}, not one of {', '.join(dtypes)}"
        elif quantized and kind == "scales" and f"{stem}.weight" in tensors:
            yield from _scales_problems(stem, tensors)


def _scales_problems(stem: str, tensors: Mapping[str, TensorInfo]) -> Iterator[str]:
    """Yield errors in a quantised matrix that can make MLX divide by zero or read out of bounds."""
    weight, scales = tensors[f"{stem}.weight"], tensors[f"{stem}.scales"]
    biases = tensors.get(f"{stem}.biases")
    name = f"{stem:.100}.scales"
    if weight.dtype != "U32":
        yield f"{stem:.100}.weight is {weight.dtype}, but has scales, so U32 is expected"
    elif len(scales.shape) < 2 or scales.shape[:-1] != weight.shape[:-1]:
        yield f"{name} has shape {scales.shape}, which does not fit the weight's {weight.shape}"
    elif (
        weight.shape[-1] * 32
        not in {
            scales.shape[-1] * bits * size
            for bits in FORMATS["bits"]
            for size in FORMATS["group_size"]
        }
        or not scales.shape[-1]
    ):
        yield f"{name} has shape {scales.shape}: no group size fits the weight's {weight.shape}"
    elif biases is not None and biases.shape != scales.shape:
        yield f"{stem:.100}.biases has shape {biases.shape}, but the scales have {scales.shape}"


def weight_names(folder: Path) -> list[str]:
    """Return the names of a model folder's tensors. Raises ModelError if a header is broken."""
    return list(_tensors(folder))


def _tensors(folder: Path) -> dict[str, TensorInfo]:
    tensors: dict[str, TensorInfo] = {}
    for path in sorted(folder.glob("model*.safetensors")):
        try:
            header = read_header(path).tensors
        except (OSError, ValueError) as error:
            raise ModelError(
                f"{path} cannot be read: {one_line(error)}: download it again"
            ) from error
        if twice := tensors.keys() & header.keys():
            raise ModelError(
                f"{path} and another weight file both have {min(twice):.100}: "
                "remove the file that does not belong to the model"
            )
        tensors |= header
    return tensors


def vocab_size(folder: Path) -> int:
    """Return the vocabulary size in a model's config.json; 0 if there is none."""
    config = json_object(folder / "config.json")
    for part in (config.get("text_config"), config):
        size = part.get("vocab_size") if isinstance(part, dict) else None
        if type(size) is int:
            return size
    return 0


def json_object(path: Path) -> dict[str, Any]:
    """Return a file's JSON object, or {} if there is none: errors surface at first real use."""
    try:
        value = reading.read_value(path, limits_of(path.name))
    except (OSError, ValueError):
        return {}
    return value if isinstance(value, dict) else {}
