"""Verdicts on the facts of made-up machines, each a case that users have."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest

from mlxtune.core.machine.facts import Device, Folder, Machine, Memory, Package, Power
from mlxtune.core.machine.machine_checks import Check, Diagnosis, check_lines, diagnose

GB = 10**9


def package(name: str, installed: str | None = "9", needs: str = ">=1", extra: str = "") -> Package:
    return Package(name, needs, installed, installed == "9", extra)


MAC = Machine(
    system="Darwin",
    name="macOS",
    release="15.3",
    chip="Apple M2",
    processor="arm64",
    python="3.12.4",
    packages=(package("mlxtune"), package("mlx"), package("transformers")),
    libraries=("mlx-metal",),
    memory=Memory(16 * GB, 9 * GB, 0),
    folders={"folder": Folder("/Users/me", 100 * GB)},
    device=Device("Metal", "Apple M2", 11 * GB, 11 * GB, 11 * GB, gflops=2500.0),
    default_limit=24 * GB,
    wired_limit_mb=0,
    power=Power(on_battery=False, saving=False),
)
LINUX = replace(
    MAC,
    system="Linux",
    name="Debian 12",
    release="6.1",
    chip="",
    processor="x86_64",
    libraries=("mlx-cpu",),
    device=Device("CPU", "AMD", 64 * GB, None, 24 * GB, "libopenblas.so.0", 160.0, 180.0),
    memory=Memory(64 * GB, 60 * GB, 0),
    wired_limit_mb=None,
    power=Power(),
)


def bad(found: Diagnosis) -> list[Check]:
    return [check for check in found.checks if check.level != "ok"]


def only(machine: Machine, name: str) -> Check:
    """Return a machine's only check that is not ok."""
    (check,) = bad(diagnose(machine))
    assert check.name == name
    assert check.remedy
    return check


@pytest.mark.parametrize("machine", [MAC, LINUX])
def test_good_machine_has_nothing_to_fix(machine: Machine) -> None:
    found = diagnose(machine)
    assert bad(found) == []
    assert found.can_train
    assert found.summary() == "mlxtune can train here: nothing to fix"


# Problems that prevent training


def test_missing_headers_of_cuda_are_named_with_their_packages() -> None:
    without = replace(LINUX, missing_headers={"cuda_fp16.h": "pip install nvidia-cuda-runtime"})
    assert only(without, "CUDA headers").remedy == "pip install nvidia-cuda-runtime"
    assert not diagnose(without).can_train
    check = only(
        replace(LINUX, missing_headers={"crt/mma.h": "pip install nvidia-cuda-crt"}), "CUDA headers"
    )
    assert check.found.startswith("crt/mma.h is missing: 4-bit bases do not train on Hopper")
    assert diagnose(replace(LINUX, missing_headers={"crt/mma.h": "install it"})).can_train


def test_headers_may_come_without_their_package() -> None:
    toolkit = package("cuda-toolkit", None, extra="cuda13")
    machine = replace(LINUX, packages=(*LINUX.packages, toolkit), libraries=("mlx-cuda-13",))
    assert bad(diagnose(machine)) == []


def test_intel_python_on_apple_silicon_is_a_problem_with_a_remedy() -> None:
    found = diagnose(replace(MAC, processor="x86_64", translated=True))
    assert [check.name for check in bad(found)] == ["python"]
    assert "Rosetta" in bad(found)[0].found
    assert "arm64" in bad(found)[0].remedy
    assert not found.can_train


def test_intel_mac_cannot_train() -> None:
    check = only(replace(MAC, processor="x86_64"), "system")
    assert check.stops
    assert "Apple silicon" in check.remedy


def test_mlx_start_failure_is_reported_with_its_reason() -> None:
    check = only(replace(LINUX, device=None, device_problem="it ends with signal 4"), "device")
    assert check.stops
    assert "it ends with signal 4" in check.found
    assert "mlx[cpu]" in check.remedy


