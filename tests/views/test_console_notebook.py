"""A run's live line in a notebook; tests/test_notebook.py runs real kernels."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest

from mlxtune.views import console
from mlxtune.views.console import NotebookLine, in_notebook


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, str]]:
    """The states that a notebook receives; its clock advances by a second at each reading."""
    states: list[dict[str, str]] = []

    def display(content: dict[str, str], **options: Any) -> SimpleNamespace:
        assert options == {"raw": True, "display_id": True}
        states.append(content)
        return SimpleNamespace(update=lambda content, raw: states.append(content))

    monkeypatch.setattr("IPython.display.display", display)
    seconds = iter(range(100))
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: next(seconds)))
    return states


def test_line_shows_how_much_is_done_and_how_long_the_rest_takes(
    shown: list[dict[str, str]],
) -> None:
    line = NotebookLine()
    line.update("step 1/10", 0.1)
    line.update("step 2/10", 0.2)
    line.update("validating <3>")
    line.close()
    assert [state["text/plain"] for state in shown] == [
        "",
        "step 1/10",
        "step 2/10  8.0s left",
        "validating <3>",
        "",
    ]
    assert '<progress max="1" value="0.2000">' in shown[2]["text/html"]
    assert "&lt;3&gt;" in shown[3]["text/html"]
    assert shown[-1]["text/html"] == ""


def test_changes_in_quick_succession_are_left_out(
    shown: list[dict[str, str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(console, "time", SimpleNamespace(monotonic=lambda: 7.0))
    line = NotebookLine()
    for step in range(1, 4):
        line.update(f"step {step}/3", step / 3)
    assert [state["text/plain"] for state in shown] == ["", "step 1/3"]


def test_only_a_kernel_is_a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    for shell, expected in (
        (None, False),
        (SimpleNamespace(), False),  # IPython without a kernel
        (SimpleNamespace(kernel=object()), True),
    ):
        ipython = SimpleNamespace(get_ipython=lambda shell=shell: shell)
        monkeypatch.setitem(sys.modules, "IPython", ipython)
        assert in_notebook() is expected
    monkeypatch.delitem(sys.modules, "IPython")
    assert not in_notebook()


def test_console_outside_a_notebook_does_not_load_ipython() -> None:
    code = (
        "import sys; from mlxtune.views.console import RunConsole\n"
        "console = RunConsole(); console.show('a'); console.close()\n"
        "assert not {'IPython', 'ipywidgets'} & sys.modules.keys()"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
