"""The text that each mutant replaces exists once, and the mutant's tests exist."""

from __future__ import annotations

from tests.long.mutants import MUTANTS
from tests.paths import ROOT


def test_text_to_mutate_stands_once_and_its_tests_exist() -> None:
    for mutant in MUTANTS:
        module = (ROOT / "mlxtune" / mutant.module).read_text(encoding="utf-8")
        assert module.count(mutant.before) == 1, mutant.name
        assert mutant.before != mutant.after, mutant.name
        assert all((ROOT / path).exists() for path in mutant.tests.split()), mutant.name


def test_mutants_have_names_of_their_own() -> None:
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) >= 60
