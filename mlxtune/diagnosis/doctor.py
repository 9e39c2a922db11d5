"""`mlxtune doctor`: checks whether this machine can train, and how well."""

from collections.abc import Sequence
from dataclasses import replace

from mlxtune.backend.workers.environment import launched_several
from mlxtune.core.machine.checks import Diagnosis, check_lines, diagnose
from mlxtune.diagnosis.machine import read_machine
from mlxtune.views.output import print_json, print_line


def doctor(model_path: str | None = None, data: Sequence[str] = ()) -> Diagnosis:
    """Check whether this machine and its packages can train.

    Under mlx.launch, also check all machines, the network between them, and whether they have the
    same model and data. Raises WorkerError if a machine cannot be reached; other problems are in
    the checks.
    """
    diagnosis = diagnose(read_machine())
    if not launched_several() or diagnosis.machine.device is None:
        return diagnosis
    # This import loads MLX, which may crash.
    from mlxtune.backend.workers.launch import check_workers, join

    workers = join()
    worker_run = check_workers(workers, diagnosis.checks, model_path, data)
    return replace(diagnosis, checks=(*diagnosis.checks, *worker_run), worker=workers.index)


def show(*, as_json: bool, model_path: str | None, data: Sequence[str]) -> bool:
    """Print the checks as lines or JSON; return whether training is possible."""
    diagnosis = doctor(model_path, data)
    if diagnosis.worker:
        # Worker 0 prints the checks.
        return diagnosis.can_train
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        for line in (*check_lines(diagnosis.checks), diagnosis.summary()):
            print_line(line)
    return diagnosis.can_train
