"""What a person reads of a benchmark."""

from __future__ import annotations

from mlxtune.core.reports import benchmark_text
from mlxtune.core.runs.benchmark import Spread, agreement
from tests.core.runs.benchmarks import benchmark, run, step

OURS = run(step(0.5), step(1.5), products=({"head": 0.4}, {"head": 1.0}))
THEIRS = run(step(3.0), step(5.0), peak_rss=8_000_000_000, loss_function="masked")


def test_table_has_both_sides_and_their_ratios() -> None:
    rows = {row[0]: row[1:] for row in benchmark_text.table(benchmark([OURS], [THEIRS]))}
    assert rows[""] == ("mlxtune", "mlx-lm", "ratio")
    assert rows["real tokens/s"] == ("110", "28", "4.00")
    assert rows["a step"] == ("1 s (0.5-1.5)", "4 s (3-5)", "")
    assert rows["padding"] == ("10.0%", "10.0%", "")
    assert rows["peak memory"] == ("3 GB", "3 GB", "1.00")
    assert rows["peak of the process"] == ("4 GB", "8 GB", "0.500")
    assert rows["step efficiency"] == ("70.0%", "", "")


def test_table_without_a_peer_has_one_column() -> None:
    assert {len(row) for row in benchmark_text.table(benchmark([OURS], None))} == {2}


def test_peer_without_a_run_is_failed_in_every_row() -> None:
    made = benchmark([OURS], [])
    assert made.theirs is not None
    made.theirs.failed = "killed (signal 9)"
    assert benchmark_text.table(made)[1] == ("real tokens/s", "110", "failed", "")
    assert benchmark_text.remarks(made) == ["mlx-lm failed: killed (signal 9)"]


def test_another_loss_of_the_peer_is_remarked() -> None:
    lines = benchmark_text.remarks(benchmark([OURS], [THEIRS]))
    assert lines[0].startswith("losses agree (they differ by 0.0e+00 at the first step")
    assert lines[1].startswith("mlx-lm ran with a masked loss")


def test_losses_that_do_not_agree_are_said_to_make_the_ratios_void() -> None:
    line = benchmark_text.agreement_line(agreement([2.0, 2.0], [2.0, 2.5], "float32"))
    assert line.startswith(
        "losses do NOT agree: the ratios compare different work (they differ by 0.0"
    )
    assert "up to 2.0e-01 after; allowed: 0.0001 and 0.001" in line


def test_spread_is_in_the_unit_of_its_median() -> None:
    assert benchmark_text.spread(Spread(0.2, 0.1, 1.0), "ms", ".3g", 0.001) == "200 ms (100-1e+03)"
    assert benchmark_text.spread(Spread(0.5, 0.25, 0.75), "%", ".0f", 0.01) == "50% (25-75)"
    assert benchmark_text.spread(Spread(2.0, 2.0, 2.0), "s", ".3g") == "2 s"
