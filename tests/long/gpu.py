"""Run all checks and benchmarks of an NVIDIA GPU in one command, in under nine minutes.

    python -m tests.long.gpu [--json gpu.json] [--shared FOLDER]
    python -m tests.long.gpu --tiny

The parts: the equality tests on the device, `step_costs` against mlx-lm at real sizes with the
share of the card's peak, the hashes of two equal runs, and predicted against measured memory.
Models with random weights are made in a temporary folder. Each part has a time limit, and is
skipped with the reason when no time is left; the JSON is written after each part. Exits with 1 if a
part failed. All processes and later runs share the CUDA kernels that MLX compiles
(MLX_PTX_CACHE_DIR): if compiling took all of a part's time, run the command again.

`--tiny` runs every part on tiny models and any device, in less than a minute on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from tests.paths import ROOT, SHARED

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlxtune.backend.device.device import device_name, on_cpu
from mlxtune.core.files.files import write_json
from mlxtune.core.files.processes import kernel_cache
from mlxtune.core.machine.facts import versions
from tests.long import bench_table
from tests.models import sums, write_chat
from tests.models import write_model as write_tiny_model

TOTAL_S = 525
EQUALITY = [
    "tests/backend/step/test_execution.py",
    "tests/backend/step/test_execution_models.py",
    "tests/backend/forward/test_recompute.py",
    "tests/backend/forward/test_side_by_side.py",
    "tests/backend/forward/test_loss.py",
    "tests/backend/forward/test_head.py",
]
SHAPES = {
    "qwen3-0.6b": bench_table.SHAPES["qwen3-0.6b"],
    "qwen3-4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
# Dense 16-bit TFLOP/s from the makers' data sheets; keys are parts of device names.
DATA_SHEETS = {
    "H100": 989.0,
    "H200": 989.0,
    "A100": 312.0,
    "L40S": 362.0,
    "L4": 121.0,
    "A10": 125.0,
}
LONG_TOKENS, CHARACTERS_PER_TOKEN = 4096, 4.5


@dataclass(frozen=True)
class Case:
    """A benchmark: a model, its data, and the number and size of steps."""

    model: str
    data: str
    batch_size: int
    steps: int
    max_seq_len: int = 1024
    bits: int | None = None

    @property
    def name(self) -> str:
        """The case's name in the report."""
        return f"{self.model}{f' {self.bits}-bit' if self.bits else ''}, {self.data}"


CASES = (
    Case("qwen3-0.6b", "wikisql_train", 8, 16),
    Case("qwen3-0.6b", "lf_alpaca_en_demo", 8, 12),
    Case("qwen3-0.6b", "long", 4, 4, max_seq_len=LONG_TOKENS),
    Case("qwen3-4b", "wikisql_train", 8, 8, bits=4),
    Case("qwen3-4b", "lf_alpaca_en_demo", 4, 6, bits=4),
)
TINY_CASES = (Case("tiny", "sums", 4, 2, max_seq_len=64),)


@dataclass
class Parts:
    """The parts of the report, run in turn until the time is over."""

    path: Path
    report: dict[str, Any]
    total_s: float = TOTAL_S
    started: float = field(default_factory=time.monotonic)

    def run(self, name: str, limit_s: float, part: Callable[[float], dict[str, Any]]) -> None:
        """Run a part within its time; record its result, or the reason why it has none."""
        begun = time.monotonic()
        seconds = min(limit_s, self.total_s - (begun - self.started))
        if seconds < limit_s / 4:
            found: dict[str, Any] = {"skipped": f"{max(seconds, 0):.0f} s are left"}
        else:
            try:
                found = part(seconds)
            except Skip as reason:
                found = {"skipped": str(reason)}
            except subprocess.TimeoutExpired:
                found = {"failed": f"took longer than {seconds:.0f} s"}
            # Any error: the other parts still run.
            except Exception as error:  # noqa: BLE001
                found = {"failed": f"{type(error).__name__}: {error}"}
        found["seconds"] = round(time.monotonic() - begun, 1)
        self.report["parts"][name] = found
        write_json(self.path, self.report)
        print(f"{name}: {json.dumps(found)[:300]}", flush=True)

    @property
    def failed(self) -> list[str]:
        """The names of the parts that failed."""
        return [name for name, part in self.report["parts"].items() if "failed" in part]


class Skip(Exception):
    """Raised by a part that cannot run on this machine."""


