"""One process of a benchmark: takes the steps of one side, and writes what it measures.

Each line on stdout is a JSON object with one entry: a step, the run as a whole, or an error.
"""

import json
import os
import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from mlxtune.backend.measure.counts import GraphSource, StepCounts, count_steps, counted_evaluations
from mlxtune.backend.measure.peers import MlxLm
from mlxtune.backend.measure.unsloth import Unsloth
from mlxtune.backend.model import device, memory
from mlxtune.config import RunParts, TrainConfig
from mlxtune.core.data.encode import Example
from mlxtune.core.files.reading import read_bytes
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.runs.benchmark import Counts, TimedStep
from mlxtune.core.steps.batch import predicted_tokens
from mlxtune.errors import MlxTuneError

if TYPE_CHECKING:
    from mlxtune.backend.step.pending import PendingStep

OURS = "mlxtune"


@dataclass(frozen=True)
class Job:
    """The work of a process, and when it was started (time.time()).

    `adapter` is the folder of the adapter that all sides start from, `execution` how our side
    computes. With `counts`, the graphs of the steps are counted after them; `needed_flops` are what
    the steps need, once known.
    """

    side: str
    folder: Path
    config: TrainConfig
    adapter: Path
    steps: Sequence[Sequence[Example]]
    execution: str
    counts: bool = True
    needed_flops: int | None = None
    started: float = 0.0


class OurSide:
    """The steps of `train`, set up as its recipe does.

    Its methods import what they need, so that a peer's process loads and measures none of it.
    """

    loss_function = "own"

    def __init__(self, folder: Path, parts: RunParts, execution: str) -> None:
        from mlxtune.backend.model import loading
        from mlxtune.backend.step import operations
        from mlxtune.setup.model import open_model
        from mlxtune.terminal.console import RunConsole

        operations.load_ahead(folder)
        self._parts, self._execution = parts, execution
        self._console = RunConsole(quiet=True)
        self._base = open_model(parts.step, folder, self._console)
        loading.read_weights(self._base)

    def start(self, adapter: Path, steps: Sequence[Sequence[Example]]) -> None:
        """Build the pipeline and load the adapter that both sides start from."""
        from mlxtune.setup.memory import choose_plan, planned_work
        from mlxtune.setup.model import build_pipeline
        from mlxtune.setup.products import settle_products

        step, lora, base = self._parts.step, self._parts.lora, self._base
        work = planned_work(lora, steps)
        plan = choose_plan(step, lora, base, work, self._execution)
        self._base, _ = settle_products(step, base, work, plan)
        if self._base is not base:
            base, plan = self._base, choose_plan(step, lora, self._base, work, self._execution)
        self._pipeline, _ = build_pipeline(step, lora, base, work, plan, self._console)
        self._pipeline.load(adapter)

    def warm_up(self, examples: Sequence[Example]) -> float | None:
        """Compute loss and gradients of a step."""
        self._pipeline.loss_and_gradients(examples)
        return None

    def rehearse(self, steps: Sequence[Sequence[Example]]) -> None:
        """Take the steps and take them back."""
        with scratch_folder("bench") as folder:
            self._pipeline.save(folder)
            for _ in self.overlapped(steps):
                pass
            self._pipeline.restore(folder)

    def step(self, number: int, examples: Sequence[Example]) -> float:
        """Take a step at the constant learning rate."""
        self._result = self._start(number, examples).result()
        return self._result.avg_loss

    def overlapped(self, steps: Sequence[Sequence[Example]]) -> Iterator[TimedStep]:
        """Take the steps as `train` does, which starts each while the one before is computed.

        A step's seconds are those since the one before was computed.
        """
        last = time.perf_counter()
        # The last step has none that follows.
        started: tuple[Sequence[Example], PendingStep] | None = None
        for number, examples in enumerate([*steps, None], 1):
            following = None if examples is None else (examples, self._start(number, examples))
            if started is not None:
                taken, pending = started
                self._result = pending.result()
                loss, peak = self._result.avg_loss, self._result.memory
                yield _timed(self, taken, pending.ended - last, loss, peak)
                last = pending.ended
            started = following

    def _start(self, number: int, examples: Sequence[Example]) -> "PendingStep":
        rate = self._parts.lora.learning_rate
        return self._pipeline.start_batch(examples, step=number, learning_rate=rate)

    def tokens(self, examples: Sequence[Example]) -> tuple[int, int]:
        """Return the tokens that the last step ran, and how many of them were padding."""
        return self._result.run_tokens, self._result.padding

    def products(self, steps: Sequence[Sequence[Example]]) -> Iterator[dict[str, float]]:
        """Yield the seconds of the matrix products of each step, by kind."""
        from mlxtune.backend.measure.floor import product_seconds

        for examples in steps:
            yield product_seconds(self._products(examples), self._base.dtype)

    def needed_flops(self, steps: Sequence[Sequence[Example]]) -> int:
        """Return those of the products that the steps need, attention's aside."""
        from mlxtune.backend.measure.floor import needed_flops

        return sum(needed_flops(self._products(examples)) for examples in steps)

    def graphs(self) -> GraphSource | None:
        """Return the graphs of the steps; None where no graph computes them."""
        from mlxtune.backend.measure.pipeline_graphs import PipelineGraphs

        # Kernels of the CPU compute as they are called.
        return None if self.execution == "cpu" else PipelineGraphs(self._pipeline)

    @property
    def execution(self) -> str:
        """How the steps are computed, as `bench --execution` names it."""
        from mlxtune.backend.step.operations import MlxOperations

        operations = self._pipeline.forward.execution.operations
        ours = "gpu" if isinstance(operations, MlxOperations) else "cpu"
        return "plain" if self._execution == "plain" else ours

    def _products(self, examples: Sequence[Example]) -> Any:
        from mlxtune.backend.measure.floor import step_products

        batches = self._pipeline.micro_batches(examples)
        return step_products(
            self._pipeline.model,
            [stretch for _, batch in batches for stretch in batch.stretches],
            sum(map(predicted_tokens, examples)),
            vocab_size=self._base.vocab_size,
            hidden_size=self._base.hidden_size,
        )


