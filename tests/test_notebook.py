"""Runs in a notebook: their output, interrupts and a dying kernel; and docs/notebook.ipynb."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import nbformat
import pytest

from tests.kernels import Kernel, Shown, kernel
from tests.models import sums, write_chat
from tests.paths import DOCS, ROOT
from tests.slow import long, slow

NOTEBOOK = DOCS / "notebook.ipynb"


@pytest.fixture(scope="module")
def opened(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Kernel]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    with kernel(cwd=str(tmp_path_factory.mktemp("notebook")), env=environment) as started:
        yield started


def options(model: Path, chat: Path, folder: Path, **changes: Any) -> dict[str, Any]:
    own = {"model_path": str(model), "data": str(chat), "patience": 100_000}
    output = {"output": str(folder / "adapters.safetensors"), "samples": 0}
    return own | output | changes


def training(**changes: Any) -> str:
    return f"import mlxtune\nresult = mlxtune.train(mlxtune.TrainConfig(**{changes!r}))"


def has_taken(shown: Shown, step: int) -> bool:
    """Return whether a live line has shown this step or a later one."""
    texts = [state["text/plain"] for states in shown.displays.values() for state in states[-1:]]
    found = [re.match(r"epoch \d+/\d+ step (\d+)/", text) for text in texts]
    return any(match and int(match[1]) >= step for match in found)


@pytest.mark.slow
def test_run_has_a_live_line_and_a_result_with_its_curve(
    opened: Kernel, model: Path, tmp_path: Path
) -> None:
    chat = write_chat(tmp_path / "chat.jsonl", sums(20))
    shown = opened.run(training(**options(model, chat, tmp_path, epochs=2)))
    assert not shown.error
    assert "Validation" in shown.text
    assert "Traceback" not in shown.text
    assert "Warning" not in shown.text
    assert "step 1/" not in shown.text
    lines = [state["text/plain"] for states in shown.displays.values() for state in states]
    assert any(re.match(r"validating|epoch 1/2 step \d+/8  loss ", line) for line in lines)
    # The live line disappears at the end.
    assert all(states[-1]["text/html"] == "" for states in shown.displays.values())

    result = opened.run("result").result
    assert "<svg" in result["text/html"]
    assert "validation loss" in result["text/plain"]
    assert f"adapter={str(tmp_path / 'adapters.safetensors')!r}" in result["text/plain"]
    assert len(result["text/plain"]) < 1500


@pytest.mark.slow
def test_interrupt_of_the_kernel_saves_and_says_how_to_resume(
    opened: Kernel, model: Path, tmp_path: Path
) -> None:
    chat = write_chat(tmp_path / "chat.jsonl", sums(20))
    code = training(**options(model, chat, tmp_path, epochs=100_000, save_every=100_000))
    shown = opened.run(code, until=lambda shown: has_taken(shown, 3))
    opened.manager.interrupt_kernel()
    opened.read(shown)
    assert "stopping after this step; interrupt the kernel again to stop at once" in shown.text
    (line,) = shown.error
    said = re.fullmatch(
        r"interrupted after step (\d+); saved to (.+); resume with mlxtune train --resume (.+), "
        r"or in Python with mlxtune.resume\('(.+)'\)",
        line,
    )
    assert said, line
    assert int(said[1]) >= 3
    assert said[2] == str(tmp_path / "checkpoints" / f"step-{said[1]}")
    assert (Path(said[2]) / "manifest.json").is_file()
    assert said[3] == said[4] == str(tmp_path)
    # The kernel still runs, and the run can be resumed in it.
    again = opened.run(f"mlxtune.resume({said[4]!r}, samples=0)", lambda shown: has_taken(shown, 5))
    assert not again.error
    opened.manager.interrupt_kernel()
    opened.read(again)
    (line,) = again.error
    assert int(line.split()[3].strip(";")) > int(said[1])


# docs/notebook.ipynb


def test_notebook_is_stored_without_outputs() -> None:
    cells = nbformat.read(NOTEBOOK, as_version=4).cells
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in cells)


@pytest.mark.parametrize("short", [slow(True), long(False)])
def test_notebook_runs_unchanged(opened: Kernel, short: bool) -> None:
    notebook = nbformat.read(NOTEBOOK, as_version=4)
    if short:
        first, run = notebook.cells[1], "result = train(config)"
        assert run in first.source
        less = "dataclasses.replace(config, max_steps=1, val_rows=4, samples=0)"
        first.source = first.source.replace(run, f"import dataclasses\nresult = train({less})")
    code = {cell.id: cell.source for cell in notebook.cells if cell.cell_type == "code"}
    shown = {name: opened.run(source) for name, source in code.items()}
    assert not any(example.error for example in shown.values())
    assert "<svg" in shown["result"].result["text/html"]
    answers = shown["generate"].text
    assert answers.startswith("without: ")
    if not short:
        assert '"people": 4' in answers.partition("with the adapter:")[2]
