"""The recipe of `mlxtune doctor`: whether training works here, and how well."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path

from mlxtune.config import StepConfig, user_cache
from mlxtune.core.machine import facts, requirements
from mlxtune.core.machine.diagnosis import Diagnosis, check_lines, diagnose
from mlxtune.core.machine.reservation import reservations
from mlxtune.errors import one_line
from mlxtune.terminal.output import print_json, print_line

# MLX starts within a second; the first time after an update perhaps within a few.
_MLX_SECONDS = 30.0


def doctor() -> Diagnosis:
    """Look at this machine and its packages, and judge whether training works here.

    Raises nothing: problems are among the checks.
    """
    device, problem = _device()
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


def _device() -> tuple[facts.Device | None, str]:
    """Return what MLX computes on; or None, and why it does not start."""
    # A separate process survives a crash of MLX. It imports this very package.
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH")) if part)
    try:
        process = subprocess.run(
            [sys.executable, "-m", "mlxtune.backend.model.probe"],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_MLX_SECONDS,
            env={**os.environ, "PYTHONPATH": path},
            # Files in the current folder could shadow libraries.
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_MLX_SECONDS:.0f} seconds"
    if process.returncode < 0:
        return None, f"it was killed by signal {-process.returncode}"
    if process.returncode:
        lines = process.stderr.split("\n\n")[-1].strip().splitlines()
        return None, one_line(RuntimeError(lines[-1] if lines else "it failed without a message"))
    return facts.Device(**json.loads(process.stdout)), ""


def _mlx_first(device: facts.Device | None) -> bool:
    """Return whether mlx was imported here before mlxtune, too early for the BLAS of `device`."""
    loaded_blas = getattr(sys.modules.get("mlxtune.backend"), "BLAS", None)
    has_blas = device is not None and device.blas is not None
    return "mlx.core" in sys.modules and loaded_blas is None and has_blas