@dataclass
class Machine:
    """The folder for temporary files, and the models and data of the cases."""

    scratch: Path
    shared: Path
    tiny: bool

    def model(self, case: Case) -> Path:
        """Return the folder of a case's model, which is written at its first use."""
        folder = self.scratch / f"{case.model}-{case.bits or 16}"
        if not folder.exists():
            if self.tiny:
                return write_tiny_model(folder, "qwen3")
            if not (self.shared / "tokenizers" / "qwen3").is_dir():
                raise Skip(f"{self.shared} has no tokenizers/qwen3: name it with --shared")
            write_model(folder, SHAPES[case.model], case.bits, self.shared)
        return folder

    def data(self, case: Case) -> Path:
        """Return the data file of a case."""
        if self.tiny:
            return write_chat(self.scratch / "sums.jsonl", sums(20))
        if case.data == "long":
            return write_long_rows(self.scratch / "long.jsonl", self.shared)
        return self.shared / "chat" / f"{case.data}.jsonl"

    def options(self, case: Case) -> list[str]:
        """Return the command's options for a case."""
        folder = self.model(case)
        options = {
            "--model-path": folder,
            "--data": self.data(case),
            "--batch-size": case.batch_size,
            "--max-seq-len": case.max_seq_len,
            "--memory-limit": 4 if self.tiny else 60,
        }
        if not self.tiny:
            options["--dtype"] = "bfloat16"
        return [str(part) for option in options.items() for part in option]


def write_model(folder: Path, shape: dict[str, int], bits: int | None, shared: Path) -> None:
    """Write a model folder with random weights in bfloat16 or `bits`, and Qwen3's tokenizer."""
    folder.mkdir()
    options: dict[str, Any] = bench_table.COMMON | shape
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs(**options))
    model.set_dtype(mx.bfloat16)
    if bits is not None:
        nn.quantize(model, group_size=64, bits=bits)
        options["quantization"] = {"group_size": 64, "bits": bits}
    weights = dict(tree_flatten(model.parameters()))
    for name in list(weights):
        # Draw and quantise one matrix at a time, to save memory.
        mx.eval(weights[name])
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = options | {"torch_dtype": "bfloat16", "eos_token_id": 151_645}
    (folder / "config.json").write_text(json.dumps(config))
    for file in (shared / "tokenizers" / "qwen3").iterdir():
        shutil.copy(file, folder)
    del model, weights
    mx.clear_cache()


def write_long_rows(path: Path, shared: Path) -> Path:
    """Write rows of about 4,096 tokens: earlier questions and answers as context, then one more."""
    source = shared / "chat" / "lf_alpaca_en_demo.jsonl"
    rows, context = [], ""
    for line in source.read_text().splitlines():
        *_, question, answer = (message["content"] for message in json.loads(line)["messages"])
        if len(context) > (LONG_TOKENS - 600) * CHARACTERS_PER_TOKEN:
            rows.append([("user", f"{context}\n{question}"), ("assistant", answer[:1500])])
            context = ""
        context += f"{question}\n{answer}\n"
    return write_chat(path, rows * 3)


