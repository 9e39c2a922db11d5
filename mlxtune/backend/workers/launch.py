"""Joins the workers of a launch for a run, for a resume, and for `mlxtune doctor`.

In a run, one worker prints and writes, and all check that they agree.
"""

import faulthandler
import hashlib
import io
import json
import tempfile
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TextIO, TypeVar, cast

from mlxtune.backend.device import allocator
from mlxtune.backend.models.model_folder import find_folder
from mlxtune.backend.workers.environment import (
    Link,
    WorkerReport,
    environment_difference,
    is_one_of_several,
    judge_workers,
    launched_worker,
)
from mlxtune.backend.workers.heartbeat import watched
from mlxtune.backend.workers.workers import Workers
from mlxtune.config import OPTIONS, TrainConfig, user_cache
from mlxtune.config.option import Effect
from mlxtune.core.files.hashing import model_hash
from mlxtune.core.files.ours import is_ours
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.scratch import lasting_folder, nowhere, scratch_folder
from mlxtune.core.files.writing import as_output_error, open_to_append
from mlxtune.core.formatting import pluralize
from mlxtune.core.machine.facts import machine_id, versions
from mlxtune.core.machine.machine_checks import PROBLEM, Check
from mlxtune.core.run.checkpoint import ADAPTER, BEST
from mlxtune.core.run.progress import Progress
from mlxtune.core.run.run_folder import (
    REFERENCE,
    TRAINED_ROWS,
    ResumePoint,
    find_resume_point,
)
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.errors import (
    ConfigError,
    MlxTuneError,
    TrainingInterrupted,
    WorkerError,
    one_line,
    resume_command,
)

# The maximum number of seconds to wait until all workers have started.
_JOIN_SECONDS = 120
# The size in bytes of a sum that measures the network, and the number of such sums.
_MEASURED_BYTES, _REPEATS = 16_000_000, 5
# Values that must be the same on all workers of a run, and the error if they differ.
_COMMON_FACTS = {
    "versions": "has different versions ({}): use the same versions everywhere",
    "options": "was given different options ({}): start all workers with one command",
    "base_hash": "reads weights from --model-path that differ from worker 0's: copy the folder",
    "data_hash": "reads examples from --data that differ from worker 0's: copy the files",
    "validation_hash": "reads examples from --val-data that differ from worker 0's: copy the file",
    "reward_hash": "has other --reward files than worker 0, or other weights: copy the files",
    "dtype": "computes in a different --dtype ({}): set --dtype",
    "quantized_compute": "multiplies quantised weights differently ({}): set --quantized-compute",
    "step": "starts at a different step ({}): start all workers with one command",
}


def join(say: Callable[[str], None] = lambda text: None, *, tensor: bool = False) -> Workers:
    """Return the workers of this launch once all have joined; without a launch, only this process.

    With `tensor`, the workers share a model.

    Ends the process if not all join within two minutes. Raises WorkerError if the others cannot be
    reached, and ConfigError if the rank is not a number.
    """
    if not is_one_of_several():
        return Workers()
    launched_worker()
    say(f"waiting for the others, up to {_JOIN_SECONDS} s")
    with nowhere() as dropped:
        # MLX waits in C++, where neither a signal nor another Python thread can end the wait.
        faulthandler.dump_traceback_later(_JOIN_SECONDS, exit=True, file=dropped)
        try:
            return Workers.launched(tensor=tensor)
        except (RuntimeError, ValueError) as error:
            raise WorkerError(f"the other workers cannot be reached: {one_line(error)}") from error
        finally:
            faulthandler.cancel_dump_traceback_later()


def from_worker_0(find: Callable[[], tuple[Path, ResumePoint]]) -> tuple[Path, ResumePoint]:
    """Return the run's folder and checkpoint that `find` returns on worker 0.

    The other workers get a copy of the checkpoint, and of the run's files that they read, which is
    deleted when the process ends. Raises the errors of `find`.
    """
    workers = join()
    if workers.world_size == 1:
        return find()
    packed, run, resume_point = io.BytesIO(), Path(), None
    with watched(workers, "--resume"):
        if workers.rank == 0:
            run, resume_point = find()
            with zipfile.ZipFile(packed, "w", strict_timestamps=False) as files:
                for folder in dict.fromkeys([resume_point.checkpoint.folder, run / BEST]):
                    for path in folder.glob("*"):
                        files.write(path, path.relative_to(run))
                for path in (run / REFERENCE, run / TRAINED_ROWS):
                    if is_ours(path):
                        files.write(path, path.relative_to(run))
        content = workers.broadcast_bytes(packed.getvalue())
        run = Path(workers.all_gather_text(str(run))[0])
        if resume_point is None:
            with as_output_error(Path(tempfile.gettempdir()), "TMPDIR"):
                copy = lasting_folder("resumed")
                with zipfile.ZipFile(io.BytesIO(content)) as files:
                    files.extractall(copy)
            resume_point = find_resume_point(copy)
            assert resume_point is not None
    return run, resume_point


