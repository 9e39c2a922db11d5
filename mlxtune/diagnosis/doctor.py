"""`mlxtune doctor`: checks whether this machine can train, and how well."""

import importlib.metadata as metadata
import platform
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from mlxtune.backend.workers.environment import is_one_of_several
from mlxtune.config import TrainConfig, user_cache
from mlxtune.core.machine import facts
from mlxtune.core.machine.blas import load_blas
from mlxtune.core.machine.conditions import Sensors
from mlxtune.core.machine.cuda import kernel_cache, missing_headers
from mlxtune.core.machine.facts import MLX_LIBRARIES, Package, read_device
from mlxtune.core.machine.installation import DISTRIBUTION, installed_version
from mlxtune.core.machine.machine_checks import Diagnosis, check_lines, diagnose
from mlxtune.core.machine.reservation import reservations
from mlxtune.views.output import print_json, print_line

# Packages whose requirements are checked, because wrong versions cause obscure errors.
_FOLLOWED_PACKAGES = (DISTRIBUTION, "mlx", "mlx-lm", "transformers")
_DEVELOPER_EXTRAS = ("test", "interop", "dev")


def doctor(model_path: str | None = None, data: Sequence[str] = ()) -> Diagnosis:
    """Check whether this machine and its packages can train.

    Under mlx.launch, also check all machines, the network between them, and whether they have the
    same model and data. Raises WorkerError if a machine cannot be reached; other problems are in
    the checks.
    """
    diagnosis = diagnose(read_machine())
    if not is_one_of_several() or diagnosis.machine.device is None:
        return diagnosis
    # This import loads MLX, which may crash.
    from mlxtune.backend.workers.launch import check_workers, join

    workers = join()
    worker_run = check_workers(workers, diagnosis.checks, model_path, data)
    return replace(diagnosis, checks=(*diagnosis.checks, *worker_run), worker=workers.rank)


def main(*, as_json: bool, model_path: str | None, data: Sequence[str]) -> bool:
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


def read_machine() -> facts.Machine:
    """Return the facts of this machine: its system, packages, device, folders and conditions."""
    device, problem = read_device()
    sensors = Sensors()
    return facts.Machine(
        system=platform.system(),
        **facts.read_system(),
        power=facts.Power(sensors.on_battery(), sensors.saves_power()),
        thermal=sensors.thermal(),
        processor=platform.machine(),
        python=platform.python_version(),
        packages=packages(),
        libraries=mlx_libraries(),
        mlx_first=_was_mlx_imported_first(device),
        device=device,
        device_problem=problem,
        has_nvidia=facts.has_nvidia(),
        default_limit=int(TrainConfig.memory_limit * 10**9),
        reserved=tuple(run.describe() for run in reservations(user_cache() / "memory")),
        folders=facts.folders() | _kernels(),
        offline=facts.offline(),
        missing_headers=missing_headers(),
    )


def _kernels() -> dict[str, facts.Folder]:
    """Return the folder of compiled kernels by its name, on a machine with an NVIDIA GPU."""
    if (kept := kernel_cache()) is None:
        return {}
    folder = facts.read_folder(lambda: Path(kept.path), measured=True)
    return {"kernels": replace(folder, problem=kept.problem or folder.problem)}


def _was_mlx_imported_first(device: facts.Device | None) -> bool:
    """Return whether MLX was imported before mlxtune could load the BLAS that `device` uses."""
    has_blas = device is not None and device.blas is not None
    return "mlx.core" in sys.modules and load_blas().name is None and has_blas


def packages() -> tuple[Package, ...]:
    """Return mlxtune, the packages that it requires, and those that each extra requires."""
    version = installed_version()
    if version is None:
        return ()
    ours = Package("mlxtune", "", version, serves=True)
    result = [ours, *_checked(_followed(DISTRIBUTION, ""), "")]
    for extra in metadata.metadata(DISTRIBUTION).get_all("Provides-Extra") or []:
        if extra not in _DEVELOPER_EXTRAS:
            result += _checked(_followed(DISTRIBUTION, extra), extra)
    return tuple(result)


def mlx_libraries() -> tuple[str, ...]:
    """Return the installed packages that contain the library libmlx."""
    files = {name: metadata.files(name) or [] for name in MLX_LIBRARIES if installed_version(name)}
    return tuple(
        name
        for name, every in files.items()
        if any(str(file).startswith("mlx/lib/libmlx.") for file in every)
    )


def _followed(name: str, extra: str) -> Iterator[Requirement]:
    """Yield the requirements of a package or its extra, and of `_FOLLOWED_PACKAGES` in them."""
    if installed_version(name) is None:
        return
    for required in map(Requirement, metadata.requires(name) or []):
        always, applies = (
            required.marker is None or required.marker.evaluate({"extra": each})
            for each in ("", extra)
        )
        if applies and not (extra and always):
            yield required
            if required.name in _FOLLOWED_PACKAGES:
                for each in ("", *sorted(required.extras)):
                    yield from _followed(required.name, each)


def _checked(required: Iterable[Requirement], extra: str) -> Iterator[Package]:
    """Yield each required package once, with all its version requirements combined."""
    specifiers: dict[str, SpecifierSet] = {}
    for requirement in required:
        name = str(canonicalize_name(requirement.name))
        specifiers[name] = specifiers.get(name, SpecifierSet()) & requirement.specifier
    for name, specifier in specifiers.items():
        version = installed_version(name)
        serves = version is not None and specifier.contains(version, prereleases=True)
        yield Package(name, str(specifier), version, serves, extra)
