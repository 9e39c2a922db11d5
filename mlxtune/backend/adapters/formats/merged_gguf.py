"""A fused model as GGUF, made by llama.cpp's own converter and checked against the fused folder."""

import shlex
import shutil
from contextlib import suppress
from pathlib import Path

import mlx.core as mx
import numpy as np

from mlxtune.backend.adapters.formats.adapter import Adapter
from mlxtune.backend.adapters.formats.gguf import check_supported, gguf_names, orders
from mlxtune.backend.models.loading import open_base
from mlxtune.core.files.processes import output_of
from mlxtune.core.text import count
from mlxtune.errors import OutputError, one_line

MERGED = "model.gguf"
# The converter's name in llama.cpp's packages, and in its repository.
_CONVERTERS = ("convert_hf_to_gguf.py", "convert-hf-to-gguf")
# The converter's names of the dtypes that a folder is stored in.
_OUTTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


def check_convertible(model_type: str) -> None:
    """Raise ModelError if the check could not read the converter's files."""
    check_supported(model_type, "--gguf", "run llama.cpp's convert_hf_to_gguf.py yourself")


def converter() -> str | None:
    """Return llama.cpp's converter, if it is installed."""
    return next(filter(None, map(shutil.which, _CONVERTERS)), None)


def conversion(program: str, folder: Path, dtype: str) -> list[str]:
    """Return the command that writes a folder stored in a dtype as GGUF."""
    target = ["--outfile", str(folder / MERGED), "--outtype", _OUTTYPES[dtype]]
    return [program, str(folder), *target]


def advice(folder: Path, dtype: str) -> str:
    """Return how to convert a folder where the converter is not installed."""
    command = shlex.join(conversion(_CONVERTERS[0], folder, dtype))
    return f"llama.cpp's converter is not on the PATH: install llama.cpp, then run {command}"


def convert(program: str, folder: Path, dtype: str) -> None:
    """Run llama.cpp's converter. Raises OutputError with the last line that it printed."""
    command = conversion(program, folder, dtype)
    try:
        done = output_of(command)
    except OSError as error:
        raise OutputError(f"{program}: cannot be run: {error.strerror}") from error
    if done.status or not (folder / MERGED).is_file():
        lines = (done.stderr + done.stdout).split("\n")
        said = next((line for line in reversed(lines) if line.strip()), "no output")
        raise OutputError(
            f"{program}: failed ({one_line(said)}): leave out --gguf to write the folder alone"
        )


def check_merged(folder: Path, adapter: Adapter, *, trust_remote_code: bool) -> str:
    """Compare the GGUF in a fused folder with the folder's weights; return a line about it.

    Every weight with an update must have the folder's values, in llama.cpp's order of rows and
    columns. Raises OutputError, naming what differs, and ModelError.
    """
    import gguf

    base = open_base(folder, "float32", trust_remote_code=trust_remote_code)
    modules = dict(base.model.named_modules())
    tensors = {}
    # The package raises all kinds of errors for files that are cut off or damaged.
    with suppress(Exception):
        tensors = {each.name: each for each in gguf.GGUFReader(folder / MERGED).tensors}
    if not tensors:
        raise OutputError(
            f"{MERGED}: the gguf package cannot read what llama.cpp's converter wrote"
        )
    names = gguf_names(adapter.modules, base)
    for name, update in adapter.modules.items():
        tensor = tensors.get(names.get(name, ""))
        if tensor is None:
            raise OutputError(f"{MERGED}: has no weight of {name}, which the adapter changes")
        found = gguf.quants.dequantize(tensor.data, tensor.tensor_type)
        wanted = np.array(modules[name].weight.astype(mx.float32))
        if not update.of_experts:
            columns, rows = orders(name, update, base)
            wanted = wanted[rows][:, columns]
        if found.shape != wanted.shape or not np.array_equal(found, wanted):
            raise OutputError(f"{MERGED}: {tensor.name} differs from {name} of the fused model")
        mx.clear_cache()
    fused = count(len(adapter.modules), "fused weight")
    return f"{MERGED}: {count(len(tensors), 'tensor')}; {fused} equal to the folder's"