class _Log:
    """A log file that is written once its folder exists; write errors are ignored."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._waiting: list[str] = []

    def write(self, text: str) -> int:
        self._waiting.append(text)
        return len(text)

    def flush(self) -> None:
        if self._waiting and self._path.parent.is_dir():
            with suppress(OSError), open_to_append(self._path) as file:
                file.write("".join(self._waiting).encode())
                self._waiting.clear()

    def isatty(self) -> bool:
        return False


class MessageSink(Protocol):
    """A console or a log, which receives the lines of a run."""

    def say(self, label: str, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


ConsoleT = TypeVar("ConsoleT", bound=MessageSink)


class LastStepObserver(TrainingObserver):
    """Observes the number of a run's last step, 0 at first, and whether there is a checkpoint."""

    def __init__(self) -> None:
        self._progress, self._saved = Progress(), False

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        """Follow the progress of the run."""
        self._progress, self._saved = run.progress, run.progress.step > 0

    def on_checkpoint(self, folder: Path) -> None:
        """Record that there is a checkpoint."""
        self._saved = True

    def describe_lost_worker(self, run: Path, lost: int | None) -> str:
        """Return the end of the message about a lost worker: the last step, and how to continue."""
        log = f", see {run / f'worker-{lost}.log'}" if lost else ""
        again = f"resume with {resume_command(run)}"
        again = again if self._saved else "nothing was saved: run the same command again"
        return f" after step {self._progress.step}{log}; {again}"


