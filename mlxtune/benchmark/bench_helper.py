"""One process of a benchmark: takes one contestant's steps, and writes the measurements.

Each line on stdout is a JSON object with one entry: a step, the run as a whole, or an error.
"""

import json
import math
import os
import pickle
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TextIO

from mlxtune.backend.device import allocator, default_device
from mlxtune.benchmark.peers import MlxLm
from mlxtune.benchmark.result import TimedStep
from mlxtune.config import TrainConfig
from mlxtune.core.data.encode import Example, predicted_tokens
from mlxtune.core.files.reading import read_bytes
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.errors import MlxTuneError

if TYPE_CHECKING:
    from mlxtune.backend.step.optimizer_step import OptimizerStep

OURS = "mlxtune"


class BenchTrainer(Protocol):
    """A trainer whose steps can be timed; `loss_function` names its loss."""

    loss_function: str

    @property
    def execution(self) -> str:
        """The name of the trainer's execution: gpu, cpu, plain, compiled or eager."""

    def start(self, adapter: Path, steps: Sequence[Sequence[Example]]) -> None:
        """Attach the adapter to the model, and prepare the steps. Raises MlxTuneError."""

    def warm_up(self, steps: Sequence[Sequence[Example]]) -> float | None:
        """Prepare for the steps, without training; return `loss_with_pad_targets` or None."""

    def step(self, number: int, examples: Sequence[Example]) -> float:
        """Take step `number`, counted from 1, on all its examples; return its loss."""

    def token_counts(self, examples: Sequence[Example]) -> tuple[int, int]:
        """Return the numbers of processed tokens and of padding tokens in the last step."""


@dataclass(frozen=True)
class Job:
    """The steps of a contestant, with `rows` rows in total.

    `adapter` is the folder of the adapter that both contestants start from. `execution` is the
    value of --execution. `started` is the time at which the contestant's process was started.
    """

    contestant_name: str
    folder: Path
    config: TrainConfig
    adapter: Path
    steps: Sequence[Sequence[Example]]
    rows: int
    execution: str
    started: float = 0.0


class OurTrainer:
    """mlxtune as a contestant: the steps of `train`, set up as in `commands.train`.

    The methods import mlxtune's libraries, so that a peer's process neither loads nor measures
    them.
    """

    loss_function = "own"

    def __init__(self, folder: Path, config: TrainConfig, execution: str) -> None:
        from mlxtune.backend.forward import operations
        from mlxtune.backend.models import loading
        from mlxtune.session.prepared_run import prepare_base
        from mlxtune.views.console import RunConsole

        operations.load_ahead(folder)
        self._config, self._execution = config, execution
        self._console = RunConsole(quiet=True)
        base = loading.open_base(folder, config.dtype, config.base_options())
        self.base = prepare_base(config, base, self._console)
        loading.read_weights(self.base)

    def start(self, adapter: Path, steps: Sequence[Sequence[Example]]) -> None:
        """Build the pipeline and load the adapter that both contestants start from."""
        from mlxtune.core.steps.pack import StepLengths
        from mlxtune.session.memory_planning import expected_workload, plan_run
        from mlxtune.session.prepared_run import build_pipeline

        config, base = self._config, self.base
        lengths = [StepLengths.of(step, keyed=config.dropout > 0) for step in steps]
        workload = expected_workload(config, lengths)
        self.base, plan, _ = plan_run(config, base, workload, self._execution)
        self.pipeline, _ = build_pipeline(config, self.base, workload, plan, self._console)
        self.pipeline.load(adapter)

    def refer(self, steps: Sequence[Sequence[Example]]) -> list[Sequence[Example]]:
        """Return the steps, with the reference's log-probabilities if the objective needs them."""
        from mlxtune.core.objectives.objective import with_references

        if not self.pipeline.objective.needs_reference:
            return list(steps)
        examples = [example for step in steps for example in step]
        logp_of = dict(zip(map(id, examples), self.pipeline.logps(examples), strict=True))
        return [with_references(step, [logp_of[id(each)] for each in step]) for step in steps]

    def warm_up(self, steps: Sequence[Sequence[Example]]) -> float | None:
        """Compute the first step's gradients or, on a GPU, take all steps and undo them."""
        if default_device.on_cpu():
            self.pipeline.loss_and_gradients(steps[0])
            return None
        with self.restored():
            for _ in self.overlapped(steps):
                pass
        return None

    @contextmanager
    def restored(self) -> Iterator[None]:
        """Restore the adapter and the optimizer's state after the block."""
        with scratch_folder("bench") as folder:
            self.pipeline.snapshot()(folder)
            yield
            self.pipeline.restore(folder)

    def step(self, number: int, examples: Sequence[Example]) -> float:
        """Take a step at the peak learning rate, which stays constant."""
        self._result = self.pipeline.wait(self._start(number, examples)).result()
        return self._result.avg_loss

    def overlapped(self, steps: Sequence[Sequence[Example]]) -> Iterator[TimedStep]:
        """Take the steps like `train`, which starts each step while the previous one runs.

        A step is timed from the end of the previous step.
        """
        last = time.perf_counter()
        # The step that is running; the None after the last step only lets that step complete.
        started: tuple[Sequence[Example], OptimizerStep] | None = None
        for number, examples in enumerate([*steps, None], 1):
            following = None if examples is None else (examples, self._start(number, examples))
            if started is not None:
                step, running = started
                outcome = self.pipeline.wait(running)
                self._result = outcome.result()
                loss, peak = self._result.avg_loss, self._result.memory
                yield _time(self, step, outcome.ended - last, loss, peak)
                last = outcome.ended
            started = following

    def _start(self, number: int, examples: Sequence[Example]) -> "OptimizerStep":
        rate = self._config.peak_rate
        return self.pipeline.start_batch(examples, step=number, learning_rate=rate)

    def token_counts(self, examples: Sequence[Example]) -> tuple[int, int]:
        return self._result.run_tokens, self._result.padding

    @property
    def execution(self) -> str:
        """The name of the execution in `bench --execution`: gpu, cpu or plain."""
        from mlxtune.backend.forward.operations import MlxOperations

        operations = self.pipeline.forward.execution.operations
        ours = "gpu" if isinstance(operations, MlxOperations) else "cpu"
        return "plain" if self._execution == "plain" else ours


