"""Whether training works here, and how well: the facts of this machine, and what they mean.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from mlxtune.config import StepConfig, user_cache
from mlxtune.errors import one_line, printable

if TYPE_CHECKING:
    from mlxtune.core.machine.diagnosis import Diagnosis
    from mlxtune.core.machine.facts import Device

# Starting MLX takes a second at most, the first time after an update perhaps a few.
_PATIENCE = 30.0


def doctor() -> Diagnosis:
    """Look at this machine and at what is installed, and judge whether training works here.

    Raises nothing: what is wrong is in the checks.
    """
    from mlxtune.core.machine import requirements, surroundings
    from mlxtune.core.machine.diagnosis import diagnose
    from mlxtune.core.machine.facts import Machine
    from mlxtune.core.machine.reservation import reservations

    said = surroundings.sysctl()
    name, release = surroundings.system_name()
    wired = said.get("iogpu.wired_limit_mb", "")
    device, problem = _device()
    return diagnose(
        Machine(
            system=platform.system(),
            name=name,
            release=release,
            chip=said.get("machdep.cpu.brand_string", ""),
            processor=platform.machine(),
            python=platform.python_version(),
            translated=said.get("sysctl.proc_translated") == "1",
            packages=requirements.packages(),
            libraries=requirements.mlx_libraries(),
            mlx_first=_mlx_first(device),
            device=device,
            device_problem=problem,
            has_nvidia=surroundings.has_nvidia(),
            memory=surroundings.memory(said),
            default_limit=int(StepConfig.memory_limit * 10**9),
            wired_limit_mb=int(wired) if wired.isdecimal() else None,
            reserved=tuple(run.describe() for run in reservations(user_cache() / "memory")),
            folders=surroundings.folders(),
            power=surroundings.power(),
            offline=surroundings.offline(),
        )
    )


def show(*, as_json: bool) -> bool:
    """Print what `doctor` finds: a line a check, or JSON. Tell whether training is possible."""
    from mlxtune.core.machine.diagnosis import check_lines

    found = doctor()
    if as_json:
        json.dump(found.as_dict(), sys.stdout, indent=2, allow_nan=False)
        sys.stdout.write("\n")
        return found.can_train
    for line in check_lines(found.checks):
        print(printable(line))
    print(found.summary())
    return found.can_train


def _device() -> tuple[Device | None, str]:
    """Return what MLX computes on, or None and why it does not start."""
    from mlxtune.core.machine.facts import Device

    # This package, wherever it was imported from.
    package = str(Path(__file__).resolve().parents[2])
    path = os.pathsep.join(part for part in (package, os.environ.get("PYTHONPATH")) if part)
    command = [sys.executable, "-m", "mlxtune.backend.model.probe"]
    try:
        process = subprocess.run(
            command,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_PATIENCE,
            env={**os.environ, "PYTHONPATH": path},
            # Not where a file of the person's may bear the name of a library.
            cwd="/",
        )
    except subprocess.TimeoutExpired:
        return None, f"no answer within {_PATIENCE:.0f} seconds"
    except OSError as error:
        return None, one_line(error)
    if process.returncode < 0:
        return None, f"it ends with signal {-process.returncode}"
    if process.returncode:
        lines = process.stderr.split("\n\n")[-1].strip().splitlines()
        return None, one_line(RuntimeError(lines[-1] if lines else "it ends without a word"))
    return Device(**json.loads(process.stdout)), ""


def _mlx_first(device: Device | None) -> bool:
    """Tell whether this process imported mlx too early for the BLAS that another one finds."""
    ours = getattr(sys.modules.get("mlxtune.backend"), "BLAS", None)
    found = device is not None and device.blas is not None
    return "mlx.core" in sys.modules and ours is None and found
