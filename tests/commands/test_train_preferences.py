"""Runs that train preferences: their start, files, resumption and messages."""

from __future__ import annotations

import dataclasses
import json
import math
import shutil
from pathlib import Path
from typing import Any

import pytest

from mlxtune import EvalConfig, TrainConfig, TrainingInterrupted, evaluate, resume, train
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.commands.verify import verify
from mlxtune.core.objectives.preference_rows import write_references
from mlxtune.errors import ConfigError, OutputError
from mlxtune.views.run_text import evaluation_lines
from tests.configs import train_to
from tests.models import CHATML, write_model
from tests.slow import slow


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("preferences")
    write_model(folder / "model", "qwen3")
    pairs, labeled = [], []
    for a in range(6):
        for b in range(6):
            prompt = f"{a} plus {b}"
            right, wrong = f"It is {a + b}.", f"It is {a + b + 1}, I guess."
            pairs.append({"prompt": prompt, "chosen": right, "rejected": wrong})
            good = (a + b) % 2 == 0
            labeled.append(
                {"prompt": prompt, "completion": right if good else wrong, "label": good}
            )
    for name, rows in (("pairs", pairs), ("labelled", labeled)):
        (folder / f"{name}.jsonl").write_text("\n".join(map(json.dumps, rows)))
    return folder


def config(folder: Path, output: Path, objective: str, **options: Any) -> TrainConfig:
    data = folder / ("labelled.jsonl" if objective == "kto" else "pairs.jsonl")
    given = {"lr": 3e-3, "targets": ("all",), "rank": 4, "samples": 0, "quiet": True, **options}
    return TrainConfig(
        str(folder / "model"), (str(data),), output=str(output), objective=objective, **given
    )


def records(output: Path) -> list[dict[str, Any]]:
    lines = (output / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))


