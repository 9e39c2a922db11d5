"""The text of a benchmark."""

from __future__ import annotations

from mlxtune.benchmark import bench
from mlxtune.benchmark.result import agreement
from tests.core.run.benchmarks import benchmark, run, step

OURS = run(step(0.5), step(1.5))
THEIRS = run(step(3.0), step(5.0), peak_rss=8_000_000_000, loss_function="masked")


def test_table_has_both_contestants_and_their_ratios() -> None:
    rows = {row[0]: row[1:] for row in bench.table(benchmark([OURS], [THEIRS]))}
    assert rows[""] == ("mlxtune", "mlx-lm", "ratio")
    assert rows["real tokens/s"] == ("110", "28", "4.00")
    assert rows["a step"] == ("1 s (500 ms-1.5 s)", "4 s (3 s-5 s)", "")
    assert rows["padding"] == ("10.0%", "10.0%", "")
    assert rows["peak memory"] == ("3 GB", "3 GB", "1.00")
    assert rows["peak of the process"] == ("4 GB", "8 GB", "0.500")


def test_table_without_a_peer_has_one_column() -> None:
    assert {len(row) for row in bench.table(benchmark([OURS], None))} == {2}


def test_peer_without_a_run_is_failed_in_every_row() -> None:
    made = benchmark([OURS], [])
    assert made.theirs is not None
    made.theirs.failed = "killed (signal 9)"
    assert bench.table(made)[1] == ("real tokens/s", "110", "failed", "")
    assert bench.remarks(made) == ["mlx-lm failed: killed (signal 9)"]


def test_cost_of_the_limited_cache_is_noted_if_timed() -> None:
    timed = [run(step(2.0), large_cache_s=each) for each in (1.0, 1.4, 3.0)]
    (line,) = bench.remarks(benchmark(timed, None))
    assert line.startswith("with MLX's cache limited as in training: 0.70x the speed")
    assert benchmark(timed, None).as_dict()["cache_ratio"] == 0.7
    assert bench.remarks(benchmark([OURS], None)) == []


def test_differing_peer_loss_is_noted() -> None:
    lines = bench.remarks(benchmark([OURS], [THEIRS]))
    assert lines[0].startswith("losses agree (they differ by 0.0e+00 at the first step")
    assert lines[1].startswith("mlx-lm ran with a masked loss")


def test_differing_losses_void_the_ratios() -> None:
    line = bench.agreement_line(agreement([2.0, 2.0], [2.0, 2.5], "float32"))
    assert line.startswith(
        "losses do NOT agree: the ratios compare different work (they differ by 0.0"
    )
    assert "later by up to 2.0e-01; allowed: 0.0001 and 0.001" in line


def test_range_is_left_out_where_all_values_are_equal() -> None:
    rows = dict(row[:2] for row in bench.table(benchmark([run(step(0.002))], None)))
    assert rows["a step"] == "2 ms"
    rows = dict(row[:2] for row in bench.table(benchmark([run(step(0.5), step(1))], None)))
    assert rows["a step"] == "750 ms (500 ms-1 s)"
