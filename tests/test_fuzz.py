"""The command on randomly damaged files and folders, and faults that these tests must detect."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from random import Random

import pytest

from tests.attacks.limits import limited
from tests.long import fuzz_cases, mutations
from tests.long.fuzz_cases import FOLDERS, Place, prepare, run_case
from tests.long.mutated_folders import mutate_model
from tests.models import THINKING, write_model

SEED = 2


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """The folders of cases, with the files that cases start from."""
    before = Path.cwd()
    made = Place(tmp_path_factory.mktemp("fuzz") / "place")
    prepare(made)
    os.chdir(before)
    return made


CASES = [("data", 12), *((kind, 1) for kind in FOLDERS)]


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
    # Of 12 cases, some fail and some succeed. Reports rarely fail, as they show all readable parts.
    assert {0} < set(found.values()) or count < 12 or kind == "report"


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


def test_cases_depend_only_on_seed_and_number(tmp_path: Path) -> None:
    made = [mutations.data_file(Random(f"{seed}:data:{7}")) for seed in (1, 1, 2)]
    assert made[0] == made[1] != made[2]
    folders = []
    for name in ("a", "b"):
        folder = write_model(tmp_path / name, "qwen3")
        (folder / "chat_template.jinja").write_text(THINKING)
        mutate_model(Random("1:model:1"), folder)
        files = sorted(path for path in folder.iterdir() if path.is_file())
        folders.append([(path.name, path.read_bytes()) for path in files])
    assert folders[0] == folders[1]


def _write(path: Path) -> None:
    path.write_text("x")


FAULTS: dict[str, tuple[Callable[[Place], object], str]] = {
    "a bug": (lambda place: 1 / 0, "ended with an exception"),
    "an exit code of its own": (lambda place: sys.exit(3), "ended with 3"),
    "an error that is not said": (lambda place: sys.exit(1), "ended with 1 and 0 lines of error"),
    "a file beside": (lambda place: _write(place.guarded / "left"), "changed files outside of"),
    "a file above": (lambda place: _write(Path("../left")), "changed files outside of"),
    "the model": (lambda place: os.utime(place.model / "config.json"), "changed files outside of"),
    "a file in its folder": (lambda place: _write(Path("left")), "inspect changed files in its"),
    "noise": (lambda place: print("hm", file=sys.stderr), "said 'hm'"),
    "a traceback": (lambda place: print("Traceback", file=sys.stderr), "showed a traceback"),
    "colours": (
        lambda place: print("warning: \x1b[31m", file=sys.stderr),
        "sent control characters",
    ),
    "slow": (lambda place: time.sleep(0.2), "took "),
}


@pytest.mark.parametrize(("fault", "said"), FAULTS.values(), ids=FAULTS.keys())
def test_command_that_does_what_it_must_not_is_found_and_its_files_are_kept(
    place: Place,
    monkeypatch: pytest.MonkeyPatch,
    fault: Callable[[Place], object],
    said: str,
) -> None:
    monkeypatch.chdir(place.cases)
    monkeypatch.setattr(fuzz_cases, "SECONDS", 0.15 if "took" in said else 10)
    monkeypatch.setattr("mlxtune.commands.inspect.show", lambda config: fault(place))
    # The first case with a problem is the first that runs `inspect`.
    results = ((name, run_case(place, SEED, name)) for name in map("data:{}".format, range(20)))
    name, result = next(each for each in results if each[1]["problem"])
    assert result["problem"].startswith(said)
    assert (place.case(name) / "here").is_dir()
    (place.guarded / "left").unlink(missing_ok=True)
