"""Detects a launch of several workers, and checks whether their machines agree."""

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from mlxtune.core.files.reading import read_text
from mlxtune.core.formatting import byte_size, pluralize, short_duration
from mlxtune.core.machine.machine_checks import OK, PROBLEM, Check
from mlxtune.errors import ConfigError, shorten

# For the network check: the size of an adapter's gradients in bytes, and the duration of a step in
# seconds.
_EXCHANGED_BYTES, _STEP_SECONDS = 10_000_000, 1.0


def is_one_of_several() -> bool:
    """Return whether a launcher started this process as one of several."""
    if "MLX_HOSTFILE" in os.environ:
        # With one worker, the file lists no hosts, and MLX would divide by their number.
        with suppress(OSError):
            return bool(read_text(Path(os.environ["MLX_HOSTFILE"])).strip(" \n[]{}"))
    return "MLX_RANK" in os.environ or "OMPI_COMM_WORLD_RANK" in os.environ


def launched_worker() -> int:
    """Return this process's worker number before it joins other workers; 0 without other workers.

    Raises ConfigError if the rank is not a number: MLX reads any text as 0.
    """
    text = os.environ.get("MLX_RANK", os.environ.get("OMPI_COMM_WORLD_RANK", "0"))
    if not re.fullmatch("[0-9]{1,6}", text):
        raise ConfigError([f"MLX_RANK: {shorten(text)} is not the number of a worker"])
    return int(text)


@dataclass(frozen=True)
class WorkerReport:
    """A worker's report on its machine.

    `files` maps each requested path to its hash, or to None if it cannot be read; `problems` are
    the findings of the machine's checks, each with its remedy.
    """

    machine: str
    versions: Mapping[str, str]
    files: Mapping[str, str | None] = field(default_factory=dict)
    problems: Sequence[tuple[str, str]] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the fields in a form that JSON can represent."""
        return asdict(self)


@dataclass(frozen=True)
class Link:
    """The times, in seconds, to all-reduce one float and to all-reduce `size` bytes."""

    one_s: float
    many_s: float
    size: int

    def gbps(self, workers: int) -> float:
        """Return the speed in Gbit/s: each of n workers sends (n - 1) / n of the bytes twice."""
        return (
            2 * (workers - 1) / workers * 8 * self.size / max(self.many_s - self.one_s, 1e-9) / 1e9
        )


def judge_workers(reports: Sequence[WorkerReport], link: Link) -> Iterator[Check]:
    """Yield checks of the workers' agreement and network; `reports` has one report per worker."""
    first, *others = reports
    machines = len({report.machine for report in reports})
    yield Check(OK, "workers", f"{len(reports)} on {pluralize(machines, 'machine')}")
    for worker, report in enumerate(others, 1):
        if differ := environment_difference(report.versions, first.versions):
            problem = f"worker {worker} has {differ}"
            yield Check(
                PROBLEM, "versions", problem, "use the same versions everywhere", stops=True
            )
        for problem, remedy in report.problems:
            yield Check(PROBLEM, "worker", f"worker {worker}: {problem}", remedy)
    for path, expected in first.files.items():
        yield _file(path, [report.files.get(path) for report in reports], expected)
    yield _network(link, len(reports))


def environment_difference(own: Mapping[str, Any], first: Mapping[str, Any]) -> str:
    """Return the entries that differ from worker 0's, as `name value, on worker 0 value`."""
    return "; ".join(
        f"{name} {own.get(name)}, on worker 0 {first.get(name)}"
        for name in sorted({*own, *first})
        if own.get(name) != first.get(name)
    )


def _file(path: str, hashes: Sequence[str | None], expected: str | None) -> Check:
    for problem, workers in (
        ("cannot be read", [worker for worker, digest in enumerate(hashes) if digest is None]),
        (
            "is not the same as worker 0's",
            [worker for worker, digest in enumerate(hashes) if digest != expected],
        ),
    ):
        if workers:
            where = ", ".join(map(str, workers))
            remedy = "copy it to the same place on every machine"
            digest = f"{path} {problem} on worker {where}"
            return Check(PROBLEM, "files", digest, remedy, stops=True)
    return Check(OK, "files", f"{path} is the same on all workers")


def _network(link: Link, workers: int) -> Check:
    gbps = link.gbps(workers)
    exchange = link.one_s + (link.many_s - link.one_s) * _EXCHANGED_BYTES / link.size
    gain = _STEP_SECONDS / (_STEP_SECONDS / workers + exchange)
    return Check(
        OK,
        "network",
        f"{gbps:.2g} Gbit/s, {short_duration(link.one_s)} to add one number: steps of "
        f"{_STEP_SECONDS:g} s that add {byte_size(_EXCHANGED_BYTES)} run at most {gain:.1f} times "
        "as fast as on one worker",
    )
