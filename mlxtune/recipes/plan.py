"""The recipe of `mlxtune plan`: the memory, steps and time of a run, before it starts."""

import math
from contextlib import closing
from dataclasses import replace

import numpy as np

from mlxtune.backend.lora.apply import apply_lora
from mlxtune.backend.model import device, loading, model_folder
from mlxtune.config import DataConfig, InstructTrainingConfig, PlanConfig, StepConfig
from mlxtune.core.reports.plan_text import plan_lines
from mlxtune.core.runs.run_plan import RunPlan
from mlxtune.core.training.speed import read_speed
from mlxtune.setup.dataset import Dataset, Reader, load_dataset, report_findings
from mlxtune.setup.memory import (
    choose_plan,
    first_steps,
    larger_limit,
    planned_work,
    speed_key,
    training_rows,
)
from mlxtune.terminal.console import RunConsole
from mlxtune.terminal.output import print_json


def plan(config: PlanConfig) -> RunPlan:
    """Plan what `train` with the same options would do, without reading any weights.

    Raises a child of MlxTuneError for what options, files or the model cause, MemoryLimitError
    if even one example does not fit.
    """
    folder = model_folder.find_folder(config.model_path)
    console = RunConsole(quiet=config.quiet)
    dataset = None
    if config.data:
        data = config.part(DataConfig)
        with closing(console):
            dataset = load_dataset(data, Reader(data, folder, console.on_encoding))
        report_findings(dataset, console)
    step, lora, training = config.part(StepConfig), config.lora(), config.training()
    base = loading.open_base(folder, step.dtype, **step.loading())
    work = planned_work(lora, first_steps(training, dataset), dataset)
    chosen = choose_plan(step, lora, base, work)
    adapter = apply_lora(base.model, lora)
    for warning in adapter.warnings():
        console.warn(warning)
    planned = RunPlan(
        model=base.describe(),
        lora=adapter.describe(),
        trainable_parameters=adapter.trainable_parameters,
        expert_matrices=adapter.expert_matrices,
        dtype=base.dtype,
        device=device.device_name(),
        max_seq_len=config.max_seq_len,
        memory=chosen,
        larger_limit=larger_limit(step, chosen, work),
        speed=read_speed(config.cache_path, speed_key(chosen, base.dtype)),
    )
    return planned if dataset is None else _with_data(planned, training, dataset)


def show(config: PlanConfig) -> None:
    """Print the plan as lines or JSON."""
    planned = plan(config)
    if config.json:
        print_json(planned.as_dict())
        return
    for name, line in plan_lines(planned):
        print(f"{name:<12}{line}")


def _with_data(planned: RunPlan, config: InstructTrainingConfig, dataset: Dataset) -> RunPlan:
    corpus, chosen = dataset.corpus, training_rows(config, dataset)
    tokens, supervised = (
        np.bincount(corpus.row_of_example, weights=values, minlength=corpus.num_rows)[chosen].sum()
        for values in (corpus.lengths, corpus.supervised)
    )
    per_epoch = math.ceil(len(chosen) / config.batch_size)
    steps = config.epochs * per_epoch
    if config.max_steps is not None:
        steps = min(steps, config.max_steps)
    return replace(
        planned,
        rows=len(chosen),
        steps_per_epoch=per_epoch,
        steps=steps,
        tokens=int(tokens),
        supervised=int(supervised),
        all_tokens=round(tokens * steps / per_epoch),
    )
