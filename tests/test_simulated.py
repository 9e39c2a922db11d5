"""Every process in an environment of tests/long/simulated.py is simulated."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.long.simulated import make_environment
from tests.long.simulation import DEVICES
from tests.paths import ROOT
from tests.slow import long, slow

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="simulates a Mac on Linux")


def answer(python: Path, code: str, **variables: str) -> Any:
    """Return the JSON that `code` prints in a grandchild process."""
    inner = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {code!r}], check=True)"
    # The simulation must not depend on the processes' environment variables.
    kept = {"PATH": os.environ["PATH"], "PYTHONPATH": str(ROOT), **variables}
    done = subprocess.run([python, "-c", inner], env=kept, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_hidden_packages_and_proc_are_absent_in_every_process(tmp_path: Path) -> None:
    python = make_environment(tmp_path, hidden=True, device=None)
    code = (
        "import importlib.metadata, importlib.util, json, os, pathlib, numpy, mlxtune\n"
        "def opens():\n"
        "    try: open('/proc/self/status'); os.listdir('/proc')\n"
        "    except FileNotFoundError: return False\n"
        "    return True\n"
        "found = [bool(importlib.util.find_spec(name)) for name in ('numba', 'threadpoolctl')]\n"
        "names = {each.name for each in importlib.metadata.distributions()}\n"
        "found += [opens(), pathlib.Path('/proc/self').exists(), os.path.isdir('/proc'),\n"
        "    'mkl' in names, 'numba' in names]\n"
        "print(json.dumps([found, 'numpy' in names, os.path.exists('/dev/null')]))"
    )
    assert answer(python, code) == [[False] * 7, True, True]


@pytest.mark.parametrize("device", [slow("m1-8"), long("h200")])
def test_device_works_and_gpu_code_is_used(tmp_path: Path, device: str) -> None:
    python = make_environment(tmp_path, hidden=False, device=device)
    code = (
        "import json, mlxtune.backend, mlx.core as mx\n"
        "from mlxtune.backend.device import allocator\n"
        "from mlxtune.backend.forward.operations import MLX, best_execution\n"
        "print(json.dumps([mx.metal.is_available(), mx.device_info(), allocator.on_cpu(),\n"
        "    best_execution(10**9).operations is MLX, allocator.find_limits(200).memory,\n"
        "    float(mx.sum(mx.ones((2, 2)) @ mx.ones((2, 2))))]))"
    )
    blas = {"MLXTUNE_BLAS": os.environ.get("MLXTUNE_BLAS", "")}
    metal, info, on_cpu, by_mlx, limit, computed = answer(python, code, **blas)
    assert (metal, info) == (device == "m1-8", DEVICES[device])
    assert (on_cpu, by_mlx, computed) == (False, True, 8.0)
    if metal:
        assert limit == DEVICES[device]["max_recommended_working_set_size"]
    else:
        # CUDA recommends no limit: a fraction of the GPU's memory is used, below the free memory.
        assert 0.8 * 140 * 2**30 < limit < 139 * 2**30
