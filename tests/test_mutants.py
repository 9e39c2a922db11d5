"""The short form of tests/long/mutants.py: each defect can still be made."""

from __future__ import annotations

import pytest

from tests.long.mutants import MUTANTS, Mutant
from tests.paths import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_text_to_mutate_stands_once_and_its_tests_exist(mutant: Mutant) -> None:
    module = (ROOT / "mlxtune" / mutant.module).read_text(encoding="utf-8")
    assert module.count(mutant.before) == 1
    assert mutant.before != mutant.after
    assert all((ROOT / path).exists() for path in mutant.tests.split())


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
