"""`mlxtune plan`: predicts the memory, steps and time of a run."""

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from mlxtune.backend.adapters.initialize import check_initial
from mlxtune.backend.device import allocator, default_device
from mlxtune.backend.lora.apply import apply_lora
from mlxtune.backend.lora.model_facts import ModelFacts
from mlxtune.backend.workers.shards import PlaceholderGroup, shard_base
from mlxtune.config import PlanConfig
from mlxtune.core.run.run_plan import RunPlan, read_speed
from mlxtune.core.steps import order
from mlxtune.core.steps.scaling import Scaling, busiest_fraction, busiest_items
from mlxtune.core.training.schedule import count_steps
from mlxtune.session import memory_planning
from mlxtune.session.arguments import ResolvedOptions, takes_resolved
from mlxtune.session.auto import with_auto_options
from mlxtune.session.dataset import Dataset
from mlxtune.session.session import TrainingSession
from mlxtune.views.console import RunConsole, print_stages
from mlxtune.views.output import print_json
from mlxtune.views.plan_text import few_steps_line, plan_lines


@takes_resolved(PlanConfig)
def plan(options: ResolvedOptions[PlanConfig]) -> RunPlan:
    """Plan the run of `train` with the same options, without reading any weights.

    Raises a subclass of MlxTuneError for errors in options, files or the model, and
    MemoryLimitError if not even one example fits.
    """
    config = options.config
    console = RunConsole(quiet=config.quiet)
    session = TrainingSession(config, console, options.explicit_options)
    if config.data and config.auto:
        session = with_auto_options(session)
    if options.initial is not None:
        check_initial(options.initial, session.base.model, session.config.pipeline_config())
    dataset = session.load() if config.data else None
    config, base = session.config, session.base
    steps = memory_planning.first_steps(config, dataset)
    costs = [ModelFacts(base.model).costs(each.forward, each.supervised) for each in steps]
    if config.parallel == "tensor":
        base = shard_base(base, PlaceholderGroup(config.workers))
    elif config.workers > 1:
        steps = [
            step.only(busiest_items(each, config.workers))
            for step, each in zip(steps, costs, strict=True)
        ]
    longest = (
        memory_planning.longest_example(config, base, config.pipeline_config())
        if config.longest
        else None
    )
    if longest and dataset is None:
        config = replace(config, max_seq_len=max(longest.recomputed, 2))
    workload = memory_planning.expected_workload(config, steps, dataset, base)
    if dataset is not None and (
        line := memory_planning.truncation_line(config, base, workload, dataset)
    ):
        console.warn(line)
    memory_plan = memory_planning.choose_plan(config, base, workload)
    adapter = apply_lora(base.model, config.pipeline_config())
    for warning in adapter.warnings():
        console.warn(warning)
    run_plan = RunPlan(
        model=base.describe(),
        lora=adapter.describe(),
        trainable_parameters=adapter.trainable_parameters,
        expert_matrices=adapter.expert_matrices,
        dtype=base.dtype,
        device=default_device.device_name(),
        max_seq_len=config.max_seq_len,
        memory=memory_plan,
        larger_limit=memory_planning.larger_limit(config, memory_plan, workload),
        longest=longest,
        free_memory=allocator.free_now(),
        # Sampling takes time too, which no run has measured.
        speed=None
        if config.is_rewarded
        else read_speed(config.cache_path, memory_planning.speed_key(memory_plan, base.dtype)),
    )
    if dataset is None:
        return run_plan
    run_plan = _with_data(run_plan, config, dataset, session.auto_chose_epochs)
    return run_plan if config.workers == 1 else _on_workers(run_plan, config, costs)


def main(config: PlanConfig) -> None:
    run_plan = plan(config)
    if config.json:
        print_json(run_plan.as_dict())
        return
    print_stages(f"{name:<12}{line}" for name, line in plan_lines(run_plan))


def _with_data(
    run_plan: RunPlan, config: PlanConfig, dataset: Dataset, auto_chose_epochs: bool
) -> RunPlan:
    corpus, rows = dataset.corpus, dataset.rows.train
    used = np.asarray(rows.indices)[order.rows_of_epoch(rows, config.seed, 1)]
    counts = memory_planning.expected_lengths(config, dataset, answers=config.group_size)
    tokens, supervised = (
        np.bincount(corpus.row_of_example, weights=values, minlength=corpus.num_rows)[used].sum()
        for values in counts
    )
    per_epoch, steps = count_steps(config.trainer_config(), len(used), config.updates)
    return replace(
        run_plan,
        rows=len(rows),
        steps_per_epoch=per_epoch,
        steps=steps,
        tokens=int(tokens),
        supervised=int(supervised),
        all_tokens=round(tokens * steps / per_epoch),
        few_steps=few_steps_line(
            steps, per_epoch, config.max_steps, config if auto_chose_epochs else None
        ),
    )


def _on_workers(run_plan: RunPlan, config: PlanConfig, costs: Sequence[Sequence[float]]) -> RunPlan:
    step_s = None
    if run_plan.speed is not None:
        step_s = run_plan.tokens / run_plan.steps_per_epoch / run_plan.speed.tokens_per_s
    # Workers exchange gradients in float32.
    gradients = 4 * run_plan.trainable_parameters
    scaling = Scaling(
        config.workers, config.link, busiest_fraction(costs, config.workers), gradients
    )
    if config.parallel == "tensor":
        # Workers sum hidden states twice in each pass of a layer: forward, backward and
        # recomputation.
        shapes, execution = run_plan.memory.shapes, run_plan.memory.execution
        sums = shapes.layers * (6 if execution.recompute else 4)
        hidden = run_plan.tokens / run_plan.steps_per_epoch * shapes.hidden * shapes.itemsize
        scaling = Scaling(
            workers=config.workers,
            gbps=config.link,
            dearest=1 / config.workers,
            exchanged=round(sums * hidden) + gradients,
            exchanges=sums + 1,
        )
    return replace(run_plan, scaling=replace(scaling, step_s=step_s))
