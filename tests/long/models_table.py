"""Measure docs/models.md: each architecture against mlx-lm's own trainer, and its optimisations.

    python -m tests.long.models_table [NAME ...] [--case CASE ...] [--execution auto|gpu]
                                      [--repeats N]
    python -m tests.long.models_table --page

Models with random weights are made in a temporary folder, one at a time (up to 1 GB each).
docs/measured/models.jsonl keeps the results, one line per architecture, so that a single
architecture can be measured again; `--page` makes the page from it without measuring, and `--case`
without a name only describes the architectures anew, with tiny models. Exits with 1 and a list if
any architecture is slower or takes more memory than in mlx-lm's trainer, or does not train.

Takes up to five minutes for an architecture; close all other programs. Two commands may measure
different architectures at the same time on separate cores (`taskset -c 0 python -m …`).
"""

from __future__ import annotations

import argparse
import fcntl
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.file_formats import gguf, mlx_lm, peft
from mlxtune.backend.cpu import CPU
from mlxtune.backend.cpu.arrays import THREADS
from mlxtune.backend.models.loading import BaseModel, load_base
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config import InstructConfig
from mlxtune.core.files.writing import write_file
from mlxtune.core.machine.facts import versions
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.errors import ModelError
from tests.backend.step.executions import fresh
from tests.long.bench_table import run_bench
from tests.long.check_architectures import Result, check
from tests.long.model_sizes import LISTED, config_of, write_sized
from tests.long.models_page import CASES, broken, page
from tests.models import write_chat
from tests.paths import DOCS, SHARED

Records = dict[str, dict[str, Any]]
RECORDS = DOCS / "measured" / "models.jsonl"
LONG_TOKENS, SECONDS = 2048, 900
DEFAULT_TARGETS = InstructConfig().targets


@dataclass(frozen=True)
class Case:
    """The rows that an architecture trains on, and the number and size of steps."""

    data: str
    batch_size: int
    steps: int
    max_seq_len: int = 512


MEASURED = {
    "wikisql": Case("wikisql_train", 4, 2),
    "alpaca": Case("lf_alpaca_en_demo", 4, 1),
    "long": Case("long", 1, 1, LONG_TOKENS),
}
assert MEASURED.keys() == CASES.keys()


def describe(name: str, folder: Path) -> dict[str, Any]:
    """Return whether an architecture trains, and its optimisations, targets and working exports.

    Everything is tried with a tiny model, which is written to the folder.
    """
    result, targets = _compare(name, folder)
    pipeline = fresh(folder, targets=targets)
    lora = pipeline.lora
    return {
        "trains": result.same,
        "gets": result.gets | {"layerwise": result.gets["layerwise"] and _gets_kernels(name)},
        "targets": list(lora.keys) if targets == DEFAULT_TARGETS else [],
        "layers": [lora.layers, lora.num_layers],
        "exports": _exports(pipeline, folder),
        "exports_all": _exports(fresh(folder, targets=("all",)), folder),
    }


def _compare(name: str, folder: Path) -> tuple[Result, tuple[str, ...]]:
    """Compare an architecture with the plain path, on the default targets if it has any of them."""
    try:
        return check(name, folder, targets=DEFAULT_TARGETS), DEFAULT_TARGETS
    except ModelError:
        return check(name, folder, targets=("all",)), ("all",)


def _gets_kernels(name: str) -> bool:
    """Return whether the CPU's kernels run the measured model, whose weights are not drawn."""
    model_type = name.split()[0]
    architecture = import_module(f"mlx_lm.models.{model_type}")
    config = {"model_type": model_type, **config_of(name)}
    model = architecture.Model(architecture.ModelArgs.from_dict(config))
    parameters = sum(value.size for _, value in tree_flatten(model.parameters()))
    return CPU.pay_off(parameters, mx.float32, model)


def _exports(pipeline: InstructPipeline, folder: Path) -> list[str]:
    """Return the formats in which a pipeline's adapter can be written."""
    base = load_base(folder, "float32")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch)
        pipeline.write(out / ADAPTER)
        adapter = mlx_lm.read_mlx_lm(AdapterFile(out / ADAPTER))
        write_gguf = gguf.write_gguf if find_spec("gguf") else _ask_gguf
        formats: dict[str, Callable[[], Any]] = {
            "mlx-lm": partial(mlx_lm.load_with_mlx_lm, base.model, out),
            "PEFT": partial(peft.write_peft, adapter, folder, out),
            "GGUF": partial(write_gguf, adapter, base, out),
        }
        return [name for name, write in formats.items() if _works(write)]


def _ask_gguf(adapter: Any, base: BaseModel, folder: Path) -> None:
    """Raise any ModelError that `write_gguf` would raise; this does not need the package gguf."""
    adapter.check_plain("GGUF")
    if base.model_type not in gguf.ARCHITECTURES:
        raise ModelError(base.model_type)


