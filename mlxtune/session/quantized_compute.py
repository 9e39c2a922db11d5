"""Times two ways to multiply by quantised weights on the device, and chooses the faster."""

from collections.abc import Mapping
from typing import Any

from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.workers.group import ALONE, Workers
from mlxtune.config import TrainConfig
from mlxtune.core.run.run_folder import ResumePoint
from mlxtune.core.steps.memory_plan import DataSample, MemoryPlan


def settle_products(
    config: TrainConfig,
    base: BaseModel,
    work: DataSample,
    plan: MemoryPlan,
    resume: ResumePoint | None = None,
    workers: Workers = ALONE,
) -> tuple[BaseModel, str]:
    """Apply the choice of --quantized-compute auto; return the model and a line on the choice.

    On a GPU, both ways are timed with as many tokens as a micro-batch can have; a resumed run keeps
    its choice, and worker 0 decides for all workers. The line is empty if nothing was timed.
    """
    if config.quantized_compute != "auto" or base.quantized_compute is None or workers.split_model:
        return base, ""
    recorded = recorded_products({} if resume is None else resume.checkpoint.metadata)
    form, line = base.quantized_compute, ""
    if recorded:
        form = recorded
    elif workers.index == 0 and (timed := loading.timed_products(base, _tokens(work, plan))):
        form, line = timed.faster, timed.describe()
    form, _, line = workers.texts(f"{form} {line}")[0].partition(" ")
    return loading.with_products(base, form), line


def recorded_products(metadata: Mapping[str, Any]) -> str:
    """Return the --quantized-compute choice in a checkpoint's metadata, or an empty string."""
    form = metadata.get("quantized_compute")
    return form if form in loading.PRODUCTS else ""


def _tokens(work: DataSample, plan: MemoryPlan) -> int:
    """Return the largest number of tokens that a micro-batch of the run can have."""
    steps = [[len(example) for example in step] for step in work.steps if step]
    if not steps:
        return max(plan.execution.micro_batch_tokens, *(load.tokens for load in work.alone))
    longest = max(map(max, steps))
    return min(max(plan.execution.micro_batch_tokens, longest), max(map(sum, steps)))
