"""Ratios, spreads and agreement of a benchmark, on made-up numbers."""

from __future__ import annotations

import json
import math

import pytest

from mlxtune.benchmark.result import ContestantResult, Spread, agreement
from tests.core.run.benchmarks import benchmark, run, step


def test_tokens_a_second_are_all_tokens_over_the_time_of_all_steps() -> None:
    one = run(step(1.0, tokens=100, supervised_tokens=10), step(3.0, tokens=500))
    assert one.real_tokens_per_s == 150
    assert one.supervised_tokens_per_s == 15


def test_ratio_is_the_median_over_neighboring_runs_with_its_spread() -> None:
    ours = [run(step(1.0)), run(step(2.0)), run(step(1.0))]
    theirs = [run(step(4.0)), run(step(4.0)), run(step(3.0))]
    made = benchmark(ours, theirs)
    assert made.ratios()["real_tokens_per_s"] == Spread(3.0, 2.0, 4.0)
    assert made.as_dict()["ratio"]["real_tokens_per_s"] == 3.0
    assert made.as_dict()["ratio_spread"]["real_tokens_per_s"]["max"] == 4.0


def test_memory_ratio_uses_the_largest_steps() -> None:
    ours = run(step(peak_memory=10), step(peak_memory=30), peak_rss=100)
    theirs = run(step(peak_memory=60), step(peak_memory=20), peak_rss=400)
    ratio = benchmark([ours], [theirs]).as_dict()["ratio"]
    assert (ratio["peak_memory"], ratio["peak_rss"]) == (0.5, 0.25)


def test_padding_is_a_fraction_of_forward_tokens() -> None:
    made = run(step(tokens_run=70, padding=10), step(tokens_run=30, padding=15))
    assert made.padding_share == pytest.approx(0.25)


def test_seconds_of_a_step_are_spread_over_all_steps_of_all_runs() -> None:
    contestant = ContestantResult("x", [run(step(1.0), step(2.0)), run(step(9.0))])
    assert contestant.spread("seconds_per_step") == Spread(2.0, 1.0, 9.0)


@pytest.mark.parametrize(
    ("theirs", "agree"),
    [
        ([2.0, 2.0], True),
        ([2.0001, 2.0], True),  # a fraction of the loss
        ([2.0003, 2.0], False),
        ([2.0, 2.0019], True),
        ([2.0, 2.0021], False),
        ([2.0, math.nan], False),
        ([math.inf, 2.0], False),
    ],
)
def test_loss_tolerance_is_tighter_before_the_first_update(
    theirs: list[float], agree: bool
) -> None:
    assert agreement([2.0, 2.0], theirs, "float32").losses_agree is agree


def test_losses_below_one_are_compared_absolutely() -> None:
    assert agreement([0.1], [0.10009], "float32").losses_agree
    assert not agreement([0.1], [0.1002], "float32").losses_agree


def test_losses_in_16_bits_may_be_further_apart() -> None:
    assert agreement([2.0, 2.0], [2.03, 1.97], "bfloat16").losses_agree
    assert not agreement([2.0], [2.05], "bfloat16").losses_agree


def test_loss_that_is_not_finite_leaves_valid_json() -> None:
    made = benchmark(
        [run(step(loss=2.0))], [run(step(loss=math.nan), loss_with_pad_targets=math.nan)]
    ).as_dict()
    assert made["losses_agree"] is False
    assert json.loads(json.dumps(made, allow_nan=False)) == made
    assert made["theirs"]["runs"][0]["steps"][0]["loss"] is None


def test_without_a_peer_there_is_nothing_to_compare() -> None:
    made = benchmark([run(step())], None).as_dict()
    names = ("against", "ratio", "ratio_spread", "losses_agree", "loss_difference", "theirs")
    assert [made[name] for name in names] == [None] * 6


def test_peer_that_failed_at_once_leaves_no_ratio_but_its_reason() -> None:
    made = benchmark([run(step())], [])
    assert made.theirs is not None
    made.theirs.failed = "killed (signal 9)"
    found = made.as_dict()
    assert found["ratio"] is None
    assert found["losses_agree"] is None
    assert found["theirs"] == {"name": "mlx-lm", "failed": "killed (signal 9)", "runs": []}


def test_peer_that_failed_later_is_compared_by_the_runs_it_ended() -> None:
    made = benchmark([run(step(1.0)), run(step(1.0))], [run(step(5.0))])
    assert made.ratios()["real_tokens_per_s"] == Spread(5.0, 5.0, 5.0)
