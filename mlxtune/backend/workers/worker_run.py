"""A run on several workers: which one prints and writes, and what all of them have to agree on."""

import json
import os
import secrets
import shlex
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Generic, Protocol, TextIO, TypeVar, cast

from mlxtune.backend.device import memory
from mlxtune.backend.workers.environment import launched_worker
from mlxtune.backend.workers.group import Workers
from mlxtune.backend.workers.heartbeat import TOKEN_SIZE, Heartbeat
from mlxtune.backend.workers.launch import join
from mlxtune.config import OPTIONS, TrainConfig
from mlxtune.config.fields import Affects
from mlxtune.core.files.files import open_to_append
from mlxtune.core.files.reading import read_text
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.machine.facts import machine_id
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.run.progress import Progress
from mlxtune.core.training.observer import RunStart, TrainingObserver
from mlxtune.errors import (
    ConfigError,
    MlxTuneError,
    TrainingInterrupted,
    WorkerError,
    printable,
)

# Seconds for the main thread to end by itself once another worker is gone.
_GRACE = 3.0
# Seconds in which the end of another worker's connection is seen.
_MOMENT = 0.5
# What the workers of a run have in common, and the error if they have not.
_COMMON = {
    "versions": "runs other versions ({}): install the same on all machines",
    "options": "was given other options ({}): start all workers with one command",
    "base_hash": "--model-path: has other weights than worker 0: copy the folder",
    "data_hash": "--data: gives other examples than on worker 0: copy the files",
    "validation_hash": "--val-data: gives other examples than on worker 0: copy the file",
    "dtype": "computes in another --dtype ({}): give one",
    "quantized_compute": "computes otherwise with quantised weights ({}): give --quantized-compute",
    "step": "starts at another step ({}): start all workers with one command",
}


class _Log:
    """A file that is written once its folder exists, where it does not matter if that fails."""

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


class Says(Protocol):
    """What a run says on its console, or in a log."""

    def say(self, label: str, text: str) -> None: ...

    def warn(self, text: str) -> None: ...


ConsoleT = TypeVar("ConsoleT", bound=Says)


class LastStep(TrainingObserver):
    """Knows the last step that a run has taken, 0 before it starts."""

    def __init__(self) -> None:
        self._progress = Progress()

    def on_start(self, run: RunStart, previous: Path | None) -> None:
        """Follow the progress of the run."""
        self._progress = run.progress

    @property
    def number(self) -> int:
        """The number of the step."""
        return self._progress.step


@dataclass(frozen=True)
class WorkerRun(Generic[ConsoleT]):
    """A worker's part of a run: its own options and console, and an observer of its last step."""

    workers: Workers
    config: TrainConfig
    console: ConsoleT
    first_on_machine: bool = True
    last_step: LastStep = field(default_factory=LastStep)

    @contextmanager
    def in_turn(self) -> Iterator[None]:
        """Let the first worker of each machine do something before the others do it."""
        if self.workers.size > 1 and not self.first_on_machine:
            self.workers.wait()
        yield
        if self.workers.size > 1 and self.first_on_machine:
            self.workers.wait()

    def check_same(self, options: Mapping[str, Any], described: Mapping[str, Any]) -> None:
        """Raise WorkerError where another worker would not do the same as worker 0."""
        if self.workers.size == 1:
            return
        kinds = (Affects.RESULT, Affects.LENGTH)
        own = {name: value for name, value in options.items() if OPTIONS[name].affects in kinds}
        facts = {**described, "options": own}
        texts = self.workers.texts(json.dumps({name: facts.get(name) for name in _COMMON}))
        first, *others = map(json.loads, texts)
        for worker, other in enumerate(others, 1):
            for name, problem in _COMMON.items():
                if other[name] != first[name]:
                    how = problem.format(_difference(first, other, name))
                    if self.workers.index:
                        # Worker 0 says it.
                        self.console.warn(f"worker {worker} {how}")
                        raise SystemExit(1)
                    raise WorkerError(f"worker {worker} {how}")


def _difference(first: Mapping[str, Any], other: Mapping[str, Any], name: str) -> str:
    """Return how an entry differs, as `name: value, on worker 0 value`."""
    here, there = first[name], other[name]
    if not isinstance(here, dict):
        here, there = {name: here}, {name: there}
    return "; ".join(
        f"{key} {there.get(key)}, on worker 0 {here.get(key)}"
        for key in sorted({*here, *there})
        if here.get(key) != there.get(key)
    )


