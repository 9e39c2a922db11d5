"""A signal at any moment gives one line, the right exit code and no verdict, and leaves no file."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxtune import TrainConfig, train
from mlxtune.backend.adapters import fusing
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.commands import runs as runs_recipe
from mlxtune.config import user_cache
from mlxtune.core.run.verification import verify_files
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.session.verified_output import noted, remove_unfinished
from tests.command import Cli, finish, start
from tests.models import sums, write_chat
from tests.slow import long, slow
from tests.waiting import SECONDS, wait_until

# During start-up: an interrupt while a module is imported.

MODULES = ["mlxtune.config", "mlxtune.cli.table"]
INTERRUPTS = """
import os, signal, sys

class Interrupts:
    def find_spec(self, name, path=None, target=None):
        if name == os.environ["INTERRUPTED"]:
            sys.meta_path.remove(self)
            os.kill(os.getpid(), signal.SIGINT)
            for _ in range(100):
                pass

sys.meta_path.insert(0, Interrupts())
"""


@pytest.mark.parametrize("module", MODULES)
def test_interrupt_while_the_command_is_imported(tmp_path: Path, module: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(INTERRUPTS)
    paths = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = os.environ | {"PYTHONPATH": paths, "INTERRUPTED": module}
    outcome = finish(start("runs", tmp_path, env=environment, cwd=Path.cwd()))
    assert (outcome.code, outcome.out, outcome.err) == (130, "", "mlxtune: interrupted\n")


def test_program_that_imports_the_package_keeps_its_handler() -> None:
    code = "import signal, mlxtune; print(signal.getsignal(2) is signal.default_int_handler)"
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=SECONDS
    )
    assert done.stdout == "True\n"


def test_interrupt_that_an_import_turned_into_an_error(
    cli: Cli, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def show(*_: Any, **__: Any) -> None:
        try:
            raise KeyboardInterrupt
        except KeyboardInterrupt:
            raise ImportError("numpy failed to import")  # noqa: B904

    monkeypatch.setattr(runs_recipe, "main", show)
    outcome = cli("runs", tmp_path)
    assert (outcome.code, outcome.err) == (130, "mlxtune: interrupted\n")


# verify --replay


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    chat = write_chat(folder / "chat.jsonl", sums(20))
    output = str(folder / "out" / "adapters.safetensors")
    config = TrainConfig(str(model), str(chat), output=output, samples=0, quiet=True, epochs=2)
    train(config)
    return folder / "out" / "checkpoints"


@pytest.mark.parametrize(
    ("step", "number"),
    [
        (0, signal.SIGINT),
        (2, signal.SIGTERM),
        slow(8, signal.SIGINT),
    ],
)
def test_interrupt_in_a_replay_gives_no_verdict(
    cli: Cli,
    finished: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    step: int,
    number: signal.Signals,
) -> None:
    """Interrupt before the first step, in the middle, and in the last step."""
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(scratch))
    whole, run = InstructPipeline.start_batch, InstructTrainer.train

    def interrupted(self: Any, examples: Any, *, step: int, **options: Any) -> Any:
        if step == reached:
            signal.raise_signal(number)
        return whole(self, examples, step=step, **options)

    def begun(self: Any, *arguments: Any, **options: Any) -> Any:
        if reached == 0:
            signal.raise_signal(number)
        return run(self, *arguments, **options)

    reached = step
    monkeypatch.setattr(InstructPipeline, "start_batch", interrupted)
    monkeypatch.setattr(InstructTrainer, "train", begun)
    monkeypatch.setattr("mlxtune.commands.verify.verify_files", newest_only)
    outcome = cli("verify", finished, "--replay")
    assert outcome.out == ""
    assert outcome.code == 128 + number
    assert outcome.err.splitlines()[-1] == "mlxtune: interrupted"
    assert "Traceback" not in outcome.err
    assert not list(scratch.iterdir())


def newest_only(run: Path) -> Any:
    """Keep only the newest good checkpoint, so that the run is replayed from its start."""
    found, good = verify_files(run)
    return found, good[:1]


# fuse


@pytest.fixture(scope="module")
def adapter(finished: Path) -> Path:
    return finished.parent / "adapters.safetensors"


def fuse(model: Path, adapter: Path, target: Path) -> list[object]:
    return ["fuse", "--adapter", adapter, "--model-path", model, "--output", target]


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP, signal.SIGINT])
def test_signal_during_fuse_leaves_nothing(
    cli: Cli,
    model: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    number: signal.Signals,
) -> None:
    save, written = fusing._save, []

    def interrupted(path: Path, tensors: Any) -> None:
        save(path, tensors)
        written.append(path)
        signal.raise_signal(number)

    monkeypatch.setattr(fusing, "_save", interrupted)
    before = signal.getsignal(number)
    outcome = cli(*fuse(model, adapter, tmp_path / "fused"))
    assert outcome.code == 128 + number
    assert outcome.err.endswith("mlxtune: interrupted\n")
    assert written
    assert list(tmp_path.iterdir()) == []
    assert signal.getsignal(number) == before


@pytest.mark.slow
def test_leftovers_of_a_killed_fuse_are_removed_by_the_next(
    cli: Cli, model: Path, adapter: Path, tmp_path: Path
) -> None:
    target = tmp_path / "fused"
    code = (
        "import os, signal, sys\n"
        "from mlxtune.backend.adapters import fusing\n"
        "save = fusing._save\n"
        "fusing._save = lambda *a: [save(*a), os.kill(os.getpid(), signal.SIGKILL)]\n"
        "from mlxtune.cli import main\n"
        "main()\n"
    )
    process = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, fuse(model, adapter, target))],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert finish(process).code == -signal.SIGKILL
    (left,) = tmp_path.iterdir()
    # A folder with such a name but without a note may belong to another program.
    other = tmp_path / ".mlxtune-fused.0123456789abcdef.tmp"
    other.mkdir()
    (other / "mine").write_text("mine")
    outcome = cli(*fuse(model, adapter, target))
    assert outcome.code == 0, outcome.err
    assert f"{left}, which a killed process left" in outcome.err
    assert sorted(path.name for path in tmp_path.iterdir()) == [other.name, "fused"]
    assert (other / "mine").read_text() == "mine"


def test_leftover_of_a_kill_is_removed(tmp_path: Path) -> None:
    folder = tmp_path / ".mlxtune-fused.0123456789abcdef.tmp"
    folder.mkdir()
    (folder / "model.safetensors").write_text("weights")
    with noted(folder):
        saved = _notes()
    for path, note in saved.items():
        path.write_bytes(note)
    assert remove_unfinished() == [folder]
    assert not folder.exists()
    assert not _notes()


def test_folder_of_another_inode_is_not_taken_for_a_leftover(tmp_path: Path) -> None:
    folder = tmp_path / ".mlxtune-fused.0123456789abcdef.tmp"
    folder.mkdir()
    with noted(folder):
        # The folder is still being filled.
        assert remove_unfinished() == []
        saved = _notes()
    for path, note in saved.items():
        path.write_bytes(note)
    aside = folder.rename(tmp_path / "aside")
    folder.mkdir()
    (folder / "mine").write_text("mine")
    assert remove_unfinished() == []
    assert (folder / "mine").exists()
    assert aside.exists()
    assert not _notes()


def _notes() -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in (user_cache() / "unfinished").iterdir()}


# Data


@pytest.mark.parametrize("number", [long(signal.SIGTERM), long(signal.SIGHUP), slow(signal.SIGINT)])
def test_signal_while_data_is_read_leaves_nothing(
    tmp_path: Path, model: Path, number: signal.Signals
) -> None:
    scratch = tmp_path / "scratch"
    scratch.mkdir(mode=0o700)
    chat = write_chat(tmp_path / "chat.jsonl", sums(50_000))
    arguments = ["inspect", "--model-path", model, "--data", chat, "--no-cache"]
    process = start(*arguments, env=os.environ | {"TMPDIR": str(scratch)})
    wait_until(lambda: bool(list(scratch.glob("mlxtune-data-*"))))
    process.send_signal(number)
    outcome = finish(process)
    assert outcome.code == 128 + number
    assert (outcome.out, outcome.err) == ("", "mlxtune: interrupted\n")
    assert [path.name for path in scratch.iterdir() if path.name != "mlx"] == []
