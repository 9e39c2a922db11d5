"""Checks of a machine's facts: problems that slow or prevent training, and their remedies.

Pure functions: facts in, checks out.
"""

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mlxtune.core.machine.cuda import CRT
from mlxtune.core.machine.facts import Device, Machine
from mlxtune.core.machine.installation import installs_extra, pip_command

GB = 10**9
OK, NOTE, PROBLEM = "ok", "note", "problem"
_SWAP_FRACTION, _LOW_MEMORY_FRACTION = 0.1, 0.15
_FULL_DISK_BYTES, _LOW_DISK_BYTES = GB // 2, 10 * GB
# The oldest macOS that MLX's wheels support.
_OLDEST_MACOS = 14
_SHOWN_PACKAGES = ("mlxtune", "mlx", "mlx-lm", "transformers", "tokenizers", "numpy", "numba")
_SPEED_PACKAGES = {
    "numba": "training on the CPU takes longer",
    "mkl": "without another fast BLAS, training on the CPU takes far longer",
    "threadpoolctl": "training on the CPU takes longer",
}
# On Linux, extras install MLX's library; on macOS, mlx includes it.
_EXTRAS = {"mlx-cpu": "cpu", "mlx-cuda-12": "cuda12", "mlx-cuda-13": "cuda13"}
INSTALL_LIBRARY = (
    f"{installs_extra('cpu')}, or for an NVIDIA GPU the extra cuda13 (cuda12 for older drivers)"
)
# A package without files: its headers are checked instead, which may come from another place.
_HEADERS = "cuda-toolkit"
_UNWRITABLE_REMEDIES = {
    "cache": "fix its permissions, or use --cache-dir or --no-cache",
    "kernels": "make that folder yours alone: until then, each command compiles its kernels again",
    "temporary": "set TMPDIR to a writable folder",
}


@dataclass(frozen=True)
class Check:
    """The result of one check; `stops` means that training is impossible."""

    level: str
    name: str
    found: str
    remedy: str = ""
    stops: bool = False


@dataclass(frozen=True)
class Diagnosis:
    """The facts of a machine, their checks, and the number of the machine's worker in a launch."""

    machine: Machine
    checks: tuple[Check, ...]
    worker: int = 0

    @property
    def can_train(self) -> bool:
        return not any(check.stops for check in self.checks)

    def as_dict(self) -> dict[str, Any]:
        return {
            "can_train": self.can_train,
            "checks": [asdict(check) for check in self.checks],
            "facts": asdict(self.machine),
        }

    def summary(self) -> str:
        counts = [
            (sum(check.level == level for check in self.checks), level) for level in (PROBLEM, NOTE)
        ]
        counted = ", ".join(f"{n} {level}{'s' * (n > 1)}" for n, level in counts if n)
        can = "mlxtune can train here" if self.can_train else "mlxtune cannot train here"
        return f"{can}: {counted or 'nothing to fix'}"


def diagnose(machine: Machine) -> Diagnosis:
    parts = (
        _system_checks,
        _packages,
        _device,
        _cuda_headers,
        _memory,
        _speed,
        _folders,
        _power_and_network,
    )
    return Diagnosis(machine, tuple(check for part in parts for check in part(machine)))


def check_lines(checks: Sequence[Check]) -> Iterator[str]:
    width = max(len(check.name) for check in checks) + 2
    for check in checks:
        yield f"{check.level:<9}{check.name:<{width}}{check.found}"
        if check.remedy:
            yield f"{'':<{9 + width}}→ {check.remedy}"


def _check(name: str, fact: str, remedy: str = "", level: str = NOTE) -> Check:
    """Return a check of the given level, or of level `ok` if there is no remedy."""
    return Check(level if remedy else OK, name, fact, remedy)


def _system_checks(m: Machine) -> Iterator[Check]:
    name = " ".join(part for part in (m.name, m.release, m.chip) if part)
    major = m.release.partition(".")[0]
    if m.system == "Darwin" and m.processor != "arm64" and not m.translated:
        remedy = "MLX needs Apple silicon: use a Mac with an M1 or later, or Linux"
        yield Check(PROBLEM, "system", f"{name}: an Intel Mac", remedy, stops=True)
    else:
        old = m.system == "Darwin" and major.isdecimal() and int(major) < _OLDEST_MACOS
        remedy = f"update to macOS {_OLDEST_MACOS} or later" if old else ""
        yield _check("system", name, remedy, PROBLEM)
    python = f"{m.python} for {m.processor}"
    if m.translated:
        remedy = "install an arm64 Python, such as python.org's or Homebrew's, and reinstall"
        yield Check(PROBLEM, "python", f"{python}, through Rosetta", remedy, stops=True)
    else:
        yield Check(OK, "python", python)


