"""A plan as lines of text. Nothing in this file prints."""

import math
from collections.abc import Iterator

from mlxtune.config import TrainConfig
from mlxtune.config.objective_config import DEFAULT_RATE
from mlxtune.core.data.inspection import TruncationReport
from mlxtune.core.formatting import byte_size, duration, pluralize, short_duration
from mlxtune.core.run.run_plan import LongestFit, RunPlan
from mlxtune.core.steps.memory_plan import ESTIMATE_RANGE, MARGIN, MemoryPlan
from mlxtune.core.steps.scaling import Scaling


def micro_batches_line(plan: MemoryPlan) -> str:
    tokens = plan.execution.micro_batch_tokens
    line = f"micro-batches of {'one example' if tokens == 1 else f'up to {tokens:,} tokens'}"
    if plan.micro_batches_per_step:
        line += (
            f", {plan.micro_batches_per_step:.1f} a step with {plan.padding_fraction:.1%} padding"
        )
    activations = "recomputed in the backward pass" if plan.execution.recompute else "kept"
    return f"{line}; activations {activations}"


def peak_line(plan: MemoryPlan) -> str:
    peak, limit = byte_size(plan.peak.total), byte_size(plan.limit)
    if plan.shapes.measured is not None:
        return f"predicted peak memory {peak} of {limit}"
    low, high = (
        byte_size(round(plan.peak.total / fraction)) for fraction in reversed(ESTIMATE_RANGE)
    )
    return f"estimated peak memory {peak} ({low} to {high}) of {limit}"


def free_line(plan: MemoryPlan, free: int | None) -> str:
    """Return a line that compares a plan with the free memory; empty if `free` is None."""
    if free is None:
        return ""
    line = f"{byte_size(free)} free now"
    if plan.peak.total > free:
        return f"only {line}: close other programs, or plan for less memory"
    return f"{line}, enough for this run"


def disk_line(checkpoint: int, free: int | None) -> str:
    """Return a line with the size of a checkpoint and the space on the disk, if it is known."""
    line = f"a checkpoint takes about {byte_size(checkpoint)} of disk"
    return line if free is None else f"{line}, and {byte_size(free)} are free"


# Fewer steps than the first number teach an adapter little; after the second number of steps, most
# adapters have learned.
MIN_STEPS, _ENOUGH_STEPS = 30, 100
# Even the demo's small models learn best at a tenth of this rate.
_LARGE_RATE = 0.05


def few_steps_line(
    steps: int, per_epoch: int, max_steps: int | None, auto: TrainConfig | None = None
) -> str:
    """Return advice for a run that is too short to learn from; empty for longer runs.

    `auto` has the options if --auto chose the epochs; more epochs would then overfit.
    """
    if not 0 < steps < MIN_STEPS:
        return ""
    if auto is not None and max_steps != steps:
        rows = math.ceil(_ENOUGH_STEPS / auto.epochs) * auto.batch_size
        return (
            f"{pluralize(steps, 'step')}, as there is too little data to learn from: "
            f"{_ENOUGH_STEPS} steps in {pluralize(auto.epochs, 'epoch')} take {rows} training rows"
        )
    epochs = math.ceil(_ENOUGH_STEPS / per_epoch)
    remedy = f"--epochs {epochs} gives {epochs * per_epoch} steps"
    if max_steps == steps:
        remedy = f"use --max-steps {_ENOUGH_STEPS} or more"
    are = "is" if steps == 1 else "are"
    return f"{pluralize(steps, 'step')} {are} too few to learn from: {remedy}"


def large_rate_line(rate: float) -> str:
    """Return a warning about a rate too high for adapters to learn; empty for lower rates."""
    if rate <= _LARGE_RATE:
        return ""
    return f"--lr {rate:g} is far above the usual {DEFAULT_RATE:g}: lower it, or expect bad answers"


def truncated_line(report: TruncationReport, max_seq_len: int, peak: int | None) -> str:
    """Return a line on the supervised tokens that --max-seq-len cuts off, and on the length needed.

    `peak` is the memory for that length, or None if it does not fit.
    """
    memory_text = f"in {byte_size(peak)}" if peak else "but does not fit into --memory-limit"
    effect = f"cuts off {report.fraction:.0%} of the supervised tokens"
    if report.skipped:
        rows = pluralize(report.skipped, "preference row")
        effect = f"skips {rows} with {report.fraction:.0%} of the supervised tokens"
    return (
        f"--max-seq-len {max_seq_len} {effect}: "
        f"--max-seq-len {report.enough} keeps 99% of them, {memory_text}"
    )