@dataclass(frozen=True)
class WorkerRun(Generic[ConsoleT]):
    """One worker of a run: its options and console, and an observer of the last step."""

    workers: Workers
    config: TrainConfig
    console: ConsoleT
    first_on_machine: bool = True
    last_step: TrainingObserver = field(default_factory=LastStepObserver)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the first worker of each machine run the block before the others."""
        if self.workers.world_size > 1 and not self.first_on_machine:
            self.workers.barrier()
        yield
        if self.workers.world_size > 1 and self.first_on_machine:
            self.workers.barrier()

    def check_same(self, options: Mapping[str, Any], described: Mapping[str, Any]) -> None:
        """Raise WorkerError (worker 0) or exit (others) if options, versions or data differ."""
        if self.workers.world_size == 1:
            return
        kinds = (Effect.RESULT, Effect.LENGTH)
        own = {name: value for name, value in options.items() if OPTIONS[name].affects in kinds}
        facts = {**described, "options": own}
        texts = self.workers.all_gather_text(
            json.dumps({name: facts.get(name) for name in _COMMON_FACTS})
        )
        first, *others = map(json.loads, texts)
        for worker, other in enumerate(others, 1):
            for name, problem in _COMMON_FACTS.items():
                if other[name] != first[name]:
                    values = (each[name] for each in (other, first))
                    entries = (each if isinstance(each, dict) else {name: each} for each in values)
                    how = problem.format(environment_difference(*entries))
                    if self.workers.rank:
                        # Worker 0 raises the error.
                        self.console.warn(f"worker {worker} {how}")
                        raise SystemExit(1)
                    raise WorkerError(f"worker {worker} {how}")


@contextmanager
def join_run(
    config: TrainConfig, console_of: Callable[[TrainConfig, TextIO | None], ConsoleT]
) -> Iterator[WorkerRun[ConsoleT]]:
    """Join the other workers of the launch, if there are any, and yield this worker of the run.

    `console_of(config, file)` makes a console, which writes to the log `file` if it is not None.

    Worker 0 writes the run's folder and prints. The others write to temporary folders, and log to
    worker-N.log in the run's folder.

    Raises WorkerError if another worker is lost.
    """
    console = console_of(config, None)
    tensor = config.parallel == "tensor"
    # Worker 0 says for all that the others are awaited.
    says = () if launched_worker() > 0 else (partial(console.say, "Workers"),)
    workers = join(*says, tensor=tensor)
    if workers.world_size == 1:
        if tensor:
            raise ConfigError(
                [
                    "--parallel tensor needs several workers: "
                    "start them with mlx.launch -n 2 -- mlxtune train …"
                ]
            )
        yield WorkerRun(workers, config, console)
        return
    last_step, run = LastStepObserver(), config.checkpoint_path
    with ExitStack() as stack:
        watch = watched(
            workers, f"--parallel {config.parallel}", partial(last_step.describe_lost_worker, run)
        )
        machines = stack.enter_context(watch)
        here = machines[workers.rank]
        own: dict[str, Any] = {"memory_limit": config.memory_limit / machines.count(here)}
        if tensor:
            # Workers share micro-batches, so they need one limit. Sampling needs the whole model,
            # which no worker has.
            own = {"memory_limit": _lowest(own["memory_limit"], workers), "samples": 0}
        if workers.rank:
            log = _Log(run / f"worker-{workers.rank}.log")
            stack.callback(log.flush)
            console = console_of(config, cast(TextIO, log))
            with as_output_error(Path(tempfile.gettempdir()), "TMPDIR"):
                scratch = stack.enter_context(scratch_folder("worker"))
            scratch_paths = {"output": str(scratch / ADAPTER), "checkpoint_dir": str(scratch)}
            own |= {**scratch_paths, "overwrite": False, "track": (), "samples": 0}
        config = replace(config, **own)
        console.say(
            "Workers", f"{workers.world_size} on {pluralize(len(set(machines)), 'machine')}"
        )
        try:
            yield WorkerRun(
                workers, config, console, machines.index(here) == workers.rank, last_step
            )
        except TrainingInterrupted as interrupt:
            # When a worker ends, mlx.launch ends the others, even if they have not saved yet.
            workers.barrier()
            if workers.rank:
                # Worker 0 reports where the run was saved.
                raise SystemExit(128 + interrupt.signal) from None
            raise


def _lowest(memory_limit: float, workers: Workers) -> float:
    """Return the lowest memory limit that a worker can have, in GB."""
    limit = allocator.find_limits(memory_limit).memory / allocator.GB
    return float(min(map(json.loads, workers.all_gather_text(json.dumps(limit)))))


def check_workers(
    workers: Workers, checks: Sequence[Check], model_path: str | None, data: Sequence[str]
) -> list[Check]:
    """Return the checks over all workers, the same list on each; `checks` are this machine's."""
    files = {path: _hash_of_data(Path(path)) for path in data}
    if model_path is not None:
        files[model_path] = _hash_of_model(model_path)
    report = WorkerReport(
        machine=machine_id(),
        versions=versions(),
        files=files,
        problems=[(check.found, check.remedy) for check in checks if check.level == PROBLEM],
    )
    with watched(workers, "doctor"):
        texts = workers.all_gather_text(json.dumps(report.as_dict()))
        link = Link(
            _seconds_to_add(workers, 4), _seconds_to_add(workers, _MEASURED_BYTES), _MEASURED_BYTES
        )
    reports = [WorkerReport(**json.loads(text)) for text in texts]
    return list(judge_workers(reports, link))


def _seconds_to_add(workers: Workers, size: int) -> float:
    """Return the shortest time to all-reduce `size` bytes of float32 numbers."""
    times = []
    for _ in range(_REPEATS):
        workers.barrier()
        started = time.perf_counter()
        workers.add_zeros(size // 4)
        times.append(time.perf_counter() - started)
    return min(times)


def _hash_of_data(path: Path) -> str | None:
    """Return the hash of a file, or of the files in a folder; None if they cannot be read."""
    try:
        if not path.is_dir():
            return file_hash(path)
        hashes = [f"{each.name} {file_hash(each)}" for each in sorted(path.iterdir())]
    except OSError:
        return None
    return hashlib.sha256("\n".join(hashes).encode()).hexdigest()


def _hash_of_model(path: str) -> str | None:
    try:
        return model_hash(find_folder(path), user_cache())
    except (OSError, MlxTuneError):
        return None