def test_missing_package_stops_and_an_old_one_is_a_problem() -> None:
    missing = replace(MAC, packages=(*MAC.packages, package("mlx-lm", None, ">=0.31.3")))
    assert only(missing, "mlx-lm").stops
    old = only(replace(MAC, packages=(package("transformers", "4.2", ">=5.7"),)), "transformers")
    assert not old.stops
    assert (old.level, old.remedy) == ("problem", "pip install --upgrade 'transformers>=5.7'")


# Slow or surprising machines


def test_old_macos_is_a_problem() -> None:
    assert "macOS 14" in only(replace(MAC, release="13.7.1"), "system").remedy
    assert bad(diagnose(replace(MAC, release="14.0"))) == []


def test_mac_without_metal_is_a_problem_that_does_not_stop() -> None:
    device = replace(MAC.device or LINUX.device, kind="CPU", gflops=None)
    check = only(replace(MAC, device=device), "device")
    assert check.level == "problem"
    assert not check.stops


def test_unused_gpu_is_noted() -> None:
    assert "'mlxtune-lora[cuda13]'" in only(replace(LINUX, has_nvidia=True), "device").remedy


def test_reference_blas_is_a_problem_with_both_remedies() -> None:
    assert LINUX.device is not None
    device = replace(LINUX.device, blas=None, gflops=6.0)
    check = only(replace(LINUX, device=device), "speed")
    assert check.level == "problem"
    assert "libopenblas0" in check.remedy
    assert "mkl" in check.remedy
    assert "6 GFLOP/s" in check.found


def test_speed_of_a_gpu_has_nothing_to_do_with_the_blas() -> None:
    assert LINUX.device is not None
    for blas in (None, "libopenblas.so.0"):
        gpu = replace(LINUX.device, kind="CUDA", blas=blas, gflops=9e4, numpy_gflops=None)
        found = {check.name: check for check in diagnose(replace(LINUX, device=gpu)).checks}
        assert (found["speed"].level, found["speed"].found) == ("ok", "90,000 GFLOP/s in float32")


def test_mlx_imported_first_is_a_problem() -> None:
    assert "import mlxtune before mlx" in only(replace(LINUX, mlx_first=True), "imports").remedy


def test_missing_numba_slows_the_cpu_down_and_does_not_stop() -> None:
    machine = replace(LINUX, packages=(*LINUX.packages, package("numba", None, extra="cpu")))
    assert not only(machine, "numba").stops
    assert bad(diagnose(replace(machine, libraries=("mlx-cuda-13",)))) == []


@pytest.mark.parametrize(("has_nvidia", "kept"), [(True, "mlx-cuda-13"), (False, "mlx-cpu")])
def test_two_packages_with_the_same_library_are_a_problem_with_a_remedy(
    has_nvidia: bool, kept: str
) -> None:
    machine = replace(LINUX, libraries=("mlx-cpu", "mlx-cuda-13"), has_nvidia=has_nvidia)
    check = next(c for c in bad(diagnose(machine)) if c.name == "mlx")
    assert "mlx-cpu and mlx-cuda-13" in check.found
    assert check.remedy == (f"pip uninstall -y mlx-cpu mlx-cuda-13, then pip install {kept}==9")


def test_library_of_another_version_than_mlx_is_a_problem() -> None:
    old = package("mlx-cuda-13", "8", "==9", extra="cuda13")
    machine = replace(LINUX, packages=(*LINUX.packages, old), libraries=("mlx-cuda-13",))
    assert only(machine, "mlx-cuda-13").remedy == "pip install --upgrade 'mlx-cuda-13==9'"
    assert bad(diagnose(replace(machine, libraries=("mlx-cpu",)))) == []


def test_linux_without_a_library_error_names_the_extras() -> None:
    machine = replace(LINUX, libraries=(), device=None, device_problem="no libmlx.so")
    remedy = only(machine, "device").remedy
    assert "pip install 'mlxtune-lora[cpu]'" in remedy
    assert all(extra in remedy for extra in ("cuda12", "cuda13"))


