"""PEFT's trainer of tests/long/gpu.py computes mlxtune's loss, on the same rows and weights."""

from __future__ import annotations

from pathlib import Path

import pytest

pytest.importorskip("torch", reason="needs torch, which runs transformers' models")
pytest.importorskip("peft", reason="needs peft, the peer")

from mlxtune.benchmark.bench_helper import open_trainer
from tests.long.gpu_material import TINY, Machine
from tests.long.gpu_peft import measure, padded
from tests.long.gpu_timing import peft_case


def test_rows_are_padded_and_only_supervised_tokens_are_labels() -> None:
    batch = padded([{"tokens": [5, 6, 7], "mask": [0, 0, 1]}, {"tokens": [5, 9], "mask": [0, 1]}])
    assert batch["input_ids"].tolist() == [[5, 6, 7], [5, 9, 0]]
    assert batch["attention_mask"].tolist() == [[1, 1, 1], [1, 1, 0]]
    assert batch["labels"].tolist() == [[-100, -100, 7], [-100, 9, -100]]


# peft reads an attribute that transformers deprecates.
@pytest.mark.filterwarnings("ignore::FutureWarning")
def test_both_trainers_start_with_the_same_loss(tmp_path: Path) -> None:
    with Machine(tmp_path, tmp_path, tiny=True) as machine:
        job = machine.job(TINY)
        phases: list[str] = []
        theirs = measure(peft_case("tiny", job), phases.append)
        trainer = open_trainer(job)
        trainer.start(job.adapter, job.steps)
        ours = trainer.step(1, job.steps[0])
    assert theirs["losses"][0] == pytest.approx(ours, rel=1e-5)
    assert len(theirs["losses"]) == len(job.steps)
    assert phases == ["reading the weights", "the warm-up", "the timed steps"]
