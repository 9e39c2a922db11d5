"""Runs that learn from rewards: what they learn, record, refuse and resume."""

from __future__ import annotations

import dataclasses
import gzip
import json
import shlex
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from mlxtune import TrainConfig, TrainingInterrupted, resume, train
from mlxtune.commands.plan import plan
from mlxtune.commands.verify import verify
from mlxtune.config import DataConfig, PlanConfig
from mlxtune.core.data.sources import rows
from mlxtune.core.run.run_folder import REFERENCE_LORA, SAMPLE_RECORDS
from mlxtune.core.run.sampled_answers import read_groups
from mlxtune.errors import ConfigError, DataError, ModelError, NonFiniteLossError
from mlxtune.rewards import rollouts
from mlxtune.rewards.rollouts import Rollouts
from mlxtune.session.reader import Reader
from tests.configs import problems, train_to
from tests.models import write_model
from tests.slow import slow

# The number of an answer's ASCII characters, in ninths.
LOW = "def reward(prompt, completion, row):\n    return sum(map(str.isascii, completion)) / 9\n"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    write_model(folder / "model", "qwen3")
    prompts = [{"prompt": f"{a} plus {b}", "sum": a + b} for a in range(5) for b in range(5)]
    (folder / "prompts.jsonl").write_text("\n".join(map(json.dumps, prompts)))
    (folder / "low.py").write_text(LOW)
    return folder


def config(folder: Path, output: Path, **options: Any) -> TrainConfig:
    given = {
        "lr": 3e-2,
        "targets": ("all",),
        "rank": 4,
        "samples": 0,
        "quiet": True,
        "reward": (f"{folder / 'low.py'}",),
        "max_new_tokens": 9,
        "group_size": 4,
        "batch_size": 2,
        "max_steps": 4,
        "val_rows": 5,
        **options,
    }
    data = str(folder / "prompts.jsonl")
    return TrainConfig(
        str(folder / "model"), (data,), output=str(output), objective="grpo", **given
    )