def run_job(job: Job) -> Iterator[dict[str, Any]]:
    """Do a job; yield each step, then the run, as the fields of TimedStep and BenchmarkRun."""
    started = time.perf_counter()
    side = _open(job)
    device.finish()
    loaded = time.perf_counter()
    side.start(job.adapter, job.steps)
    ready, process_s = time.perf_counter(), time.time() - job.started
    with_pads = side.warm_up(job.steps[0])
    device.finish()
    if not device.on_cpu() and not isinstance(side, Unsloth):
        # Kernels are compiled, and memory is cached, for every shape of the steps.
        side.rehearse(job.steps)
        device.finish()
    warm = time.perf_counter()
    with counted_evaluations() as evaluations:
        for step in _timed_steps(side, job.steps):
            yield {"step": asdict(step)}
    peak_rss = memory.peak_rss()
    counts = asdict(_count(side, job, evaluations[0])) if job.counts else None
    products = list(side.products(job.steps)) if isinstance(side, OurSide) else []
    yield {
        "run": {
            "process_s": process_s,
            "weights_s": loaded - started,
            "startup_s": ready - loaded,
            "warm_up_s": warm - ready,
            "peak_rss": peak_rss,
            "loss_function": side.loss_function,
            "loss_with_pad_targets": with_pads,
            "products": products,
            "counts": counts,
        }
    }


def _open(job: Job) -> OurSide | MlxLm | Unsloth:
    """Read the weights of a side's model."""
    parts = job.config.split()
    if job.side == OURS:
        return OurSide(job.folder, parts, job.execution)
    return (Unsloth if job.side == "unsloth" else MlxLm)(job.folder, parts)


def _timed_steps(
    side: OurSide | MlxLm | Unsloth, steps: Sequence[Sequence[Example]]
) -> Iterator[TimedStep]:
    """Take the steps of a benchmark, and time each until the device has finished."""
    memory.forget_peak()
    if isinstance(side, OurSide) and not device.on_cpu():
        yield from side.overlapped(steps)
        return
    for number, examples in enumerate(steps, 1):
        memory.forget_peak()
        started = time.perf_counter()
        loss = side.step(number, examples)
        device.finish()
        yield _timed(side, examples, time.perf_counter() - started, loss, memory.peak_bytes())


def _timed(
    side: OurSide | MlxLm | Unsloth,
    examples: Sequence[Example],
    seconds: float,
    loss: float,
    peak: int,
) -> TimedStep:
    run, padding = side.tokens(examples)
    return TimedStep(
        seconds=seconds,
        tokens=sum(map(len, examples)),
        supervised_tokens=sum(map(predicted_tokens, examples)),
        tokens_run=run,
        padding=padding,
        loss=loss,
        peak_memory=peak,
    )


def _count(side: OurSide | MlxLm | Unsloth, job: Job, evaluations: int) -> Counts:
    """Count what the steps need and compute."""
    steps, needed = job.steps, job.needed_flops
    if isinstance(side, OurSide):
        needed = side.needed_flops(steps)
    source = side.graphs()
    found = StepCounts() if source is None else count_steps(source, steps)
    launches = None
    if found.launches is not None:
        head, total = found.head_launches / len(steps), found.launches.total() / len(steps)
        launches = {"head": head, "rest": total - head}
    return Counts(
        execution=side.execution,
        matmul_flops={"needed": needed, "run": found.matmul_flops},
        attention_flops=found.attention_flops,
        launches_per_step=launches,
        evaluations_per_step=evaluations / len(steps),
        compiled_shapes=found.shapes,
        host_memory_per_shape=found.memory_per_shape,
    )


def main() -> None:
    """Do the job that the command line names."""
    records = _claim_stdout()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job: Job = pickle.loads(read_bytes(Path(sys.argv[1])))
    try:
        for record in run_job(job):
            print(json.dumps(record), file=records, flush=True)
    except MlxTuneError as error:
        print(json.dumps({"error": str(error)}), file=records, flush=True)
        sys.exit(1)


def _claim_stdout() -> TextIO:
    """Return stdout for records alone; what libraries print goes to stderr."""
    records = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return records


def _end_with_parent() -> None:
    # The pipe closes when the parent ends, even if it is killed.
    # Not by `sys.stdin`, whose lock an exit by an error would wait for, and abort.
    while os.read(0, 1):
        pass
    os._exit(1)
