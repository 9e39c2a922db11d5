"""Reading a run's folder: whole, unfinished or damaged."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxtune.core.run.stored_run import find_runs, number, read_run, run_folder_at
from mlxtune.core.run.summary import RunView
from mlxtune.errors import OutputError
from mlxtune.views.pages.run_page import render_runs
from tests.runs import EVALUATION, LEDGER, as_lines, metrics, step_line, write_run


def test_complete_run_has_no_problem(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "out", evaluation=EVALUATION))

    assert run.problems == []
    assert list(run.column("step")) == list(range(1, 81))
    assert sum(run.column("tokens")) == 80 * 400
    losses = [(validation.step, validation.val_loss) for validation in run.progress.validations]
    assert losses == [(0, 4.0), (40, 2.0), (80, 1.0)]
    assert [epoch.epoch for epoch in run.progress.epochs] == [1, 2]
    assert [ledger.as_dict() for ledger in run.ledgers] == [LEDGER]
    assert run.evaluation is not None
    assert json.loads(json.dumps(run.evaluation.as_dict())) == EVALUATION
    assert run.config["epochs"] == 2
    assert run.checkpoints == ["epoch-1"]
    assert run.holder is None


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("out", "checkpoints"), "out"),
        (("out", "checkpoints", "previous-2"), "out/checkpoints/previous-2"),
        (("out", "mine"), "out/mine"),
    ],
)
def test_run_is_named_by_its_adapters_folder(
    tmp_path: Path, parts: tuple[str, ...], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = Path(*parts)
    folder.mkdir(parents=True)
    assert read_run(folder).name == name
    monkeypatch.chdir(tmp_path / "out")
    assert read_run(Path("checkpoints")).name == "out"


def test_run_is_found_by_its_folder_its_adapter_or_a_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out")
    for named in (run, run.parent, run.parent / "adapters.safetensors", run / "epoch-1"):
        assert run_folder_at(named) == run
    for missing in (tmp_path, tmp_path / "none"):
        with pytest.raises(OutputError, match="name the folder"):
            run_folder_at(missing)


def test_unfinished_run_is_read_up_to_its_last_step(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "out", finished=False))
    assert run.problems == []
    assert len(run.column("step")) == 60
    assert run.result == {}


def test_run_without_steps_is_read(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    run = read_run(tmp_path)
    assert run.problems == []
    assert "<h1>" in render_runs([run])


# Search


def test_search_finds_nested_and_archived_runs_but_no_checkpoints(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / name) for name in ("b", "a/deep/er", "a/x")]
    write_run(runs[0] / "previous-1").rename(runs[0] / "previous-1" / "run")
    before = runs[0] / "previous-1"
    for path in (before / "run").iterdir():
        path.rename(before / path.name)
    found = list(find_runs(tmp_path))
    assert found == [runs[1], runs[2], runs[0], before]


def test_search_skips_hidden_linked_deep_and_foreign_folders(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path / "seen")
    for hidden in (".hidden", "node_modules/x", "1/2/3/4/5/6/7"):
        write_run(tmp_path / hidden)
    write_run(tmp_path / "venv" / "x")
    (tmp_path / "venv" / "pyvenv.cfg").write_text("")
    (tmp_path / "link").symlink_to(tmp_path / "seen")
    (tmp_path / "loop").symlink_to(tmp_path)
    assert list(find_runs(tmp_path)) == [run]


@pytest.mark.skipif(os.geteuid() == 0, reason="root reads all folders")
def test_search_skips_unreadable_folders(tmp_path: Path) -> None:
    run = write_run(tmp_path / "seen")
    closed = tmp_path / "closed"
    closed.mkdir(mode=0)
    assert list(find_runs(tmp_path)) == [run]


# Damage


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("run.json", b"{", "run.json is not valid JSON"),
        ("run.json", b"[]", "run.json is not a JSON object"),
        ("result.json", b"\xff", "result.json is not valid JSON"),
        ("evaluation.json", b"[" * 100_000, "evaluation.json is nested too deep"),
        ("evaluation.json", b'{"rows": 1}', "evaluation.json is not an evaluation"),
        ("ledger.json", b"7", "ledger.json is not a list of ledgers"),
        ("epoch-1/metadata.json", b"nonsense", "epoch-1/metadata.json is not valid JSON"),
        ("metrics.jsonl", b"\xff\xfe", "metrics.jsonl: its last line is incomplete"),
        ("metrics.jsonl", b'{"kind": "st', "metrics.jsonl: its last line is incomplete"),
        (
            "metrics.jsonl",
            b"[]\n{}\n7\n",
            "line 1 is not the next record of the run, with 2 more like it",
        ),
        (
            "metrics.jsonl",
            b'{"kind": "step", "step": 1}\n',
            "line 1 is not the next record of the run",
        ),
        ("metrics.jsonl", as_lines([step_line(2, 9)]), "steps are missing"),
        ("metrics.jsonl", as_lines([step_line(1, 9)] * 2), "line 2 is not the next record"),
    ],
)
def test_damaged_file_is_a_problem_on_the_page(
    tmp_path: Path, file: str, content: bytes, problem: str
) -> None:
    folder = write_run(tmp_path / "out", evaluation=EVALUATION)
    (folder / file).write_bytes(content)
    run = read_run(folder)

    assert len(run.problems) == 1
    assert problem in run.problems[0]
    page = render_runs([run])
    assert "Some files could not be read" in page
    assert problem in page


def test_missing_metrics_are_a_problem(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert run.problems == ["metrics.jsonl is missing, so there are no curves"]
    assert "Nothing was measured." in render_runs([run])


def test_damaged_or_unordered_line_is_skipped_alone(tmp_path: Path) -> None:
    metrics = write_run(tmp_path / "out") / "metrics.jsonl"
    lines = metrics.read_bytes().split(b"\n")
    lines[10] = lines[10][:20]
    metrics.write_bytes(b"\n".join(lines))
    run = read_run(metrics.parent)
    assert len(run.column("step")) == 79
    assert "line 11 is not the next record" in run.problems[0]

    metrics.write_bytes(as_lines([step_line(step, 9) for step in (1, 3, 2, 4)]))
    run = read_run(metrics.parent)
    assert list(run.column("step")) == [1, 3, 4]
    assert "line 3 is not the next record" in run.problems[0]
    assert "steps are missing" in run.problems[1]


KEYS = [
    *("kind", "step", "loss", "epoch", "val_loss", "config", "plan", "memory", "peak"),
    *("lengths", "tokens", "p50", "mean", "difference", "low", "high"),
    *("base", "adapted", "gained", "generated", "samples", "rows", "reason", "rank"),
    *("targets", "data", "epochs", "steps", "adapter", "total_time_ms", "verdict"),
    *("path", "rows_read", "exact_match", "versions", "model_path", "started_at"),
]
JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(max_size=8)
    | st.just(10**400),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(KEYS),
            inner,
            max_size=5,
        )
    ),
    max_leaves=12,
)
RECORDS: dict[str, dict[str, Any]] = {
    "step": step_line(4, 3),
    "epoch": metrics(2, 3)[-1],
    "skipped": {"kind": "skipped", "step": 4, "epoch": 2, "learning_rate": 1e-4}
    | {"reason": "the loss is nan", "rows": ["chat.jsonl:4"]},
}
NAMES = ("run.json", "result.json", "evaluation.json", "ledger.json", "epoch-1/metadata.json")


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(name=st.sampled_from(NAMES), value=JSON, kind=st.sampled_from(sorted(RECORDS)))
def test_no_content_of_a_file_breaks_the_page(
    tmp_path: Path, name: str, value: object, kind: str
) -> None:
    folder = tmp_path / "out" / "checkpoints"
    if not folder.is_dir():
        write_run(tmp_path / "out", epochs=1, per_epoch=3, evaluation=EVALUATION)
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / name).write_text(json.dumps(value))
    if isinstance(value, dict):
        changed = RECORDS[kind] | {key: value[key] for key in value if key in RECORDS[kind]}
        with (folder / "metrics.jsonl").open("ab") as file:
            file.write(as_lines([changed]))
    try:
        run = read_run(folder)
        assert render_runs([run]).endswith("</html>\n")
        assert render_runs([run, run]).endswith("</html>\n")
        json.dumps(RunView.of(run).as_dict(), allow_nan=False)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_number_is_finite_and_no_boolean() -> None:
    values = {"a": 1, "b": True, "c": math.inf, "d": "1", "e": 10**400, "f": {"g": 2.5}}
    assert [number(values, name) for name in "abcde"] == [1.0, None, None, None, None]
    assert number(values, "f", "g") == 2.5
    assert number(values, "a", "g") is None


def test_adapter_is_traced_to_the_run_that_wrote_it(tmp_path: Path) -> None:
    """Two files in one folder share `checkpoints/`, and the later run archived the earlier run."""
    for name in ("a", "b"):
        (tmp_path / f"{name}.safetensors").write_bytes(b"adapter")
    now, before = tmp_path / "checkpoints", tmp_path / "checkpoints" / "previous-1"
    for run, name in ((now, "b"), (before, "a")):
        run.mkdir()
        (run / "metrics.jsonl").touch()
        (run / "result.json").write_text(json.dumps({"adapter": f"../{name}.safetensors"}))
    assert run_folder_at(tmp_path / "a.safetensors") == before
    assert run_folder_at(tmp_path / "b.safetensors") == now
    (tmp_path / "c.safetensors").write_bytes(b"adapter")
    with pytest.raises(OutputError, match=r"its run is missing: .* is the run of b\.safetensors"):
        run_folder_at(tmp_path / "c.safetensors")
