"""The parts of `gpu` that time steps: on each side, with settings of MLX, and kernel by kernel."""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from mlxtune.backend.device.default_device import on_cpu
from mlxtune.benchmark.bench_helper import Job
from mlxtune.benchmark.result import agreement
from tests.long.gpu_material import Case, Machine
from tests.long.gpu_parts import Parts, Skip
from tests.long.gpu_processes import CaseProcesses, Record
from tests.long.gpu_steps import TimedCase

# MLX reads each setting once, so each needs a process.
SETTINGS: tuple[dict[str, str], ...] = (
    {},
    {"MLX_USE_CUDA_GRAPHS": "0"},
    {"MLX_MAX_OPS_PER_BUFFER": "100", "MLX_MAX_MB_PER_BUFFER": "2000"},
    {"MLX_MAX_OPS_PER_BUFFER": "400", "MLX_MAX_MB_PER_BUFFER": "8000"},
    {"MLX_CUDA_GRAPH_CACHE_SIZE": "4000"},
)
SETTINGS_CASES, SETTINGS_STEPS = ("0.6b-alpaca", "4b-alpaca"), 4
PEFT = "PEFT"


def make_steps(parts: Parts, machine: Machine, cases: Sequence[Case]) -> dict[str, Any]:
    """Write the models of cases, and put what the sides share into the report."""
    for case in cases:
        job = machine.job(case)
        examples = [example for step in job.steps for example in step]
        known = parts.report["cases"].get(case.name, {"sides": {}})
        parts.report["cases"][case.name] = {
            "title": case.title,
            "dtype": job.config.dtype,
            "batch_size": case.batch_size,
            "steps": len(job.steps),
            "tokens": sum(map(len, examples)),
            "supervised_tokens": sum(example.supervised for example in examples),
            "sides": known["sides"],
        }
    return {"made": [case.name for case in cases]}


def take_steps(
    seconds: float, parts: Parts, machine: Machine, side: str, cases: Sequence[Case]
) -> dict[str, Any]:
    """Take the steps of all cases on a side; put each result into the report as it comes."""
    if side == PEFT and not (find_spec("torch") and find_spec("peft")):
        raise Skip("torch and peft are not installed")
    make_steps(parts, machine, cases)
    reported, card = parts.report["cases"], parts.report["parts"].get("card", {})
    results: dict[str, dict[str, Any]] = {}

    def record(name: str, found: dict[str, Any]) -> None:
        results[name] = found
        reported[name]["sides"][side] = found | compared(found, reported[name], card)
        parts.write()

    jobs = {case.name: replace(machine.job(case), contestant_name=side) for case in cases}
    if side == PEFT:
        _peft_processes(machine.scratch / "peft.json", jobs).run(list(jobs), seconds, record)
    else:
        timed = [TimedCase(name, job) for name, job in jobs.items()]
        _run(machine.scratch / f"{side}.pickle", timed, seconds, record)
    measured = [name for name, found in results.items() if "seconds" in found]
    missed = {name: found for name, found in results.items() if name not in measured}
    # A peer that fails is a result, not a failure of this script.
    failed = [name for name, found in missed.items() if "failed" in found and side == "mlxtune"]
    return {"measured": measured, "missed": missed} | (
        {"failed": ", ".join(failed)} if failed else {}
    )


def compared(
    found: Mapping[str, Any], case: Mapping[str, Any], card: Mapping[str, Any]
) -> dict[str, Any]:
    """Return a result's tokens per second, first loss against mlxtune's, and share of the peak."""
    if "seconds" not in found:
        return {}
    fastest = min(found["seconds"])
    values: dict[str, Any] = {"tokens_per_s": case["tokens"] / fastest}
    if ours := case["sides"].get("mlxtune", {}).get("losses"):
        apart = agreement(ours[:1], found["losses"][:1], case["dtype"])
        values |= {"loss_difference": apart.first, "losses_agree": apart.losses_agree}
    if "needed_flops" in found and "measured_tflops" in card:
        rate = found["needed_flops"] / fastest / 1e12
        values["share_of_measured_peak"] = rate / card["measured_tflops"]
    return values


def time_settings(
    seconds: float, parts: Parts, machine: Machine, cases: Sequence[Case]
) -> dict[str, Any]:
    """Time a few steps in a process for each setting of MLX, each with its share of the time."""
    deadline = time.monotonic() + seconds
    make_steps(parts, machine, cases)
    jobs = {case.name: machine.job(case) for case in cases}
    timed = [
        TimedCase(name, replace(job, steps=job.steps[:SETTINGS_STEPS]))
        for name, job in jobs.items()
    ]
    settings = SETTINGS[1:2] if machine.tiny else SETTINGS
    parts.report["settings"] = []
    for number, variables in enumerate(settings):
        results: dict[str, Any] = {}
        entry = {"variables": variables, "steps": SETTINGS_STEPS, "cases": results}
        parts.report["settings"].append(entry)
        share = (deadline - time.monotonic()) / (len(settings) - number)
        record = _into(results, parts)
        _run(machine.scratch / "settings.pickle", timed, share, record, **variables)
    return {"settings": len(settings)}


def time_kernels(
    seconds: float, parts: Parts, machine: Machine, cases: Sequence[Case]
) -> dict[str, Any]:
    """Count and time the GPU's kernels in mlxtune's steps."""
    if on_cpu() or not find_spec("torch"):
        raise Skip("needs torch, with CUDA")
    make_steps(parts, machine, cases)
    found = parts.report["kernels"] = {}
    timed = [TimedCase(case.name, machine.job(case), 1, profiled=True) for case in cases]
    _run(machine.scratch / "kernels.pickle", timed, seconds, _into(found, parts))
    return {"cases": list(found)}


def _into(results: dict[str, Any], parts: Parts) -> Record:
    """Return a function that keeps a result, and writes the report."""

    def record(name: str, found: dict[str, Any]) -> None:
        results[name] = found
        parts.write()

    return record


def _run(
    file: Path, timed: Sequence[TimedCase], seconds: float, record: Record, **variables: str
) -> None:
    """Run cases of mlxtune or mlx-lm."""

    def write(path: Path, names: Sequence[str]) -> None:
        path.write_bytes(pickle.dumps([case for case in timed if case.name in names]))

    names = [case.name for case in timed]
    CaseProcesses("tests.long.gpu_steps", file, write).run(names, seconds, record, **variables)


def _peft_processes(file: Path, jobs: Mapping[str, Job]) -> CaseProcesses:
    def write(path: Path, names: Sequence[str]) -> None:
        path.write_text(json.dumps([peft_case(name, jobs[name]) for name in names]))

    return CaseProcesses("tests.long.gpu_peft", file, write)


def peft_case(name: str, job: Job) -> dict[str, Any]:
    """Return a case for `gpu_peft`: the model, steps and options of a job, for JSON."""
    config = job.config
    steps = [
        [{"tokens": each.tokens.tolist(), "mask": each.assistant_mask.tolist()} for each in step]
        for step in job.steps
    ]
    lora = {"r": config.rank, "lora_alpha": config.alpha, "target_modules": list(config.targets)}
    optimizer = {"lr": config.peak_rate, "weight_decay": config.weight_decay, "eps": 1e-8}
    return {
        "name": name,
        "folder": str(job.folder),
        "steps": steps,
        "passes": 2,
        "lora": lora,
        "optimizer": optimizer,
    }
