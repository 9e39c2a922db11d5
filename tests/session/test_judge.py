"""What an evaluation compares an adapter with."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal, get_args

import pytest
import safetensors.numpy

from mlxtune import EvalConfig, TrainConfig, evaluate, resume, train
from mlxtune.backend.workers.workers import Workers
from mlxtune.core.files.reading import file_hash
from mlxtune.core.run.stored_run import read_evaluation
from mlxtune.errors import TrainingInterrupted
from mlxtune.session.trained_model import unchanged_initial
from tests.command import Cli
from tests.models import write_model

Objective = Literal["sft", "dpo"]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with rows and two adapters of each objective: the second began with the first."""
    folder = tmp_path_factory.mktemp("judge")
    write_model(folder / "model", "qwen3", num_hidden_layers=1)
    rows = [
        {"prompt": f"{a} plus {b}", "chosen": f"It is {a + b}.", "rejected": f"Is it {a * b}?"}
        for a in range(5)
        for b in range(5)
    ]
    (folder / "dpo.jsonl").write_text("\n".join(map(json.dumps, rows)))
    answers = [{"prompt": row["prompt"], "completion": row["chosen"]} for row in rows]
    (folder / "sft.jsonl").write_text("\n".join(map(json.dumps, answers)))
    for objective in get_args(Objective):
        first = options(folder, objective, folder / f"{objective}-first")
        train(first)
        train(replace(first, output=str(folder / f"{objective}-second"), init_adapter=first.output))
    return folder


def options(home: Path, objective: Objective, output: Path, **given: Any) -> TrainConfig:
    data = (str(home / f"{objective}.jsonl"),)
    given = {"lr": 3e-3, "max_steps": 2, "samples": 0, "quiet": True} | given
    model = str(home / "model")
    return TrainConfig(model, data, objective=objective, output=str(output), **given)


def evaluation(home: Path, adapter: str, **options: Any) -> Any:
    data = (str(home / f"{adapter[:3]}.jsonl"),)
    return evaluate(EvalConfig(adapter=str(home / adapter), data=data, quiet=True, **options))


@pytest.mark.parametrize("objective", get_args(Objective))
def test_evaluation_and_end_of_a_run_compare_with_the_initial_adapter(
    home: Path, objective: Objective
) -> None:
    found = evaluation(home, f"{objective}-second", generate=True, max_new_tokens=2)
    alone = evaluation(home, f"{objective}-first")
    assert alone.start is None
    assert found.start is not None
    assert found.start.loss == pytest.approx(alone.adapted.loss)
    if objective == "dpo":
        assert found.preference.before == pytest.approx(alone.preference.after)
    run = read_evaluation(home / f"{objective}-second" / "checkpoints" / "evaluation.json")
    assert run is not None
    assert (found.verdict, found.rows, found.left_out) == (run.verdict, run.rows, 25 - run.rows)
    for name in ("base", "start", "adapted", "difference", "base_difference"):
        one, other = (asdict(getattr(each, name)) for each in (found, run))
        assert one == pytest.approx(other, rel=1e-4), name
    # Only --against adds another adapter's answers.
    assert all(sample.against is None for sample in found.generated.samples)


def replaced(first: Path) -> None:
    """Replace an adapter with another one, which has the opposite signs."""
    tensors = safetensors.numpy.load_file(first / "adapters.safetensors")
    with safetensors.safe_open(first / "adapters.safetensors", "numpy") as file:
        metadata = file.metadata()
    other = {name: -value for name, value in tensors.items()}
    safetensors.numpy.save_file(other, first / "adapters.safetensors", metadata)


@pytest.mark.parametrize("change", [replaced, shutil.rmtree])
@pytest.mark.parametrize("stop", [False, True])
@pytest.mark.parametrize("objective", get_args(Objective))
def test_initial_adapter_that_changed_is_not_compared(
    capsys: pytest.CaptureFixture[str],
    home: Path,
    tmp_path: Path,
    objective: Objective,
    stop: bool,
    change: Callable[[Path], None],
) -> None:
    first = shutil.copytree(home / f"{objective}-first", tmp_path / "first")
    config = options(home, objective, tmp_path / "out", init_adapter=str(first))
    if stop:
        with pytest.raises(TrainingInterrupted):
            train(config, stop_after=1)
        change(first)
        result = resume(tmp_path / "out")
    else:
        result = train(config, on_step=lambda step: change(first) if step.step == 2 else None)
    warning = f"started from, {first}, is missing or has changed, so it is compared with the base"
    assert warning in " ".join(capsys.readouterr().err.split())
    assert result.evaluation is not None
    assert result.evaluation.start is None
    found = json.loads((tmp_path / "out" / "checkpoints" / "evaluation.json").read_text())
    assert found["start"] is None
    assert result.evaluation.base.loss == pytest.approx(
        evaluation(home, f"{objective}-first").base.loss
    )


@pytest.mark.parametrize(("other", "is_used"), [("unchanged", True), ("missing", False)])
def test_all_workers_compare_with_the_same_adapter(home: Path, other: str, is_used: bool) -> None:
    class TwoWorkers(Workers):
        def all_gather_text(self, own: str) -> list[str]:
            return [own, other]

    first = home / "sft-first" / "adapters.safetensors"
    warnings: list[str] = []
    given = (str(first), file_hash(first), Path("trained"), warnings.append)
    found = unchanged_initial(*given, workers=TwoWorkers())
    assert (found is not None, not warnings) == (is_used, is_used)


def test_missing_first_adapter_is_named(cli: Cli, home: Path, tmp_path: Path) -> None:
    shutil.move(home / "dpo-first", tmp_path / "moved")
    try:
        given = ["--adapter", home / "dpo-second", "--data", home / "dpo.jsonl"]
        outcome = cli("eval", *given)
        named = f"started from, {home / 'dpo-first'}, is missing or has changed"
        assert named in " ".join(outcome.err.split())
        named = cli("eval", *given, "--against", tmp_path / "moved", "--json")
        assert json.loads(named.out)["against"] == str(tmp_path / "moved")
    finally:
        shutil.move(tmp_path / "moved", home / "dpo-first")
