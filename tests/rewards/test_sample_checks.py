"""Edited, lost and damaged records of samples: what verify finds, and what a resumed run does."""

from __future__ import annotations

import copy
import gzip
import json
import shutil
from collections.abc import Callable
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest

from mlxtune import TrainingInterrupted, resume, train
from mlxtune.commands.verify import verify
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.remembered import mark
from mlxtune.core.run.checkpoint import MANIFEST, METADATA, WRITTEN_SAMPLES
from mlxtune.core.run.run_folder import SAMPLE_RECORDS
from mlxtune.core.run.sampled_answers import read_members
from mlxtune.errors import OutputError
from tests.configs import train_to
from tests.session.test_rewarding import config, folder, result_of

__all__ = ["folder"]
Member = list[dict[str, Any]]


def members_of(path: Path) -> list[Member]:
    with path.open("rb") as file:
        return [list(map(json.loads, each.content.splitlines())) for each in read_members(file)]


def as_bytes(members: list[Member]) -> bytes:
    return b"".join(
        gzip.compress(b"".join(json.dumps(each).encode() + b"\n" for each in member), mtime=0)
        for member in members
    )


def set_in_groups(**values: Any) -> Callable[[list[Member]], object]:
    return lambda members: [each.update(values) for member in members for each in member]


def set_in_samples(**values: Any) -> Callable[[list[Member]], object]:
    return lambda members: [
        sample.update(values) for member in members for each in member for sample in each["samples"]
    ]


def add_step(members: list[Member]) -> None:
    members.append(copy.deepcopy(members[-1]))
    for group in members[-1]:
        group["step"] = 100


def rename_rewards(members: list[Member]) -> None:
    for group in members[0]:
        for sample in group["samples"]:
            sample["rewards"] = {"other": sample["rewards"]["low.reward"]}


def move_row(members: list[Member]) -> None:
    members[0][0]["row"] = "elsewhere.jsonl:3"


def shorten(members: list[Member]) -> None:
    for group in members[-1]:
        group["samples"].pop()


EDITS: dict[str, tuple[Callable[[list[Member]], object], str]] = {
    "empty": (list.clear, "lacks the samples of step 1"),
    "last": (list.pop, "lacks the samples of step 4"),
    "middle": (lambda members: members.pop(1), "lacks the samples of step 2"),
    "twice": (
        lambda members: members.append(members[-1]),
        "the samples up to step 4 is not that in",
    ),
    "order": (list.reverse, "the samples up to step 4 is not that in"),
    "later": (add_step, "step 100: is not a step of metrics.jsonl"),
    "rows": (lambda members: members[2].pop(), "has rows 1, but metrics.jsonl has 2"),
    "samples": (shorten, "not 4 samples"),
    "seed": (set_in_groups(seed=7), "another step, adapter, seed or use"),
    "use": (set_in_groups(use=1), "another step, adapter, seed or use"),
    "adapter": (set_in_groups(adapter="other"), "no hash of the adapter"),
    "row": (move_row, "is in no file of the run"),
    "prompt": (set_in_groups(prompt_tokens=[]), "has no prompt"),
    "rewards": (set_in_samples(rewards={"low.reward": 9.0}), "but its weighted sum is 9.0"),
    "sum": (set_in_samples(reward=9.0), "has reward 9.0, but its weighted sum"),
    "no rewards": (
        set_in_samples(reward=None, rewards={"low.reward": None}, problems=["no"], advantage=0.0),
        "completions/without_reward 1, but metrics.jsonl has 0",
    ),
    "both": (
        set_in_samples(reward=9.0, rewards={"low.reward": 9.0}, advantage=0.0),
        "has rewards/low.reward/mean 9, but metrics.jsonl",
    ),
    "names": (
        set_in_samples(reward=9.0, rewards={"other": 9.0}, advantage=0.0),
        "has rewards/other/mean 9, but metrics.jsonl has None",
    ),
    "advantage": (set_in_samples(advantage=0.5), "has advantage 0.5, but its rewards give"),
    "token": (set_in_samples(tokens=[2**40], logps=[-1.0], finished=True), "has the token"),
    "no tokens": (set_in_samples(tokens=[], logps=[]), "has 0 tokens"),
    "long": (set_in_samples(tokens=[5] * 10, logps=[-1.0] * 10), "has 10 tokens, of at most 9"),
    "logps": (set_in_samples(logps=[]), "has 0 log-probabilities"),
    "probability": (set_in_samples(tokens=[5], logps=[1.0], finished=True), "above 0"),
    "old": (set_in_samples(old_logps=[-1.0] * 9), "has 9 earlier log-probabilities"),
}


