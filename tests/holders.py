"""Processes that hold a lock or a file, for tests across processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import mlxtune


def hold_elsewhere(code: str, *arguments: object) -> subprocess.Popen[str]:
    """Run code in a separate process, which keeps its locks and files until it is ended."""
    waiting = f"{code}\nprint('held', flush=True)\nimport time; time.sleep(600)\n"
    process = subprocess.Popen(
        [sys.executable, "-c", waiting, *map(str, arguments)],
        stdout=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": str(Path(mlxtune.__file__).parents[1])},
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process