def command(
    arguments: list[str], seconds: float, **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a module with this Python. Raises RuntimeError with its last output if it fails."""
    done = subprocess.run(
        [sys.executable, "-m", *arguments],
        cwd=ROOT,
        env=os.environ | {"MLX_PTX_CACHE_DIR": kernel_cache()} | variables,
        capture_output=True,
        text=True,
        timeout=seconds,
        check=False,
    )
    if done.returncode:
        raise RuntimeError("\n".join((done.stdout + done.stderr).splitlines()[-15:]))
    return done


def equality(seconds: float, tests: list[str]) -> dict[str, Any]:
    """Run the tests that compare each way of computing a step with the plain path."""
    arguments = ["pytest", "-q", "-p", "no:cacheprovider", *tests]
    # TF32, MLX's default on CUDA, has three digits; the tests need five.
    done = command(arguments, seconds, MLX_ENABLE_TF32="0")
    return {"tests": tests, "result": done.stdout.strip().splitlines()[-1]}


def proof(seconds: float, scratch: Path) -> dict[str, Any]:
    """Run `doctor --prove`; return its report, marked as failed if a check failed."""
    path = scratch / "proof.json"
    try:
        command(["mlxtune", "doctor", "--prove", "--share", str(path)], seconds)
    except RuntimeError as error:
        if not path.exists():
            raise
        return {"failed": str(error), "report": json.loads(path.read_text())}
    return {"report": json.loads(path.read_text())}


def card(size: int) -> dict[str, Any]:
    """Return the measured TFLOP/s of a large product, and the data sheet's TFLOP/s if known."""
    dtype = mx.float32 if on_cpu() else mx.bfloat16
    a, b = (mx.random.normal((size, size)).astype(dtype) for _ in range(2))
    mx.eval(a @ b)
    samples = []
    for _ in range(5):
        started = time.perf_counter()
        mx.eval([a @ b for _ in range(4)])
        samples.append(4 * 2 * size**3 / (time.perf_counter() - started) / 1e12)
    name = device_name()
    sheet = next((peak for part, peak in DATA_SHEETS.items() if part in name), None)
    return {"measured_tflops": max(samples), "data_sheet_tflops": sheet}


def bench(seconds: float, machine: Machine, case: Case, peak: dict[str, Any]) -> dict[str, Any]:
    """Compare a case's speed with mlx-lm's, and the case's FLOP/s with the card's peak."""
    out = machine.scratch / "bench.json"
    more = ["--against", "mlx-lm", "--repeats", "1", "--steps", str(case.steps), "--json", str(out)]
    command(["tests.long.step_costs", *machine.options(case), "--execution", "gpu", *more], seconds)
    result = json.loads(out.read_text())
    ours = result["ours"]
    (run,) = ours["runs"]
    spent = sum(step["seconds"] for step in run["steps"])
    tflops = ours["matmul_flops"]["needed"] / spent / 1e12
    return {
        "ratio": result["ratio"],
        "losses_agree": result["losses_agree"],
        "theirs_failed": result["theirs"]["failed"],
        "needed_tflops": tflops,
        "share_of_measured_peak": tflops / peak["measured_tflops"],
        "share_of_data_sheet": tflops / sheet if (sheet := peak["data_sheet_tflops"]) else None,
        "report": result,
    }


def train_twice(seconds: float, machine: Machine, case: Case) -> dict[str, Any]:
    """Train twice with one command; compare the hashes, and measured with predicted memory."""
    hashes, peaks = [], []
    for number in (1, 2):
        folder = machine.scratch / f"{case.model}-{case.bits or 16}-run{number}"
        output = ["--output", str(folder / "adapters.safetensors"), "--max-steps", "4", "--quiet"]
        more = ["--val-split", "0", "--samples", "0", *output]
        command(["mlxtune", "train", *machine.options(case), *more], seconds / 2)
        found = json.loads(command(["mlxtune", "runs", str(folder), "--json"], 60).stdout)
        (run,) = found["runs"] if isinstance(found, dict) else found
        hashes.append(json.loads(next(folder.rglob("result.json")).read_text())["sha256"])
        peaks.append((run["peak_memory"], run["predicted_memory"]))
    return {
        "sha256": hashes,
        "bytes_equal": hashes[0] == hashes[1],
        "peak_memory": [peak for peak, _ in peaks],
        "predicted_memory": peaks[0][1],
        "measured_over_predicted": max(peak for peak, _ in peaks) / peaks[0][1],
    }


def run_all(parts: Parts, machine: Machine) -> None:
    """Run all parts; when time runs out, the last ones are skipped.

    The limits leave room for the first compilation of CUDA's kernels.
    """
    cases = TINY_CASES if machine.tiny else CASES
    parts.run("card", 30, lambda _: card(256 if machine.tiny else 8192))
    peak = parts.report["parts"]["card"]
    tests = EQUALITY[-2:] if machine.tiny else EQUALITY
    parts.run("equality", 240, lambda seconds: equality(seconds, tests))
    if not machine.tiny:
        # This part precedes the benchmarks, which mean little if the proof fails.
        parts.run("doctor --prove", 240, lambda seconds: proof(seconds, machine.scratch))
    parts.run("two runs", 120, lambda seconds: train_twice(seconds, machine, cases[0]))
    for case in cases:
        parts.run(f"bench: {case.name}", 150, lambda s, case=case: bench(s, machine, case, peak))
    if not machine.tiny:
        parts.run("two runs, 4 bits", 120, lambda seconds: train_twice(seconds, machine, cases[-1]))


def main() -> None:
    """Run all parts and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--json", type=Path, default=Path("gpu.json"))
    parser.add_argument("--shared", type=Path, default=SHARED)
    given = parser.parse_args()
    if on_cpu() and not given.tiny:
        parser.error("MLX computes on the CPU here: install mlxtune[cuda13], or use --tiny")
    # This must be set before the process compiles its first kernel.
    os.environ["MLX_PTX_CACHE_DIR"] = kernel_cache()
    report: dict[str, Any] = {
        "device": device_name(),
        "device_info": {key: str(value) for key, value in mx.device_info().items()},
        "versions": versions(),
        "tiny": given.tiny,
        "parts": {},
    }
    parts = Parts(given.json, report)
    with tempfile.TemporaryDirectory(prefix="mlxtune-gpu-") as scratch:
        run_all(parts, Machine(Path(scratch), given.shared, given.tiny))
    print(f"{given.json}: {time.monotonic() - parts.started:.0f} s")
    if parts.failed:
        sys.exit(f"failed: {', '.join(parts.failed)}")


if __name__ == "__main__":
    main()
