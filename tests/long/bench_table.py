"""Measure the tables of docs/performance.md: `step_costs --against mlx-lm` at real sizes.

    python -m tests.long.bench_table [NAME ...] [--out docs/measured]

Cases named `gpu-…` use a GPU's execution (`--execution gpu`). Writes models with random weights and
the real tokenizer of ../shared to a temporary folder (1.4 GB), runs the cases in turn, saves each
result as JSON, and prints the tables; `measured_pages` puts them into the page. Takes about two
hours, and 15 GB of memory for mlx-lm; close all other programs.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx
from tests.paths import ROOT, SHARED

import mlx.core as mx  # isort: skip
from mlx.utils import tree_flatten
from mlx_lm.models import qwen3
from transformers import AutoTokenizer

COMMON = {
    "model_type": "qwen3",
    "rms_norm_eps": 1e-6,
    "vocab_size": 151_936,
    "max_position_embeddings": 4096,
    "rope_theta": 1e6,
    "tie_word_embeddings": True,
}
SHAPES = {
    "qwen3-0.6b": {
        "hidden_size": 1024,
        "num_hidden_layers": 28,
        "intermediate_size": 3072,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "head_dim": 128,
    },
    "small": {
        "hidden_size": 512,
        "num_hidden_layers": 8,
        "intermediate_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 64,
    },
}
# The system prompt of one case, repeated until it has SYSTEM_TOKENS tokens.
RULES = (
    "You translate questions about a table into SQL. Write one statement, and nothing else. Name "
    "columns as the table names them, quote text, leave numbers bare, and use COUNT, MAX, MIN, SUM "
    "and AVG where a question asks for them. Never invent a column. When a question names a value, "
    "compare with it exactly as it is written. "
)
SYSTEM_TOKENS = 396  # 400 with the template's control tokens


@dataclass(frozen=True)
class Case:
    """One row of a table: a model shape, its data, and the number and size of steps.

    `rows` limits the data to its first rows. `execution` is `bench`'s option of that name. `target`
    is the required ratio of tokens/s.
    """

    title: str
    shape: str
    data: str
    batch_size: int
    steps: int
    rows: int | None = None
    system: bool = False
    execution: str = "auto"
    target: float | None = None
    repeats: int = 1


_LARGE, _SMALL = "qwen3-0.6b", "small"
_ALPACA, _WIKISQL = "lf_alpaca_en_demo", "wikisql_train"
CASES = {
    "alpaca": Case("0.6B shape, Alpaca", _LARGE, _ALPACA, 4, 6, target=3),
    "wikisql": Case("0.6B shape, WikiSQL", _LARGE, _WIKISQL, 4, 6, target=2.5),
    "wikisql-system": Case(
        "0.6B shape, WikiSQL behind a 400-token system prompt",
        *(_LARGE, _WIKISQL, 4, 6, 1000, True),
        target=6,
    ),
    "tool-calls": Case("0.6B shape, tool calls", _LARGE, "lf_glaive_toolcall_en", 4, 2, target=2.5),
    "small-wikisql": Case(
        "small shape, WikiSQL, its first 128 rows, steps of 8",
        *(_SMALL, _WIKISQL, 8, 16, 128),
        target=4,
    ),
    "small-alpaca": Case("small shape, Alpaca", _SMALL, _ALPACA, 4, 6, target=4),
    "gpu-alpaca": Case(
        "0.6B shape, Alpaca, steps of 4", _LARGE, _ALPACA, 4, 3, execution="gpu", target=2.6
    ),
    "gpu-wikisql": Case(
        "0.6B shape, WikiSQL, steps of 8", _LARGE, _WIKISQL, 8, 3, execution="gpu", target=3.2
    ),
    "gpu-small-alpaca": Case(
        "small shape, Alpaca, steps of 4", _SMALL, _ALPACA, 4, 4, execution="gpu"
    ),
    "gpu-small-wikisql": Case(
        "small shape, WikiSQL, steps of 8", _SMALL, _WIKISQL, 8, 4, execution="gpu"
    ),
}
# The title of each table, by execution.
EXECUTIONS = {"auto": "", "gpu": "`--execution gpu`"}
HEADER = (
    "| {} | tokens/s | mlx-lm | ratio (target) | peak, GB | mlx-lm | ratio (target 0.35) "
    "| step efficiency | start, s | mlx-lm |\n"
    "| --- | --- | --- | --- | --- | --- | --- | --- | --- | --- |"
)


def write_model(folder: Path, shape: str) -> None:
    """Write a model folder with random weights in bfloat16 and the real tokenizer."""
    folder.mkdir()
    options = COMMON | SHAPES[shape]
    mx.random.seed(0)
    model = qwen3.Model(qwen3.ModelArgs(**options))
    weights = {name: value.astype(mx.bfloat16) for name, value in tree_flatten(model.parameters())}
    mx.save_safetensors(str(folder / "model.safetensors"), weights, metadata={"format": "mlx"})
    config = options | {"torch_dtype": "bfloat16", "eos_token_id": 151_645}
    (folder / "config.json").write_text(json.dumps(config))
    for file in (SHARED / "tokenizers" / "qwen3").iterdir():
        shutil.copy(file, folder)


def write_data(path: Path, case: Case) -> None:
    """Write the rows of a case, with the system prompt if it has one."""
    tokenizer = AutoTokenizer.from_pretrained(SHARED / "tokenizers" / "qwen3")
    system = tokenizer.decode(tokenizer(RULES * 20)["input_ids"][:SYSTEM_TOKENS])
    with (SHARED / "chat" / f"{case.data}.jsonl").open() as rows, path.open("w") as out:
        for number, line in enumerate(rows):
            if number == case.rows:
                break
            row = json.loads(line)
            if case.system:
                row["messages"].insert(0, {"role": "system", "content": system})
            out.write(json.dumps(row) + "\n")


def measure(name: str, scratch: Path, out: Path) -> None:
    """Run the benchmark of a case and keep its JSON."""
    case = CASES[name]
    if not (scratch / case.shape).exists():
        write_model(scratch / case.shape, case.shape)
    write_data(scratch / f"{name}.jsonl", case)
    options = {
        "--model-path": case.shape,
        "--data": f"{name}.jsonl",
        "--max-seq-len": 512,
        "--batch-size": case.batch_size,
        "--steps": case.steps,
        "--repeats": case.repeats,
        "--execution": case.execution,
    }
    result = run_bench(scratch, f"{name}.json", options)
    (out / f"{name}.json").write_text(json.dumps(result, indent=1) + "\n")


def run_bench(folder: Path, name: str, options: Mapping[str, Any], **how: Any) -> Any:
    """Compare with mlx-lm in float32; return the content of the JSON file `name`.

    `how` goes to subprocess.run, whose errors are raised.
    """
    command = [sys.executable, "-m", "tests.long.step_costs", "--against", "mlx-lm", "--no-cache"]
    given = {"--dtype": "float32", "--rank": 8, "--json": name, **options}
    pairs = [str(part) for option in given.items() for part in option]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    subprocess.run([*command, *pairs], cwd=folder, env=environment, check=True, **how)
    return json.loads((folder / name).read_text())


def line(name: str, out: Path) -> str:
    """Return a case's row of a table in docs/performance.md."""
    result, case = json.loads((out / f"{name}.json").read_text()), CASES[name]
    if result["ratio"] is None:
        return f"| {case.title} | mlx-lm: {result['theirs']['failed']} |"
    if not result["losses_agree"]:
        return f"| {case.title} | the losses differ: {result['loss_difference']} |"
    sides = [result["ours"], result["theirs"]]
    speeds = [f"{side['real_tokens_per_s']['median']:.0f}" for side in sides]
    peaks = [f"{side['peak_memory']['median'] / 1e9:.2f}" for side in sides]
    starts = [f"{side['startup_s']['median']:.1f}" for side in sides]
    target = "" if case.target is None else f" ({case.target:g})"
    ratio = f"**{result['ratio']['real_tokens_per_s']:.2f}**{target}"
    memory, efficiency = result["ratio"]["peak_memory"], f"{result['step_efficiency']:.0%}"
    cells = [case.title, *speeds, ratio, *peaks, f"**{memory:.2f}**", efficiency, *starts]
    return f"| {' | '.join(cells)} |"


def tables(out: Path) -> dict[str, str]:
    """Return a table of the measured cases for each execution."""
    found = {}
    for execution, title in EXECUTIONS.items():
        names = [name for name, case in CASES.items() if case.execution == execution]
        rows = [line(name, out) for name in names if (out / f"{name}.json").exists()]
        if rows:
            found[execution] = "\n".join([HEADER.format(title).replace("|  |", "| |"), *rows])
    return found


def main() -> None:
    """Measure the named cases, or all, and print the tables of all measured cases."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", default=[], metavar="NAME", help=", ".join(CASES))
    parser.add_argument("--out", type=Path, default=Path("docs/measured"))
    given = parser.parse_args()
    if unknown := [name for name in given.names if name not in CASES]:
        parser.error(f"no case is named {', '.join(unknown)}: there are {', '.join(CASES)}")
    given.out.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="mlxtune-table-") as scratch:
        for name in given.names or CASES:
            measure(name, Path(scratch), given.out)
    print("\n\n".join(tables(given.out).values()))


if __name__ == "__main__":
    main()
