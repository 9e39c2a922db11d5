"""Property tests use fixed examples by default, and other examples with a seed."""

from __future__ import annotations

import subprocess
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

from tests.long.explore import arguments, property_tests
from tests.paths import ROOT

DRAWS = """
from pathlib import Path
from hypothesis import given, settings, strategies as st

@given(st.integers())
def test_draws(number):
    with Path(__file__).with_name("drawn").open("a") as file:
        file.write(f"{number} ")
"""


def test_default_run_draws_the_same_examples_and_knows_no_clock() -> None:
    assert settings.default is not None
    assert settings.default.derandomize
    assert settings.default.deadline is None
    assert settings.default.database is None


def test_property_tests_are_found() -> None:
    found = property_tests()
    assert "tests/views/pages/test_axis.py" in found
    assert "tests/views/test_run_text.py" not in found


@pytest.mark.slow
def test_seed_decides_the_examples(tmp_path: Path) -> None:
    def drawn(seed: int) -> str:
        folder = Path(tempfile.mkdtemp(dir=tmp_path))
        (folder / "test_draws.py").write_text(DRAWS)
        command = arguments(seed, ["-p", "tests.conftest", str(folder)])
        subprocess.run(command, cwd=ROOT, check=True)
        return (folder / "drawn").read_text()

    assert drawn(1) == drawn(1) != drawn(2)
