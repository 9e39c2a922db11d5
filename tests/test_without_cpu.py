"""The package without mlxtune/backend/cpu: MLX's own operations compute everything."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.paths import ROOT, SHARED

# Tests of training, from the step to the command.
CORE = (
    "tests/cli/test_not_finite.py",
    "tests/backend/step/test_execution.py::test_step_equals_the_plain_one",
)
LONG = (
    *("tests/backend/step/test_pipeline.py", "tests/backend/step/test_execution.py"),
    *("tests/core", "tests/config", "tests/views", "tests/commands", "tests/cli"),
    *("tests/backend/adapters", "tests/backend/lora", "tests/backend/text"),
)


@pytest.fixture(scope="module")
def copy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository without mlxtune/backend/cpu."""
    parent = tmp_path_factory.mktemp("without")
    ignored = shutil.ignore_patterns(".*", "__pycache__")
    shutil.copytree(ROOT, parent / "repository", ignore=ignored)
    shutil.rmtree(parent / "repository" / "mlxtune" / "backend" / "cpu")
    (parent / "shared").symlink_to(SHARED)
    return parent / "repository"


def run_tests(copy: Path, *tests: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n0", "-p", "no:cacheprovider", *tests],
        cwd=copy,
        env={**os.environ, "PYTHONPATH": str(copy)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]


@pytest.mark.slow
def test_core_of_the_suite_runs_without_the_cpus_operations(copy: Path) -> None:
    run_tests(copy, *CORE)


@pytest.mark.long
def test_commands_and_adapters_run_without_the_cpus_operations(copy: Path) -> None:
    run_tests(copy, *LONG)
