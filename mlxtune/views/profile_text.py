"""A profile as lines of text. Nothing here prints."""

from collections.abc import Iterator

from mlxtune.core.run.profile import OTHER, PHASES, Phase, StepProfile
from mlxtune.core.text import byte_size, count, short_duration

_WIDTH = 16


class ProfileSummary:
    """The profile of a run, summed up as its records arrive."""

    def __init__(self) -> None:
        self.steps = 0
        self.seconds = 0.0
        self.phases: dict[str, Phase] = {}

    def add(self, profile: StepProfile) -> None:
        """Add a step."""
        self.steps += 1
        self.seconds += profile.seconds
        for name, phase in profile.phases.items():
            known_phase = self.phases.get(name)
            self.phases[name] = known_phase.plus(phase) if known_phase else phase


def step_line(profile: StepProfile) -> str:
    """Return a profiled step in one line."""
    shares = ", ".join(
        f"{name} {phase.seconds / max(profile.seconds, 1e-12):.0%}"
        for name, phase in profile.phases.items()
    )
    highest = max(profile.phases, key=lambda name: profile.phases[name].peak_bytes)
    peak = byte_size(profile.phases[highest].peak_bytes)
    took = short_duration(profile.seconds)
    return f"step {profile.step}: {took}: {shares}; peak {peak} in {highest}"


def table(summary: ProfileSummary) -> Iterator[str]:
    """Yield the lines of a table with each phase of a step."""
    if summary.steps:
        steps = count(summary.steps, "step")
        yield f"{steps} profiled, {short_duration(summary.seconds / summary.steps)} a step"
        yield f"{'phase':<{_WIDTH}}{'time':>10}{'share':>8}{'takes':>10}{'peak':>10}"
        for name in (*PHASES, OTHER):
            if phase := summary.phases.get(name):
                time = f"{short_duration(phase.seconds / summary.steps):>10}"
                share = f"{phase.seconds / max(summary.seconds, 1e-12):>8.1%}"
                memory = f"{byte_size(phase.bytes):>10}{byte_size(phase.peak_bytes):>10}"
                yield f"{name:<{_WIDTH}}{time}{share}{memory}"
