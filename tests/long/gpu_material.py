"""The cases of `gpu`: models with random weights, data, and the steps that all sides take."""

from __future__ import annotations

import json
import shutil
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

import mlx.core as mx  # isort: skip
import mlx.nn as nn
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3

from mlxtune.benchmark.bench import prepared
from mlxtune.benchmark.bench_helper import Job
from mlxtune.config import BenchConfig
from mlxtune.views.console import RunConsole
from tests.long import bench_table
from tests.long.gpu_parts import Skip
from tests.models import sums, write_chat
from tests.models import write_model as write_tiny_model

SHAPES = {
    "0.6b": bench_table.SHAPES["qwen3-0.6b"],
    "4b": {
        "hidden_size": 2560,
        "num_hidden_layers": 36,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
}
LONG_TOKENS, CHARACTERS_PER_TOKEN = 4096, 4.5


@dataclass(frozen=True)
class Case:
    """A benchmark: a model, its data, and the number and size of steps.

    `name` is its key in the report, and `title` its heading in the tables of the documentation.
    """

    name: str
    title: str
    model: str
    data: str
    batch_size: int
    steps: int
    max_seq_len: int = 1024
    bits: int | None = None


_WIKISQL, _ALPACA = "wikisql_train", "lf_alpaca_en_demo"
# The order puts the cases that compile fewest kernels first.
CASES = (
    Case("0.6b-alpaca", "0.6B shape, Alpaca", "0.6b", _ALPACA, 8, 10),
    Case("4b-alpaca", "4B shape, Alpaca", "4b", _ALPACA, 8, 6),
    Case("0.6b-wikisql", "0.6B shape, WikiSQL", "0.6b", _WIKISQL, 8, 12),
    Case("0.6b-gsm8k", "0.6B shape, GSM8K, steps of 32", "0.6b", "gsm8k_train", 32, 5),
    Case("0.6b-long", "0.6B shape, 4,096 tokens, steps of 4", "0.6b", "long", 4, 3, LONG_TOKENS),
)
FOUR_BITS = Case("0.6b-4bit-alpaca", "0.6B shape in 4 bits, Alpaca", "0.6b", _ALPACA, 8, 6, bits=4)
TINY = Case("tiny", "tiny shape, sums", "tiny", "sums", 4, 2, max_seq_len=64)


@dataclass
class Machine:
    """The folder for temporary files, and the models, data and steps of the cases.

    Use as a context manager: at its end, the adapters that the sides start from are removed.
    """

    scratch: Path
    shared: Path
    tiny: bool
    _open: ExitStack = field(default_factory=ExitStack)
    _jobs: dict[str, Job] = field(default_factory=dict)

    def __enter__(self) -> Machine:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

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

    def options(self, case: Case) -> dict[str, Any]:
        """Return the options of a case, by their names in `BenchConfig`."""
        return {
            "model_path": str(self.model(case)),
            "data": str(self.data(case)),
            "batch_size": case.batch_size,
            "max_seq_len": case.max_seq_len,
            "memory_limit": 4.0 if self.tiny else 60.0,
            "dtype": "float32" if self.tiny else "bfloat16",
        }

    def job(self, case: Case) -> Job:
        """Return mlxtune's job for a case, made at its first use; a peer's differs in `side`."""
        if case.name not in self._jobs:
            config = BenchConfig(**self.options(case), steps=case.steps, execution="gpu")
            console = RunConsole(quiet=True)
            self._open.callback(console.close)
            self._jobs[case.name] = self._open.enter_context(prepared(config, console))
        return self._jobs[case.name]


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