def records(output: Path) -> list[dict[str, Any]]:
    lines = (output / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return list(map(json.loads, lines))


def result_of(output: Path) -> tuple[bytes, bytes, list[Any]]:
    """Return the bytes of the adapter and of the samples, and the losses and metrics."""
    kept = ("kind", "step", "loss", "val_loss", "grad_norm", "metrics")
    found = [{name: each.get(name) for name in kept} for each in records(output)]
    adapter = (output / "adapters.safetensors").read_bytes()
    return adapter, (output / "checkpoints" / SAMPLE_RECORDS).read_bytes(), found


def drawn_steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return a list that gets the first step of each rollout that is drawn from now on."""
    steps, draw = list[int](), Rollouts._draw

    def counted(self: Rollouts, rows: Any, step: int, *rest: Any) -> Any:
        steps.append(step)
        return draw(self, rows, step, *rest)

    monkeypatch.setattr(Rollouts, "_draw", counted)
    return steps


def test_rewards_rise_and_the_adapter_helps(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = {
        "max_steps": 16,
        "group_size": 6,
        "batch_size": 4,
        "epochs": 4,
        "val_split": 0.4,
        "val_rows": 10,
    }
    result = train(config(folder, tmp_path, quiet=False, samples=1, **options))
    found = records(tmp_path)
    first, last = (found[i]["metrics"]["rewards/low.reward/mean"] for i in (1, -2))
    assert last > first + 0.2
    validations = [each for each in found if each["kind"] == "validation"]
    assert all(each["val_loss"] == -each["metrics"]["reward"] for each in validations)
    evaluation = result.evaluation
    assert evaluation is not None and evaluation.verdict == "helped"
    greedy, sampled = evaluation.rewards
    assert (greedy.sampled, sampled.sampled) == (False, True)
    assert 0 < sampled.low <= sampled.after - sampled.before <= sampled.high
    assert evaluation.generated is not None and len(evaluation.generated.samples) == 1
    shown = capsys.readouterr().err
    assert "grpo (dapo)" in shown
    assert "the adapter helped: greedy answers to" in shown
    assert "reward of sampled answers: " in shown
    assert verify(tmp_path).ok
    page = (tmp_path / "checkpoints" / "report.html").read_text()
    assert "mean reward from " in page
    assert "rows with equal rewards" in page
    assert "beta times the log-ratio" not in page


def test_every_sample_is_on_record(folder: Path, tmp_path: Path) -> None:
    train(config(folder, tmp_path))
    groups = list(read_groups(tmp_path / "checkpoints" / SAMPLE_RECORDS))
    assert [each.step for each in groups] == [1, 1, 2, 2, 3, 3, 4, 4]
    steps = [each for each in records(tmp_path) if each["kind"] == "step"]
    for step in steps:
        of_step = [s for g in groups if g.step == step["step"] for s in g.samples]
        assert len(of_step) == 8
        mean = sum(s.reward or 0 for s in of_step) / 8
        assert step["metrics"]["reward"] == pytest.approx(mean)
        assert step["metrics"]["ratio/max"] == pytest.approx(1, abs=1e-3)
        assert step["rows"] == 2
    assert len({each.adapter for each in groups}) == 4
    assert all(
        each.row.startswith(str(folder / "prompts.jsonl")[-14:]) or each.row for each in groups
    )


@pytest.mark.parametrize(
    "options",
    [slow({"updates": 2, "kl": 0.1}), slow({"grpo_loss": "gspo", "correct": True, "dropout": 0.1})],
)
def test_resumed_run_ends_like_an_undisturbed_one(
    folder: Path, tmp_path: Path, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, again, stopped = (tmp_path / name for name in ("whole", "again", "stopped"))
    for output in (whole, again):
        train(config(folder, output, **options))
    assert result_of(whole) == result_of(again)
    # Stopped after its first step, within the first rollout if it has two updates.
    with pytest.raises(TrainingInterrupted):
        train_to(config(folder, stopped, **options), 1)
    drawn = drawn_steps(monkeypatch)
    resume(stopped, quiet=True)
    assert result_of(stopped) == result_of(whole)
    assert drawn == ([3] if options.get("updates") else [2, 3, 4])


@pytest.mark.parametrize("options", [slow({"init": "pissa"}), slow({"dora": True})])
def test_resumed_run_measures_the_divergence_from_its_first_model(
    folder: Path, tmp_path: Path, options: dict[str, Any]
) -> None:
    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    train(config(folder, whole, kl=0.3, save_steps=2, keep=9, **options))
    with pytest.raises(TrainingInterrupted):
        train_to(config(folder, stopped, kl=0.3, **options), 2)
    file = stopped / "checkpoints" / REFERENCE_LORA
    content = file.read_bytes()
    file.write_bytes(content + b"?")
    with pytest.raises(ModelError, match="from which --kl measures, has changed"):
        resume(stopped, quiet=True)
    file.write_bytes(content)
    resume(stopped, quiet=True)
    assert file.read_bytes() == (whole / "checkpoints" / REFERENCE_LORA).read_bytes() == content
    assert result_of(stopped) == result_of(whole)
    result = verify(whole, replay=True)
    assert result.ok, [each for each in result.checks if not each.ok]
    assert "trained again from step 2" in str(result.checks)


@pytest.mark.slow
def test_run_that_died_after_sampling_reads_the_samples(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, died = tmp_path / "whole", tmp_path / "died"
    train(config(folder, whole, save_steps=1))
    real = rollouts.step_metrics

    class Death(BaseException):
        pass

    def dying(groups: Any, config: Any) -> Any:
        if groups[0].step == 3:
            raise Death
        return real(groups, config)

    with monkeypatch.context() as patched:
        patched.setattr(rollouts, "step_metrics", dying)
        with pytest.raises(Death):
            train(config(folder, died, save_steps=1))
    samples = died / "checkpoints" / SAMPLE_RECORDS
    # The power went while the next rollout was written.
    samples.write_bytes(samples.read_bytes() + gzip.compress(b"{}")[:15])
    drawn = drawn_steps(monkeypatch)
    resume(died, quiet=True)
    assert drawn == [4]
    assert result_of(died) == result_of(whole)


@pytest.mark.parametrize("save_steps", [slow(None), slow(1)])
def test_replay_draws_the_samples_again(
    folder: Path, tmp_path: Path, save_steps: int | None
) -> None:
    train(config(folder, tmp_path, updates=2, save_steps=save_steps, keep=9))
    result = verify(tmp_path, replay=True)
    assert result.ok, [each for each in result.checks if not each.ok]
    checks = {each.name: each.detail for each in result.checks}
    assert checks[SAMPLE_RECORDS] == "16 samples of 4 prompts"
    drawn = 4 if save_steps is None else 2
    assert checks["samples"] == f"{drawn} prompts answered again"


@pytest.mark.slow
def test_new_run_replaces_the_samples_of_an_earlier_one(folder: Path, tmp_path: Path) -> None:
    train(config(folder, tmp_path))
    train(config(folder, tmp_path, seed=1, overwrite=True))
    seeds = {each.seed for each in read_groups(tmp_path / "checkpoints" / SAMPLE_RECORDS)}
    assert seeds == {1}


def test_changed_reward_is_refused_on_resume(folder: Path, tmp_path: Path) -> None:
    file = tmp_path / "own.py"
    file.write_text(LOW)
    made = config(folder, tmp_path / "out", reward=(str(file),))
    with pytest.raises(TrainingInterrupted):
        train_to(made, 1)
    # Before any of the new code runs.
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{LOW}")
    with pytest.raises(DataError, match="--reward: the rewards differ"):
        resume(tmp_path / "out", quiet=True)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("changed", [slow("", id="edited"), slow(None, id="deleted")])
def test_files_of_rewards_are_read_once_in_a_run(
    folder: Path, tmp_path: Path, changed: str | None
) -> None:
    """Training, the measure before it, validations and the verdict share what was read."""
    check, schema = tmp_path / "check.py", tmp_path / "schema.json"
    check.write_text(LOW)
    schema.write_text('{"type": "object"}')
    options = {"reward": (str(check), f"json:{schema}=0.5"), "max_steps": 2}

    def change(step: int, loss: float) -> None:
        for file in (check, schema):
            file.unlink(missing_ok=True) if changed is None else file.write_text(changed)

    start = train(config(folder, tmp_path / "start", **options)).adapter
    options["init_adapter"] = str(start)
    expected = train(config(folder, tmp_path / "whole", **options)).evaluation
    found = train(config(folder, tmp_path / "out", **options), on_validation=change).evaluation
    assert found == expected
    assert found is not None and [each.name for each in found.rewards[:3]] == [
        *("", "", "check.reward"),
    ]
    assert result_of(tmp_path / "out") == result_of(tmp_path / "whole")


@pytest.mark.slow
def test_strangers_rewards_run_only_if_given_again(folder: Path, tmp_path: Path) -> None:
    file, output, received = tmp_path / "own.py", tmp_path / "out", tmp_path / "received"
    file.write_text(LOW)
    rewards = (f"{file}:reward=2", "length:20=0.5")
    with pytest.raises(TrainingInterrupted):
        train_to(config(folder, output, reward=rewards, max_steps=2), 1)
    shutil.copytree(output, received)
    file.rename(tmp_path / "sent.py")
    file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n{LOW}")
    with pytest.raises(ConfigError, match="not made by you") as refused:
        resume(received, quiet=True)
    asked = "".join(f" --reward {shlex.quote(each)}" for each in rewards)
    assert str(refused.value).endswith(f"if you want them:{asked}")
    found = verify(received, replay=True)
    assert [each.name for each in found.checks if not each.ok] == ["replay"]
    assert "--reward" in found.checks[-1].detail
    assert "base model" in [each.name for each in found.checks]
    assert not (tmp_path / "ran").exists()
    # The same code may be elsewhere on this machine.
    file.unlink()
    file = tmp_path / "elsewhere" / "own.py"
    file.parent.mkdir()
    (tmp_path / "sent.py").rename(file)
    with pytest.raises(DataError, match="--reward: the rewards differ"):
        resume(received, quiet=True, reward=(f"{file}:reward=3", rewards[1]))
    given = (f"{file}:reward=2", rewards[1])
    assert resume(received, quiet=True, reward=given).adapter
    assert verify(received, replay=True, reward=given).ok


@pytest.mark.slow
def test_own_rewards_are_found_from_another_folder(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own.py").write_text(LOW)
    (tmp_path / "any.json").write_text("{}")
    monkeypatch.chdir(tmp_path)
    rewards = ("own.py=2", "json:any.json", r"regex=\.py")
    with pytest.raises(TrainingInterrupted):
        train_to(config(folder, tmp_path / "out", reward=rewards, max_steps=2), 1)
    monkeypatch.chdir(folder)
    assert resume(tmp_path / "out", quiet=True).adapter
    about = json.loads((tmp_path / "out" / "checkpoints" / "run.json").read_text())
    assert about["config"]["reward"] == [
        f"{tmp_path}/own.py=2",
        f"json:{tmp_path}/any.json",
        rewards[2],
    ]


@pytest.mark.slow
def test_run_resumed_in_other_folders_ends_like_an_undisturbed_one(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its functions read a file, and its data and outputs are named, from where it started."""
    start, bonus = tmp_path / "start", tmp_path / "start" / "bonus.txt"
    start.mkdir()
    bonus.write_text("1")
    shutil.copy(folder / "prompts.jsonl", start)
    code = LOW.replace("return", "return float(open('bonus.txt').read()) +")
    (start / "own.py").write_text(code)
    monkeypatch.chdir(start)

    def made(output: str) -> TrainConfig:
        own = config(folder, Path(output), reward=("own.py",), save_steps=1)
        return dataclasses.replace(own, data=("prompts.jsonl",))

    train(made("whole"))
    with pytest.raises(TrainingInterrupted):
        train_to(made("stopped"), 1)
    whole, stopped = start / "whole", start / "stopped"

    class Death(BaseException):
        pass

    def die(record: Any) -> None:
        raise Death

    for elsewhere in (tmp_path, folder):
        monkeypatch.chdir(elsewhere)
        bonus.rename(tmp_path / "moved.txt")
        with pytest.raises(NonFiniteLossError, match=r"no answer of step \d has a reward"):
            resume(stopped, quiet=True)
        (tmp_path / "moved.txt").rename(bonus)
        with pytest.raises(Death):
            resume(stopped, quiet=True, on_step=die)
    resume(stopped, quiet=True)
    assert result_of(stopped) == result_of(whole)
    for each in (start, tmp_path):
        monkeypatch.chdir(each)
        for run in (whole, stopped):
            found = verify(run, replay=True)
            assert found.ok, [check for check in found.checks if not check.ok]


def test_plan_counts_sampled_tokens_and_promises_no_time(folder: Path, tmp_path: Path) -> None:
    options = {
        "model_path": str(folder / "model"),
        "data": (str(folder / "prompts.jsonl"),),
        "objective": "grpo",
        "reward": ("length:20",),
        "group_size": 4,
        "max_new_tokens": 9,
        "updates": 2,
        "quiet": True,
    }
    found = plan(PlanConfig(**options))
    assert found.rows == 20
    assert found.supervised == 20 * 4 * 9 < found.tokens
    assert found.steps == 5 * 2
    assert found.speed is None
    longer = plan(PlanConfig(**{**options, "max_new_tokens": 90}))
    assert longer.memory.peak.total > found.memory.peak.total


def test_equal_rewards_teach_nothing(folder: Path, tmp_path: Path) -> None:
    made = config(folder, tmp_path, reward=("length:1000",), weight_decay=0.0)
    result = train(made)
    steps = [each for each in records(tmp_path) if each["kind"] == "step"]
    assert all(each["metrics"]["frac_reward_zero_std"] == 1 for each in steps)
    assert all((each["loss"], each["grad_norm"], each["run_tokens"]) == (0, 0, 0) for each in steps)
    assert result.evaluation is not None and result.evaluation.verdict == "cannot tell"


def test_run_of_masked_answers_warns_that_it_learned_nothing(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    train(config(folder, tmp_path, mask_truncated=True, max_new_tokens=2, quiet=False))
    steps = [each for each in records(tmp_path) if each["kind"] == "step"]
    assert all((each["grad_norm"], each["run_tokens"]) == (0, 0) for each in steps)
    assert all(each["metrics"]["frac_masked"] == 1 for each in steps)
    shown = " ".join(capsys.readouterr().err.split())
    assert "in the first 3 rollouts, nothing was learned, and for 100% of the rows" in shown
    assert shown.count("raise --max-new-tokens, or leave out --mask-truncated") >= 2


def test_runs_of_earlier_versions_without_the_masked_rows_pass(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = rollouts.step_metrics

    def earlier(groups: Any, config: Any) -> Any:
        metrics = real(groups, config)
        assert metrics.pop("frac_masked") == 1
        return metrics

    with monkeypatch.context() as patched:
        patched.setattr(rollouts, "step_metrics", earlier)
        with pytest.raises(TrainingInterrupted):
            options = {"mask_truncated": True, "max_new_tokens": 2, "updates": 2}
            train(config(folder, tmp_path, **options), stop_after=1)
    resume(tmp_path, quiet=True)
    found = [each["metrics"] for each in records(tmp_path) if each["kind"] == "step"]
    assert ["frac_masked" in each for each in found] == [False, True, True, True]
    assert verify(tmp_path).ok


def test_lines_are_parsed_once_to_encode_them_and_once_for_their_prompts(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With encoded rows in the cache, a run of grpo parses lines for their prompts alone."""
    parsed, parse = Counter[bytes](), rows.parse_row_json

    def counted(line: bytes, *rest: Any) -> Any:
        parsed[line] += 1
        return parse(line, *rest)

    def times(made: TrainConfig) -> set[int]:
        parsed.clear()
        train(made)
        assert len(parsed) == 25
        return set(parsed.values())

    monkeypatch.setattr(rows, "parse_row_json", counted)
    own: dict[str, Any] = {"cache_dir": str(tmp_path / "cache"), "max_steps": 1}
    made = config(folder, tmp_path / "grpo", **own)
    assert times(made) == {2}
    assert times(dataclasses.replace(made, output=str(tmp_path / "again"))) == {1}
    answered = tmp_path / "answered.jsonl"
    lines = [json.dumps({"prompt": str(i), "completion": "1"}) for i in range(25)]
    answered.write_text("\n".join(lines))
    own |= {"output": str(tmp_path / "sft"), "samples": 0, "quiet": True}
    assert times(TrainConfig(str(folder / "model"), (str(answered),), **own)) == {1}


def test_unanswered_rows_of_a_cached_file_are_counted_as_in_a_new_one(
    folder: Path, tmp_path: Path
) -> None:
    data = tmp_path / "half.jsonl"
    lines = [{"prompt": "1 plus 2"}, {"prompt": "2 plus 2", "completion": "4"}]
    data.write_text("\n".join(map(json.dumps, lines)))
    options = {"model_path": str(folder / "model"), "objective": "grpo", "reward": ("length:20",)}
    made = PlanConfig(**options, data=(str(data),), cache_dir=str(tmp_path), quiet=True)
    reads = [Reader(made.part(DataConfig), folder / "model").encode(data) for _ in range(2)]
    assert [each.skipped.unanswered for each in reads] == [{1}, {1}]
    assert reads[0].truncate(99).ledger() == reads[1].truncate(99).ledger()


@pytest.mark.slow
def test_other_commands_and_objectives_do_not_import_the_rewards() -> None:
    import subprocess

    code = (
        "import sys, mlxtune.commands.train, mlxtune.commands.evaluate, mlxtune.session.judge;"
        "sys.exit(any(name.startswith('mlxtune.rewards') for name in sys.modules))"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_options_that_do_not_fit_are_refused() -> None:
    assert problems(reward="json") == [
        "--reward goes with --objective grpo: leave it out",
    ]
    assert problems(objective="grpo") == [
        "--objective grpo needs a --reward, such as json or FILE.py"
    ]
    found = problems(objective="grpo", reward="json", beta=0.1, parallel="tensor", auto=True)
    assert [each.partition(":")[0] for each in found] == [
        "--beta goes with a preference objective",
        "--objective grpo does not work with --parallel tensor",
        "--auto does not choose the options of grpo",
    ]


def test_rewards_without_a_weight_are_an_error_before_training(
    folder: Path, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match="every reward has the weight 0"):
        train(config(folder, tmp_path, reward=("length=0",)))


def test_unknown_reward_is_an_error_before_training(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="reward 'wonder' is unknown"):
        train(config(folder, tmp_path, reward=("wonder",)))
    assert not (tmp_path / "checkpoints").exists() or not list((tmp_path / "checkpoints").iterdir())
    assert dataclasses.asdict(config(folder, tmp_path))["objective"] == "grpo"
