"""Several workers stop and save after the same step, and one worker at once."""

from __future__ import annotations

from pathlib import Path

import pytest

from mlxtune.core.training.requests import RequestExchange, Requests
from mlxtune.errors import TrainingInterrupted
from tests.core.training.fake_pipeline import FakePipeline, rows, train

NONE, STOP, SAVE = Requests(), Requests(stop=True), Requests(save=True)


def exchanged(asked: list[list[Requests]]) -> list[list[Requests]]:
    """Return what each worker is to do after each step, given the requests of each worker."""
    workers = [RequestExchange(len(asked)) for _ in asked]
    found: list[list[Requests]] = [[] for _ in asked]
    running = NONE
    for own in zip(*asked, strict=True):
        # A step starts with all requests, and the previous step ends.
        ended, running = running, NONE
        for worker in workers:
            running = running.merged(worker.sent)
            worker.receive(ended)
        for worker, requests, answers in zip(workers, own, found, strict=True):
            answers.append(worker.exchange(requests))
    return found


def test_one_worker_acts_at_once() -> None:
    asked = [NONE, SAVE, NONE, STOP]
    assert exchanged([asked]) == [asked]


def test_any_worker_makes_all_act_two_steps_later() -> None:
    first, second = [NONE, STOP, NONE, NONE, NONE], [NONE] * 5
    expected = [NONE, NONE, NONE, STOP, NONE]
    assert exchanged([first, second]) == exchanged([second, first]) == [expected] * 2


def test_pending_save_is_made_once() -> None:
    due, idle = [SAVE, SAVE, SAVE, NONE, NONE, NONE], [NONE] * 6
    assert exchanged([due, idle]) == [[NONE, NONE, SAVE, NONE, NONE, NONE]] * 2


@pytest.mark.parametrize(("workers", "last"), [(1, 2), (2, 4)])
def test_run_stops_after_the_step_on_which_all_agree(
    tmp_path: Path, workers: int, last: int
) -> None:
    pipeline = FakePipeline(workers=workers)
    with pytest.raises(TrainingInterrupted) as caught:
        train(tmp_path, pipeline, validation=[], should_stop=lambda: len(pipeline.batches) >= 1)
    assert len(pipeline.batches) == caught.value.step == last


def test_only_one_worker_stops_within_a_validation(tmp_path: Path) -> None:
    """Several workers would wait for each other."""
    for workers in (1, 2):
        pipeline = FakePipeline(workers=workers)
        with pytest.raises(TrainingInterrupted):
            train(tmp_path, pipeline, validation=rows(20, 21), should_stop=lambda: True)
        assert bool(pipeline.batches) == (workers > 1)
