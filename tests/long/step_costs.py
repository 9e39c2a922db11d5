"""Measure the matrix products, kernel launches and efficiency of training steps.

    python -m tests.long.step_costs --model-path M --data F [options of mlxtune bench]

Runs `mlxtune bench` with the same options, and adds to the JSON in the file of --json:

    step_efficiency    the time of the step's matrix products over the time of the step
    ours, theirs
        matmul_flops         `needed` and `run`: multiplications and additions of all steps
        attention_flops      the same for attention's products, without regard to masks
        launches_per_step    `head` and `rest`: mean number of kernels that a GPU launches
    ours
        matmuls              for each step, the seconds of its products by kind

`floor` defines the products that a step needs; `counts` counts the products and launches that run.
A value is null if it cannot be counted: the CPU's kernels have no graph.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import closing, nullcontext
from dataclasses import replace
from multiprocessing import get_context
from statistics import median
from typing import Any

from mlxtune.benchmark.bench import prepared, run_benchmark, show_benchmark
from mlxtune.benchmark.bench_helper import Job, OurTrainer, open_trainer
from mlxtune.benchmark.peers import MlxLm
from mlxtune.config import BenchConfig
from mlxtune.core.data.encode import Example, predicted_tokens
from mlxtune.core.files.writing import make_folder, write_json
from mlxtune.views.console import RunConsole
from mlxtune.views.terminal import result_console
from tests.long.bench_options import run_with_options
from tests.long.counts import GraphSource, StepCounts, count_steps, kernels_of_a_gpu
from tests.long.floor import Matmuls, matmul_seconds, needed_flops, step_matmuls
from tests.long.peer_graphs import MlxLmGraphs
from tests.long.pipeline_graphs import PipelineGraphs


def costs(job: Job) -> dict[str, Any]:
    """Return the costs of a contestant's steps; for mlxtune, also the products that they need."""
    trainer = open_trainer(job)
    # The CPU has no such kernels, and its own execution is counted without them.
    with kernels_of_a_gpu() if job.execution == "gpu" else nullcontext():
        trainer.start(job.adapter, job.steps)
    if not isinstance(trainer, OurTrainer):
        assert isinstance(trainer, MlxLm)
        return _counted(MlxLmGraphs(trainer), job.steps)
    # The CPU's kernels compute when called, so there is no graph.
    source = None if trainer.execution == "cpu" else PipelineGraphs(trainer.pipeline)
    matmuls = [needed_matmuls(trainer, examples) for examples in job.steps]
    counted = _counted(source, job.steps)
    counted["matmul_flops"]["needed"] = sum(map(needed_flops, matmuls))
    seconds = [matmul_seconds(product, trainer.base.dtype) for product in matmuls]
    return counted | {"matmuls": seconds}


def needed_matmuls(trainer: OurTrainer, examples: Sequence[Example]) -> Matmuls:
    """Return the products that one of mlxtune's steps needs."""
    batches = trainer.pipeline._engine.micro_batches.iterate(examples)
    return step_matmuls(
        trainer.pipeline.model,
        [stretch for _, batch in batches for stretch in batch.stretches],
        sum(map(predicted_tokens, examples)),
        vocab_size=trainer.base.vocab_size,
        hidden_size=trainer.base.hidden_size,
    )


def _counted(source: GraphSource | None, steps: Sequence[Sequence[Example]]) -> dict[str, Any]:
    found = StepCounts() if source is None else count_steps(source, steps)
    launches = None
    if found.launches is not None:
        head, total = found.head_launches / len(steps), found.launches.total() / len(steps)
        launches = {"head": head, "rest": total - head}
    return {
        "matmul_flops": {"needed": None, "run": found.matmul_flops},
        "attention_flops": found.attention_flops,
        "launches_per_step": launches,
    }


def measure(config: BenchConfig, console: RunConsole) -> dict[str, Any]:
    """Return the JSON of `mlxtune bench`, extended by the costs of the steps."""
    with prepared(config, console) as job:
        benchmark = run_benchmark(config, job, console)
        if not config.quiet:
            show_benchmark(benchmark, result_console(stderr=config.json == "-"))
        found = benchmark.as_dict()
        for name, contestant in (("ours", benchmark.ours), ("theirs", benchmark.theirs)):
            if contestant is not None and contestant.runs:
                found[name] |= _apart(replace(job, contestant_name=contestant.name))
    ours, theirs = found["ours"], found["theirs"]
    if theirs and "matmul_flops" in theirs:
        # Both contestants' steps need the same products.
        theirs["matmul_flops"]["needed"] = ours["matmul_flops"]["needed"]
    spent = median(run.seconds for run in benchmark.ours.runs)
    floor = math.fsum(sum(kinds.values()) for kinds in ours["matmuls"])
    return found | {"step_efficiency": floor / spent}


def _apart(job: Job) -> dict[str, Any]:
    """Return the costs of a contestant, counted in a fresh process."""
    with ProcessPoolExecutor(1, get_context("spawn")) as pool:
        return pool.submit(costs, job).result()


def step_costs(config: BenchConfig) -> None:
    """Measure the products, launches and efficiency of steps."""
    with closing(RunConsole(quiet=config.quiet)) as console:
        found = measure(config, console)
    if config.json_path is not None:
        make_folder(config.json_path.parent)
        write_json(config.json_path, found)
    else:
        print(json.dumps(found, indent=2))


if __name__ == "__main__":
    run_with_options("step-costs", step_costs, sys.argv[1:])