@contextmanager
def join_run(
    config: TrainConfig, console_of: Callable[[TrainConfig, TextIO | None], ConsoleT]
) -> Iterator[WorkerRun[ConsoleT]]:
    """Join the other workers of the launch, if there are any.

    `console_of` makes the console of a run, which prints, or writes to a log.

    Worker 0 has the run's folder and prints. The others keep theirs in a temporary folder, and log
    to worker-N.log in the run's folder.

    Raises WorkerError when another worker is lost.
    """
    waiting = console_of(replace(config, quiet=config.quiet or launched_worker() > 0), None)
    tensor = config.parallel == "tensor"
    workers = join(partial(waiting.say, "Workers"), tensor=tensor)
    if workers.size == 1:
        if tensor:
            raise ConfigError(
                [
                    "--parallel tensor needs several workers: "
                    "start them with mlx.launch -n 2 -- mlxtune train …"
                ]
            )
        yield WorkerRun(workers, config, console_of(config, None))
        return
    with ExitStack() as held:
        machines = workers.texts(machine_id())
        here = machines[workers.index]
        own = replace(config, memory_limit=config.memory_limit / machines.count(here))
        if tensor:
            own = _alike(own, workers)
        console = console_of(own, None)
        if workers.index:
            log = _Log(config.checkpoint_path / f"worker-{workers.index}.log")
            held.callback(log.flush)
            console = console_of(own, cast(TextIO, log))
            scratch = held.enter_context(scratch_folder("worker"))
            own = replace(
                own,
                output=str(scratch / ADAPTER),
                checkpoint_dir=str(scratch),
                overwrite=False,
                track=(),
                samples=0,
            )
        worker_run = WorkerRun(workers, own, console, machines.index(here) == workers.index)
        watch = _Watch(worker_run, config.checkpoint_path)
        held.push(watch.leave)
        console.say("Workers", f"{workers.size} on {len(set(machines))} machine(s)")
        try:
            yield worker_run
        except ConfigError:
            raise
        except TrainingInterrupted as interrupt:
            # Once one has ended, mlx.launch ends the others, saved or not.
            workers.wait()
            if workers.index:
                # Worker 0 says where the run was saved.
                raise SystemExit(128 + interrupt.signal) from None
            raise
        except Exception as error:
            if (lost := watch.found(error)) is not None:
                raise WorkerError(lost) from error
            if workers.index and isinstance(error, MlxTuneError):
                error.args = (f"worker {workers.index}: {error}",)
            raise


def _alike(config: TrainConfig, workers: Workers) -> TrainConfig:
    """Return options by which workers that share a model run the same micro-batches.

    Raises WorkerError where they were given different ones.
    """
    limit = memory.find_limits(config.memory_limit).memory / memory.GB
    found = [json.loads(text) for text in workers.texts(json.dumps([config.parallel, limit]))]
    if len({parallel for parallel, _ in found}) > 1:
        raise WorkerError("--parallel differs between the workers: start all with one command")
    # Answers are generated token by token, for which no worker has the whole model.
    return replace(config, memory_limit=min(each for _, each in found), samples=0)


class _Watch:
    """Ends this process where another worker is gone and a collective waits for it."""

    def __init__(self, worker_run: WorkerRun, run: Path) -> None:
        self._worker_run, self._run = worker_run, run
        self._found = threading.Event()
        workers, server, port = worker_run.workers, None, 0
        # Over MLX's own connections, which nobody else has.
        token = workers.bytes_from_first(secrets.token_bytes(TOKEN_SIZE))
        self._heartbeat = heartbeat = Heartbeat(self._end, token)
        if workers.index == 0:
            server = Heartbeat.listen(_address())
            port = server.getsockname()[1]
        place = json.loads(workers.texts(json.dumps([_address(), port]))[0])
        try:
            if server is not None:
                heartbeat.accept(server, workers.size - 1)
            else:
                heartbeat.connect(place[0], place[1], workers.index)
        except OSError as error:
            raise WorkerError(
                f"worker 0 cannot be reached at {place[0]}:{place[1]} ({error.strerror or error}): "
                "allow connections between the machines"
            ) from error

    def leave(self, kind: type[BaseException] | None, *_: object) -> None:
        """End, and tell the others if it is by an error: they may wait for this one."""
        self._found.set()
        peaceful = kind is None or issubclass(kind, SystemExit | TrainingInterrupted)
        self._heartbeat.close(failed=not peaceful)

    def found(self, error: Exception) -> str | None:
        """Return what to say of an error, if it is that another worker is gone."""
        self._found.set()
        # What MLX's ring returned after a loss may have led to an error of any kind.
        of_ring = "[ring]" in str(error)
        self._heartbeat.wait_for_loss(_GRACE if of_ring else _MOMENT)
        if of_ring:
            return self._line()
        # An error that the other one has, too, says more than its loss.
        own = self._heartbeat.failed and not isinstance(error, WorkerError)
        return None if own or self._heartbeat.lost is None else self._line()

    def _line(self) -> str:
        lost = self._heartbeat.lost
        who = "another worker" if lost is None else f"worker {lost}"
        log = f", see {self._run / f'worker-{lost}.log'}" if lost else ""
        step = self._worker_run.last_step.number
        again = f"resume with mlxtune train --resume {shlex.quote(str(self._run))}"
        return f"{who} is gone after step {step}{log}; {again if step else 'start the run again'}"

    def _end(self, lost: int) -> None:
        if not self._found.wait(_GRACE):
            line, index = self._line(), self._worker_run.workers.index
            name = f"worker {index}: " if index else ""
            sys.stderr.write(printable(f"mlxtune: error: {name}{line}") + "\n")
            sys.stderr.flush()
            os._exit(1)


def _address() -> str:
    """Return where the other machines find this one, as the launcher told MLX."""
    with suppress(OSError, ValueError, LookupError, TypeError):
        hosts = json.loads(read_text(Path(os.environ["MLX_HOSTFILE"])))
        return str(hosts[0][0]).rpartition(":")[0].strip("[]")
    for name in ("MLX_JACCL_COORDINATOR", "NCCL_HOST_IP"):
        if host := os.environ.get(name, "").rpartition(":")[0] or os.environ.get(name):
            return host
    return "127.0.0.1"