def _works(write: Callable[[], Any]) -> bool:
    try:
        write()
    except ModelError:
        return False
    return True


def measure(folder: Path, data: Path, case: Case, **options: Any) -> dict[str, Any]:
    """Return both sides' results in a case, or the error of the side that failed."""
    given = {
        "--model-path": folder.name,
        "--data": data,
        "--batch-size": case.batch_size,
        "--max-seq-len": case.max_seq_len,
        "--steps": case.steps,
        **{f"--{name}": value for name, value in options.items()},
    }
    try:
        result = run_bench(
            folder.parent, "bench.json", given, timeout=SECONDS, capture_output=True, text=True
        )
    except subprocess.CalledProcessError as error:
        return {"failed": (error.stderr.strip().splitlines() or [f"exit {error.returncode}"])[-1]}
    except subprocess.TimeoutExpired:
        return {"failed": f"took longer than {SECONDS} s"}
    return _figures(result)


def _figures(result: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values that the table needs from `bench`'s JSON."""
    ours, theirs = result["ours"], result["theirs"]

    def both(quantity: str) -> list[float | None]:
        sides = (side.get(quantity, {}).get("median") for side in (ours, theirs))
        return [None if value is None else round(value, 2) for value in sides]

    return {
        "execution": ours["execution"],
        "real_tokens_per_s": both("real_tokens_per_s"),
        "peak_memory": both("peak_memory"),
        "step_efficiency": result["step_efficiency"],
        "losses_agree": result["losses_agree"],
        "theirs_failed": theirs["failed"],
    }


def rows(case: Case, folder: Path, shared: Path) -> Path:
    """Return the data file of a case for a model folder."""
    if case.data != "long":
        return shared / "chat" / f"{case.data}.jsonl"
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    text = (shared / "chat" / "lf_alpaca_en_demo.jsonl").read_text(encoding="utf-8")[:60_000]
    tokens = tokenizer.encode(text).ids
    context, answer = (tokenizer.decode(part) for part in (tokens[:1600], tokens[1600:3000]))
    # Decoding may join or split tokens at the cuts, so the row is longer than needed.
    return write_chat(
        folder.parent / "long.jsonl", [[("user", context), ("assistant", answer)]]
    ).resolve()


def read_records(path: Path) -> Records:
    """Return the measurements by architecture."""
    if not path.exists():
        return {}
    lines = path.read_text(encoding="utf-8").splitlines()
    return {record["name"]: record for record in map(json.loads, lines)}


def keep(path: Path, record: dict[str, Any]) -> None:
    """Write an architecture's measurements to the file, in the order of `LISTED`."""
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        records = read_records(path) | {record["name"]: record}
        found = [records[name] for name in LISTED if name in records]
        write_file(path, [f"{json.dumps(each)}\n".encode() for each in found])
    finally:
        os.close(folder)


def measure_all(
    name: str, cases: list[str], execution: str, repeats: int, records: Records
) -> None:
    """Describe an architecture, measure its cases, and save each immediately."""
    record = records.setdefault(name, {"name": name, "cases": {}})
    with tempfile.TemporaryDirectory(prefix="mlxtune-models-") as scratch:
        record |= describe(name, Path(scratch) / "tiny") | {"versions": versions()}
        keep(RECORDS, record)
        for case in cases:
            layers = LISTED[name].short if case == "long" else None
            folder = Path(scratch) / f"model-{layers or 'whole'}"
            if not folder.exists():
                write_sized(folder, name, SHARED, layers)
            options = {"execution": execution, "repeats": repeats}
            if not record["targets"]:
                options["targets"] = "all"
            data = rows(MEASURED[case], folder, SHARED)
            found = measure(folder, data, MEASURED[case], **options)
            record["cases"].setdefault(execution, {})[case] = found | {
                "model_layers": layers,
                "repeats": repeats,
                "threads": THREADS,
            }
            keep(RECORDS, record)
            print(f"{name}, {case}, {execution}: {json.dumps(found)}", flush=True)


def main() -> None:
    """Measure the named architectures, or all; write the page; exit with the broken rules."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=", ".join(LISTED))
    parser.add_argument("--case", nargs="*", choices=CASES, default=list(CASES))
    parser.add_argument("--execution", choices=("auto", "gpu"), default="auto")
    parser.add_argument("--repeats", type=int, default=1, help="runs of each side, for medians")
    parser.add_argument("--page", action="store_true", help="make the page, measure nothing")
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in LISTED]:
        parser.error(f"nothing is named {', '.join(unknown)}: there are {', '.join(LISTED)}")
    records = read_records(RECORDS)
    for name in [] if given.page else given.names or LISTED:
        measure_all(name, given.case, given.execution, given.repeats, records)
    write_file(DOCS / "models.md", [page(records).encode()])
    if found := broken(records):
        sys.exit("\n".join(found))


if __name__ == "__main__":
    main()
