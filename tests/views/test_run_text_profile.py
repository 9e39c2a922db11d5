"""The text of a profile."""

from __future__ import annotations

from mlxtune.core.run.profile import Phase, StepProfile
from mlxtune.views.run_text import ProfileSummary, profile_line, profile_table

STEP = StepProfile(
    10,
    2.0,
    {
        "data": Phase(0.1, 2_000, 1_000_000),
        "forward": Phase(0.5, 3_000_000, 4_000_000),
        "backward": Phase(1.3, 5_000_000, 9_000_000),
        "other": Phase(0.1, 0, 1_000_000),
    },
)


def summary(*records: StepProfile) -> ProfileSummary:
    made = ProfileSummary()
    for record in records:
        made.add(record)
    return made


def test_step_is_one_line_of_shares_and_its_peak() -> None:
    assert profile_line(STEP) == (
        "step 10: 2 s: data 5%, forward 25%, backward 65%, other 5%; peak 9 MB in backward"
    )


def test_table_has_a_mean_for_each_phase() -> None:
    slower = StepProfile(20, 4.0, {"forward": Phase(3.5, 1, 6_000_000), "other": Phase(0.5, 0, 0)})
    rows = [line.split() for line in profile_table(summary(STEP, slower))]
    assert rows == [
        ["2", "steps", "profiled,", "3", "s", "a", "step"],
        ["phase", "time", "share", "takes", "peak"],
        ["data", "50", "ms", "1.7%", "2", "kB", "1", "MB"],
        ["forward", "2", "s", "66.7%", "3", "MB", "6", "MB"],
        ["backward", "650", "ms", "21.7%", "5", "MB", "9", "MB"],
        ["other", "300", "ms", "10.0%", "0", "B", "1", "MB"],
    ]


def test_run_without_a_profile_has_no_table() -> None:
    assert list(profile_table(summary())) == []
