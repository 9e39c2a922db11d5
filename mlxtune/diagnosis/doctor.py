"""`mlxtune doctor`: whether training works here, and how well."""

import platform
import sys
from collections.abc import Sequence
from dataclasses import replace

from mlxtune.backend.workers.environment import launched_several
from mlxtune.config import TrainConfig, user_cache
from mlxtune.core.machine import facts
from mlxtune.core.machine.blas import load_blas
from mlxtune.core.machine.checks import Diagnosis, check_lines, diagnose
from mlxtune.core.machine.conditions import Sensors
from mlxtune.core.machine.facts import probe_device
from mlxtune.core.machine.reservation import reservations
from mlxtune.diagnosis import requirements
from mlxtune.views.output import print_json, print_line


def read_machine() -> facts.Machine:
    """Return the facts of this machine: its system, packages, device, folders and conditions."""
    device, problem = probe_device()
    sensors = Sensors()
    return facts.Machine(
        system=platform.system(),
        **facts.read_system(),
        power=facts.Power(sensors.on_battery(), sensors.saves_power()),
        thermal=sensors.thermal(),
        processor=platform.machine(),
        python=platform.python_version(),
        packages=requirements.packages(),
        libraries=requirements.mlx_libraries(),
        mlx_first=_mlx_first(device),
        device=device,
        device_problem=problem,
        has_nvidia=facts.has_nvidia(),
        default_limit=int(TrainConfig.memory_limit * 10**9),
        reserved=tuple(run.describe() for run in reservations(user_cache() / "memory")),
        folders=facts.folders(),
        offline=facts.offline(),
    )


def doctor(model_path: str | None = None, data: Sequence[str] = ()) -> Diagnosis:
    """Look at this machine and its packages, and judge whether training works here.

    Under mlx.launch, look at all machines, the network between them, and whether all have the same
    model and data. Raises WorkerError when they cannot be reached; else problems are among the
    checks.
    """
    diagnosis = diagnose(read_machine())
    if not launched_several() or diagnosis.machine.device is None:
        return diagnosis
    # MLX, which may crash where it is imported.
    from mlxtune.backend.workers.launch import check_workers, join

    workers = join()
    worker_run = check_workers(workers, diagnosis.checks, model_path, data)
    return replace(diagnosis, checks=(*diagnosis.checks, *worker_run), worker=workers.index)


def show(*, as_json: bool, model_path: str | None, data: Sequence[str]) -> bool:
    """Print the checks as lines or JSON; return whether training is possible."""
    diagnosis = doctor(model_path, data)
    if diagnosis.worker:
        # Worker 0 prints them.
        return diagnosis.can_train
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        for line in (*check_lines(diagnosis.checks), diagnosis.summary()):
            print_line(line)
    return diagnosis.can_train


def _mlx_first(device: facts.Device | None) -> bool:
    """Return whether mlx was imported here before mlxtune, too early for the BLAS of `device`."""
    has_blas = device is not None and device.blas is not None
    return "mlx.core" in sys.modules and load_blas().name is None and has_blas
