"""`mlxtune train` on several workers: started, stopped and resumed."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from mlxtune import TrainConfig, TrainingInterrupted, resume, train
from mlxtune.commands.verify import verify
from mlxtune.core.run.run_folder import SAMPLE_RECORDS
from mlxtune.core.run.sampled_answers import read_groups
from tests.configs import train_to
from tests.launch import free_ports, launched, needs_ring, pid_of, run
from tests.paths import DATA
from tests.waiting import SECONDS, wait_until

pytestmark = needs_ring
OPTIONS = {
    "max_steps": 16,
    "save_steps": 6,
    "val_rows": 8,
    "val_steps": 5,
    "samples": 0,
    "dropout": 0.1,
}


def arguments(folder: Path, **changed: object) -> list[object]:
    options = {
        "model_path": DATA / "demo-qwen3",
        "data": DATA / "bookings_test.jsonl",
        "output": folder / "adapters.safetensors",
        **OPTIONS,
        **changed,
    }
    flags = [(f"--{name.replace('_', '-')}", value) for name, value in options.items()]
    return ["-m", "mlxtune", "train", *(part for flag in flags for part in flag)]


def steps_in(folder: Path) -> int:
    path = folder / "checkpoints" / "metrics.jsonl"
    return path.read_text().count('"kind": "step"') if path.exists() else 0


def has_ended(process: int) -> bool:
    try:
        return Path(f"/proc/{process}/stat").read_text().split()[2] == "Z"
    except OSError:
        return True


def adapter(folder: Path) -> bytes:
    return (folder / "adapters.safetensors").read_bytes()


def assert_same_but_for_rounding(run: Path, other: Path) -> None:
    found, expected = (load_file(each / "adapters.safetensors") for each in (run, other))
    assert found.keys() == expected.keys()
    largest = max(np.abs(value).max() for value in expected.values())
    for name, value in expected.items():
        assert np.abs(found[name] - value).max() <= 1e-4 * largest, name


def resumed(workers: int, folder: Path, *options: object) -> str:
    command = ["-m", "mlxtune", "train", "--resume", folder / "checkpoints", *options]
    return run(workers, command, folder / "log")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of an uninterrupted run on two workers."""
    folder = tmp_path_factory.mktemp("whole")
    run(2, arguments(folder), folder / "log")
    return folder


@pytest.mark.slow
def test_two_workers_learn_what_one_does(whole: Path, tmp_path: Path) -> None:
    config = TrainConfig(
        model_path=str(DATA / "demo-qwen3"),
        data=(str(DATA / "bookings_test.jsonl"),),
        output=str(tmp_path / "adapters.safetensors"),
        quiet=True,
        **OPTIONS,
    )
    train(config)
    assert_same_but_for_rounding(whole, tmp_path)
    # Only worker 0 writes the run's files; worker 1 writes a log. The verdict covers all rows.
    files = {path.name for path in (whole / "checkpoints").iterdir()}
    assert {"best", "worker-1.log", "report.html", "result.json"} <= files
    assert "Training" in (whole / "checkpoints" / "worker-1.log").read_text()
    one, other = (
        json.loads((each / "checkpoints" / "evaluation.json").read_text())
        for each in (whole, tmp_path)
    )
    assert one["rows"] == other["rows"] == 8
    assert one["adapted"]["loss"] == pytest.approx(other["adapted"]["loss"], rel=1e-5)
    said = (whole / "log").read_text()
    assert said.count("Verdict") == 1
    assert "2 on 1 machine" in said


