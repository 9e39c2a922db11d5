"""`mlxtune eval --reward`: compares the rewards of answers without and with an adapter."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune import EvalConfig, TrainConfig, TrainResult, evaluate, train
from mlxtune.errors import ConfigError, NonFiniteLossError
from mlxtune.views.run_text import evaluation_lines
from tests.command import Cli
from tests.models import sums, write_chat, write_model
from tests.slow import slow

# The number of an answer's ASCII characters, in ninths. The file leaves a mark when it is run.
LOW = """
open({mark!r}, "w").close()

def reward(prompt, completion, row):
    return sum(map(str.isascii, completion)) / 9
"""


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, TrainResult]:
    """A folder with a run that learned from a reward, and its result."""
    folder = tmp_path_factory.mktemp("run")
    write_model(folder / "model", "qwen3")
    write_chat(folder / "chat.jsonl", sums(30))
    (folder / "low.py").write_text(LOW.format(mark=str(folder / "mark")))
    return folder, train(training(folder, folder / "out", max_steps=8))


def training(folder: Path, output: Path, **changes: object) -> TrainConfig:
    given = {
        "objective": "grpo",
        "reward": (str(folder / "low.py"),),
        "targets": ("all",),
        "max_new_tokens": 9,
        "group_size": 5,
        "lr": 3e-2,
        "val_split": 0.4,
        "samples": 2,
        "quiet": True,
        **changes,
    }
    data = (str(folder / "chat.jsonl"),)
    return TrainConfig(str(folder / "model"), data, output=str(output), **given)


def options(folder: Path, **changes: object) -> EvalConfig:
    given = {
        "adapter": str(folder / "out"),
        "data": (str(folder / "chat.jsonl"),),
        "reward": (str(folder / "low.py"),),
        "max_new_tokens": 9,
        "quiet": True,
        **changes,
    }
    return EvalConfig(**given)


def test_rewards_and_verdict_are_the_run_s(run: tuple[Path, TrainResult]) -> None:
    folder, result = run
    trained = result.evaluation
    assert trained is not None and trained.generated is not None
    found = evaluate(options(folder))
    # The rows that were trained on are left out, so the run's validation rows remain.
    assert (found.rows, found.left_out) == (12, 18)
    assert found.rewards == trained.rewards
    assert found.verdict == trained.verdict == "helped"
    total, sampled, exact = found.rewards
    assert (total.name, sampled.sampled, exact.name) == ("", True, "exact")
    assert total.after > total.before and (exact.before, exact.after) == (0, 0)
    assert found.generated is not None and found.generated.rows == 12
    assert set(map(str, trained.generated.samples)) < set(map(str, found.generated.samples))


def test_answers_before_further_training_are_the_first_adapters(
    run: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    folder, first = run
    start = str(folder / "out")
    found = train(training(folder, tmp_path / "out", init_adapter=start, max_steps=1)).evaluation
    assert found is not None and found.generated is not None
    assert first.evaluation is not None and first.evaluation.generated is not None
    answers = [each.base for each in found.generated.samples]
    assert answers == [each.adapted for each in first.evaluation.generated.samples]
    assert answers != [each.base for each in first.evaluation.generated.samples]
    lines = [line[:12] for line in evaluation_lines(found)]
    assert lines.count("  before    ") == 2 and "  base      " not in lines


@pytest.mark.parametrize("system", ["", slow("You are a bot.")])
def test_prompts_that_training_used_are_left_out_under_any_answer(
    run: tuple[Path, TrainResult], tmp_path: Path, system: str
) -> None:
    folder, _ = run
    start = [{"role": "system", "content": system}] if system else []
    prompts = [[*start, {"role": "user", "content": row[0][1]}] for row in sums(30)]
    answer = {"role": "assistant", "content": "None"}
    without_answers = [{"prompt": each} for each in prompts]
    for rows in (without_answers, [{"messages": [*each, answer]} for each in prompts]):
        data = write_chat(tmp_path / "chat.jsonl", rows + rows[:1] + rows[-1:])
        found = evaluate(options(folder, data=(str(data),), reward=("length:4",)))
        assert (found.rows, found.left_out + found.copies) == (12, 20)


def test_adapter_against_itself_has_no_verdict(
    run: tuple[Path, TrainResult], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run
    rewards = (str(folder / "low.py"), "exact=2", "length=200")
    found = evaluate(options(folder, against=str(folder / "out"), reward=rewards))
    assert found.verdict == "cannot tell"
    names = ["", "low.reward", "exact", "length"]
    assert [(each.name, each.sampled) for each in found.rewards] == [
        (name, sampled) for name in names for sampled in (False, True)
    ]
    assert all(each.before == each.after for each in found.rewards)
    assert found.generated is not None and not found.generated.differing
    assert "warning: reward length=200 has the weight 200" in capsys.readouterr().err


def test_code_that_a_run_names_is_not_executed(run: tuple[Path, TrainResult], cli: Cli) -> None:
    folder, _ = run
    (folder / "mark").unlink(missing_ok=True)
    adapter, data = str(folder / "out"), str(folder / "chat.jsonl")
    outcome = cli("eval", "--adapter", adapter, "--data", data)
    assert f"trained with --reward {folder / 'low.py'}: give them" in outcome.err
    assert not (folder / "mark").exists()
    shown = cli(
        *("eval", "--adapter", adapter, "--data", data, "--reward", folder / "low.py"),
        *("--max-new-tokens", 9),
    )
    assert (folder / "mark").exists()
    assert "Verdict     the adapter helped: greedy answers to 12 rows (without 18 " in shown.out
    assert "exact greedy answers: 0%, 0% before (+0 points, 95% interval " in shown.out
    assert "Base  " not in shown.out


@pytest.mark.slow
def test_adapter_of_another_objective_is_judged_by_rewards(
    run: tuple[Path, TrainResult], tmp_path: Path
) -> None:
    folder, _ = run
    pair = {"prompt": "2 + 2?", "chosen": "4", "rejected": "5"}
    data = write_chat(tmp_path / "pairs.jsonl", [pair] * 4)
    model, output = str(folder / "model"), str(tmp_path / "out")
    options_of_run = {"objective": "orpo", "max_steps": 1, "val_split": 0.0, "quiet": True}
    train(TrainConfig(model, (str(data),), output=output, **options_of_run))
    found = evaluate(options(folder, adapter=output, reward=("length:4",)))
    assert (found.rows, found.left_out, found.preference) == (30, 0, None)
    assert [each.name for each in found.rewards] == ["", "", "exact"]


def test_options_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ConfigError) as raised:
        EvalConfig(model_path="m", data=("d",), reward=("json",), generate=True, objective="dpo")
    assert [each.partition(":")[0] for each in raised.value.problems] == [
        "--reward compares answers before and after training",
        "--reward compares no preferences",
        "--reward already counts exact answers",
    ]
    with pytest.raises(ConfigError, match="--objective grpo compares rewards: give --reward"):
        EvalConfig(model_path="m", data=("d",), objective="grpo")
    with pytest.raises(ConfigError, match="--temperature goes with --reward: leave it out"):
        EvalConfig(model_path="m", data=("d",), temperature=0.5)


def test_unknown_reward_is_an_error(run: tuple[Path, TrainResult]) -> None:
    with pytest.raises(ConfigError, match="reward 'wonder' is unknown"):
        evaluate(options(run[0], reward=("wonder",)))


def test_rows_without_a_reward_are_counted_with_the_first_reason(
    run: tuple[Path, TrainResult], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder, _ = run
    for name, condition in (
        ("some", "int(row['messages'][0]['content'].split()[2]) % 2"),
        ("never", "True"),
    ):
        (tmp_path / f"{name}.py").write_text(
            "def reward(prompt, completion, row):\n"
            f"    if {condition}: raise ValueError('bad')\n"
            "    return len(completion)\n"
        )
    found = evaluate(options(folder, reward=(str(tmp_path / "some.py"),), quiet=False))
    without = found.unrewarded
    assert without is not None and found.rows + without.rows == without.total == 12
    assert (without.before, without.after) == (without.rows, without.rows)
    assert "reward some.reward: raised ValueError: bad (line 2)" in without.reason
    assert found.as_dict()["unrewarded"]["rows"] == without.rows > 0
    sentence = f"{without.rows} of 12 rows have no reward; the first: {without.reason}"
    assert sentence in " ".join(capsys.readouterr().err.split())
    with pytest.raises(NonFiniteLossError, match=r"no row has a reward .*: bad .*: return 0 if"):
        evaluate(options(folder, reward=(str(tmp_path / "never.py"),)))
