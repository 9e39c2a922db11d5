"""A process of `mlxtune doctor --prove`, for what needs a model in memory.

    python -m mlxtune.diagnosis.worker RECORDS JOB PATH...

Each result is a line of JSON, appended to the file RECORDS.
"""

import json
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mlxtune.commands.prepare.dataset import Reader, load_dataset
from mlxtune.config import DataConfig, StepConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.files.files import append_line
from mlxtune.diagnosis import proofs as proving
from mlxtune.diagnosis.kernel_proofs import kernel_differences

# Tokens of a micro-batch, and rows that fill the largest.
SIZES, ROWS = (128, 512, 2048), 24
# Rows of the steps that are timed.
TIMED_ROWS = 12


def gradients(model: Path, data: Path) -> Iterator[dict[str, Any]]:
    """Yield how far each way to compute a step is from the plain one."""
    for way, loss, gradient in proving.gradient_differences(model, _examples(model, data)):
        yield {"way": way, "loss": loss, "gradient": gradient}


def reference(model: Path, data: Path, out: Path) -> Iterator[dict[str, Any]]:
    """Write the gradients of the plain path in float32."""
    proving.write_reference(model, _examples(model, data), out)
    yield {}


def dtype(model: Path, data: Path, expected: Path) -> Iterator[dict[str, Any]]:
    """Yield how far the gradients of each 16-bit dtype and way are from the reference."""
    found = proving.dtype_differences(model, _examples(model, data), expected)
    for way, cosine, norm, unpacked in found:
        yield {"way": way, "cosine": cosine, "norm": norm, "unpacked": unpacked}


def kernels() -> Iterator[dict[str, Any]]:
    """Yield how far each kernel is from the CPU's operations."""
    yield from kernel_differences("float32")


def kernels16() -> Iterator[dict[str, Any]]:
    """Yield how far each kernel in 16 bits is from the CPU's operations in float32."""
    yield from kernel_differences("bfloat16")


def steps(model: Path, data: Path) -> Iterator[dict[str, Any]]:
    """Yield the speed of steps, in each choice of their shapes."""
    for name, speed in proving.timed_steps(model, _examples(model, data)[:TIMED_ROWS]):
        yield {"shapes": name, "tokens_per_s": speed}


def memory(model: Path, data: Path) -> Iterator[dict[str, Any]]:
    """Yield the predicted and the measured peak of each size of a micro-batch."""
    examples = _examples(model, data)[:ROWS]
    peaks = proving.memory_peaks(model, examples, SIZES, StepConfig.memory_limit)
    for tokens, predicted, measured in peaks:
        yield {"tokens": tokens, "predicted": predicted, "measured": measured}


def base(like: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Write the base in 4 bits."""
    proving.write_base(like, folder)
    yield {}


def dense(like: Path, folder: Path) -> Iterator[dict[str, Any]]:
    """Write the base in 16 bits."""
    proving.write_base(like, folder, quantized=False)
    yield {}


_ALL = (gradients, reference, dtype, kernels, kernels16, memory, steps, base, dense)
JOBS = {job.__name__: job for job in _ALL}


def _examples(model: Path, data: Path) -> list[Example]:
    """Return all examples of a data file, as `train` encodes them."""
    config = DataConfig(model_path=str(model), data=(str(data),), val_split=0.0, no_cache=True)
    return list(load_dataset(config, Reader(config, model)).corpus)


def main() -> None:
    """Do the job that the command line names."""
    records, job, *paths = sys.argv[1:]
    began = time.perf_counter()
    for record in JOBS[job](*map(Path, paths)):
        now = time.perf_counter()
        append_line(Path(records), json.dumps(record | {"seconds": now - began}))
        began = now


if __name__ == "__main__":
    main()
