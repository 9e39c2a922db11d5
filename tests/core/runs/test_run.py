"""What is read of a run's folder, whole, unfinished, damaged, or of an earlier version."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mlxtune.core.reports.run_page import render_runs
from mlxtune.core.runs.run import is_run, number, read_run, run_folder_at
from mlxtune.core.runs.summary import ledgers_of, summarize
from mlxtune.errors import OutputError
from tests.runs import EVALUATION, LEDGER, as_lines, metrics, step_line, write_run


def test_whole_run_is_read_without_a_problem(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "out", evaluation=EVALUATION))

    assert run.problems == []
    assert len(run.steps) == 80
    assert run.steps["step"] == list(range(1, 81))
    assert run.steps.total("tokens") == 80 * 400
    assert run.validations == [(0, 4.0), (40, 2.0), (80, 1.0)]
    assert [epoch["epoch"] for epoch in run.epochs] == [1, 2]
    assert run.evaluation == EVALUATION
    assert run.config["epochs"] == 2
    assert run.checkpoints == ["epoch-1"]
    assert run.holder is None


@pytest.mark.parametrize(
    ("parts", "name"),
    [
        (("out", "checkpoints"), "out"),
        (("out", "checkpoints", "previous"), "out (previous)"),
        (("out", "mine"), "out/mine"),
    ],
)
def test_run_is_named_as_a_person_would(
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
    assert is_run(run)
    assert not is_run(run / "epoch-1")


def test_run_of_an_earlier_version_lacks_what_that_did_not_write(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    (folder / "run.json").unlink()
    result = json.loads((folder / "result.json").read_text())
    del result["peak_memory"]
    (folder / "result.json").write_text(json.dumps(result))
    older = []
    for record in metrics(2, 40):
        for name in ("memory", "micro_batches", "run_tokens", "padding"):
            record.pop(name, None)
        older.append(record)
    (folder / "metrics.jsonl").write_bytes(as_lines(older))
    run = read_run(folder)

    assert run.problems == []
    assert run.config["epochs"] == 2, "a checkpoint says it"
    assert run.steps.known("memory") == []
    summary = summarize(run)
    assert summary.total_steps == 80
    assert summary.started[:2] == "20", "the time of its files"
    assert summary.peak_memory is None
    assert "earlier version" in render_runs([run])


def test_run_of_the_first_version_is_read(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out", finished=False)
    for name in ("run.json", "epoch-1/manifest.json"):
        (folder / name).unlink()
    own = {key: value for key, value in LEDGER.items() if key not in ("path", "examples", "notes")}
    (folder / "ledger.json").write_text(json.dumps({"data/old.jsonl": own}))
    run = read_run(folder)

    assert run.problems == []
    assert (run.config["epochs"], run.checkpoints) == (2, [])
    (ledger,) = ledgers_of(run)
    assert (ledger["path"], ledger["examples"], ledger["rows_read"]) == ("data/old.jsonl", 48, 50)
    assert summarize(run).resume == ""


def test_unfinished_run_is_read_as_far_as_it_came(tmp_path: Path) -> None:
    run = read_run(write_run(tmp_path / "out", finished=False))
    assert run.problems == []
    assert len(run.steps) == 60
    assert run.result == {}


def test_empty_folder_of_a_run_that_has_just_begun(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    run = read_run(tmp_path)
    assert run.problems == []
    assert "<h1>" in render_runs([run])


# Damage


@pytest.mark.parametrize(
    ("file", "content", "problem"),
    [
        ("run.json", b"{", "run.json is not valid JSON"),
        ("run.json", b"[]", "run.json: expected a JSON object"),
        ("result.json", b"\xff", "result.json is not valid JSON"),
        ("evaluation.json", b"[" * 100_000, "evaluation.json is not valid JSON"),
        ("ledger.json", b"7", "ledger.json: expected a list of files"),
        ("epoch-1/metadata.json", b"nonsense", "epoch-1/metadata.json cannot be read"),
        ("metrics.jsonl", b"\xff\xfe", "metrics.jsonl: its last line is incomplete"),
        ("metrics.jsonl", b'{"kind": "st', "metrics.jsonl: its last line is incomplete"),
        ("metrics.jsonl", b"[]\n{}\n7\n", "line 1 is not a record of a run, and 2 more"),
        ("metrics.jsonl", b'{"kind": "step", "step": 1}\n', "line 1 is not a record of a run"),
        ("metrics.jsonl", as_lines([step_line(2, 9)]), "steps are missing or duplicated"),
        ("metrics.jsonl", as_lines([step_line(1, 9)] * 2), "steps are missing or duplicated"),
    ],
)
def test_damage_is_a_problem_that_names_the_file_and_the_rest_is_shown(
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


def test_missing_metrics_are_said_and_the_rest_is_shown(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    (folder / "metrics.jsonl").unlink()
    run = read_run(folder)
    assert run.problems == ["metrics.jsonl is missing, so there are no curves"]
    assert "Nothing was measured." in render_runs([run])


def test_bad_line_among_good_ones_costs_that_line_alone(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    lines = (folder / "metrics.jsonl").read_bytes().split(b"\n")
    lines[10] = lines[10][:20]
    (folder / "metrics.jsonl").write_bytes(b"\n".join(lines))
    run = read_run(folder)
    assert len(run.steps) == 79
    assert "line 11 is not a record" in run.problems[0]


def test_steps_out_of_order_are_brought_into_it(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    records = [step_line(step, 9) for step in (1, 3, 2)]
    (folder / "metrics.jsonl").write_bytes(as_lines(records))
    run = read_run(folder)
    assert run.steps["step"] == [1, 2, 3]
    assert run.steps["loss"] == [step_line(step, 9)["loss"] for step in (1, 2, 3)]


def test_records_of_a_later_version_are_passed_over(tmp_path: Path) -> None:
    folder = write_run(tmp_path / "out")
    with (folder / "metrics.jsonl").open("ab") as file:
        file.write(b'{"kind": "profile", "step": 80}\n')
    run = read_run(folder)
    assert run.problems == []
    assert len(run.steps) == 80


KEYS = [
    *("kind", "step", "loss", "epoch", "val_loss", "config", "plan", "memory", "peak"),
    *("lengths", "tokens", "counts", "width", "start", "difference", "low", "high"),
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
NAMES = ("run.json", "result.json", "evaluation.json", "ledger.json", "epoch-1/metadata.json")


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from(NAMES), value=JSON, kind=st.sampled_from(["step", "epoch", "skipped"]))
def test_nothing_that_a_file_may_hold_breaks_the_page(
    tmp_path: Path, name: str, value: object, kind: str
) -> None:
    folder = tmp_path / "out" / "checkpoints"
    if not folder.is_dir():
        write_run(tmp_path / "out", epochs=1, per_epoch=3, evaluation=EVALUATION)
    kept = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    (folder / name).write_text(json.dumps(value))
    if isinstance(value, dict):
        with (folder / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({"kind": kind, "step": 4, "loss": 1.0} | value) + "\n")
    try:
        run = read_run(folder)
        assert render_runs([run]).endswith("</html>\n")
        assert render_runs([run, run]).endswith("</html>\n")
        json.dumps(summarize(run).as_dict(), allow_nan=False)
    finally:
        for path, content in kept.items():
            path.write_bytes(content)


def test_number_is_finite_and_not_a_truth() -> None:
    values = {"a": 1, "b": True, "c": math.inf, "d": "1", "e": 10**400, "f": {"g": 2.5}}
    assert [number(values, name) for name in "abcde"] == [1.0, None, None, None, None]
    assert number(values, "f", "g") == 2.5
    assert number(values, "a", "g") is None
