"""Whether an adapter helped: the verdict, its rows and its JSON."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import numpy.typing as npt
import pytest

from mlxtune.config.objective_config import ObjectiveConfig
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.evaluation.interval import paired_difference
from mlxtune.core.evaluation.outcome import (
    Difference,
    Evaluation,
    ExactMatch,
    Generated,
    Loss,
    PreferenceDifference,
    Sample,
    parse_evaluation,
)
from mlxtune.core.evaluation.row_losses import AnswerLossSums, RowLossSums
from mlxtune.core.evaluation.verdict import (
    JudgedRows,
    evaluate_losses,
    evaluate_preferences,
    verdict_of,
)
from mlxtune.core.evaluation.verdict_text import file_verdict_lines, verdict_lines
from mlxtune.core.objectives.objective import Objective
from mlxtune.errors import NonFiniteLossError
from mlxtune.views.run_text import evaluation_lines
from tests.core.evaluation.evaluations import evaluated, example

Floats = npt.NDArray[np.float64]


def verdict_on(difference: Difference, rows: int, *, only_trained: bool = False) -> str:
    loss = Loss(1.0, 1.0)
    found = Evaluation(rows, 100, loss, loss, difference, only_trained=only_trained)
    # The verdict on preferences, whose differences have the other sign, follows the same rules.
    preference = PreferenceDifference(
        "DPO", True, 0.5, 0.5, -difference.high, -difference.low, 0.95, 0.0, 0.0, fewest=rows
    )
    assert verdict_of(found) == verdict_of(replace(found, preference=preference))
    return verdict_of(found)


@pytest.mark.parametrize(
    ("low", "high", "rows", "verdict"),
    [
        (-0.2, -0.1, 20, "helped"),
        (0.1, 0.2, 20, "hurt"),
        (-0.2, 0.1, 20, "cannot tell"),
        (-0.2, 0.0, 20, "cannot tell"),
        (0.0, 0.0, 20, "cannot tell"),
        (-0.2, -0.1, 5, "cannot tell"),
        (-0.2, -0.1, 6, "helped"),
    ],
)
def test_verdict_needs_an_interval_without_zero_and_some_rows(
    low: float, high: float, rows: int, verdict: str
) -> None:
    difference = Difference(0.0, 0.0, low, high, 0.95, 10_000, 0)
    assert verdict_on(difference, rows) == verdict
    assert verdict_on(difference, rows, only_trained=True) == "cannot tell"


@pytest.mark.parametrize("rows", [1, 2, 5])
def test_few_rows_give_no_verdict_even_if_equal(rows: int) -> None:
    tokens = np.full(rows, 10)
    found = paired_difference(np.full(rows, 30.0), np.full(rows, 10.0), tokens, 0)
    assert (found.loss, found.low, found.high) == (-2.0, -2.0, -2.0)
    assert verdict_on(found, rows) == "cannot tell"


def test_adapter_that_changes_nothing_cannot_tell() -> None:
    same = np.arange(1.0, 51.0)
    found = paired_difference(same, same, np.full(50, 3), 0)
    assert (found.low, found.high) == (0.0, 0.0)
    assert verdict_on(found, 50) == "cannot tell"


# Rows


def test_rows_that_gained_and_lost_most_are_named_by_what_they_brought() -> None:
    found = evaluated([-1.0, 3.0, 0.0, -4.0, 0.5, -0.1])
    assert [(each.path, each.row) for each in found.gained] == [
        ("a.jsonl", 13),
        ("a.jsonl", 10),
        ("a.jsonl", 15),
    ]
    assert [each.row for each in found.lost] == [11, 14]
    first = found.gained[0]
    assert (first.tokens, first.base_loss, first.adapted_loss) == (4, 2.0, 1.0)


def test_loss_that_is_not_finite_names_its_row() -> None:
    with pytest.raises(
        NonFiniteLossError, match=r"^a\.jsonl:11: the row's loss under the adapted model"
    ):
        evaluated([0.0, float("nan")])


# Messages


def test_output_has_the_verdict_size_and_rows() -> None:
    found = list(evaluation_lines(evaluated([-1.0, -1.2] * 20)))
    assert found[0] == "Base        2.0000 (perplexity 7.389)"
    assert found[2].startswith(
        "Verdict     the adapter helped: it takes 14% off the loss of the base model, 0.2750 "
        "nats per token (95% interval"
    )
    assert found[2].endswith(", on 40 rows, 160 supervised tokens")
    assert found[3] == "Gained most a.jsonl:11: 2.0000 to 1.7000 over 4 tokens"
    (hurt,) = verdict_lines(evaluated([1.0, 1.2] * 20))
    assert hurt.startswith("the adapter hurt: it adds 14% to the loss of the base model")
    (few,) = verdict_lines(evaluated([-1.0]))
    assert few.startswith("cannot tell whether the adapter helped: ")
    assert "0.2500 nats per token (no interval: all rows changed alike)" in few
    assert few.endswith("; at least 6 rows are needed")


def test_answers_are_shown_without_template_tokens() -> None:
    sample = Sample("a.jsonl", 1, "<|im_start|>2 + 2?", "4", "5<|im_end|>", "<bos>4<end_of_turn>")
    found = replace(evaluated([-1.0] * 40), generated=Generated(1, ExactMatch(0, 0), [sample]))
    lines = {" ".join(line.split()) for line in evaluation_lines(found)}
    assert {"expected 4", "base 5", "adapted 4"} <= lines


def test_interval_of_a_gain_is_shown_from_small_to_large() -> None:
    (line,) = verdict_lines(evaluated([-1.0, -3.0] * 20))
    low, high = line.partition("interval ")[2].partition(")")[0].split(" to ")
    assert 0 < float(low) < 0.5 < float(high)


@pytest.mark.parametrize(("change", "word"), [(-0.07, "hardly helped"), (-0.09, "helped")])
def test_gain_below_a_percent_of_the_loss_is_negligible(change: float, word: str) -> None:
    found = evaluated([change] * 40)
    assert (found.verdict, found.hardly) == ("helped", word != "helped")
    assert found.difference
    assert found.difference.share == pytest.approx(change / 8)
    assert verdict_lines(found)[0].startswith(f"the adapter {word}: it takes ")


def test_small_remaining_loss_is_not_rounded_to_zero() -> None:
    (line,) = verdict_lines(evaluated([-7.98, -7.99] * 20))
    assert "it takes more than 99% off the loss of the base model" in line


def test_verdict_says_the_fraction_of_answers() -> None:
    answers = Generated(12, ExactMatch(1, 9), [])
    (line,) = verdict_lines(replace(evaluated([-1.0] * 40), generated=answers))
    assert line.endswith("; 75% of 12 answers exact, 8% without it")
    few = replace(answers, rows=9)
    assert "exact" not in verdict_lines(replace(evaluated([-1.0] * 40), generated=few))[0]


def test_verdict_on_selection_rows_names_number_of_adapters() -> None:
    found = replace(evaluated([-4.0] * 40), candidates=5)
    assert "; as the best of 5 adapters on these rows, it may change" in verdict_lines(found)[0]
    assert parse_evaluation(json.loads(json.dumps(found.as_dict()))) == found
    assert "candidates" not in evaluated([-4.0] * 40).as_dict()


def test_rows_that_were_trained_on_are_left_out_of_the_verdict() -> None:
    changes = [-4.0] * 10 + [1.0] * 10
    found = evaluated(changes, trained=list(range(10)))
    assert (found.rows, found.left_out, found.verdict) == (10, 10, "hurt")
    assert verdict_lines(found)[0].endswith("; without 10 rows that training also used")

    found = evaluated(changes, trained=list(range(20)))
    assert (found.rows, found.only_trained, found.verdict) == (20, True, "cannot tell")
    assert verdict_lines(found)[0].endswith("; all of these rows are training rows too")


def test_verdict_compares_with_the_adapter_from_which_training_started() -> None:
    found = evaluated([-3.0] * 40, start=-4.0)
    assert (found.verdict, found.start) == ("hurt", Loss(1.0, pytest.approx(np.e)))
    first, second = verdict_lines(found)
    assert first.startswith("the adapter hurt: it adds 25% to the loss of the first adapter")
    assert second.startswith("compared with the base model, it takes 38% off the loss")


@pytest.mark.parametrize("pairs", [False, True])
@pytest.mark.parametrize("against", [None, "other"])
def test_files_and_rows_show_the_losses_that_the_verdict_compares(
    against: str | None, *, pairs: bool
) -> None:
    corpus = Corpus.of([replace(example(i, 9, 4), file=int(i > 8)) for i in range(1, 17)])
    corpus.paths = ["a.jsonl", "b.jsonl"]
    judged = replace(JudgedRows.of(corpus.select(), corpus.identities[[]]), against=against)
    base, start, adapted = (RowLossSums(np.full(16, x), np.full(16, 4)) for x in (8.0, 2.0, 4.0))
    if pairs:
        dpo = Objective(ObjectiveConfig(objective="dpo"))
        models = [AnswerLossSums(each, base, np.ones(16)) for each in (base, start, adapted)]
        found = evaluate_preferences(judged, dpo, models[0], models[2], 0, models[1])
    else:
        found = evaluate_losses(judged, base, adapted, 0, start)
    shown = [*found.files, *found.lost]
    assert [(each.base_loss, each.adapted_loss) for each in shown] == [(0.5, 1.0)] * 7
    assert (found.gained, found.baseline.loss) == ((), 0.5)
    assert found.baseline_name == (against or "the first adapter")
    assert found.difference is not None
    assert found.difference.loss == 0.5
    if pairs:
        before = "before" if against is None else "with other"
        lines = verdict_lines(found)
        assert f"100% of 16 pairs, 100% {before} (" in lines[0]
        assert lines[1].startswith(f"margin 1.500 nats per token {before}, 1.000 after; ")
    else:
        assert file_verdict_lines(found)[0] == "a.jsonl: hurt, 0.5000 to 1.0000 on 8 rows"


def test_each_file_of_several_has_its_verdict() -> None:
    corpus = Corpus.of([replace(example(i, 9, 4), file=int(i > 9)) for i in range(1, 14)])
    corpus.paths = ["a.jsonl", "b.jsonl"]
    tokens = np.full(13, 4)
    base = RowLossSums(np.full(13, 8.0), tokens)
    adapted = RowLossSums(base.losses + np.array([-0.07] * 9 + [2.0] * 4), tokens)

    found = evaluate_losses(JudgedRows.of(corpus.select(), corpus.identities[[]]), base, adapted, 0)

    assert parse_evaluation(json.loads(json.dumps(found.as_dict()))) == found
    assert file_verdict_lines(found) == [
        "a.jsonl: hardly helped, 2.0000 to 1.9825 on 9 rows",
        "b.jsonl: cannot tell, 2.0000 to 2.5000 on 4 rows",
    ]
    assert evaluation_lines(found)[3].split() == [
        "By",
        "file",
        *file_verdict_lines(found)[0].split(),
    ]
    assert evaluated([-1.0] * 8).files == ()


def test_copies_of_a_row_count_as_one() -> None:
    tokens = np.full(20, 4)
    base, adapted = (RowLossSums(np.full(20, loss), tokens) for loss in (8.0, 4.0))
    corpus = Corpus.of([replace(example(5, 9, 4), row=row) for row in range(20)])
    judged = JudgedRows.of(corpus.select(), corpus.identities[:0])
    assert (len(judged.rows), judged.copies) == (1, 19)
    index = np.asarray(judged.rows.indices)
    found = evaluate_losses(judged, base.only(index), adapted.only(index), 0)
    assert (found.rows, found.copies, found.verdict) == (1, 19, "cannot tell")
    (line,) = verdict_lines(found)
    assert line.endswith("; without 19 repeated rows; at least 6 rows are needed")
    both = replace(found, left_out=2)
    assert "without 2 rows that training also used and 19 repeated rows;" in verdict_lines(both)[0]
    assert parse_evaluation(json.loads(json.dumps(found.as_dict()))) == found
    assert "copies" not in evaluated([1.0] * 9).as_dict()