def _packages(m: Machine) -> Iterator[Check]:
    # The extra that installs MLX's library is checked too: it requires versions of the library, and
    # packages that make training faster.
    wanted = ("", *(_EXTRAS[name] for name in m.libraries if name in _EXTRAS))
    required = {package.name: package for package in m.packages if package.extra in wanted}
    shown = (required[name] for name in _SHOWN_PACKAGES if name in required)
    fact = ", ".join(f"{p.name} {p.installed}" for p in shown if p.installed)
    yield Check(OK, "versions", fact or "unknown: mlxtune is imported, but not installed")
    for name, package in required.items():
        if package.serves or name == _HEADERS:
            continue
        requirement, effect = f"{name}{package.needs}", _SPEED_PACKAGES.get(name)
        fact = f"{package.installed or 'is missing'}, needed: {requirement}"
        fact += f": {effect}" if effect else ""
        stops = package.installed is None and not effect
        yield Check(
            PROBLEM, name, fact, pip_command("install", f"--upgrade '{requirement}'"), stops
        )
    if len(m.libraries) > 1:
        # The library installed last is in use; its version may differ from mlx's.
        fact = f"{' and '.join(m.libraries)} install MLX's library into the same file"
        yield Check(PROBLEM, "mlx", fact, _keep_one_library(m))
    if m.mlx_first:
        fact = "mlx was imported before mlxtune could load a fast BLAS"
        yield Check(PROBLEM, "imports", fact, "import mlxtune before mlx")
    if extras := _extras(m):
        yield Check(OK, "extras", extras)


def _keep_one_library(m: Machine) -> str:
    for_gpu = [name for name in m.libraries if "cuda" in name and m.has_nvidia]
    library = for_gpu[-1] if for_gpu else m.libraries[0]
    version = next((f"=={p.installed}" for p in m.packages if p.name == "mlx"), "")
    remove = pip_command("uninstall", f"-y {' '.join(m.libraries)}")
    return f"{remove}, then {pip_command('install', library + version)}"


def _extras(m: Machine) -> str:
    hidden = ("cpu",) if m.has_nvidia else _EXTRAS.values()
    serves: dict[str, bool] = {}
    for package in m.packages:
        if package.extra and package.extra not in hidden:
            serves[package.extra] = serves.get(package.extra, True) and package.serves
    every = {
        state: ", ".join(name for name, there in serves.items() if there is installed)
        for state, installed in (("installed", True), ("not installed", False))
    }
    return "; ".join(f"{names} {state}" for state, names in every.items() if names)


def _device(m: Machine) -> Iterator[Check]:
    device = m.device
    if device is None:
        remedy = f"{pip_command('install', '--force-reinstall mlx')}, in a new virtual environment"
        if m.system == "Linux":
            reinstall = pip_command("install", "--force-reinstall 'mlx[cpu]'")
            remedy = f"{reinstall}, or 'mlx[cuda13]' for a GPU"
            if not m.libraries:
                remedy = INSTALL_LIBRARY
        fact = f"MLX does not start: {m.device_problem}"
        yield Check(PROBLEM, "device", fact, remedy, stops=True)
        return
    fact, remedy, level = f"{device.kind}: {device.name}", "", NOTE
    if m.system == "Darwin" and device.kind != "Metal":
        remedy = "MLX sees no GPU: run outside a virtual machine, with the Mac's own Python"
        level = PROBLEM
    elif m.has_nvidia and device.kind == "CPU":
        fact += "; the NVIDIA GPU is not used"
        remove = pip_command("uninstall", "-y mlx-cpu")
        remedy = f"{remove}, then {installs_extra('cuda13')} (or cuda12)"
    yield _check("device", fact, remedy, level)


