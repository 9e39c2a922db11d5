"""The recipe of `mlxtune doctor`: whether training works here, and how well."""

import platform
import sys

from mlxtune.config import StepConfig, user_cache
from mlxtune.core.machine import facts, requirements
from mlxtune.core.machine.diagnosis import Diagnosis, check_lines, diagnose
from mlxtune.core.machine.reservation import reservations
from mlxtune.setup.children import probe_device
from mlxtune.terminal.output import print_json, print_line


def doctor() -> Diagnosis:
    """Look at this machine and its packages, and judge whether training works here.

    Raises nothing: problems are among the checks.
    """
    device, problem = probe_device()
    return diagnose(
        facts.Machine(
            system=platform.system(),
            **facts.read_system(),
            processor=platform.machine(),
            python=platform.python_version(),
            packages=requirements.packages(),
            libraries=requirements.mlx_libraries(),
            mlx_first=_mlx_first(device),
            device=device,
            device_problem=problem,
            has_nvidia=facts.has_nvidia(),
            default_limit=int(StepConfig.memory_limit * 10**9),
            reserved=tuple(run.describe() for run in reservations(user_cache() / "memory")),
            folders=facts.folders(),
            offline=facts.offline(),
        )
    )


def show(*, as_json: bool) -> bool:
    """Print the checks as lines or JSON; return whether training is possible."""
    diagnosis = doctor()
    if as_json:
        print_json(diagnosis.as_dict())
    else:
        for line in (*check_lines(diagnosis.checks), diagnosis.summary()):
            print_line(line)
    return diagnosis.can_train


def _mlx_first(device: facts.Device | None) -> bool:
    """Return whether mlx was imported here before mlxtune, too early for the BLAS of `device`."""
    loaded_blas = getattr(sys.modules.get("mlxtune.backend"), "BLAS", None)
    has_blas = device is not None and device.blas is not None
    return "mlx.core" in sys.modules and loaded_blas is None and has_blas
