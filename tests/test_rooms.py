"""Rules for the sizes and names of folders and modules, which import contracts cannot express."""

from __future__ import annotations

from collections import defaultdict

from tests.long.structure import (
    PACKAGE,
    SCRIPTS,
    importers,
    length,
    modules,
    short,
    single_importers,
    twin_definitions,
    twin_names,
    without_tests,
)

MAX_MODULES = 16
MIN_LINES = 80
# Folders that may have short modules, as each command, format or mixer has its own file.
ONE_FILE_EACH = ("commands/", "backend/adapters/file_formats/", "backend/models/mixers/")
# Modules with a single importer, unless each is a file of its own: at most so many, none shorter.
MAX_SINGLE_IMPORTERS, MIN_SINGLE_IMPORTER_LINES = 30, 130
MAX_TWIN_NAMES = 6
MAX_WITHOUT_TESTS = 42


def test_no_folder_has_too_many_modules() -> None:
    counts: dict[str, int] = defaultdict(int)
    for path in modules():
        counts[short(path.parent)] += 1
    assert {folder: count for folder, count in counts.items() if count > MAX_MODULES} == {}


def test_short_module_has_several_importers() -> None:
    users = importers()
    found = {
        name: lines
        for path in modules()
        if len(users[path]) < 2
        and not (name := short(path)).startswith(ONE_FILE_EACH)
        and not path.stem.endswith(SCRIPTS)
        and (lines := length(path)) < MIN_LINES
    }
    assert found == {}, "merge each into the module whose subject it is"


def test_few_modules_have_a_single_importer() -> None:
    single = {
        name: lines
        for name, lines in single_importers().items()
        if not name.startswith(ONE_FILE_EACH)
    }
    assert len(single) <= MAX_SINGLE_IMPORTERS, f"merge some of {single} into their importers"
    assert min(single.values()) >= MIN_SINGLE_IMPORTER_LINES


def test_module_and_package_names_are_unique() -> None:
    twins = twin_names()
    assert len(twins) <= MAX_TWIN_NAMES, f"rename modules of {twins}"


def test_names_of_classes_and_functions_are_unique() -> None:
    assert twin_definitions() == {}


def test_most_modules_have_a_test_file_of_the_same_name() -> None:
    names = without_tests()
    assert len(names) <= MAX_WITHOUT_TESTS, f"name tests after some of {names}"


def test_counts_of_importers_are_not_empty() -> None:
    """A count that finds nothing would hold for ever."""
    assert {path.name for path in importers()[PACKAGE / "errors.py"]} > {"fields.py", "trainer.py"}
    assert single_importers().keys() > {"commands/verify.py"}