@pytest.mark.slow
def test_two_workers_learn_from_rewards_what_one_does(tmp_path: Path) -> None:
    """Three prompts a step are divided unequally; the resumed run needs the reference."""
    options = {
        **{"objective": "grpo", "reward": "length", "updates": 2, "kl": 0.1, "init": "pissa"},
        **{"group_size": 4, "batch_size": 3, "max_new_tokens": 8, "lr": 1e-3, "val_rows": 3},
        **{"max_steps": 2, "val_steps": 50, "save_steps": 50, "dropout": 0.0},
    }
    both, one = tmp_path / "both", tmp_path / "one"
    run(2, arguments(both, **options), tmp_path / "log")
    resumed(2, both, "--max-steps", 4)
    config = {**OPTIONS, **options, "data": (str(DATA / "bookings_test.jsonl"),)}
    config |= {"model_path": str(DATA / "demo-qwen3"), "reward": ("length",), "quiet": True}
    train(TrainConfig(output=str(one / "adapters.safetensors"), **config))
    resume(one, quiet=True, max_steps=4)
    assert_same_but_for_rounding(both, one)
    found, expected = (
        list(read_groups(each / "checkpoints" / SAMPLE_RECORDS)) for each in (both, one)
    )
    assert len(found) == 6
    for group, other in zip(found, expected, strict=True):
        assert [s.tokens for s in group.samples] == [s.tokens for s in other.samples]
        assert [s.reward for s in group.samples] == [s.reward for s in other.samples]
    assert verify(both).ok


@pytest.mark.slow
def test_two_workers_resume_preferences_without_a_cache(tmp_path: Path) -> None:
    both, one = tmp_path / "both", tmp_path / "one"
    config = TrainConfig(
        str(DATA / "demo-qwen3"),
        (str(DATA / "bookings_pairs.jsonl"),),
        output=str(both / "adapters.safetensors"),
        objective="dpo",
        **{"max_steps": 2, "val_rows": 8, "samples": 0, "no_cache": True, "quiet": True},
    )
    with pytest.raises(TrainingInterrupted):
        train_to(config, 1)
    shutil.copytree(both, one)
    resume(one, no_cache=True)
    resumed(2, both, "--no-cache")
    assert_same_but_for_rounding(both, one)
    assert "trained_rows.bin" not in (both / "checkpoints" / "worker-1.log").read_text()


@pytest.mark.long
def test_a_worker_short_of_memory_halves_its_own_micro_batches(whole: Path, tmp_path: Path) -> None:
    pressure = tmp_path / "pressure"
    pressure.write_text("some avg10=90.00\nfull avg10=50.00\n")
    code = (
        "import os, pathlib, mlxtune.commands.train as recipe, mlxtune.cli\n"
        "if os.environ['MLX_RANK'] == '1':\n"
        f"    found = recipe.Sensors('Linux', pathlib.Path({str(pressure)!r}))\n"
        "    recipe.Sensors = lambda: found\n"
        "mlxtune.cli.main()\n"
    )
    (tmp_path / "short.py").write_text(code)
    _, _, *options = arguments(tmp_path)
    log = run(2, [tmp_path / "short.py", *options], tmp_path / "log")
    line = "very short of memory after step 0: micro-batches of up to "
    assert line not in log
    assert line in (tmp_path / "checkpoints" / "worker-1.log").read_text()
    assert_same_but_for_rounding(tmp_path, whole)


@pytest.mark.slow
def test_a_killed_worker_ends_all_and_the_run_resumes(whole: Path, tmp_path: Path) -> None:
    with launched(2, arguments(tmp_path), tmp_path / "log") as launch:
        wait_until(lambda: steps_in(tmp_path) > 8)
        first, second = pid_of(launch, 0), pid_of(launch, 1)
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: has_ended(first))
        launch.wait(SECONDS)
    said = (tmp_path / "log").read_text()
    (line,) = [line for line in said.splitlines() if "mlxtune: error" in line]
    assert "worker 1 is gone after step" in line
    assert f"resume with mlxtune train --resume {tmp_path}" in line
    # On a machine without the run's files, worker 1 gets the checkpoint from worker 0.
    script = tmp_path / "resume.sh"
    start, folder = f"{sys.executable} -m mlxtune train --resume", tmp_path / "checkpoints"
    elsewhere = tmp_path / "elsewhere"
    script.write_text(f'[ "$MLX_RANK" = 1 ] && exec {start} {elsewhere}; exec {start} {folder}\n')
    run(2, ["bash", script], tmp_path / "log")
    assert adapter(tmp_path) == adapter(whole)


