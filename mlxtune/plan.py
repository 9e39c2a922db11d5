"""What a run will take of memory, steps and time: for `train`, and as a recipe by itself."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from mlxtune.config import BenchConfig, PlanConfig, TrainConfig
from mlxtune.dataset import Dataset, Reader, load_dataset
from mlxtune.errors import MemoryLimitError

if TYPE_CHECKING:
    from mlxtune.backend.forward import Execution
    from mlxtune.backend.model import BaseModel
    from mlxtune.backend.pipeline import InstructPipeline
    from mlxtune.core.encode import Example
    from mlxtune.core.memory_plan import MemoryPlan, Work
    from mlxtune.core.memory_prediction import ModelShapes, Way
    from mlxtune.core.metrics import StepRecord
    from mlxtune.core.run_plan import RunPlan

# On the CPU, wide micro-batches are hardly faster: what they may save of time to be chosen.
_CPU_TOLERANCE = 0.05


def plan(config: PlanConfig) -> RunPlan:
    """Plan what `train` with the same options would do, without reading any weights.

    Raises a child of MlxTuneError for what options, files or the model cause, MemoryLimitError
    when even one example does not fit.
    """
    from mlxtune.backend import memory, model, model_folder
    from mlxtune.console import RunConsole
    from mlxtune.core.run_plan import RunPlan
    from mlxtune.core.speed import read_speed
    from mlxtune.train import say_findings

    folder = model_folder.find_folder(config.model_path)
    console = RunConsole(quiet=config.quiet)
    dataset = None
    if config.data:
        with closing(console):
            dataset = load_dataset(config, Reader(config, folder, console.on_encoding))
        say_findings(dataset, console)
    base = model.open_base(folder, config.dtype, **config.base())
    limit = memory.find_limits(config.memory_limit).memory
    work = work_of(config, first_steps(config, dataset), dataset)
    chosen = choose_plan(config, base, work, limit)
    found = RunPlan(
        model=base.describe(),
        dtype=base.dtype,
        device=memory.device_name(),
        max_seq_len=config.max_seq_len,
        memory=chosen,
        speed=read_speed(config.cache_path, speed_key(chosen, base.dtype)),
    )
    return found if dataset is None else _with_data(found, config, dataset)


def show(config: PlanConfig) -> None:
    """Print what `plan` finds: lines and a table, or JSON."""
    from mlxtune.core.run_plan import plan_lines

    found = plan(config)
    if config.json:
        json.dump(found.as_dict(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return
    for name, line in plan_lines(found):
        print(f"{name:<12}{line}")


def _with_data(found: RunPlan, config: TrainConfig, dataset: Dataset) -> RunPlan:
    import numpy as np

    corpus, chosen = dataset.corpus, _training_rows(config, dataset)
    tokens, supervised = (
        np.bincount(corpus.row_of_example, weights=values, minlength=corpus.num_rows)[chosen].sum()
        for values in (corpus.lengths, corpus.supervised)
    )
    per_epoch = math.ceil(len(chosen) / config.batch_size)
    steps = config.epochs * per_epoch
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return replace(
        found,
        rows=len(chosen),
        steps_per_epoch=per_epoch,
        steps=steps,
        tokens=int(tokens),
        supervised=int(supervised),
        all_tokens=round(tokens * steps / per_epoch),
    )


def _training_rows(config: TrainConfig | BenchConfig, dataset: Dataset) -> list[int]:
    """Return the rows of the corpus that train, as the trainer chooses them."""
    from mlxtune.core import batch

    corpus = dataset.corpus
    if dataset.validation is not None:
        return list(range(corpus.num_rows))
    held_out = batch.split_rows(corpus.identities, config.val_split, config.seed, config.val_rows)
    return held_out[0]


def first_epoch(
    config: TrainConfig | BenchConfig, dataset: Dataset
) -> Iterator[list[Sequence[Example]]]:
    """Yield the rows of each step of the first epoch, as the trainer takes them."""
    rows = dataset.corpus.select(_training_rows(config, dataset))
    for step in rows.steps(config.batch_size, config.order, config.seed, 1):
        yield [rows[i] for i in step]


def first_steps(config: TrainConfig, dataset: Dataset | None) -> list[Sequence[Example]]:
    """Return as many of the first epoch's steps as are planned to choose how to run all."""
    from mlxtune.core.memory_plan import planned

    if dataset is None:
        return []
    return planned([each for row in step for each in row] for step in first_epoch(config, dataset))