@pytest.fixture(scope="module")
def finished(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("finished")
    train(config(folder, output))
    return output / "checkpoints"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished.parent, tmp_path / "out")
    return tmp_path / "out" / "checkpoints"


def problem_of(run: Path) -> str:
    """Return what the check of samples finds; other checks must pass."""
    checks = [each for each in verify(run).checks if not each.ok]
    assert [each.name for each in checks] in ([], [SAMPLE_RECORDS])
    return checks[0].detail if checks else ""


def forge_hashes(run: Path) -> None:
    """Put the hash of the record into the checkpoints, as one who knows the format could."""
    content = (run / SAMPLE_RECORDS).read_bytes()
    for manifest in run.glob(f"*/{MANIFEST}"):
        path, listed = manifest.with_name(METADATA), json.loads(manifest.read_text())
        metadata = json.loads(path.read_text())
        metadata[WRITTEN_SAMPLES] = {
            "bytes": len(content),
            "sha256": sha256(content).hexdigest(),
        }
        path.write_text(json.dumps(metadata))
        listed["files"][METADATA] = {"size": path.stat().st_size, "sha256": file_hash(path)}
        manifest.write_text(json.dumps(listed))


def test_untouched_record_passes(run: Path) -> None:
    assert problem_of(run) == ""
    forge_hashes(run)
    assert problem_of(run) == ""


@pytest.mark.parametrize("name", EDITS)
def test_verify_finds_every_edit_even_with_forged_hashes(run: Path, name: str) -> None:
    edit, problem = EDITS[name]
    members = members_of(run / SAMPLE_RECORDS)
    edit(members)
    (run / SAMPLE_RECORDS).write_bytes(as_bytes(members))
    assert "has changed: the hash of the samples up to step" in problem_of(run)
    forge_hashes(run)
    assert problem in problem_of(run)


def test_verify_finds_changed_bytes(run: Path) -> None:
    path = run / SAMPLE_RECORDS
    content = path.read_bytes()
    path.write_bytes(content + bytes(300))
    assert problem_of(run)
    path.write_bytes(content[:-20])
    assert "has changed" in problem_of(run)
    members = members_of(run / SAMPLE_RECORDS)
    set_in_samples(text="forged")(members)
    path.write_bytes(as_bytes(members))
    assert "has changed" in problem_of(run)
    path.unlink()
    assert problem_of(run) == "is missing"


@pytest.mark.slow
@pytest.mark.parametrize("damage", ["bytes", "twice"])
def test_replay_of_a_damaged_record_is_a_failed_check(folder: Path, run: Path, damage: str) -> None:
    path = run / SAMPLE_RECORDS
    members = members_of(path)
    content = {"bytes": path.read_bytes() + bytes(300), "twice": path.read_bytes()}[damage]
    path.write_bytes(content + as_bytes(members[-1:]) * (damage == "twice"))
    checks = verify(run, replay=True, reward=(str(folder / "low.py"),)).checks
    failed = {each.name: each.detail for each in checks if not each.ok}
    assert failed.keys() == {SAMPLE_RECORDS, "samples"}
    assert failed["samples"].startswith("is damaged: ")