@pytest.mark.slow
def test_ctrl_c_stops_all_after_one_step_and_saves_once(whole: Path, tmp_path: Path) -> None:
    # Worker 0 waits in step 8, so that the run cannot end before Ctrl-C; then its disk is slow.
    pressed = tmp_path / "pressed"
    patch = f"""import time
from mlxtune.backend.step.pipeline import InstructPipeline
start, fsync, pressed = InstructPipeline.start_batch, os.fsync, Path({str(pressed)!r})
def waiting(*args, step, **options):
    while step == 8 and not pressed.exists():
        time.sleep(0.01)
    return start(*args, step=step, **options)
def slow(file):
    if pressed.exists():
        pressed.unlink()
        time.sleep(3)
    fsync(file)
InstructPipeline.start_batch, os.fsync = waiting, slow"""
    command = patched(tmp_path, 0, patch, save_steps=100, val_steps=100)
    with launched(2, command, tmp_path / "log") as launch:
        wait_until(lambda: steps_in(tmp_path) > 4)
        workers = [pid_of(launch, worker) for worker in range(2)]
        # The signal does not go to mlx.launch, which would end all workers as soon as one ends.
        for process in workers:
            os.kill(process, signal.SIGINT)
        pressed.touch()
        for process in workers:
            wait_until(lambda process=process: has_ended(process))
    (saved,) = (tmp_path / "checkpoints").glob("step-*")
    said = (tmp_path / "log").read_text().splitlines()
    (line,) = [line for line in said if line.startswith("mlxtune: ")]
    assert f"; saved to {saved};" in line
    # A run that is resumed with fewer workers reports that its result differs by rounding.
    warning = "continues with 1 worker: its result is the same except for rounding"
    assert warning in resumed(1, tmp_path)
    found, expected = (load_file(each / "adapters.safetensors") for each in (tmp_path, whole))
    largest = max(np.abs(value).max() for value in expected.values())
    assert max(np.abs(found[name] - expected[name]).max() for name in found) <= 1e-4 * largest


