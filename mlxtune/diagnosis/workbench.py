"""Small models and rows for `mlxtune doctor --prove`, and the processes that use them."""

import json
import signal
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from mlxtune.config.trial_config import DATA, demo_file
from mlxtune.core.files.processes import HelperError, Helpers, HelperTimeoutError, describe_end
from mlxtune.core.files.reading import file_hash, read_bytes, read_json, read_text
from mlxtune.core.files.scratch import lasting_folder
from mlxtune.core.files.writing import write_file
from mlxtune.diagnosis.checks import ProofCheck

QWEN, GEMMA = "demo-qwen3", "demo-gemma3"
# The base models, and the jobs of the helper that make them.
BASE, DENSE = "4-bit base", "16-bit base"
_FOLDER_NAMES = {BASE: "base", DENSE: "dense"}
# Several threads would slow down the matmuls of such small models.
_ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
# Without this, the newest GPUs round the factors of float32 matmuls to 19 bits.
_NO_TF32 = {"MLX_ENABLE_TF32": "0"}
# Jobs that run without `_NO_TF32`, as training does.
_JOBS_WITH_TF32 = ("products", "kernels16", "dtype", "steps")
# Jobs whose matmuls are large.
_LARGE_JOBS = ("products",)
_ROWS = 32
# With dropout, at most two turns of a row share a prefix, so bytes stay equal on Metal.
_TRAINING = (
    *("--batch-size", "4", "--val-split", "0", "--samples", "0", "--save-steps", "2"),
    *("--targets", "all", "--dropout", "0.1", "--lr", "1e-3"),
)
# An epoch has 8 steps; runs on the 4-bit base stop after 3.
_BASE_STEPS = ("--max-steps", "3")
_INTERRUPT_STATUS = 130


@dataclass(frozen=True)
class Workbench:
    """Models, rows and runs in the folder `scratch`."""

    scratch: Path

    def model(self, name: str) -> Path:
        """Return a model's folder; create a base model on first use."""
        if name not in _FOLDER_NAMES:
            return demo_file(name)
        folder = self.scratch / _FOLDER_NAMES[name]
        if not folder.exists():
            list(self.measure(_FOLDER_NAMES[name], demo_file(QWEN), folder))
        return folder

    @cached_property
    def rows(self) -> Path:
        """A file of the rows to train on: the first rows of the demo data."""
        lines = read_text(demo_file(DATA)).splitlines()
        return self._write("rows.jsonl", lines[:_ROWS])

    @cached_property
    def step(self) -> Path:
        """A file of rows that share prefixes: one row per sequence of roles, the last one twice."""
        kinds: dict[tuple[str, ...], str] = {}
        for line in read_text(self.rows).splitlines():
            kinds.setdefault(
                tuple(message["role"] for message in json.loads(line)["messages"]), line
            )
        lines = list(kinds.values())
        return self._write("step.jsonl", [*lines, lines[-1]])

    def measure(self, job: str, *paths: Path) -> Iterator[ProofCheck]:
        """Run a job of the helper, and yield its checks.

        Raises HelperError if the job fails or takes too long, after the checks that it has made.
        """
        folder = lasting_folder("job", self.scratch)
        records = folder / "records"
        arguments = ["-m", "mlxtune.diagnosis.proof_helper", str(records), job, *map(str, paths)]
        variables = ({} if job in _LARGE_JOBS else _ONE_THREAD) | (
            {} if job in _JOBS_WITH_TF32 else _NO_TF32
        )
        late, status = None, 0
        try:
            status = Helpers(self.scratch).call(arguments, folder, variables=variables)
        except HelperTimeoutError as error:
            late = error
        if records.exists():
            for line in read_text(records).splitlines():
                yield ProofCheck(**json.loads(line))
        if late is not None:
            raise late
        _expect(status, 0, folder)

    def measure_model(self, job: str, name: str, rows: Path) -> Iterator[ProofCheck]:
        """Yield the checks of a job on a model, with the model's name before each check's name."""
        for check in self.measure(job, self.model(name), rows):
            yield replace(check, name=f"{name}: {check.name}")

    def bench(self, name: str, *timed: str) -> dict[str, Any]:
        """Return the JSON of `mlxtune bench --against mlx-lm` on a model; `timed` are options."""
        folder = self.scratch / "bench"
        options = ("--against", "mlx-lm", "--repeats", "1", "--json", str(folder / "bench.json"))
        _expect(self._run("bench", name, folder, *options, *timed), 0, folder)
        return read_json(folder / "bench.json")

    def train(self, name: str, run: str = "straight") -> str:
        """Return the hash of a run's adapter; each run trains only once."""
        folder = self.scratch / f"{name}-{run}"
        adapter = folder / "adapters.safetensors"
        if not adapter.exists():
            _expect(self._train(name, folder), 0, folder)
        return file_hash(adapter)

    def resumed(self, name: str, stop: signal.Signals) -> tuple[str, int]:
        """Stop and resume a run; return its adapter's hash and the step after which it stopped."""
        folder = self.scratch / f"{name}-{stop.name}"
        run = folder / "checkpoints"
        metrics = run / "metrics.jsonl"

        def has_begun() -> bool:
            # A killed run resumes from its last checkpoint; an interrupted run saves another
            # checkpoint.
            return any(run.glob("step-*")) if stop == signal.SIGKILL else metrics.exists()

        status = self._train(name, folder, until=has_begun, stop=stop)
        if status == 0:
            raise HelperError("the run ended before it was stopped")
        _expect(status, -9 if stop == signal.SIGKILL else _INTERRUPT_STATUS, folder)
        step = read_bytes(metrics).count(b"\n")
        resume = ["-m", "mlxtune", "train", "--resume", "--quiet"]
        _expect(Helpers(self.scratch).call(resume, folder), 0, folder)
        return file_hash(folder / "adapters.safetensors"), step

    def _train(self, name: str, folder: Path, **options: Any) -> int:
        steps = _BASE_STEPS if name == BASE else ()
        return self._run("train", name, folder, *_TRAINING, *steps, **options)

    def _run(self, command: str, name: str, folder: Path, *options: str, **settings: Any) -> int:
        """Run a command in a folder, on a model and the rows; return its exit status."""
        data = ("--model-path", str(self.model(name)), "--data", str(self.rows))
        run = ["-m", "mlxtune", command, *data, "--no-cache", "--quiet", *options]
        return Helpers(self.scratch).call(run, folder, **settings)

    def _write(self, name: str, lines: Sequence[str]) -> Path:
        path = self.scratch / name
        write_file(path, [f"{line}\n".encode() for line in lines])
        return path


def _expect(status: int, expected: int, folder: Path) -> None:
    if status != expected:
        raise HelperError(describe_end(status, folder))
