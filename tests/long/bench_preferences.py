"""Time whole runs in turn: DPO and `sft` on the same sides, and DPO in Unsloth's trainer.

    python -m tests.long.bench_preferences [--peer-python PATH] [--repeats N] [--json FILE]

The rows are the first 16 pairs of LLaMA-Factory's `dpo_en_demo` that have one human turn and fewer
than 4,300 characters. They make 4 steps of 4 pairs, with each example cut to 1,024 tokens. The
model is the small shape in float32, with rank 8 on queries and values. A measured run consists of
the reference and the steps, without start and warm-up. `bench_unsloth` says how to make Unsloth's
environment, whose interpreter is PATH. Unsloth's trainer computes the reference either before or
within the steps. It does not compile, as compiling takes ten more minutes on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections import defaultdict
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from statistics import median
from typing import Any

from mlxtune.benchmark.bench import measured, prepared
from mlxtune.config import BenchConfig
from mlxtune.core.files.files import write_json
from mlxtune.core.files.processes import output_of
from mlxtune.views.console import RunConsole
from tests.long.bench_table import write_model
from tests.paths import ROOT, SHARED

_ROWS, _CHARACTERS, _STEPS, _BATCH, _LENGTH = 16, 4300, 4, 4, 1024
# Seconds of the reference and of all steps, the peak in bytes, and the number of tokens run.
Run = dict[str, float]


def pairs() -> list[dict[str, Any]]:
    """Return the rows in LLaMA-Factory's format."""
    rows = json.loads((SHARED / "preferences" / "lf_dpo_en_demo.json").read_text(encoding="utf-8"))

    def characters(row: dict[str, Any]) -> int:
        turns = (*row["conversations"], row["chosen"], row["rejected"])
        return sum(len(turn["value"]) for turn in turns)

    single = [row for row in rows if len(row["conversations"]) == 1]
    return [row for row in single if characters(row) < _CHARACTERS][:_ROWS]


def messages(row: dict[str, Any]) -> dict[str, list[dict[str, str]]]:
    """Return a row's prompt, chosen and rejected answer, each as a list of messages."""

    def answer(turn: dict[str, str]) -> list[dict[str, str]]:
        return [{"role": "assistant", "content": turn["value"]}]

    prompt = [{"role": "user", "content": row["conversations"][0]["value"]}]
    return {
        "prompt": prompt,
        "chosen": answer(row["chosen"]),
        "rejected": answer(row["rejected"]),
    }


def ours(folder: Path, execution: str, objective: str) -> Run:
    """Take mlxtune's steps once in a new process; return the measurements."""
    sft = objective == "sft"
    config = BenchConfig(
        model_path=str(folder / "model"),
        data=[str(folder / ("sides.jsonl" if sft else "pairs.json"))],
        objective=objective,
        execution=execution,
        steps=_STEPS,
        batch_size=2 * _BATCH if sft else _BATCH,
        max_seq_len=_LENGTH,
        dtype="float32",
        repeats=1,
        quiet=True,
    )
    with closing(RunConsole(quiet=True)) as console, prepared(config, console) as job:
        run = measured(config, job, console).ours.runs[0]
    return {
        "reference": run.reference_s,
        "steps": sum(step.seconds for step in run.steps),
        "peak": max(step.peak_memory for step in run.steps),
        "tokens": sum(step.tokens_run for step in run.steps),
    }


def unsloth(folder: Path, python: str, first: bool) -> Run:
    """Run Unsloth's trainer; with `first`, it computes the reference before the steps."""
    job = folder / "job.json"
    described = {
        "model": str(folder / "model"),
        "rows": [messages(row) for row in pairs()],
        "output": str(folder / "unsloth"),
        **{"batch_size": _BATCH, "steps": _STEPS, "rank": 8, "targets": ["q_proj", "v_proj"]},
        **{"max_length": _LENGTH, "rate": 5e-6, "beta": 0.1, "first": first},
    }
    write_json(job, described)
    output = output_of([python, "-m", "tests.long.unsloth_preferences", str(job)], folder=ROOT)
    assert output.status == 0, output.stderr[-2000:]
    found = json.loads(output.stdout.splitlines()[-1])
    return {"reference": 0.0, "steps": found["seconds"], "peak": found["peak"]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--peer-python")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--json", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        write_model(folder / "model", "small")
        write_json(folder / "pairs.json", pairs())
        sides = [
            {"messages": row["prompt"] + row[side]}
            for row in map(messages, pairs())
            for side in ("chosen", "rejected")
        ]
        lines = "".join(json.dumps(side) + "\n" for side in sides)
        (folder / "sides.jsonl").write_text(lines, encoding="utf-8")
        runs: dict[str, Callable[[], Run]] = {}
        for execution in ("gpu", "auto"):
            for objective in ("dpo", "sft"):
                runs[f"{objective}, {execution}"] = lambda e=execution, o=objective: ours(
                    folder, e, o
                )
        if given.peer_python:
            for name, first in (("in the steps", False), ("first", True)):
                runs[f"unsloth, reference {name}"] = lambda first=first: unsloth(
                    folder, given.peer_python, first
                )
        found: dict[str, list[Run]] = defaultdict(list)
        for _ in range(given.repeats):
            for name, run in runs.items():
                found[name].append(run())
                print(name, json.dumps(found[name][-1]), flush=True)
    print("| | reference, s | steps, s | together | tokens run | peak, GB |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, each in found.items():
        reference, steps = (median(run[key] for run in each) for key in ("reference", "steps"))
        together = median(run["reference"] + run["steps"] for run in each)
        tokens = f"{each[0]['tokens']:,.0f}" if "tokens" in each[0] else ""
        peak = median(run["peak"] for run in each) / 1e9
        print(
            f"| {name} | {reference:.1f} | {steps:.1f} | {together:.1f} | {tokens} | {peak:.2f} |"
        )
    if given.json:
        write_json(given.json, found)


if __name__ == "__main__":
    main()
