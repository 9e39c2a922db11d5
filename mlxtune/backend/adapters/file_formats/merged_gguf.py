"""Converts a fused model to GGUF with llama.cpp's tools, and checks the GGUF's weights."""

import shlex
import shutil
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np

from mlxtune.backend.adapters.file_formats.adapter import Adapter
from mlxtune.backend.adapters.file_formats.gguf import check_supported, gguf_names, orders
from mlxtune.backend.models.loading import open_base
from mlxtune.config.data_config import BaseOptions
from mlxtune.core.files.ours import is_ours
from mlxtune.core.files.processes import output_of
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.writing import write_file
from mlxtune.core.formatting import pluralize
from mlxtune.core.machine.installation import pip_command
from mlxtune.errors import OutputError, one_line

MERGED_MODEL = "model.gguf"
MODELFILE = "Modelfile"
# The converter's names in llama.cpp's repository, and in the packages of some systems.
_CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
_QUANTIZER = "llama-quantize"
# Since May 2026, llama.cpp's builds and packages do not include the converter (llama.cpp#23171).
_CONVERTER_REMEDY = (
    "git clone https://github.com/ggml-org/llama.cpp, put the clone on the PATH, "
    f"{pip_command('install', 'torch')}"
)
_QUANTIZER_REMEDY = "brew install llama.cpp"
# The converter's names for the dtypes of a folder's weights.
_OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def check_convertible(model_type: str, option: str) -> None:
    """Raise ModelError if `check_merged` does not support this model type."""
    check_supported(model_type, option, "run llama.cpp's convert_hf_to_gguf.py yourself")


def converter() -> str | None:
    """Return the path of llama.cpp's converter; None if it is not on the PATH."""
    return next(filter(None, map(shutil.which, _CONVERTERS)), None)


def find_quantizer() -> str | None:
    """Return the path of llama.cpp's quantiser; None if it is not on the PATH."""
    return shutil.which(_QUANTIZER)


def conversion(program: str, folder: Path, dtype: str) -> list[str]:
    """Return the command that converts a folder with weights of this dtype to GGUF."""
    target = ["--outfile", str(folder / MERGED_MODEL), "--outtype", _OUTTYPES[dtype]]
    return [program, str(folder), *target]


def advice(folder: Path, dtype: str) -> str:
    """Return a message on how to get the missing converter and convert a folder with it."""
    command = shlex.join(conversion(_CONVERTERS[0], folder, dtype))
    return f"llama.cpp's converter is not on the PATH: {_CONVERTER_REMEDY}, then run {command}"


def write_modelfile(folder: Path) -> None:
    """Write a Modelfile that makes Ollama load the folder's GGUF or, without one, the folder."""
    model = f"./{MERGED_MODEL}" if (folder / MERGED_MODEL).is_file() else "."
    write_file(folder / MODELFILE, [f"FROM {model}\n".encode()])


def ollama_advice(folder: Path, quantize: str | None, *, converted: bool) -> str:
    """Return a message that names the missing tool and gives an Ollama command to use instead."""
    missing, written, get = _QUANTIZER, f"{MERGED_MODEL} is not quantised", _QUANTIZER_REMEDY
    if not converted:
        missing, get = _CONVERTERS[0], _CONVERTER_REMEDY
        written = "a model folder is written instead"
    option = ["-q", quantize] if quantize else []
    command = shlex.join(["ollama", "create", *option, "NAME", "-f", str(folder / MODELFILE)])
    return f"{missing} is not on the PATH, so {written}: {get}, or run {command}"


def convert(program: str, folder: Path, dtype: str, remedy: str) -> None:
    """Run llama.cpp's converter on a folder whose weights have this dtype. Raises OutputError."""
    _run(conversion(program, folder, dtype), folder / MERGED_MODEL, remedy)


def quantize_gguf(program: str, plain: Path, target: Path, type_name: str) -> None:
    """Quantise a GGUF to one of llama.cpp's types, such as Q4_K_M. Raises OutputError."""
    remedy = f"choose another --quantize: {_QUANTIZER} --help lists the types"
    _run([program, str(plain), str(target), type_name], target, remedy)
    shapes = [
        {name: tuple(tensor.shape) for name, tensor in _tensors(path).items()}
        for path in (plain, target)
    ]
    if shapes[0] != shapes[1] or file_hash(plain) == file_hash(target):
        raise OutputError(f"{program}: wrote no quantised copy of {plain.name}: {remedy}")


def _tensors(path: Path) -> dict[str, Any]:
    """Return the tensors of a GGUF by name; none if it cannot be read."""
    import gguf

    # The package raises many kinds of errors for truncated or damaged files.
    with suppress(Exception):
        return {tensor.name: tensor for tensor in gguf.GGUFReader(path).tensors}
    return {}


def _run(command: Sequence[str], output: Path, remedy: str) -> None:
    """Run a tool that writes `output`. Raises OutputError with the tool's last line if it fails."""
    program = command[0]
    try:
        done = output_of(command)
    except OSError as error:
        raise OutputError(f"{program} cannot be run: {error.strerror}") from error
    # A link could lead out of the folder, so it is refused.
    if done.status or not is_ours(output):
        lines = (done.stdout + done.stderr).split("\n")
        last_line = next((line for line in reversed(lines) if line.strip()), "no output")
        remedy = _CONVERTER_REMEDY if last_line.startswith("ModuleNotFoundError") else remedy
        raise OutputError(f"{program}: failed ({one_line(last_line)}): {remedy}")


def check_merged(folder: Path, adapter: Adapter, options: BaseOptions) -> str:
    """Compare the GGUF in a fused folder with the folder's weights; return a summary line.

    Every weight with an update must have the folder's values, in llama.cpp's order of rows and
    columns. Raises OutputError if a weight is missing or different. Raises ModelError if the folder
    cannot be opened.
    """
    import gguf

    base = open_base(folder, "float32", options)
    modules = dict(base.model.named_modules())
    tensors = _tensors(folder / MERGED_MODEL)
    if not tensors:
        raise OutputError(
            f"{MERGED_MODEL}: the gguf package cannot read what llama.cpp's converter wrote"
        )
    names = gguf_names(adapter.modules, base)
    for name, update in adapter.modules.items():
        tensor = tensors.get(names.get(name, ""))
        if tensor is None:
            raise OutputError(f"{MERGED_MODEL} has no weight of {name}, which the adapter changes")
        written = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = np.array(modules[name].weight.astype(mx.float32))
        if not update.is_of_experts:
            columns, rows = orders(name, update, base)
            wanted = wanted[rows][:, columns]
        if written.shape != wanted.shape or not np.array_equal(written, wanted):
            raise OutputError(
                f"{MERGED_MODEL}: {tensor.name} differs from {name} of the fused model"
            )
        mx.clear_cache()
    fused = pluralize(len(adapter.modules), "fused weight")
    return f"{MERGED_MODEL}: {pluralize(len(tensors), 'tensor')}; {fused} equal to the folder's"
