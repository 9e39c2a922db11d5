"""Run the tests on a simulated machine: without Linux's features, or with a device's answers.

    python -m tests.long.simulated --hidden [arguments of pytest]
    python -m tests.long.simulated --device m1-8 [arguments of pytest]

`--hidden` hides numba, mkl, threadpoolctl and /proc, as on a Mac. `--device` (m1-8, m2-max-64,
m5-32, h200) makes MLX answer like that device, so that the code runs as on a GPU while MLX computes
on the CPU; without paths, it runs only the tests that depend on the device. Both may be given.

Makes an environment with links to the current environment's packages, except the hidden ones, so
that processes that tests start are simulated too, whatever their environment variables. Linux only.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path

# This import puts the fast BLAS's path into MLXTUNE_BLAS for child processes: without mkl they
# would find no fast BLAS, although a Mac has one, and the reference's products would take most of
# the time.
import mlxtune.backend  # noqa: F401
from tests.long import simulation
from tests.paths import ROOT

HIDDEN = ("numba", "llvmlite", "mkl", "threadpoolctl")
# The tests that depend on the device's answers.
WHERE_IT_MATTERS = (
    "tests/backend/device/test_allocator.py",
    "tests/backend/step",
    "tests/backend/memory",
    "tests/cli/test_plan.py",
    "tests/core/machine",
    "tests/commands",
    "tests/test_demo.py",
)


def make_environment(folder: Path, *, hidden: bool, device: str | None) -> Path:
    """Make an environment with the current environment's packages; return its Python."""
    venv.create(folder, symlinks=True)
    (site,) = (folder / "lib").glob("python3*/site-packages")
    skipped = tuple(f"{name}{end}" for name in HIDDEN for end in ("", ".py")) if hidden else ()
    starts = tuple(f"{name}-" for name in HIDDEN) if hidden else ()
    for source in (Path(each) for each in sys.path if each.endswith("site-packages")):
        for entry in source.iterdir():
            ours = entry.name in skipped or entry.name.startswith(starts or "\0")
            # below.pth lists folders that contain the hidden packages.
            if ours or entry.name in ("below.pth", "__pycache__") or (site / entry.name).exists():
                continue
            (site / entry.name).symlink_to(entry.resolve())
    shutil.copy(simulation.__file__, site / "mlxtune_simulation.py")
    settings = {"hidden": hidden, "device": device}
    (site / "simulation.json").write_text(json.dumps(settings))
    # This name sorts first, so Python reads the file before all others.
    (site / "_simulation.pth").write_text(f"import mlxtune_simulation\n{ROOT}\n")
    python = folder / "bin" / "python"
    scripts = {Path(sys.executable).parent, Path(os.environ.get("VIRTUAL_ENV", sys.prefix)) / "bin"}
    for name in ("mlx.launch", "mlxtune"):
        text = next(
            (path.read_text() for each in scripts if (path := each / name).exists()),
            "#!\nimport sys\nfrom mlx._distributed_utils.launch import main\nsys.exit(main())\n"
            if name == "mlx.launch"
            else "#!\nfrom mlxtune.cli import main\nmain()\n",
        )
        script = python.with_name(name)
        script.write_text(f"#!{python}\n{text.partition(chr(10))[2]}")
        script.chmod(0o755)
    return python


def main() -> None:
    """Run pytest in the environment, and exit with its code."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--hidden", action="store_true")
    parser.add_argument("--device", choices=simulation.DEVICES)
    given, arguments = parser.parse_known_args()
    if not given.hidden and not given.device:
        parser.error("name --hidden or --device")
    paths = [argument for argument in arguments if (ROOT / argument.partition("::")[0]).exists()]
    if given.device and not paths:
        arguments = [*arguments, *WHERE_IT_MATTERS]
    environment = dict(os.environ)
    with tempfile.TemporaryDirectory(prefix="mlxtune-simulated-") as folder:
        python = make_environment(Path(folder), hidden=given.hidden, device=given.device)
        environment["PATH"] = f"{python.parent}{os.pathsep}{environment['PATH']}"
        environment["VIRTUAL_ENV"] = folder
        done = subprocess.run([python, "-m", "pytest", *arguments], cwd=ROOT, env=environment)
    sys.exit(done.returncode)


if __name__ == "__main__":
    main()
