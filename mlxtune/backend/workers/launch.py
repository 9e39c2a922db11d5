"""Joins the workers of a launch, and checks them for `mlxtune doctor`."""

import faulthandler
import hashlib
import io
import json
import tempfile
import time
import zipfile
from collections.abc import Callable, Sequence
from pathlib import Path

from mlxtune.backend.models.model_folder import find_folder
from mlxtune.backend.workers.environment import (
    Link,
    WorkerReport,
    judge_workers,
    launched_several,
    launched_worker,
)
from mlxtune.backend.workers.group import Workers
from mlxtune.backend.workers.watch import watched
from mlxtune.config import user_cache
from mlxtune.core.files.files import as_output_error, file_hash
from mlxtune.core.files.hashing import model_hash
from mlxtune.core.files.scratch import lasting_folder, nowhere
from mlxtune.core.machine.checks import PROBLEM, Check
from mlxtune.core.machine.facts import machine_id, versions
from mlxtune.core.run.checkpoint import BEST
from mlxtune.core.run.run_folder import ResumePoint, find_resume_point
from mlxtune.errors import MlxTuneError, WorkerError, one_line

# The maximum number of seconds to wait until all workers have started.
_JOIN_SECONDS = 120
# The size in bytes of a sum that measures the network, and the number of such sums.
_MEASURED, _TIMES = 16_000_000, 5


def join(say: Callable[[str], None] = lambda text: None, *, tensor: bool = False) -> Workers:
    """Return the workers of this launch once all have joined; without a launch, only this process.

    With `tensor`, the workers share a model.

    Ends the process if not all join within two minutes. Raises WorkerError if the others cannot be
    reached, and ConfigError if the rank is not a number.
    """
    if not launched_several():
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

    The other workers get a copy of the checkpoint, which is deleted when the process ends. Raises
    the errors of `find`.
    """
    workers = join()
    if workers.size == 1:
        return find()
    packed, run, found = io.BytesIO(), Path(), None
    with watched(workers, "--resume"):
        if workers.index == 0:
            run, found = find()
            with zipfile.ZipFile(packed, "w", strict_timestamps=False) as files:
                for folder in dict.fromkeys([found.checkpoint.folder, run / BEST]):
                    for path in folder.glob("*"):
                        files.write(path, path.relative_to(run))
        content = workers.bytes_from_first(packed.getvalue())
        run = Path(workers.texts(str(run))[0])
        if found is None:
            with as_output_error(Path(tempfile.gettempdir()), "TMPDIR"):
                copy = lasting_folder("resumed")
                with zipfile.ZipFile(io.BytesIO(content)) as files:
                    files.extractall(copy)
            found = find_resume_point(copy)
            assert found is not None
    return run, found


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
        texts = workers.texts(json.dumps(report.as_dict()))
        link = Link(_seconds_to_add(workers, 4), _seconds_to_add(workers, _MEASURED), _MEASURED)
    reports = [WorkerReport(**json.loads(text)) for text in texts]
    return list(judge_workers(reports, link))


def _seconds_to_add(workers: Workers, size: int) -> float:
    """Return the shortest time to sum `size` bytes of float32 numbers over the workers."""
    found = []
    for _ in range(_TIMES):
        workers.wait()
        started = time.perf_counter()
        workers.add_zeros(size // 4)
        found.append(time.perf_counter() - started)
    return min(found)


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