@pytest.mark.slow
@pytest.mark.parametrize(
    ("option", "problem"),
    [
        ("data", "reads examples from --data that differ from worker 0's: copy the files"),
        ("reward", "has other --reward files than worker 0, or other weights: copy the files"),
    ],
)
def test_workers_with_other_files_end_before_the_first_step(
    tmp_path: Path, option: str, problem: str
) -> None:
    rows = (DATA / "bookings_test.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "other.jsonl").write_text("".join(rows[:100]))
    changed: dict[str, tuple[dict[str, object], ...]] = {
        "data": ({}, {"data": tmp_path / "other.jsonl"}),
        "reward": tuple({"objective": "grpo", "reward": f"length={each}"} for each in (1, 2)),
    }
    first, second = (arguments(tmp_path / "run", **each) for each in changed[option])
    script = tmp_path / "start.sh"
    lines = (" ".join(map(str, [sys.executable, *each])) for each in (second, first))
    script.write_text('if [ "$MLX_RANK" = 1 ]; then exec {}; else exec {}; fi\n'.format(*lines))
    said = run(2, ["bash", script], tmp_path / "log")
    (line,) = [line for line in said.splitlines() if "mlxtune: error" in line]
    assert line.startswith(f"mlxtune: error: worker 1 {problem}")
    assert not (tmp_path / "run" / "checkpoints").exists()


def patched(folder: Path, worker: int, patch: str, **changed: object) -> list[object]:
    """Return the command of a run in which one worker first runs the code of `patch`."""
    script = folder / "patched.py"
    lines = [
        "import errno, os, sys, importlib.metadata as metadata",
        "from pathlib import Path",
        f"if os.environ['MLX_RANK'] == '{worker}':",
        *(f"    {line}" for line in patch.splitlines()),
        "from mlxtune.cli import main",
        "main()",
    ]
    script.write_text("\n".join(lines))
    return [script, *arguments(folder, **changed)[2:]]


@pytest.mark.long
def test_a_full_disk_on_worker_0_ends_all_and_the_run_resumes(whole: Path, tmp_path: Path) -> None:
    saved = tmp_path / "checkpoints" / "step-5"
    patch = f"""real = os.fsync
def fsync(file):
    if Path({str(saved)!r}).exists():
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    real(file)
os.fsync = fsync"""
    said = run(2, patched(tmp_path, 0, patch), tmp_path / "log")
    lines = [line for line in said.splitlines() if "mlxtune: error" in line]
    assert any("No space left on device" in line for line in lines), said
    assert "Traceback" not in said
    assert not (tmp_path / "adapters.safetensors").exists()
    resumed(2, tmp_path)
    assert adapter(tmp_path) == adapter(whole)


@pytest.mark.long
def test_a_bug_on_one_worker_ends_all_and_the_run_resumes(whole: Path, tmp_path: Path) -> None:
    patch = """from mlxtune.backend.step.engine import Engine
real = Engine.build
def build(self, step, *rest, **options):
    if step.number == 14:
        raise KeyError("bug")
    return real(self, step, *rest, **options)
Engine.build = build"""
    said = run(2, patched(tmp_path, 1, patch), tmp_path / "log")
    assert "KeyError: 'bug'" in said
    assert "worker 1 is gone after step" in said
    resumed(2, tmp_path)
    assert adapter(tmp_path) == adapter(whole)


@pytest.mark.slow
def test_a_worker_that_hangs_ends_all(tmp_path: Path) -> None:
    with launched(2, arguments(tmp_path), tmp_path / "log") as launch:
        wait_until(lambda: steps_in(tmp_path) > 8)
        first, second = pid_of(launch, 0), pid_of(launch, 1)
        os.kill(second, signal.SIGSTOP)
        wait_until(lambda: has_ended(first))
        # The launcher still waits for worker 1, so the error is read from the log.
        wait_until(lambda: "worker 1 is gone after step" in (tmp_path / "log").read_text())


@pytest.mark.slow
def test_one_rank_of_the_launcher_is_a_plain_run(tmp_path: Path) -> None:
    said = run(1, arguments(tmp_path, max_steps=2), tmp_path / "log")
    assert "Verdict" in said
    assert "Workers" not in said


@pytest.mark.long
def test_doctor_looks_at_all_workers(tmp_path: Path) -> None:
    model = DATA / "demo-qwen3"
    options = [
        "--model-path",
        model,
        "--data",
        DATA / "bookings_test.jsonl",
        "--data",
        "none.jsonl",
    ]
    said = run(2, ["-m", "mlxtune", "doctor", *options], tmp_path / "log")
    assert re.search(r"workers +2 on 1 machine", said)
    assert f"{model} is the same on all workers" in said
    assert "none.jsonl cannot be read on worker 0, 1" in said
    assert " Gbit/s, " in said
    assert said.count("mlxtune cannot train here: 1 problem") == 1


@pytest.mark.slow
def test_missing_workers_are_not_waited_for(
    tmp_path: Path,
) -> None:
    hosts = tmp_path / "hosts.json"
    hosts.write_text(json.dumps([[f"127.0.0.1:{port}"] for port in free_ports(2)]))
    # The process ends without a flush.
    program = (
        "from functools import partial\n"
        "from mlxtune.backend.workers import launch\n"
        "launch._JOIN_SECONDS = 1\n"
        "print(launch.join(partial(print, flush=True)).world_size)"
    )
    environment = {**os.environ, "MLX_RANK": "0", "MLX_HOSTFILE": str(hosts)}
    ended = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True
    )
    assert (ended.stderr, ended.returncode) == ("", 1)
    assert ended.stdout == "waiting for the others, up to 1 s\n"