@pytest.fixture(scope="module")
def interrupted(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    output = tmp_path_factory.mktemp("interrupted")
    with pytest.raises(TrainingInterrupted):
        train_to(config(folder, output), 2)
    return output


@pytest.fixture
def stopped(interrupted: Path, tmp_path: Path) -> Path:
    """The own run of a user, stopped after step 2."""
    shutil.copytree(interrupted, tmp_path / "stopped")
    mark(tmp_path / "stopped" / "checkpoints")
    return tmp_path / "stopped" / "checkpoints"


def add_next(stopped: Path, finished: Path, edit: Callable[[list[Member]], object]) -> None:
    """Add the samples of a step that a stopped run drew but did not train on."""
    path = stopped / SAMPLE_RECORDS
    added = members_of(finished / SAMPLE_RECORDS)[2:3]
    edit(added)
    path.write_bytes(path.read_bytes() + as_bytes(added))


def same_as(finished: Path, stopped: Path, *, samples: bool = True) -> bool:
    own, expected = result_of(stopped.parent), result_of(finished.parent)
    return (own[0], own[2]) == (expected[0], expected[2]) and (not samples or own[1] == expected[1])


@pytest.mark.parametrize(
    ("steps", "end", "last"),
    [
        ((), bytes(300), 2),
        ((3, 4, 4), b"", 4),
        *(
            pytest.param(*values, marks=pytest.mark.slow)
            for values in (
                ((1, 2), b"", 2),
                ((2, 3, 4), b"", 2),
                ((4, 3), b"", 4),
                ((3, 4, 1), b"", 4),
                ((3, 4), bytes(300), 4),
            )
        ),
    ],
    ids=lambda value: str(value)[:20],
)
def test_damaged_end_is_replaced(
    finished: Path,
    stopped: Path,
    capsys: pytest.CaptureFixture[str],
    steps: tuple[int, ...],
    end: bytes,
    last: int,
) -> None:
    """Members of some `steps` follow the member of step 2, and bytes follow them."""
    with (finished / SAMPLE_RECORDS).open("rb") as file:
        members = {each.step: slice(each.start, each.end) for each in read_members(file)}
    path, content = stopped / SAMPLE_RECORDS, (finished / SAMPLE_RECORDS).read_bytes()
    added = b"".join(content[members[step]] for step in steps)
    path.write_bytes(path.read_bytes() + added + end)
    resume(stopped, quiet=True)
    assert same_as(finished, stopped)
    assert f"behind step {last}: the rest is replaced" in " ".join(capsys.readouterr().err.split())
    assert problem_of(stopped) == ""


@pytest.mark.slow
def test_damage_before_the_checkpoint_is_an_error_and_its_remedy_works(
    finished: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = stopped / SAMPLE_RECORDS
    content = path.read_bytes()
    path.write_bytes(content[:30] + bytes(30) + content[60:])
    with pytest.raises(OutputError, match=r"damaged.*bring it back, or move it away to train on"):
        resume(stopped, quiet=True)
    path.unlink()
    resume(stopped, quiet=True)
    assert "is missing up to step 2" in " ".join(capsys.readouterr().err.split())
    assert same_as(finished, stopped, samples=False)
    assert "has changed" in problem_of(stopped)


def test_samples_of_another_run_are_reported(
    finished: Path, stopped: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    members = members_of(stopped / SAMPLE_RECORDS)
    set_in_samples(text="of another run")(members)
    (stopped / SAMPLE_RECORDS).write_bytes(as_bytes(members))
    resume(stopped, quiet=True)
    shown = " ".join(capsys.readouterr().err.split())
    assert "has other samples than the run drew up to step 2" in shown
    assert same_as(finished, stopped, samples=False)


@pytest.mark.parametrize("name", ["samples", "advantage", "token", "no tokens", "logps", "prompt"])
def test_wrong_samples_of_the_next_step_are_an_error(
    finished: Path, stopped: Path, name: str
) -> None:
    edit, problem = EDITS[name]
    add_next(stopped, finished, edit)
    with pytest.raises(OutputError) as refused:
        resume(stopped, quiet=True)
    assert f"{SAMPLE_RECORDS}: step 3: " in str(refused.value)
    assert problem in str(refused.value)
    assert str(refused.value).count("\n") == 0


@pytest.mark.slow
def test_samples_that_do_not_fit_the_rows_are_an_error(finished: Path, stopped: Path) -> None:
    for edit, problem in (
        (set_in_groups(prompt="forged"), "is not the prompt of"),
        (set_in_groups(prompt_tokens=[5]), "is not the prompt of"),
        (rename_rewards, "has other rewards"),
        (set_in_samples(text="forged"), "has other tokens than its text"),
        (lambda members: members[0].pop(), "has 1 rows, not 2"),
    ):
        content = (stopped / SAMPLE_RECORDS).read_bytes()
        add_next(stopped, finished, edit)
        with pytest.raises(OutputError, match=problem):
            resume(stopped, quiet=True)
        (stopped / SAMPLE_RECORDS).write_bytes(content)


def test_strangers_samples_are_drawn_again(
    folder: Path, finished: Path, stopped: Path, tmp_path: Path
) -> None:
    edit = set_in_samples(reward=None, rewards={"low.reward": None}, problems=["no"], advantage=0.0)
    add_next(stopped, finished, edit)
    received = tmp_path / "received"
    shutil.copytree(stopped.parent, received)
    resume(received, quiet=True, reward=(str(folder / "low.py"),))
    assert same_as(finished, received / "checkpoints")