def _cuda_headers(m: Machine) -> Iterator[Check]:
    for header, remedy in m.missing_headers.items():
        if header == CRT:
            fact = f"{header} is missing: 4-bit bases do not train on Hopper GPUs (H100, H200)"
            yield Check(NOTE, "CUDA headers", fact, remedy)
        else:
            fact = f"{header} is missing: MLX cannot compile its kernels"
            yield Check(PROBLEM, "CUDA headers", fact, remedy, stops=True)


def _memory(m: Machine) -> Iterator[Check]:
    total, available, swap = m.memory.total, m.memory.available, m.memory.swap_used
    if total is not None:
        little = available is not None and available < _LOW_MEMORY_FRACTION * total
        free = "" if available is None else f", {_gb(available)} available"
        remedy = "close other programs before training" if little else ""
        yield _check("memory", f"{_gb(total)}{free}", remedy)
        if swap is not None and swap > _SWAP_FRACTION * total:
            remedy = "close other programs, or restart: swapping slows training down"
            yield _check("swap", f"{_gb(swap)} used", remedy)
    if m.device is not None:
        yield _limit(m, m.device)
    for run in m.reserved:
        yield _check("reserved", run, "add --wait to a run to have it wait for this memory")


def _limit(m: Machine, device: Device) -> Check:
    fact, remedy = f"by default {_gb(device.limit)}", ""
    if device.limit < m.default_limit:
        fact += f": {_gb(m.default_limit)}, capped at what the GPU may use"
        more = (m.memory.total or 0) - 8 * GB
        if m.wired_limit_mb == 0 and more > device.limit:
            command = f"sudo sysctl iogpu.wired_limit_mb={more // 2**20}"
            remedy = f"for a larger model: {command} (until the next restart)"
        return Check(OK, "memory limit", fact, remedy)
    if device.limit > device.capacity:
        fits = max(int(0.75 * device.capacity / GB), 1)
        fact += f", more than the {_gb(device.capacity)} of this machine"
        return Check(NOTE, "memory limit", fact, f"train and plan with --memory-limit {fits}")
    fact += f" of {_gb(device.capacity)}; --memory-limit changes it"
    return Check(OK, "memory limit", fact)


def _speed(m: Machine) -> Iterator[Check]:
    device = m.device
    if device is None or device.gflops is None:
        return
    fact, remedy = f"{device.gflops:,.0f} GFLOP/s in float32", ""
    if device.kind == "CPU" and device.blas:
        fact += f", {device.blas}"
    elif device.kind == "CPU" and m.system == "Linux":
        fact += ", MLX's own reference BLAS"
        remedy = f"apt-get install libopenblas0, or {pip_command('install', 'mkl')}"
    if device.numpy_gflops:
        fact += f"; numpy reaches {device.numpy_gflops:,.0f}"
    yield _check("speed", fact, remedy, PROBLEM)


def _folders(m: Machine) -> Iterator[Check]:
    for name, folder in m.folders.items():
        fact, remedy, level = folder.path, "", NOTE
        if folder.size is not None:
            fact += f": {_gb(folder.size)} stored"
        if folder.free is None or folder.problem:
            fact += f": {folder.problem}"
            remedy = _UNWRITABLE_REMEDIES.get(
                name, "fix its permissions, or choose another --output"
            )
        else:
            fact += f", {_gb(folder.free)} free"
            if folder.free < _FULL_DISK_BYTES:
                remedy, level = "free space: there is no room for checkpoints", PROBLEM
            elif folder.free < _LOW_DISK_BYTES:
                remedy = "free space: a model of 4 billion parameters takes 8 GB"
        yield _check(name, fact, remedy, level)


def _power_and_network(m: Machine) -> Iterator[Check]:
    if m.power.on_battery is not None:
        on_battery = m.power.on_battery
        remedy = "plug the machine in: it computes more slowly on battery" if on_battery else ""
        yield _check("power", "battery" if on_battery else "mains", remedy)
    if m.power.saving:
        remedy = "turn Low Power Mode off while training (System Settings, Battery)"
        yield _check("power", "Low Power Mode is on", remedy)
    if m.thermal:
        remedy = "let the machine cool: clear its vents, and put it on a hard surface"
        yield _check("thermal state", m.thermal, remedy)
    if m.offline:
        remedy = f"unset {m.offline} to download a model by owner/name"
        yield _check("Hugging Face", f"{m.offline} is set: downloads are off", remedy)


def _gb(size: int) -> str:
    return f"{size / GB:.1f} GB"
