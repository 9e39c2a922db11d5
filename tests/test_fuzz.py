"""The command on randomly damaged files and folders."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.attacks.limits import limited
from tests.long.fuzz_cases import FOLDERS, Place, prepare, run_case

SEED = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folders of cases, with the files that cases start from."""
    before = Path.cwd()
    made = Place(tmp_path_factory.mktemp("fuzz") / "place")
    prepare(made)
    os.chdir(before)
    return made


CASES = [("data", 4), *((kind, 1) for kind in FOLDERS)]


@pytest.mark.parametrize(("kind", "count"), CASES)
def test_damaged_files_end_in_success_or_in_one_line(
    place: Place, kind: str, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.cases)
    found = {}
    for number in range(count):
        result = run_case(place, SEED, f"{kind}:{number}")
        assert not result["problem"], f"{kind}:{number}: {result['problem']}\n{result['said']}"
        found[number] = result["code"]
    # Of several cases, some fail and some succeed.
    assert {0} < set(found.values()) or count == 1


@pytest.mark.long
@pytest.mark.parametrize("seed", range(100, 140))
def test_thousands_of_damaged_files_end_in_success_or_in_one_line(
    place: Place, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(place.cases)
    names = [f"data:{number}" for number in range(300)]
    names += [f"{kind}:{number}" for kind in FOLDERS for number in range(9)]
    for name in names:
        with limited(memory=2 * 10**9):
            result = run_case(place, seed, name)
        assert not result["problem"], f"{seed}, {name}: {result['problem']}\n{result['said']}"
