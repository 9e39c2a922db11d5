"""Three runs as `mlxtune runs` lists them."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.core.run.stored_run import read_run
from mlxtune.core.run.summary import RunView
from tests.runs import write_run


def listed(folder: Path, **changes: object) -> RunView:
    return RunView.of(read_run(write_run(folder, **changes)))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[RunView]:
    folder = tmp_path_factory.mktemp("runs")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        early = {"started_at": "2026-01-01T00:00:00+00:00"}
        return [
            listed(Path("first"), epochs=4, about=early),
            listed(Path("second"), epochs=2, about={"started_at": "2026-03-01T12:30:00+01:00"}),
            listed(Path("third"), epochs=2, validation=False, finished=False),
        ]