def open_trainer(job: Job) -> BenchTrainer:
    """Return the trainer of a job, with the model's weights read."""
    if job.contestant_name == OURS:
        return OurTrainer(job.folder, job.config, job.execution)
    return MlxLm(job.folder, job.config)


def run_job(
    job: Job, opened: Callable[[Job], BenchTrainer] = open_trainer
) -> Iterator[dict[str, Any]]:
    """Run a job; yield each step, then the run, as the fields of TimedStep and BenchmarkRun."""
    started = time.perf_counter()
    trainer = opened(job)
    default_device.finish()
    loaded = time.perf_counter()
    trainer.start(job.adapter, job.steps)
    ready, process_s = time.perf_counter(), time.time() - job.started
    steps = trainer.refer(job.steps) if isinstance(trainer, OurTrainer) else job.steps
    default_device.finish()
    referred = time.perf_counter()
    # On a GPU, this compiles kernels and caches memory for every shape of the steps.
    with_pads = trainer.warm_up(steps)
    default_device.finish()
    warm = time.perf_counter()
    for step in _timed_steps(trainer, steps):
        yield {"step": asdict(step)}
    peak_rss, large_cache_s = allocator.peak_rss(), None
    if isinstance(trainer, OurTrainer) and not default_device.on_cpu():
        large_cache_s = _time_with_large_cache(trainer, steps)
    yield {
        "run": {
            "process_s": process_s,
            "weights_s": loaded - started,
            "startup_s": ready - loaded,
            "reference_s": referred - ready,
            "warm_up_s": warm - referred,
            "peak_rss": peak_rss,
            "loss_function": trainer.loss_function,
            "loss_with_pad_targets": with_pads,
            "execution": trainer.execution,
            "large_cache_s": large_cache_s,
        }
    }


def _time_with_large_cache(trainer: OurTrainer, steps: Sequence[Sequence[Example]]) -> float:
    """Return the time of all steps while MLX's cache may grow to the memory limit."""
    import mlx.core as mx

    before = mx.set_cache_limit(mx.get_memory_limit())
    try:
        trainer.warm_up(steps)
        default_device.finish()
        return math.fsum(step.seconds for step in trainer.overlapped(steps))
    finally:
        mx.set_cache_limit(before)


def _timed_steps(trainer: BenchTrainer, steps: Sequence[Sequence[Example]]) -> Iterator[TimedStep]:
    """Take the steps, and time each until the device has finished it."""
    allocator.reset_peaks()
    if isinstance(trainer, OurTrainer) and not default_device.on_cpu():
        # The steps are taken again with a large cache, and preferences need the first state.
        with trainer.restored():
            allocator.reset_peaks()
            yield from trainer.overlapped(steps)
        return
    for number, examples in enumerate(steps, 1):
        allocator.reset_peaks()
        started = time.perf_counter()
        loss = trainer.step(number, examples)
        default_device.finish()
        yield _time(trainer, examples, time.perf_counter() - started, loss, allocator.peak_bytes())


def _time(
    trainer: BenchTrainer, examples: Sequence[Example], seconds: float, loss: float, peak: int
) -> TimedStep:
    forward, padding = trainer.token_counts(examples)
    return TimedStep(
        seconds=seconds,
        tokens=sum(map(len, examples)),
        supervised_tokens=sum(map(predicted_tokens, examples)),
        tokens_run=forward,
        padding=padding,
        loss=loss,
        peak_memory=peak,
    )


def main(opened: Callable[[Job], BenchTrainer] = open_trainer) -> None:
    """Run the job in the file that the command line names."""
    MlxTuneError.names_flags = True
    records = _claim_stdout()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    job: Job = pickle.loads(read_bytes(Path(sys.argv[1])))
    try:
        for record in run_job(job, opened):
            print(json.dumps(record), file=records, flush=True)
    except MlxTuneError as error:
        print(json.dumps({"error": str(error)}), file=records, flush=True)
        sys.exit(1)


def _claim_stdout() -> TextIO:
    """Return a stdout for records only; other output of the process goes to stderr."""
    records = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    return records


def _end_with_parent() -> None:
    # The pipe closes when the parent ends, even if it is killed. `sys.stdin` is not used: an exit
    # after an error would wait for that stream's lock, and abort.
    while os.read(0, 1):
        pass
    os._exit(1)
