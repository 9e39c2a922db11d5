"""A failing disk or a dying process while fuse, export and import write."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune import ExportConfig, FuseConfig, ImportConfig, export, fuse, import_adapter
from mlxtune.backend.adapters.certificate import CERTIFICATE
from mlxtune.errors import OutputError
from tests.command import files_in
from tests.faults import KINDS, Crash, FaultyDisk
from tests.long.fuzz_cases import Place, prepare
from tests.slow import long

Write = Callable[[Place, Path], object]
WRITERS: dict[str, Write] = {
    "fuse": lambda place, output: fuse(
        FuseConfig(str(place.adapter), str(output), str(place.model), quiet=True)
    ),
    "export": lambda place, output: export(
        ExportConfig(str(place.adapter), str(output), str(place.model), quiet=True, format="mlx-lm")
    ),
    "import": lambda place, output: import_adapter(
        ImportConfig(str(place.peft), str(output), str(place.model), quiet=True)
    ),
}


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Place:
    """A model and its adapters."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        root = tmp_path_factory.mktemp("faults")
        monkeypatch.chdir(root)
        made = Place(root / "place")
        prepare(made)
    return made


# One in this many operations fails; for each failure, fuse and export load the model three times.
EVERY = {"fuse": 20, "export": 20, "import": 2}
CASES = [("fuse", "crash", 170), ("export", "ENOSPC", 60), ("import", "crash", 12)]
CASES += [long(name, kind, every) for name, every in EVERY.items() for kind in KINDS]


@pytest.mark.parametrize(("name", "kind", "every"), CASES)
def test_failed_operation_leaves_nothing_that_looks_finished(
    place: Place,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    name: str,
    kind: str,
    every: int,
) -> None:
    from mlxtune.backend.adapters import compare_logits

    monkeypatch.setattr(compare_logits, "NEW_TOKENS", 2)
    monkeypatch.setattr("mlxtune.session.verified_output._PROMPTS", ("Hi",))
    write, code = WRITERS[name], KINDS[kind]
    write(place, tmp_path / "whole")
    whole = contents(tmp_path / "whole")
    failed = 0
    for fails_at in range(1, 1000, every):
        folder = tmp_path / str(fails_at)
        folder.mkdir()
        raised: BaseException | None = None
        with pytest.MonkeyPatch.context() as patched:
            disk = FaultyDisk(patched, fails_at, code, within=folder)
            try:
                write(place, folder / "out")
            except (Crash, OutputError) as error:
                raised = error
        failed += raised is not None
        assert raised is not None or contents(folder / "out") == whole
        # If the last operation fails, all is in place and only the flush is missing.
        assert not (folder / "out").exists() or contents(folder / "out") == whole
        if not isinstance(raised, Crash):
            assert [path.name for path in folder.iterdir()] in ([], ["out"])
        shutil.rmtree(folder)
        if not disk.failed:
            break
    assert failed


def contents(folder: Path) -> dict[str, bytes]:
    """Return the content of each file in a folder, but b"" for a certificate."""
    return {
        name: b"" if name == CERTIFICATE else (folder / name).read_bytes()
        for name in files_in(folder)
    }
