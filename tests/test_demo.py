"""The README's demo: its files, and a training run that learns from them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

# isort: off
import mlxtune.backend  # noqa: F401  loads a fast BLAS before mlx

# isort: on
import pytest
from mlx_lm.utils import load_tokenizer as load_with_mlx_lm

from mlxtune import TrainConfig, train
from mlxtune.backend.text.tokenizer import load_tokenizer
from tests.paths import DATA
from tests.slow import long, slow

MODELS = ("demo-qwen3", "demo-gemma3")
ROWS = (DATA / "bookings.jsonl").read_text(encoding="utf-8").splitlines()
TEST_ROWS = (DATA / "bookings_test.jsonl").read_text(encoding="utf-8").splitlines()


@pytest.mark.parametrize(("name", "steps"), [slow("demo-qwen3", 12), long("demo-gemma3", 40)])
def test_demo_model_learns_in_a_few_steps(name: str, steps: int, tmp_path: Path) -> None:
    result = train(
        TrainConfig(
            model_path=str(DATA / name),
            data=str(DATA / "bookings.jsonl"),
            output=str(tmp_path / "adapters.safetensors"),
            targets=("all",),
            lr=5e-3,
            max_steps=steps,
            val_split=0.05,
            val_rows=steps,
            samples=0 if steps < 40 else 3,
            quiet=True,
        )
    )
    assert result.training is not None
    initial, best = result.training.initial_val_loss, result.training.best_val_loss
    assert initial is not None
    assert best is not None
    assert best < initial / 2
    assert result.evaluation is not None
    assert result.evaluation.verdict == "helped"
    (ledger,) = result.ledgers
    assert ledger.rows_read == len(ROWS)
    assert not ledger.rows_skipped
    assert not ledger.notes


@pytest.mark.parametrize("name", MODELS)
def test_prompts_are_the_tokens_that_mlx_lm_gives_the_model(name: str) -> None:
    theirs = load_with_mlx_lm(DATA / name)
    ours = load_tokenizer(DATA / name)
    for line in TEST_ROWS:
        prompt = json.loads(line)["messages"][:-1]
        text = theirs.apply_chat_template(prompt, tokenize=False, add_generation_prompt=True)
        ids = theirs.apply_chat_template(prompt, add_generation_prompt=True)
        assert ours.encode_batch([text])[0].ids == ids


def test_prompts_of_the_test_rows_are_in_no_training_row() -> None:
    def prompt(line: str) -> str:
        return json.dumps(json.loads(line)["messages"][:-1])

    assert not {prompt(line) for line in ROWS} & {prompt(line) for line in TEST_ROWS}


def test_script_writes_the_chat_data_again_byte_for_byte(tmp_path: Path) -> None:
    command = [sys.executable, str(DATA / "make_chat.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    for name in ("bookings.jsonl", "bookings_test.jsonl"):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_script_writes_the_pairs_again_byte_for_byte(tmp_path: Path) -> None:
    command = [sys.executable, str(DATA / "make_pairs.py"), "--out", str(tmp_path)]
    subprocess.run(command, check=True)
    name = "bookings_pairs.jsonl"
    assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_rejected_bookings_have_one_error_and_their_prompts_are_new() -> None:
    text = (DATA / "bookings_pairs.jsonl").read_text(encoding="utf-8")
    pairs = [json.loads(line) for line in text.splitlines()]
    seen = {json.loads(line)["messages"][0]["content"] for line in TEST_ROWS}
    wrong = set()
    for pair in pairs:
        chosen, rejected = (json.loads(pair[side]) for side in ("chosen", "rejected"))
        (field,) = (name for name in chosen if chosen[name] != rejected[name])
        wrong.add(field)
        assert list(chosen) == list(rejected) and pair["prompt"] not in seen
    assert wrong == {"name", "day", "time", "people", "note"}
    assert len({pair["prompt"] for pair in pairs}) == len(pairs) == 300
