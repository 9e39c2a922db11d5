"""`mlxtune train --objective grpo`: validations by reward, and what the output advises."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune import TrainConfig, TrainResult, train
from mlxtune.commands.verify import verify
from tests.models import sums, write_chat, write_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rewards")
    write_model(folder / "model", "qwen3")
    write_chat(folder / "chat.jsonl", sums(20))
    return folder


def trained(folder: Path, output: Path, reward: str, **options: object) -> TrainResult:
    given = {
        "reward": (reward,),
        "max_new_tokens": 5,
        "group_size": 2,
        "batch_size": 2,
        "max_steps": 6,
        "epochs": 2,
        "val_rows": 3,
        "samples": 0,
        **options,
    }
    model, data = str(folder / "model"), (str(folder / "chat.jsonl"),)
    return train(TrainConfig(model, data, output=str(output), objective="grpo", **given))


def test_run_whose_reward_does_not_rise_stops_early_and_says_why(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    training = trained(folder, tmp_path, "length:1000", val_steps=1, patience=2).training
    assert training is not None
    assert (len(training.steps), training.stopped_early) == (3, True)
    assert {each.val_loss for each in training.validations} == {-1}
    shown = capsys.readouterr().err
    assert "3 for validation every 1 step" in shown
    assert "before training: reward 1.0000\n" in shown
    assert "validation reward 1.0000 before, reward 1.0000 at the end" in shown
    assert "stopped early after step 3: see --patience 2" in shown
    assert "lower --lr, raise --group-size, or change --reward" in shown
    assert "for 100% of the rows, all answers got the same reward" in shown
    # No token was trained on, so there is no speed in tokens.
    assert ", ," not in shown and "tokens/s" not in shown.partition("Done  ")[2]
    assert "add data" not in shown and "training loss" not in shown


def test_verdict_of_a_run_counts_the_rows_without_a_reward(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "some.py"
    file.write_text(
        "def reward(prompt, completion, row):\n"
        "    if int(row['messages'][0]['content'].split()[2]) % 2: raise ValueError('bad')\n"
        "    return len(completion)\n"
    )
    output = tmp_path / "out"
    evaluation = trained(
        folder, output, str(file), max_steps=1, val_split=0.4, val_rows=8
    ).evaluation
    assert evaluation is not None and evaluation.unrewarded is not None
    without = evaluation.unrewarded
    assert 0 < without.rows < without.total == evaluation.rows + without.rows == 8
    shown = " ".join(capsys.readouterr().err.split())
    assert (
        f"{without.rows} of 8 rows have no reward; the first: {without.reason}: return 0" in shown
    )
    assert f"; {without.rows} of 8 rows without a reward ({without.before} before, " in shown
    assert shown.count("return 0 if such an answer is wrong") == 2
    assert "of the sampled answers had no reward" in shown
    assert verify(output).ok
