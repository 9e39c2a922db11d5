"""`--track` with the real libraries, which must read back the values of metrics.jsonl."""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

import pytest

from tests.models import sums, write_chat

STOP_AT = 4
# Neither a run nor a tracker needs torch, which transformers would import in every process.
NO_TORCH = "import sys; sys.modules['torch'] = None\n"
Series = dict[str, list[tuple[int, float]]]


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("data") / "chat.jsonl", sums(10))


def run(code: str, folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run Python code in a separate process whose home folder is below `folder`."""
    home = folder / "home"
    home.mkdir(exist_ok=True)
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB", "TRACKIO", "HF_"))}
    # The cache is elsewhere, so that only the trackers' files are left in the home folder.
    own = {"HOME": str(home), "XDG_CACHE_HOME": str(folder / "cache"), **environment}
    return subprocess.run(
        [sys.executable, "-c", NO_TORCH + code],
        env={**kept, **own},
        cwd=folder,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )


def trained(folder: Path, model: Path, chat: Path, tracker: str, **environment: str) -> Path:
    """Train, stop after step 4, and resume from step 2 as after a crash; return the run's folder.

    Check that nothing is written to stdout and that there is no warning.
    """
    options = {
        "output": str(folder / "run/adapters.safetensors"),
        "epochs": 3,
        "lr": 1e-2,
        "track": tracker,
        "save_steps": 2,
        "log_every": 1,
    }
    begin = (
        "from mlxtune import TrainConfig, TrainingInterrupted\n"
        "from mlxtune.commands.train import RunMode, run_training\n"
        "from mlxtune.session.arguments import resolve_options\n"
        f"config = TrainConfig({str(model)!r}, {str(chat)!r}, **{options!r})\n"
        f"try: run_training(resolve_options(config), RunMode(stop_after={STOP_AT}))\n"
        "except TrainingInterrupted: pass\n"
    )
    for code in (begin, "import mlxtune; mlxtune.resume('run')"):
        done = run(code, folder, **environment)
        assert done.returncode == 0, done.stderr
        assert done.stdout == ""
        assert "warning" not in done.stderr, done.stderr
        shutil.rmtree(folder / f"run/checkpoints/step-{STOP_AT}", ignore_errors=True)
    return folder / "run/checkpoints"


def expected(checkpoints: Path) -> Series:
    """Return the run's metrics as (step, value) pairs, by the trackers' names."""
    series: Series = defaultdict(list)
    for line in (checkpoints / "metrics.jsonl").read_text().splitlines():
        record = json.loads(line)
        if record["kind"] == "step":
            series["train/loss"].append((record["step"], record["loss"]))
            series["train/grad_norm"].append((record["step"], record["grad_norm"]))
            series["train/learning_rate"].append((record["step"], record["learning_rate"]))
        elif record["kind"] == "validation":
            series["val/loss"].append((record["step"], record["val_loss"]))
    assert [step for step, _ in series["train/loss"]] == [1, 2, 3, 4, 5, 6]
    return series


def assert_series(found: Series, wanted: Series, tolerance: float = 1e-6) -> None:
    for name, points in wanted.items():
        assert [step for step, _ in found[name]] == [step for step, _ in points], name
        values = [value for _, value in points]
        assert [value for _, value in found[name]] == pytest.approx(values, rel=tolerance), name


def outside(folder: Path) -> list[str]:
    """Return the files that trackers left in the home folder."""
    home = folder / "home"
    return sorted(str(path.relative_to(home)) for path in home.rglob("*") if path.is_file())


def test_tensorboard_shows_the_run_without_a_step_twice(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    pytest.importorskip("tensorboard", reason="tensorboard is not installed")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    from tensorboard.plugins.hparams import metadata

    checkpoints = trained(tmp_path, model, chat, "tensorboard")
    events = EventAccumulator(str(checkpoints / "tensorboard"))
    events.Reload()
    found = {
        name: [(event.step, event.value) for event in events.Scalars(name)]
        for name in events.Tags()["scalars"]
    }
    assert_series(found, expected(checkpoints))
    assert found["train/tokens_per_second"][-1][1] > 0
    assert found["train/memory_gb"][-1][1] > 0
    result = json.loads((checkpoints / "result.json").read_text())
    assert found["result/best_val_loss"] == [
        (result["steps"], pytest.approx(result["best_val_loss"]))
    ]
    content = events.summary_metadata[metadata.SESSION_START_INFO_TAG].plugin_data.content
    options = metadata.parse_session_start_info_plugin_data(content).hparams
    assert options["rank"].number_value == 8
    assert options["targets"].string_value == "q_proj,v_proj"
    assert outside(tmp_path) == []


def test_trackio_has_the_run_once(model: Path, chat: Path, tmp_path: Path) -> None:
    pytest.importorskip("trackio", reason="trackio is not installed")
    store = tmp_path / "trackio"
    checkpoints = trained(tmp_path, model, chat, "trackio", TRACKIO_DIR=str(store))
    read = run(
        "import json, trackio\n"
        "s = trackio.SQLiteStorage\n"
        "(name,) = s.get_runs('mlxtune')\n"
        "print(json.dumps([s.get_logs('mlxtune', name), s.get_run_config('mlxtune', name)]))\n",
        tmp_path,
        TRACKIO_DIR=str(store),
    )
    logs, options = json.loads(read.stdout)
    found: Series = defaultdict(list)
    for row in logs:
        for name, value in row.items():
            found[name].append((row["step"], value))
    assert_series(found, expected(checkpoints))
    result = json.loads((checkpoints / "result.json").read_text())
    assert found["result/best_val_loss"] == [(result["steps"], result["best_val_loss"])]
    assert options["rank"] == 8
    assert options["targets"] == "q_proj,v_proj"
    assert outside(tmp_path) == []


def test_wandb_keeps_the_run_in_its_folder_without_a_login(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    checkpoints = trained(tmp_path, model, chat, "wandb")

    parts = sorted((checkpoints / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(parts) == 2
    (identity,) = {part.name for part in parts}
    found: Series = defaultdict(list)
    options: dict[str, Any] = {}
    summary: dict[str, Any] = {}
    exits = []
    for part in parts:
        for record in wandb_records(part):
            if record.HasField("history"):
                step = record.history.step.num
                for item in record.history.item:
                    name = item.key or "/".join(item.nested_key)
                    found[name] = [point for point in found[name] if point[0] != step]
                    found[name].append((step, json.loads(item.value_json)))
            if record.HasField("run"):
                assert identity == f"run-{record.run.run_id}.wandb"
                assert record.run.project == "mlxtune"
                assert record.run.display_name == "run"
                options |= {
                    item.key: json.loads(item.value_json) for item in record.run.config.update
                }
            if record.HasField("summary"):
                for item in record.summary.update:
                    summary[item.key or item.nested_key[0]] = json.loads(item.value_json)
            if record.HasField("exit"):
                exits.append(record.exit.exit_code)
    assert_series(found, expected(checkpoints))
    result = json.loads((checkpoints / "result.json").read_text())
    assert summary["best_val_loss"] == result["best_val_loss"]
    assert options["rank"] == 8
    # The first process was stopped, and the second completed the run.
    assert exits == [1, 0]
    assert outside(tmp_path) == []


def wandb_records(path: Path) -> list[Any]:
    """Return the records of wandb's run file, in LevelDB's log format after the first 7 bytes."""
    from wandb.proto import wandb_internal_pb2

    content, place, records, parts = path.read_bytes(), 7, [], b""
    while place + 7 <= len(content):
        left = 32768 - place % 32768
        if left < 7:
            place += left
            continue
        size, kind = struct.unpack("<HB", content[place + 4 : place + 7])
        parts += content[place + 7 : place + 7 + size]
        place += 7 + size
        if kind in (1, 4):  # a whole record, or the last part of one
            record = wandb_internal_pb2.Record()
            record.ParseFromString(parts)
            records.append(record)
            parts = b""
    return records


def test_wandb_online_without_a_login_is_a_warning_and_no_question(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    pytest.importorskip("wandb", reason="wandb is not installed")
    output = str(tmp_path / "run/adapters.safetensors")
    code = (
        "from mlxtune import TrainConfig, train\n"
        f"train(TrainConfig({str(model)!r}, {str(chat)!r}, output={output!r}, track='wandb'))\n"
    )
    done = run(code, tmp_path, WANDB_MODE="online")
    assert done.returncode == 0, done.stderr
    assert done.stderr.count('warning: track="wandb": ') == 1
    assert "wandb login" in done.stderr
    assert Path(output).exists()
