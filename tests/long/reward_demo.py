"""Train the demo on rewards over three seeds, and on wrong rewards, as the guide does.

    python -m tests.long.reward_demo

Prints the exact answers to the 150 test rows before and after, and the verdict. Exits with 1 if
`json` raises them by fewer than 15 points, or if a wrong reward gets a verdict.

Results: docs/rewards.md.
"""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path
from typing import Any

from mlxtune import TrainConfig, train
from mlxtune.core.evaluation.outcome import CANNOT_TELL, EXACT, HELPED
from tests.paths import ROOT

_DATA = ROOT / "data"
_SHARED: dict[str, Any] = {
    "model_path": str(_DATA / "demo-qwen3"),
    "data": (str(_DATA / "bookings.jsonl"),),
    "targets": ("all",),
    "samples": 0,
    "quiet": True,
}
_CHANCE = "import random\n\ndef reward(prompt, completion, row):\n    return random.random()\n"
_MIN_POINTS = 15
# Wrong rewards need fewer steps: they have nothing to teach.
_STEPS, _WRONG_STEPS = 60, 20


def passes(folder: Path, reward: str, seed: int) -> bool:
    """Train from the brief adapter, print a line, and return whether the result is as expected."""
    is_right = reward == "json"
    run = TrainConfig(
        **_SHARED,
        objective="grpo",
        reward=(reward,),
        val_data=str(_DATA / "bookings_test.jsonl"),
        init_adapter=str(folder / "brief"),
        lr=2e-3,
        temperature=0.8,
        batch_size=16,
        group_size=4,
        max_new_tokens=56,
        max_steps=_STEPS if is_right else _WRONG_STEPS,
        seed=seed,
        output=str(folder / "rewarded"),
        overwrite=True,
    )
    evaluation = train(run).evaluation
    assert evaluation is not None
    exact = next(each for each in evaluation.rewards if each.name == EXACT)
    points = 100 * (exact.after - exact.before)
    print(
        f"{Path(reward).name}, seed {seed}: exact {exact.before:.0%} to {exact.after:.0%} "
        f"({points:+.0f} points, {100 * exact.low:+.0f} to {100 * exact.high:+.0f}); "
        f"{evaluation.verdict}",
        flush=True,
    )
    if is_right:
        return points >= _MIN_POINTS and evaluation.verdict == HELPED
    return evaluation.verdict == CANNOT_TELL


def main() -> None:
    with tempfile.TemporaryDirectory(prefix="mlxtune-rewards-") as name:
        folder = Path(name)
        (folder / "chance.py").write_text(_CHANCE)
        brief = str(folder / "brief")
        train(TrainConfig(**_SHARED, lr=5e-3, max_steps=100, output=brief))
        rewards = ("json", "length:1000", str(folder / "chance.py"))
        found = [passes(folder, reward, seed) for reward in rewards for seed in range(3)]
    sys.exit(not all(found))


if __name__ == "__main__":
    main()