def work_of(
    config: TrainConfig, steps: Sequence[Sequence[Example]], dataset: Dataset | None = None
) -> Work:
    """Return what there is to plan: steps, and the examples that take most by themselves.

    Those are sought in the whole data set, in the steps without one. With neither, an example of
    --max-seq-len tokens takes their place.
    """
    from mlxtune.backend.micro_batches import step_cost
    from mlxtune.core.memory_plan import Work
    from mlxtune.core.memory_prediction import Load

    sizes = [(len(example), example.supervised) for step in steps for example in step]
    if dataset is not None:
        corpus = dataset.corpus
        sizes = list(zip(corpus.lengths.tolist(), corpus.supervised.tolist(), strict=True))
    sizes = sizes or [(config.max_seq_len, config.max_seq_len)]
    extremes = {max(sizes), max(sizes, key=lambda size: size[::-1])}
    return Work(
        steps=steps,
        alone=tuple(Load(1, length, supervised) for length, supervised in sorted(extremes)),
        cost=step_cost(),
        keyed=config.dropout > 0,
    )


def execution(config: TrainConfig, parameters: int, way: Way | None = None) -> Execution:
    """Return how steps of a model are computed, by the options and what was chosen."""
    from mlxtune.backend.forward import Execution

    best = Execution.best(parameters)
    compiles = best.compile if config.compile == "auto" else config.compile == "on"
    if way is None:
        return replace(best, compile=compiles)
    return replace(best, compile=compiles, recompute=way.recompute, loss_chunk=way.loss_chunk)


def choose_plan(config: TrainConfig, base: BaseModel, work: Work, limit: int) -> MemoryPlan:
    """Choose how to run the steps in `limit` bytes. Raises MemoryLimitError when nothing fits."""
    from mlxtune.backend.shapes import model_shapes, way_of

    way = way_of(execution(config, base.parameters), base)
    shapes = model_shapes(base, config.pipeline(), kernels=way.kernels)
    return _choose(config, shapes, way, work, limit)


def confirm(
    config: TrainConfig, pipeline: InstructPipeline, work: Work, plan: MemoryPlan
) -> MemoryPlan:
    """Return the plan, made again where the model turned out to be run otherwise.

    Whether its head can be run apart, and examples in one line, is known only once its weights are
    read.
    """
    how = pipeline.forward.how
    found = {"kernels": how.cpu_kernels, "split_head": how.split_head}
    way = replace(plan.way, **found, packs_up_to=pipeline.forward.packs_up_to)
    shapes = plan.shapes
    plain = shapes.plain_head and pipeline.forward.plain_head
    if way == plan.way and plain == shapes.plain_head:
        return plan
    fixed = replace(config, grad_checkpoint="on" if way.recompute else "off")
    return _choose(fixed, replace(shapes, plain_head=plain), way, work, plan.limit)


def _choose(
    config: TrainConfig, shapes: ModelShapes, way: Way, work: Work, limit: int
) -> MemoryPlan:
    from mlxtune.backend import memory
    from mlxtune.core import memory_plan

    allowed = {"on": (True,), "off": (False,), "auto": (False, True)}[config.grad_checkpoint]
    found = memory_plan.choose(
        shapes,
        work,
        way,
        limit=limit,
        checkpointing=allowed,
        tolerance=_CPU_TOLERANCE if memory.on_cpu() else 0.0,
    )
    if found is None:
        raise MemoryLimitError(memory_plan.why_not(shapes, work, way, limit, True in allowed))
    return found


def speed_key(plan: MemoryPlan, dtype: str) -> str:
    """Return what a speed is kept under: the model's shapes, its LoRA, dtype and device."""
    from mlxtune.backend import memory
    from mlxtune.core.cache import key_of

    return key_of([asdict(plan.shapes), dtype, memory.device_name()])


def keep_speed_of(
    config: TrainConfig, plan: MemoryPlan, dtype: str, steps: Sequence[StepRecord]
) -> None:
    """Keep the speed of a finished run for the next plan."""
    import datetime

    from mlxtune.core.speed import keep_speed, speed_of

    speed = speed_of(steps, str(datetime.date.today()))
    if speed is not None:
        keep_speed(config.cache_path, speed_key(plan, dtype), speed)