def test_extras_are_listed_and_those_for_nvidia_only_where_there_is_one() -> None:
    extras = (package("pyarrow", None, extra="parquet"), package("mlx-cuda-13", extra="cuda13"))
    machine = replace(LINUX, packages=(*LINUX.packages, *extras))

    def listed(machine: Machine) -> str:
        return next(c.found for c in diagnose(machine).checks if c.name == "extras")

    assert listed(machine) == "parquet not installed"
    assert listed(replace(machine, has_nvidia=True)) == "cuda13 installed; parquet not installed"
    assert diagnose(machine).can_train


# Memory


def test_capped_default_limit_is_reported_with_a_remedy() -> None:
    machine = replace(MAC, memory=Memory(36 * GB, 30 * GB, 0))
    (check,) = [c for c in diagnose(machine).checks if c.name == "memory limit"]
    assert check.level == "ok"
    assert "by default 11.0 GB: 24.0 GB, capped" in check.found
    assert "sudo sysctl iogpu.wired_limit_mb=26702" in check.remedy
    set_already = replace(machine, wired_limit_mb=20000)
    assert all("sysctl" not in check.remedy for check in diagnose(set_already).checks)


def test_default_limit_beyond_the_memory_is_noted_with_one_that_fits() -> None:
    assert LINUX.device is not None
    small = replace(LINUX, device=replace(LINUX.device, capacity=16 * GB))
    assert only(small, "memory limit").remedy == "train and plan with --memory-limit 12"


@pytest.mark.parametrize(
    ("memory", "name"),
    [(Memory(16 * GB, 2 * GB, 0), "memory"), (Memory(16 * GB, 9 * GB, 5 * GB), "swap")],
)
def test_memory_that_others_hold_is_noted(memory: Memory, name: str) -> None:
    assert only(replace(MAC, memory=memory), name).level == "note"


def test_runs_that_hold_memory_are_named() -> None:
    machine = replace(MAC, reserved=("process 7 holds 5.0 GB for /x",))
    assert "process 7" in only(machine, "reserved").found


# Disks and surroundings


@pytest.mark.parametrize(
    ("folder", "level"),
    [
        (Folder("/x", GB // 10), "problem"),
        (Folder("/x", 5 * GB), "note"),
        (Folder("/x", 500 * GB, 30 * GB), "ok"),
        (Folder("/x", 500 * GB, problem="cannot be written"), "note"),
        (Folder("/x", None, problem="no such folder"), "note"),
    ],
)
def test_folder_is_judged_by_its_room(folder: Folder, level: str) -> None:
    found = diagnose(replace(MAC, folders={"cache": folder}))
    (check,) = [check for check in found.checks if check.name == "cache"]
    assert check.level == level
    assert (check.remedy != "") == (level != "ok")
    assert found.can_train


def test_battery_low_power_heat_and_offline_are_noted() -> None:
    assert "plug the machine in" in only(replace(MAC, power=Power(True, False)), "power").remedy
    assert "Low Power" in only(replace(MAC, power=Power(False, True)), "power").remedy
    assert "let the machine cool" in only(replace(MAC, thermal="serious"), "thermal state").remedy
    assert "HF_HUB_OFFLINE" in only(replace(MAC, offline="HF_HUB_OFFLINE"), "Hugging Face").remedy


# Printed output


def test_remedy_is_below_its_check() -> None:
    lines = list(check_lines([Check("ok", "a", "well"), Check("note", "longer", "so so", "do x")]))
    assert lines == ["ok       a       well", "note     longer  so so", " " * 17 + "→ do x"]


def test_summary_counts_and_json_holds_all() -> None:
    found = diagnose(replace(MAC, device=None, offline="HF_HUB_OFFLINE"))
    assert found.summary() == "mlxtune cannot train here: 1 problem, 1 note"
    saved = json.loads(json.dumps(found.as_dict()))
    assert saved["can_train"] is False
    assert saved["facts"]["memory"]["total"] == 16 * GB
    assert {"level", "name", "found", "remedy", "stops"} == set(saved["checks"][0])