def larger_limit_line(plan: MemoryPlan, larger: MemoryPlan, most: int) -> str:
    """Return a line on what a larger memory limit gains; empty if it gains nothing.

    The device has `most` GB.
    """
    now, then, gains = plan.execution, larger.execution, ""
    if then.micro_batch_tokens > now.micro_batch_tokens:
        gains += f" run micro-batches of up to {then.micro_batch_tokens:,} tokens"
    if now.recompute and not then.recompute:
        gains += "" if gains else " run"
        gains += " without recomputing activations, which takes 25 to 33% of a step"
    # Leave the plan's safety margin, if the device has room for it.
    needed = min(math.ceil(larger.peak.total * (1 + MARGIN) / 1e9), most)
    return gains and f"the device has {most} GB: --memory-limit {needed} would{gains}"


def plan_lines(run: RunPlan) -> Iterator[tuple[str, str]]:
    """Yield a plan as pairs of heading and line; an empty heading continues the last one."""
    plan, peak = run.memory, run.memory.peak
    yield "Model", run.model
    yield "LoRA", run.lora
    yield "Device", run.device
    yield "Memory", peak_line(plan)
    if line := free_line(plan, run.free_memory):
        yield "", line
    for name in ("weights", "optimizer", "activations", "head"):
        yield "", f"{name:<12}{byte_size(getattr(peak, name)):>9}"
    yield "Plan", micro_batches_line(plan)
    if run.larger_limit:
        yield "", run.larger_limit
    if run.longest:
        yield "Longest", _longest_line(run.longest)
    if not run.steps:
        example = f"one example of {pluralize(run.max_seq_len, 'token')}"
        yield "", f"for {example}: add --data to plan the steps and their time"
        return
    yield (
        "Data",
        f"{pluralize(run.rows, 'training row')}: {pluralize(run.tokens, 'token')}, "
        f"{run.supervised:,} of "
        f"them supervised; the model processes {plan.forward_fraction:.0%} of that number, "
        "padding included",
    )
    yield "Steps", f"{pluralize(run.steps, 'step')}, {run.steps_per_epoch:,} per epoch"
    if run.few_steps:
        yield "", run.few_steps
    if run.scaling:
        yield "Workers", _workers_line(run.scaling)
    yield "Time", _time(run)


def _longest_line(longest: LongestFit) -> str:
    if not longest.recomputed:
        return "not even one token fits: raise --memory-limit, or use --quantize 4"
    whole = f", the model's maximum: use --max-seq-len {longest.context}"
    if longest.kept == longest.context:
        return f"{longest.kept:,} tokens with activations kept{whole}"
    recomputed = f"{longest.recomputed:,} with --grad-checkpoint on"
    kept = (
        f"{longest.kept:,} tokens with activations kept"
        if longest.kept
        else "no example with activations kept"
    )
    return f"{kept}; {recomputed}{whole if longest.recomputed == longest.context else ''}"


def _workers_line(scaling: Scaling) -> str:
    what = "gradients" if scaling.exchanges == 1 else "hidden states and gradients"
    exchange = (
        f"adding {byte_size(scaling.exchanged)} of {what} takes "
        f"{short_duration(scaling.exchange_s)} at {scaling.gbps:g} Gbit/s"
    )
    busiest = f"the busiest worker computes up to {scaling.dearest:.0%} of a step"
    if scaling.speedup is None or scaling.step_s is None:
        return f"{scaling.workers}: {busiest}; {exchange}"
    gain = f"at most {scaling.speedup:.1f} times as fast as one alone"
    if scaling.speedup < 1:
        gain = (
            "slower than one alone: only steps of over "
            f"{short_duration(scaling.least_step_s)} get faster"
        )
    return f"{scaling.workers}, {gain}: {busiest} of {short_duration(scaling.step_s)}; {exchange}"


def _time(run: RunPlan) -> str:
    if run.speed is None or run.seconds is None:
        return "unknown until a first run of at least 3 steps"
    rate = f"{run.speed.tokens_per_s:,.0f} tokens/s measured on {run.speed.measured}"
    return f"about {duration(run.seconds)} at {rate}, without validation"
