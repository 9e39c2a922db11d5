"""`mlxtune runs` from the command line, and `mlxtune.commands.runs`."""

from __future__ import annotations

import json
import os
import pty
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

import mlxtune
from tests.command import Cli
from tests.runs import as_lines, write_rewarded_run, write_run


@pytest.fixture(autouse=True)
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_runs_below_this_folder_are_listed(cli: Cli) -> None:
    write_run(Path("out/a"))
    write_run(Path("out/b"), finished=False)
    outcome = cli("runs")
    assert outcome.code == 0
    assert [line.split()[0] for line in outcome.out.splitlines()[1:3]] == ["out/a", "out/b"]
    assert "mlxtune train --resume out/b" in outcome.out
    assert outcome.err == ""
    assert cli("runs", "out/a").out.count("\n") == outcome.out.count("\n") - 4


def test_run_with_rewards_is_listed_with_rewards(cli: Cli) -> None:
    run = write_rewarded_run(Path("out"))
    before = {"kind": "validation", "step": 0, "val_loss": -0.25, "val_perplexity": 1.0}
    after = {**before, "step": 12, "val_loss": -0.75}
    lines = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(as_lines([before]) + lines + as_lines([after]))
    row = cli("runs").out.splitlines()[1]
    assert "1.52 reward  0.250 → 0.750 reward  ▁▁▂▃▃▄▅▆▆▇██" in row


def test_sort_and_json(cli: Cli) -> None:
    write_run(Path("a"), epochs=2)
    write_run(Path("b"), epochs=4)
    found = json.loads(cli("runs", "--json", "--sort", "val", ".").out)
    assert [(each["name"], each["best_val_loss"]) for each in found] == [("b", 0.5), ("a", 1.0)]
    assert found[0]["curve"] == [4.0, 2.0, 1.0, pytest.approx(2 / 3), 0.5]
    assert cli("runs", "--sort", "colour").code == 2


def test_run_given_twice_is_listed_once(cli: Cli) -> None:
    write_run(Path("a"))
    assert len(json.loads(cli("runs", "--json", ".", "a", "a/checkpoints").out)) == 1


def test_empty_folder_is_reported_and_missing_folder_is_an_error(cli: Cli) -> None:
    Path("empty").mkdir()
    outcome = cli("runs", "empty")
    assert (outcome.code, outcome.out) == (0, "")
    assert "no run below empty" in outcome.err
    assert json.loads(cli("runs", "empty", "--json").out) == []
    assert "none: no such folder" in cli("runs", "none").error


def test_damaged_run_is_listed_as_one(cli: Cli) -> None:
    run = write_run(Path("a"))
    (run / "metrics.jsonl").write_bytes(b"\x00")
    outcome = cli("runs")
    assert outcome.code == 0
    assert "damaged:\n  a/checkpoints: metrics.jsonl" in outcome.out


def test_help_has_an_example(cli: Cli) -> None:
    assert "Example: mlxtune runs" in cli("runs", "--help").out


def in_terminal(columns: int, **environment: str) -> str:
    """Run `mlxtune runs` in a terminal of this many columns, and return its output."""
    main, secondary = pty.openpty()
    variables = {**os.environ, "COLUMNS": str(columns), **environment}
    with subprocess.Popen(
        [sys.executable, "-m", "mlxtune", "runs"], stdout=secondary, env=variables
    ) as process:
        os.close(secondary)
        shown = b""
        while True:
            try:
                part = os.read(main, 4096)
            except OSError:
                break
            shown += part
            if not part:
                break
    os.close(main)
    assert process.returncode == 0
    return shown.decode("utf-8").replace("\r\n", "\n")


def test_table_fits_a_terminal_and_its_encoding() -> None:
    write_run(Path("a_run_with_a_rather_long_name/of/its/own"), epochs=4)
    narrow = in_terminal(44, PYTHONUTF8="1").splitlines()
    assert max(map(len, narrow[:3])) <= 44
    plain = in_terminal(100, PYTHONUTF8="0", PYTHONIOENCODING="ascii")
    assert plain.isascii()
    assert r"4.00 \u2192 0.500" in plain


def test_summaries_for_python() -> None:
    write_run(Path("a"), epochs=2)
    write_run(Path("b"), epochs=4)
    assert [run.name for run in mlxtune.runs(sort="val")] == ["b", "a"]
    assert [run.name for run in mlxtune.runs("a")] == ["a"]


def test_runs_are_removed_after_a_question(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = [write_run(Path(name)) for name in ("a", "b")]
    for run in runs:
        (run / ".mlxtune").touch()
        shutil.rmtree(run / "epoch-1")
    assert cli("runs", "--remove").code == 2
    assert "add --yes" in cli("runs", "--remove", "a").error
    monkeypatch.setattr("sys.stdin", SimpleNamespace(isatty=lambda: True, readline=lambda: "n\n"))
    assert cli("runs", "--remove", "a").code == 0
    assert all(each.exists() for each in runs)
    assert "no such folder" in cli("runs", "--remove", "--yes", "a", "none").error
    assert all(each.exists() for each in runs)
    assert cli("runs", "--remove", "--yes", "a").code == 0
    assert [each.exists() for each in runs] == [False, True]


def test_adapter_of_an_earlier_run_is_its_best_checkpoint(cli: Cli) -> None:
    """The later run's adapter replaced the earlier run's adapter."""
    run = write_run(Path("out"))
    earlier = run / "previous-1"
    earlier.mkdir()
    for path in run.iterdir():
        if path != earlier:
            path.rename(earlier / path.name)
    (earlier / "best").mkdir()
    best = earlier / "best" / "adapters.safetensors"
    (found,) = json.loads(cli("runs", "--json").out)
    assert (found["name"], found["adapter"]) == (str(earlier), "")
    best.touch()
    (found,) = json.loads(cli("runs", "--json").out)
    assert found["adapter"] == str(best)
