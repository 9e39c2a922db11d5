"""What the facts of a machine mean for training on it: what is slow or broken, and the remedy.

Pure: facts in, checks out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxtune.core.machine.facts import MLX_LIBRARIES, Device, Folder, Machine

GB = 10**9
OK, NOTE, PROBLEM = "ok", "note", "problem"
# A tuned BLAS gives MLX about as much as numpy's; the reference one a fortieth.
_SLOW_BLAS = 0.25
_SWAP_SHARE, _LITTLE_MEMORY = 0.1, 0.15
_FULL, _NEARLY_FULL, _LARGE_CACHE = GB // 2, 10 * GB, 20 * GB
_OLDEST_MACOS = 14


@dataclass(frozen=True)
class Check:
    """What was found of one thing. `stops` tells that no training is possible like this."""

    level: str
    name: str
    found: str
    remedy: str = ""
    stops: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The facts, and a check for each thing that was looked at."""

    machine: Machine
    checks: tuple[Check, ...]

    @property
    def can_train(self) -> bool:
        """Tell whether nothing stops training."""
        return not any(check.stops for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        """Return all of it for JSON."""
        return {
            "can_train": self.can_train,
            "checks": [asdict(check) for check in self.checks],
            "facts": asdict(self.machine),
        }

    def summary(self) -> str:
        """Say in a line what came of it."""
        counts = [
            (sum(check.level == level for check in self.checks), level) for level in (PROBLEM, NOTE)
        ]
        said = ", ".join(f"{n} {level}{'s' * (n > 1)}" for n, level in counts if n)
        can = "mlxtune can train here" if self.can_train else "mlxtune cannot train here"
        return f"{can}: {said or 'nothing to mend'}"


def diagnose(machine: Machine) -> Diagnosis:
    """Judge the facts of a machine."""
    parts = (_system, _packages, _device, _memory, _speed, _folders, _surroundings)
    return Diagnosis(machine, tuple(check for part in parts for check in part(machine)))


def _system(m: Machine) -> Iterator[Check]:
    name = " ".join(part for part in (m.name or m.system, m.release, m.chip) if part)
    if m.system == "Darwin" and m.processor != "arm64" and not m.translated:
        remedy = "MLX needs Apple silicon: use a Mac with an M1 or later, or Linux"
        yield Check(PROBLEM, "system", f"{name}: an Intel Mac", remedy, stops=True)
    elif m.system == "Darwin" and _major(m.release) < _OLDEST_MACOS:
        yield Check(PROBLEM, "system", name, f"update to macOS {_OLDEST_MACOS} or later")
    else:
        yield Check(OK, "system", name)
    python = f"{m.python} for {m.processor}"
    if m.translated:
        remedy = "install a Python for arm64, such as python.org's or Homebrew's, and start anew"
        yield Check(PROBLEM, "python", f"{python}, through Rosetta", remedy, stops=True)
    else:
        yield Check(OK, "python", python)


def _major(release: str) -> int:
    number = release.partition(".")[0]
    return int(number) if number.isdecimal() else _OLDEST_MACOS


def _packages(m: Machine) -> Iterator[Check]:
    asked = [package for package in m.packages if not package.extra]
    shown = sorted((p for p in asked if p.name in _SHOWN), key=lambda p: _SHOWN.index(p.name))
    found = ", ".join(f"{p.name} {p.installed}" for p in shown if p.installed)
    # Any of them does: mlx-cpu need not be there where there is one for a GPU.
    absent = {p.name for p in asked if p.installed is None} if m.libraries else set()
    bad = [p for p in asked if not p.serves and p.name not in absent & set(MLX_LIBRARIES)]
    # numba is for speed alone.
    slow = [package.name for package in bad if package.name in _FOR_SPEED]
    wrong = [package for package in bad if package.name not in _FOR_SPEED]
    yield Check(OK, "versions", found or "unknown: mlxtune is not installed, only imported")
    for package in wrong:
        has = package.installed or "is missing"
        wish = f"{package.name}{package.needs}"
        yield Check(
            PROBLEM,
            package.name,
            f"{has}, needed: {wish}",
            f"pip install --upgrade '{wish}'",
            stops=package.installed is None,
        )
    for name in slow:
        remedy = f"pip install --upgrade {name}"
        yield Check(PROBLEM, name, f"missing or too old: {_FOR_SPEED[name]}", remedy)
    if len(m.libraries) > 1:
        # Whichever was installed last is in use, perhaps with the version of another.
        found = f"{' and '.join(m.libraries)} both bring MLX's library, into one file"
        yield Check(PROBLEM, "mlx", found, _part(m))
    if m.mlx_first:
        remedy = "import mlxtune before mlx"
        found = "mlx was imported before mlxtune, which came too late to load a fast BLAS"
        yield Check(PROBLEM, "imports", found, remedy)
    if extras := _extras(m):
        yield Check(OK, "extras", extras)


_SHOWN = ("mlxtune", "mlx", "mlx-lm", "transformers", "tokenizers", "numpy", "numba")
_FOR_SPEED = {
    "numba": "training on the CPU takes longer",
    "mkl": "without another fast BLAS, training on the CPU takes far longer",
}


def _part(m: Machine) -> str:
    """Return how to keep one of the packages that bring MLX's library, as good as new."""
    on_gpu = [name for name in m.libraries if "cuda" in name and m.has_nvidia]
    kept = on_gpu[-1] if on_gpu else m.libraries[0]
    version = next((f"=={p.installed}" for p in m.packages if p.name == "mlx"), "")
    return f"pip uninstall -y {' '.join(m.libraries)}, then pip install {kept}{version}"


def _extras(m: Machine) -> str:
    """Say which extras are installed, of those that mean something here."""
    serves: dict[str, bool] = {}
    for package in m.packages:
        if package.extra and (m.has_nvidia or not package.extra.startswith("cuda")):
            serves[package.extra] = serves.get(package.extra, True) and package.serves
    return ", ".join(f"{name}{'' if there else ' not installed'}" for name, there in serves.items())


def _device(m: Machine) -> Iterator[Check]:
    device = m.device
    if device is None:
        remedy = "pip install --force-reinstall mlx, in an environment of its own"
        if m.system == "Linux":
            remedy = "pip install --force-reinstall 'mlx[cpu]', or 'mlx[cuda13]' for a GPU"
        yield Check(
            PROBLEM, "device", f"MLX does not start: {m.device_problem}", remedy, stops=True
        )
        return
    found = f"{device.kind}: {device.name}"
    if m.system == "Darwin" and device.kind != "Metal":
        remedy = "MLX sees no GPU: run outside of a virtual machine, with the Mac's own Python"
        yield Check(PROBLEM, "device", found, remedy)
    elif m.has_nvidia and device.kind == "CPU":
        remedy = "pip uninstall -y mlx-cpu, then pip install mlx-cuda-13 (12 for older drivers)"
        yield Check(NOTE, "device", f"{found}; there is an NVIDIA GPU, which is not used", remedy)
    else:
        yield Check(OK, "device", found)


def _memory(m: Machine) -> Iterator[Check]:
    total, available = m.memory.total, m.memory.available
    if total is not None:
        free = "" if available is None else f", {_gb(available)} available"
        found, remedy = f"{_gb(total)}{free}", ""
        if available is not None and available < _LITTLE_MEMORY * total:
            remedy = "close other programs before training"
        yield Check(NOTE if remedy else OK, "memory", found, remedy)
    swap = m.memory.swap_used
    if swap is not None and total is not None and swap > _SWAP_SHARE * total:
        remedy = "close other programs, or restart: what is swapped out slows training down"
        yield Check(NOTE, "swap", f"{_gb(swap)} used", remedy)
    if m.device is not None:
        yield _limit(m, m.device)
    for run in m.reserved:
        yield Check(NOTE, "reserved", run, "another run waits for it with --wait")


def _limit(m: Machine, device: Device) -> Check:
    """Say what the default --memory-limit means here."""
    found = f"by default {_gb(device.limit)}"
    if device.limit < m.default_limit:
        found += f": {_gb(m.default_limit)}, capped at what the GPU may use"
        if m.wired_limit_mb == 0:
            more = (m.memory.total or 0) - 8 * GB
            if more > device.limit:
                hint = f"for a larger model: sudo sysctl iogpu.wired_limit_mb={more // 2**20}"
                return Check(OK, "memory limit", found, f"{hint} (until the next start)")
        return Check(OK, "memory limit", found)
    if device.limit > device.capacity:
        fits = max(int(0.75 * device.capacity / GB), 1)
        found += f", more than the {_gb(device.capacity)} that there are"
        return Check(NOTE, "memory limit", found, f"train and plan with --memory-limit {fits}")
    return Check(
        OK, "memory limit", f"{found} of {_gb(device.capacity)}; --memory-limit changes it"
    )


def _speed(m: Machine) -> Iterator[Check]:
    device = m.device
    if device is None or device.gflops is None:
        return
    found = f"{device.gflops:,.0f} GFLOP/s in float32"
    if device.kind != "CPU":
        yield Check(OK, "speed", found)
        return
    library = f", {device.blas}" if device.blas else ""
    if m.system == "Linux" and not device.blas:
        library = ", MLX's own reference BLAS"
    theirs = device.numpy_gflops
    if theirs:
        library += f"; numpy reaches {theirs:,.0f}"
    if m.system == "Linux" and not device.blas:
        remedy = "apt-get install libopenblas0, or pip install mkl"
        yield Check(PROBLEM, "speed", found + library, remedy)
    elif theirs and device.gflops < _SLOW_BLAS * theirs:
        remedy = "look again when nothing else runs; if it stays so, install libopenblas0 or mkl"
        yield Check(NOTE, "speed", found + library, remedy)
    else:
        yield Check(OK, "speed", found + library)


def _folders(m: Machine) -> Iterator[Check]:
    for name, folder in m.folders.items():
        yield _folder(name, folder)


def _folder(name: str, folder: Folder) -> Check:
    found = folder.path
    if folder.size is not None:
        found += f": {_gb(folder.size)} kept"
    if folder.problem:
        remedy = {
            "cache": "mend its permissions, or give --cache-dir or --no-cache",
            "temporary": "set TMPDIR to a folder that can be written",
        }.get(name, "mend its permissions, or give another --output")
        return Check(NOTE, name, f"{found}: {folder.problem}", remedy)
    if folder.free is None:
        return Check(OK, name, found)
    found += f", {_gb(folder.free)} free"
    if folder.free < _FULL:
        return Check(PROBLEM, name, found, "free space: checkpoints could not be written")
    if folder.free < _NEARLY_FULL:
        return Check(NOTE, name, found, "free space: a model of 4 billion parameters takes 8 GB")
    if (folder.size or 0) > _LARGE_CACHE:
        return Check(NOTE, name, found, "remove it when space is short: it is made again")
    return Check(OK, name, found)


def _surroundings(m: Machine) -> Iterator[Check]:
    if m.power.on_battery is not None:
        source = "battery" if m.power.on_battery else "mains"
        remedy = "plug it in: a Mac on battery computes slower" if m.power.on_battery else ""
        yield Check(NOTE if remedy else OK, "power", source, remedy)
    if m.power.saving:
        remedy = "turn Low Power Mode off while training (System Settings, Battery)"
        yield Check(NOTE, "power", "Low Power Mode is on", remedy)
    if m.offline:
        remedy = f"unset {m.offline} to download a model by owner/name"
        yield Check(NOTE, "Hugging Face", f"{m.offline} is set: nothing is downloaded", remedy)


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB"


def check_lines(checks: Sequence[Check]) -> Iterator[str]:
    """Yield the lines of checks: level, name, what was found; a remedy on a line of its own."""
    width = max(len(check.name) for check in checks) + 2
    for check in checks:
        yield f"{check.level:<9}{check.name:<{width}}{check.found}"
        if check.remedy:
            yield f"{'':<{9 + width}}→ {check.remedy}"