def evaluated(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list to which each evaluation adds its number of answers."""
    counts: list[int] = []
    real = InstructPipeline.logps

    def counted(self: InstructPipeline, examples: Any, *rest: Any) -> Any:
        counts.append(len(examples))
        return real(self, examples, *rest)

    monkeypatch.setattr(InstructPipeline, "logps", counted)
    return counts


def test_dpo_starts_at_the_logarithm_of_two_and_learns(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = train(config(folder, tmp_path / "out", "dpo", epochs=3))
    found = records(tmp_path / "out")
    assert found[0]["kind"] == "validation"
    assert found[0]["val_loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[1]["loss"] == pytest.approx(math.log(2), abs=1e-6)
    assert found[-2]["metrics"]["rewards/accuracies"] > 0.9
    verdict = result.evaluation
    assert verdict is not None and verdict.preference is not None
    assert verdict.verdict == "helped"
    assert verdict.preference.after > verdict.preference.before
    assert verdict.preference.margin_after > verdict.preference.margin_before
    again = evaluate(
        EvalConfig(
            str(folder / "model"),
            data=(str(folder / "pairs.jsonl"),),
            adapter=str(tmp_path / "out"),
        )
    )
    assert "Objective   dpo, beta 0.1, as in training" in capsys.readouterr().err
    assert again.preference is not None
    assert again.preference.after == verdict.preference.after
    data = (str(folder / "pairs.jsonl"),)
    base = evaluate(EvalConfig(str(folder / "model"), data=data, objective="dpo", quiet=True))
    assert base.preferred is not None
    # All rows count, including rows that the adapter's run trained on.
    assert 0 < base.preferred < 1
    assert any(f"{base.preferred:.1%} of 36 pairs" in line for line in evaluation_lines(base))


def test_pairs_of_several_files_have_losses_and_verdicts_by_file(
    folder: Path, tmp_path: Path
) -> None:
    lines = (folder / "pairs.jsonl").read_text().splitlines()
    files = [tmp_path / "a.jsonl", tmp_path / "b.jsonl"]
    for file, part in zip(files, (lines[::2], lines[1::2]), strict=True):
        file.write_text("\n".join(part))
    one = config(folder, tmp_path / "out", "dpo", max_steps=2)

    result = train(dataclasses.replace(one, data=tuple(map(str, files))))

    first, *_ = records(tmp_path / "out")
    assert [Path(each["path"]).name for each in first["files"]] == ["a.jsonl", "b.jsonl"]
    for each in first["files"]:
        assert each["val_loss"] == pytest.approx(math.log(2), abs=1e-6)
        assert "rewards/accuracies" in each["metrics"]
    assert result.evaluation is not None
    preference = result.evaluation.preference
    assert preference is not None
    # The two files have equally many validation rows.
    fractions = [each.preferred_after for each in result.evaluation.files]
    assert len(fractions) == 2
    assert sum(each or 0 for each in fractions) / 2 == pytest.approx(preference.after)
    assert "preferred before" in (tmp_path / "out" / "checkpoints" / "report.html").read_text()


@pytest.mark.slow
def test_kto_learns_from_labels(folder: Path, tmp_path: Path) -> None:
    result = train(config(folder, tmp_path / "out", "kto", epochs=3))
    found = records(tmp_path / "out")
    assert found[1]["loss"] == pytest.approx(0.5, abs=1e-6)
    assert found[1]["metrics"]["kl"] == pytest.approx(0, abs=1e-4)
    verdict = result.evaluation
    assert verdict is not None and verdict.preference is not None
    assert verdict.preference.after > 0.5


@pytest.mark.parametrize("objective", ["dpo", slow("kto")])
def test_stopped_run_resumes_to_the_same_bytes(
    folder: Path, tmp_path: Path, objective: str
) -> None:
    whole = config(folder, tmp_path / "whole", objective, epochs=2, dropout=0.1)
    train(whole)
    part = config(folder, tmp_path / "part", objective, epochs=2, dropout=0.1)
    with pytest.raises(TrainingInterrupted):
        train_to(part, 5)
    resume(tmp_path / "part", quiet=True)
    names = ("adapters.safetensors", "checkpoints/reference.json")
    for name in names:
        assert (tmp_path / "part" / name).read_bytes() == (tmp_path / "whole" / name).read_bytes()


def test_reference_is_computed_once(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts = evaluated(monkeypatch)
    options = {"max_steps": 1, "cache_dir": str(tmp_path / "cache")}
    train(config(folder, tmp_path / "first", "dpo", **options))
    # The run evaluates all answers, then the validation answers before and after the step.
    assert counts[0] == 72
    assert all(count == counts[1] < 72 for count in counts[1:])
    counts.clear()
    train(config(folder, tmp_path / "second", "dpo", beta=0.3, targets=("q_proj",), **options))
    assert 72 not in counts
    other = {"init_adapter": str(tmp_path / "first"), "targets": ("all",)}
    train(config(folder, tmp_path / "third", "dpo", **{**options, **other}))
    assert 72 in counts


def test_resume_needs_the_reference_and_the_same_objective(folder: Path, tmp_path: Path) -> None:
    stopped = config(folder, tmp_path / "out", "dpo", epochs=2, no_cache=True)
    with pytest.raises(TrainingInterrupted):
        train_to(stopped, 3)
    with pytest.raises(ConfigError, match="--beta"):
        resume(tmp_path / "out", beta=0.3)
    (tmp_path / "out" / "checkpoints" / "reference.json").unlink()
    with pytest.raises(OutputError, match="start over with --overwrite"):
        resume(tmp_path / "out", quiet=True)


@pytest.mark.slow
def test_resume_keeps_the_reference_after_a_comment_in_the_template(
    folder: Path, tmp_path: Path
) -> None:
    home = Path(shutil.copytree(folder, tmp_path / "home"))
    (home / "model" / "chat_template.jinja").write_text(CHATML)
    with pytest.raises(TrainingInterrupted):
        train(config(home, tmp_path / "out", "dpo", epochs=2, no_cache=True), stop_after=3)
    (home / "model" / "chat_template.jinja").write_text("{# A comment. #}" + CHATML)
    assert resume(tmp_path / "out", quiet=True).adapter is not None


@pytest.mark.slow
def test_replay_from_a_checkpoint_needs_no_cache(folder: Path, tmp_path: Path) -> None:
    train(config(folder, tmp_path / "out", "dpo", epochs=2, no_cache=True))
    verification = verify(tmp_path / "out", replay=True)
    assert verification.ok, verification.checks


@pytest.mark.slow
def test_resume_with_more_epochs_keeps_the_reference_of_a_pissa_start(
    folder: Path, tmp_path: Path
) -> None:
    stopped = config(folder, tmp_path / "out", "dpo", epochs=1, init="pissa", no_cache=True)
    with pytest.raises(TrainingInterrupted):
        train_to(stopped, 3)
    resume(tmp_path / "out", epochs=2, quiet=True)
    assert (tmp_path / "out" / "adapters.safetensors").is_file()


@pytest.mark.slow
def test_chosen_answers_that_become_less_likely_are_warned_of(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A model that moves away from the rejected answers may also move away from the chosen ones."""
    options = {"epochs": 4, "dpo_loss": "apo_down", "lr": 1e-2}
    train(config(folder, tmp_path / "out", "dpo", **options))
    said = capsys.readouterr().err
    assert "warning: the chosen answers became less likely, by" in said
    assert "try --sft-weight" in said
    page = (tmp_path / "out" / "checkpoints" / "report.html").read_text()
    assert "chosen answers preferred before" in page
    assert "Rewards" in page


@pytest.mark.slow
def test_reference_in_a_run_folder_never_reaches_the_cache(folder: Path, tmp_path: Path) -> None:
    """A stranger may have written the folder, and the cache serves all runs."""
    cache = tmp_path / "cache"
    stopped = config(folder, tmp_path / "out", "dpo", epochs=2, cache_dir=str(cache))
    with pytest.raises(TrainingInterrupted):
        train_to(stopped, 3)
    own = tmp_path / "out" / "checkpoints" / "reference.json"
    (cached,) = cache.glob("references/*.json")
    forged = json.loads(own.read_text())
    write_references(own, forged["key"], [-5.0 for _ in forged["logps"]])
    cached.unlink()
    resume(tmp_path / "out", quiet=True, cache_dir=str(cache))
    assert not list(cache.glob("references/*.json"))
