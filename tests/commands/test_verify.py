"""`mlxtune verify`: its checks of a good run, and every fault that it finds."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import safetensors.numpy

from mlxtune import TrainConfig, train, verify
from mlxtune.core.files.reading import file_hash
from mlxtune.core.run.checkpoint import _manifest
from mlxtune.core.run.verification import verify_files
from mlxtune.errors import MlxTuneError
from tests.command import Cli
from tests.models import sums, write_chat, write_model
from tests.slow import slow, slow_except


@pytest.fixture(scope="module")
def finished(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of two epochs; the first epoch's checkpoint was removed."""
    folder = tmp_path_factory.mktemp("finished")
    chat = write_chat(folder / "chat.jsonl", sums(20))
    output = str(folder / "out" / "adapters.safetensors")
    options: dict[str, Any] = {"epochs": 2, "lr": 1e-2, "dropout": 0.1, "save_steps": 3}
    train(TrainConfig(str(model), str(chat), output=output, samples=0, quiet=True, **options))
    return folder / "out"


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    """The folder of checkpoints of a copy of the run, for tests to damage."""
    shutil.copytree(finished, tmp_path / "out")
    return tmp_path / "out" / "checkpoints"


def bad(run: Path) -> dict[str, str]:
    return {check.name: check.detail for check in verify(run).checks if not check.ok}


def test_sound_run_passes_each_check_and_exits_with_0(cli: Cli, run: Path) -> None:
    outcome = cli("verify", run.parent)
    assert (outcome.code, outcome.err) == (0, "")
    lines = outcome.out.splitlines()
    *checks, note, summary = lines
    assert all(line.startswith("ok  ") for line in checks)
    assert note.startswith("--  not checked ")
    assert summary.endswith(f"{len(checks)} checks, all passed")
    names = {check.name for check in verify(run).checks}
    assert names >= {"best", "metrics.jsonl", "ledger.json", "best step", "adapter", "base model"}
    assert {name for name in names if name.endswith("/adapters.safetensors")} == {
        f"{path.parent.name}/adapters.safetensors" for path in run.glob("*/manifest.json")
    }


def test_run_with_repeated_validation_rows_passes(model: Path, tmp_path: Path) -> None:
    rows = sums(12)
    chat = write_chat(tmp_path / "chat.jsonl", rows[:4])
    validation = write_chat(tmp_path / "valid.jsonl", [*rows[4:], *rows[4:7]])
    result = train(
        TrainConfig(
            str(model),
            str(chat),
            val_data=str(validation),
            output=str(tmp_path / "out"),
            max_steps=1,
            samples=0,
            quiet=True,
        )
    )
    assert result.evaluation is not None
    assert (result.evaluation.rows, result.evaluation.copies) == (8, 3)
    assert bad(tmp_path / "out") == {}


def test_json_is_for_programs(cli: Cli, run: Path) -> None:
    outcome = cli("verify", run, "--json")
    found = json.loads(outcome.out)
    assert (found["ok"], found["step"], found["finished"]) == (True, 8, True)
    assert all(check.keys() == {"name", "ok", "detail"} for check in found["checks"])
    (run / "ledger.json").unlink()
    outcome = cli("verify", run, "--json")
    assert outcome.code == 1
    assert json.loads(outcome.out)["ok"] is False


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


def rewrite(path: Path, change: Callable[[Any], Any]) -> None:
    path.write_text(json.dumps(change(json.loads(path.read_text()))))


def drop_line(path: Path, part: str) -> None:
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(line for line in lines if part not in line))


def added(path: Path) -> None:
    path.write_text("x")


def without_last(path: Path) -> None:
    path.write_text("".join(path.read_text().splitlines(keepends=True)[:2]))


def other_shapes(run: Path) -> None:
    """Replace the best adapter with one of a different rank, and write a manifest to match."""
    path = run / "best" / "adapters.safetensors"
    tensors = safetensors.numpy.load_file(path)
    cut = {
        name: value[:, :4] if name.endswith("lora_a") else value[:4]
        for name, value in tensors.items()
    }
    safetensors.numpy.save_file({name: value.copy() for name, value in cut.items()}, path)
    (run / "best" / "manifest.json").unlink()
    (run / "best" / "manifest.json").write_text(json.dumps(_manifest(run / "best")))


@pytest.mark.parametrize(
    ("spoil", "name", "problem"),
    [
        (lambda run: flip(run / "best" / "adapters.safetensors"), "best", "SHA-256 differs"),
        (lambda run: flip(run / "epoch-2" / "metadata.json"), "epoch-2", "SHA-256 differs"),
        (lambda run: (run / "best" / "optimizer.safetensors").unlink(), "best", "is missing"),
        (lambda run: (run / "best" / "manifest.json").write_text("{"), "best", "not valid JSON"),
        (lambda run: (run / "step-7" / "manifest.json").unlink(), "step-7", "has no manifest.json"),
        (lambda run: added(run / "best" / "evil.py"), "best", "evil.py is not in its manifest"),
        (lambda run: (run / "epoch-7").mkdir(), "epoch-7", "has no manifest.json"),
        (lambda run: (run / ".mlxtune").unlink(), ".mlxtune", "is missing"),
        (lambda run: drop_line(run / "metrics.jsonl", '"step": 5,'), "metrics.jsonl", "not 5"),
        (lambda run: without_last(run / "metrics.jsonl"), "metrics.jsonl", "before the newest"),
        (
            lambda run: drop_line(run / "metrics.jsonl", '"kind": "epoch", "epoch": 1'),
            "metrics.jsonl",
            "its epochs are 2",
        ),
        (lambda run: shutil.rmtree(run / "best"), "best step", "best/ is not a valid checkpoint"),
        (
            lambda run: rewrite(run / "ledger.json", lambda found: [found[0] | {"rows_read": 21}]),
            "ledger.json",
            "does not add up",
        ),
        (
            lambda run: (run / "ledger.json").write_text("[1]"),
            "ledger.json",
            "not a list of ledgers",
        ),
        (
            lambda run: rewrite(
                run / "run.json", lambda found: found | {"config": found["config"] | {"rank": 3}}
            ),
            "run.json",
            "has --rank 3, but ",
        ),
        (
            lambda run: rewrite(run / "result.json", lambda found: found | {"steps": 9}),
            "result.json",
            "has 9 steps",
        ),
        (lambda run: flip(run / "trained_rows.bin"), "trained_rows.bin", "is damaged"),
        (lambda run: flip(run.parent / "adapters.safetensors"), "adapter", "SHA-256 differs"),
        (lambda run: (run.parent / "adapters.safetensors").unlink(), "adapter", "no such file"),
        (other_shapes, "best/adapters.safetensors", "does not fit the model"),
    ],
)
def test_fault_is_found_and_named(
    run: Path, spoil: Callable[[Path], None], name: str, problem: str
) -> None:
    assert bad(run) == {}
    spoil(run)
    found = bad(run)
    assert problem in found[name]


def killed_before_result(run: Path) -> None:
    """Leave the files of a run that was killed between its adapter and its result."""
    for name in ("result.json", "evaluation.json"):
        (run / name).unlink()


def test_unfinished_run_verifies_and_names_the_resume_command(run: Path) -> None:
    killed_before_result(run)
    found = verify(run)
    assert found.ok
    assert not found.finished
    assert any("--resume" in check.detail for check in found.checks)


def test_run_without_result_has_no_other_adapter_or_evaluation(run: Path) -> None:
    adapter, about = run.parent / "adapters.safetensors", run / "run.json"
    (run / "result.json").unlink()
    assert "result.json, which a run writes before it, is not" in bad(run)["evaluation.json"]
    (run / "evaluation.json").unlink()
    content = adapter.read_bytes()
    flip(adapter)
    assert "differs from best/" in bad(run)["adapter"]
    adapter.write_bytes(b"garbage")
    assert "adapter" in bad(run)
    adapter.write_bytes(content)
    edit(about, device="another")
    assert "run.json: its hashes are not those in " in bad(run)["files before the first step"]


def test_run_killed_after_it_resumed_may_have_other_records(run: Path) -> None:
    killed_before_result(run)
    step = json.loads(newest(run))["step"]
    edit(run / "run.json", device="another", resumed=step - 1)
    assert "its hashes are not those in " in bad(run)["files before the first step"]
    edit(run / "run.json", resumed=step)
    assert bad(run) == {}


# report.html is the run's page, which is not checked.
_UNCHECKED = {"report.html"}


def files_of(run: Path) -> list[str]:
    files = (path for path in run.parent.rglob("*") if path.is_file())
    return sorted(str(path.relative_to(run.parent)) for path in files)


def absences(run: Path, *, of_keys: bool) -> Iterator[tuple[str, Path, bytes | None]]:
    """Yield each way in which one file or key of a finished run can be missing, by its name.

    With it comes the file's path, and its new content: None for a file that is missing.
    """
    for name in files_of(run):
        path = run.parent / name
        if path.name in _UNCHECKED:
            continue
        if not of_keys:
            yield f"{name} removed", path, None
        if not of_keys and path.name != ".mlxtune":  # empty in runs that others made
            yield f"{name} emptied", path, b""
        if not of_keys or path.suffix != ".json":
            continue
        values = json.loads(path.read_text())
        yield f"{name} without content", path, json.dumps(type(values)()).encode()
        entries = values[0] if isinstance(values, list) else values
        for key in entries:
            rest = {other: value for other, value in entries.items() if other != key}
            left = [rest] if isinstance(values, list) else rest
            yield f"{name} without {key}", path, json.dumps(left).encode()


@pytest.mark.parametrize("of_keys", [False, slow(True)])
def test_absence_of_any_file_or_key_is_bad(run: Path, of_keys: bool) -> None:
    passed, tried = [], 0
    for name, path, content in list(absences(run, of_keys=of_keys)):
        before = path.read_bytes()
        path.unlink()
        if content is not None:
            path.write_bytes(content)
        found = verify_files(run)[0]
        if found.ok:
            passed.append(name)
        # Neither numbers of errors nor paths of this machine.
        problems = [each.detail for each in found.checks if not each.ok]
        assert not any("Errno" in each or str(run) in each for each in problems), problems
        path.write_bytes(before)
        tried += 1
    assert passed == []
    assert tried > (90 if of_keys else 40)
    assert verify_files(run)[0].ok


def test_base_model_that_was_changed_or_moved_away_is_found(
    cli: Cli, run: Path, model: Path, tmp_path: Path
) -> None:
    other = write_model(tmp_path / "other", "qwen3", seed=1, num_hidden_layers=1)
    outcome = cli("verify", run, "--model-path", other)
    assert outcome.code == 1
    assert "its weights differ from those at the start of the run" in outcome.out
    outcome = cli("verify", run, "--model-path", tmp_path / "none")
    assert outcome.code == 1
    assert "BAD model" in outcome.out


@pytest.mark.parametrize("first_only", [slow(False), True])
def test_replay_gives_same_bytes_from_checkpoint_or_start(
    cli: Cli, run: Path, first_only: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = list[Path]()
    monkeypatch.setattr("mlxtune.session.memory_planning.recorded_memory", read.append)
    if first_only:
        for path in [*run.glob("step-*"), run / "best"]:
            shutil.rmtree(path)
        (run / "best").mkdir()
    before = sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*"))
    outcome = cli("verify", run, "--replay")
    (line,) = [line for line in outcome.out.splitlines() if line[4:].startswith("replay ")]
    start = 0 if first_only else 7
    assert line.startswith("ok ")
    assert line.endswith(f"from step {start} to 8: the same bytes")
    assert "missing or damaged" not in outcome.err
    assert set(read) == {run}  # the plan keeps to the memory that the run measured
    assert sorted((path, path.stat().st_mtime_ns) for path in run.rglob("*")) == before


def test_replay_on_other_data_names_the_data(
    cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    for path in [*run.glob("step-*"), run / "best"]:
        shutil.rmtree(path)
    chat = write_chat(tmp_path / "other.jsonl", sums(21)[1:])
    for folder in run.glob("*/manifest.json"):
        metadata = folder.with_name("metadata.json")
        rewrite(metadata, lambda found: found | {"config": found["config"] | {"data": [str(chat)]}})
        folder.unlink()
        folder.write_text(json.dumps(_manifest(folder.parent)))
    outcome = cli("verify", run, "--replay")
    problem = "because the data gives different examples than the run was trained on"
    assert problem in outcome.out
    chat.unlink()
    assert f"{chat}: no such file: bring it back" in cli("verify", run, "--replay").out
    monkeypatch.setattr(MlxTuneError, "names_flags", False)
    found = verify(str(run), replay=True).as_dict()
    assert f"{chat}: no such file: bring it back" in json.dumps(found)


def test_replay_names_an_initial_adapter_that_moved_or_changed(
    cli: Cli, model: Path, finished: Path, tmp_path: Path
) -> None:
    first = tmp_path / "first"
    shutil.copytree(finished, first)
    chat = write_chat(tmp_path / "chat.jsonl", sums(4))
    options: dict[str, Any] = {"samples": 0, "quiet": True, "max_steps": 1, "val_split": 0}
    output = str(tmp_path / "out")
    train(TrainConfig(str(model), str(chat), output=output, init_adapter=str(first), **options))

    first.rename(tmp_path / "moved")
    missing = cli("verify", output, "--replay").out
    said = f"the adapter from which the run started is missing: {first}: no such file or folder"
    assert "BAD replay" in missing and f"{said}: bring it back" in missing
    (tmp_path / "moved").rename(first)
    shutil.copy(min((first / "checkpoints").glob("step-*/adapters.safetensors")), first)
    changed = cli("verify", output, "--replay").out
    assert f"the run did not start from {first}, which has changed: bring it back" in changed


def test_replay_without_the_initial_adapter_judges_nothing_again(
    model: Path, finished: Path, tmp_path: Path
) -> None:
    first = shutil.copytree(finished, tmp_path / "first")
    chat = write_chat(tmp_path / "chat.jsonl", sums(8))
    options: dict[str, Any] = {"samples": 0, "quiet": True, "max_steps": 3, "save_steps": 1}
    options |= {"val_split": 0.5, "batch_size": 1, "init_adapter": str(first), "keep": 9}
    train(TrainConfig(str(model), str(chat), output=str(tmp_path / "out"), **options))

    def again() -> str:
        result = verify(tmp_path / "out", replay=True)
        assert result.ok, result
        return next(each.detail for each in result.checks if each.name == "evaluation.json again")

    assert again().startswith("judged again: ")
    shutil.rmtree(first)
    assert again().startswith("not judged again: the adapter from which the run started is missing")


def test_replay_detects_a_forged_run(cli: Cli, run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.core.run.checkpoint import _manifest

    for folder in run.glob("*/manifest.json"):
        metadata = folder.with_name("metadata.json")
        rewrite(metadata, lambda found: found | {"config": found["config"] | {"seed": 7}})
        folder.unlink()
        folder.write_text(json.dumps(_manifest(folder.parent)))
    monkeypatch.setattr("mlxtune.commands.verify.on_cpu", lambda: True)
    outcome = cli("verify", run, "--replay")
    assert outcome.code == 1
    assert "to 8: the adapter differs\n" in outcome.out
    monkeypatch.setattr("mlxtune.commands.verify.on_cpu", lambda: False)
    assert "differs, perhaps by rounding" in cli("verify", run, "--replay").out


@pytest.mark.parametrize(
    ("before", "after"),
    [
        slow({"max_steps": 6}, {"max_steps": 10}),
        slow({"epochs": 1}, {"epochs": 2}),
        # The validation at the end of the first stretch stays, because it is the best so far.
        ({"max_steps": 6, "val_steps": 4}, {"max_steps": 8}),
    ],
)
def test_replay_of_an_extended_run_follows_the_schedule_of_each_stretch(
    cli: Cli, model: Path, chat: Path, tmp_path: Path, before: dict[str, Any], after: dict[str, Any]
) -> None:
    output = str(tmp_path / "out")
    options = {"epochs": 4, "lr": 1e-2, "keep": 1, "samples": 0} | before
    train(TrainConfig(str(model), str(chat), output=output, **options))
    ((name, value),) = after.items()
    outcome = cli("train", "--resume", output, f"--{name.replace('_', '-')}", value)
    assert "extended from " in outcome.err
    assert ": the learning rate restarts, from " in outcome.err

    run = tmp_path / "out" / "checkpoints"
    first = run_steps(run, next(iter(json.loads(newest(run))["extensions"]))["step"])
    assert first["learning_rate"] < 1e-3
    shutil.rmtree(run / "best")
    (run / "best").mkdir()
    for folder in run.glob("*/manifest.json"):
        assert json.loads(folder.with_name("metadata.json").read_text())["step"] > first["step"]
    replay = {check.name: check for check in verify(run, replay=True).checks}["replay"]
    assert replay.ok, replay.detail
    assert replay.detail.startswith("trained again from step 0 to ")
    page = cli("report", output)
    assert page.code == 0
    assert f"extended after step {first['step']}" in (run / "report.html").read_text()


def test_replay_finds_changed_weights_in_a_checkpoint(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"epochs": 3, "lr": 1e-2, "keep": 9, "samples": 0, "quiet": True}
    output = str(tmp_path / "out")
    train(TrainConfig(str(model), str(chat), output=output, val_split=0.0, **options))
    run = tmp_path / "out" / "checkpoints"
    shutil.copy(run / "epoch-1" / "adapters.safetensors", run / "epoch-2")
    sealed(run / "epoch-2")
    assert verify(run).ok
    replay = {check.name: check for check in verify(run, replay=True).checks}["replay"]
    assert not replay.ok
    assert replay.detail.endswith("the same bytes, but not at epoch-2")


def newest(run: Path) -> str:
    found = [path.read_text() for path in run.glob("*/metadata.json")]
    return max(found, key=lambda each: json.loads(each)["step"])


def run_steps(run: Path, step: int) -> dict[str, Any]:
    lines = map(json.loads, (run / "metrics.jsonl").read_text().splitlines())
    found: dict[str, Any] = next(e for e in lines if (e["kind"], e.get("step")) == ("step", step))
    return found


@pytest.mark.parametrize("place", ["none", "empty"])
def test_folder_without_a_run_is_an_error(cli: Cli, tmp_path: Path, place: str) -> None:
    (tmp_path / "empty").mkdir()
    outcome = cli("verify", tmp_path / place)
    assert outcome.code == 1
    assert ("no such folder" if place == "none" else "holds no run") in outcome.error


# Contradictions: each edit leaves every file valid, and contradicts a hashed copy.


@pytest.fixture(scope="module")
def other_run(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run like `finished`, with another seed."""
    folder = tmp_path_factory.mktemp("other")
    chat = write_chat(folder / "chat.jsonl", sums(20))
    options: dict[str, Any] = {"epochs": 2, "lr": 1e-2, "dropout": 0.1, "save_steps": 3, "seed": 7}
    output = str(folder / "out")
    train(TrainConfig(str(model), str(chat), output=output, samples=0, quiet=True, **options))
    return folder / "out" / "checkpoints"


def sealed(folder: Path) -> None:
    """Write a checkpoint's manifest again, so that the checkpoint passes as intact."""
    (folder / "manifest.json").unlink()
    (folder / "manifest.json").write_text(json.dumps(_manifest(folder)))


def sign(run: Path, adapter: Path | None = None) -> None:
    """Write the hash of the adapter into the result, as the run would have."""
    path = adapter or run.parent / "adapters.safetensors"
    rewrite(run / "result.json", lambda found: found | {"sha256": file_hash(path)})


def edit(path: Path, **changes: Any) -> None:
    rewrite(path, lambda found: found | changes)


def lines_with(path: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    lines = map(json.loads, path.read_text().splitlines())
    path.write_text("".join(json.dumps(change(line)) + "\n" for line in lines))


def quartered(line: dict[str, Any]) -> dict[str, Any]:
    """Return a record whose losses, and the perplexities of steps, are those of a better run."""
    new = dict(line)
    for name in ("loss", "val_loss", "train_loss"):
        if line.get(name) is not None:
            new[name] = line[name] / 4
            new[name.replace("loss", "perplexity")] = math.exp(line[name] / 4)
    return new


def replace_adapter(run: Path, other: Path) -> None:
    shutil.copy(other.parent / "adapters.safetensors", run.parent)
    sign(run)


def replace_best(run: Path, other: Path) -> None:
    shutil.rmtree(run / "best")
    shutil.copytree(other / "best", run / "best")


def replace_weights_of_best(run: Path, other: Path) -> None:
    shutil.copy(other / "best" / "adapters.safetensors", run / "best")
    sealed(run / "best")


def scale(config: dict[str, Any]) -> dict[str, Any]:
    loaded = config["lora_parameters"]
    return config | {"lora_parameters": loaded | {"scale": loaded["scale"] * 20}}


def scale_in_header(run: Path, other: Path) -> None:
    path = run.parent / "adapters.safetensors"
    with safetensors.safe_open(path, "numpy") as file:
        metadata = file.metadata()
    own = scale(json.loads(metadata["adapter_config"]))
    metadata |= {"adapter_config": json.dumps(own, sort_keys=True)}
    safetensors.numpy.save_file(safetensors.numpy.load_file(path), path, metadata)
    sign(run)


def scale_of_best(run: Path, other: Path) -> None:
    rewrite(run / "best" / "adapter_config.json", scale)
    sealed(run / "best")


def outside(run: Path, other: Path) -> None:
    target = run.parent.parent / "elsewhere" / "adapters.safetensors"
    target.parent.mkdir()
    shutil.copy(run.parent / "adapters.safetensors", target)
    edit(run / "result.json", adapter="../../elsewhere/adapters.safetensors")


def turn_sign(found: dict[str, Any]) -> dict[str, Any]:
    difference = found["difference"]
    low, high = -difference["high"], -difference["low"]
    new = {"loss": -difference["loss"], "share": -difference["share"], "low": low, "high": high}
    return found | {"difference": difference | new, "verdict": "helped"}


def swap(found: dict[str, Any]) -> dict[str, Any]:
    """Turn an evaluation round, so that its own numbers agree."""
    share = -found["difference"]["loss"] / found["adapted"]["loss"]
    turned = turn_sign(found)
    difference = turned["difference"] | {"share": share}
    assert found["rows"] == 4  # too few for a verdict
    return turned | {
        "base": found["adapted"],
        "adapted": found["base"],
        "difference": difference,
        "verdict": "cannot tell",
    }


def earlier_losses(run: Path, other: Path) -> None:
    folder = next(run.glob("step-*"))
    lines_with(folder / "metrics.jsonl", quartered)
    sealed(folder)


def more_rows(found: list[dict[str, Any]]) -> list[dict[str, Any]]:
    first = found[0]
    return [first | {"rows_read": first["rows_read"] + 9, "rows_train": first["rows_train"] + 9}]


def in_config(path: Path, **changes: Any) -> None:
    rewrite(path, lambda found: found | {"config": found["config"] | changes})


def without(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda found: {key: value for key, value in found.items() if key != name}


def in_notes(config: dict[str, Any]) -> dict[str, Any]:
    return config | {"mlxtune": config["mlxtune"] | {"trained_rows": {"rows": 1}}}


def slightly_better(found: dict[str, Any]) -> dict[str, Any]:
    """Lower the loss by 0.04 nats, and agree on it in the other numbers."""
    loss, before = found["adapted"]["loss"] * 0.9, found["base"]["loss"]
    change = {"loss": loss - before, "share": (loss - before) / before}
    adapted = {"loss": loss, "perplexity": math.exp(loss)}
    return found | {"adapted": adapted, "difference": found["difference"] | change}


def loss_of_best(run: Path, other: Path) -> None:
    edit(run / "best" / "metadata.json", train_loss=0.5)
    sealed(run / "best")


EDITS: dict[str, tuple[Callable[[Path, Path], None], str, str]] = {
    "adapter of another run": (replace_adapter, "adapter", "differs from "),
    "best of another run": (replace_best, "best", "has seed 7, but "),
    "weights of another best": (replace_weights_of_best, "adapter", "differs from best/"),
    "scale beside the adapter": (
        lambda run, other: rewrite(run.parent / "adapter_config.json", scale),
        "adapter",
        "has scale ",
    ),
    "scale in the adapter": (scale_in_header, "adapter", "has scale "),
    "scale of best": (scale_of_best, "best", "has scale "),
    "losses": (
        lambda run, other: lines_with(run / "metrics.jsonl", quartered),
        "metrics.jsonl",
        "has ValidationRecord 0 with ",
    ),
    "losses of a checkpoint": (earlier_losses, "step", "has "),
    "sign of the evaluation": (
        lambda run, other: rewrite(run / "evaluation.json", turn_sign),
        "evaluation.json",
        "has difference ",
    ),
    "sides of the evaluation": (
        lambda run, other: rewrite(run / "evaluation.json", swap),
        "evaluation.json",
        "training, but metrics.jsonl has ",
    ),
    "verdict": (
        lambda run, other: edit(run / "evaluation.json", verdict="hurt"),
        "evaluation.json",
        "has verdict 'hurt', but its interval",
    ),
    "rows of the evaluation": (
        lambda run, other: edit(run / "evaluation.json", rows=100_000),
        "evaluation.json",
        "has 100,000 rows, but ledger.json has ",
    ),
    "emptied ledger": (
        lambda run, other: (run / "ledger.json").write_text("[]") and None,
        "ledger.json",
        "has no rows",
    ),
    "rows of the ledger": (
        lambda run, other: rewrite(run / "ledger.json", more_rows),
        "ledger.json",
        "rows to train on, but epoch 1",
    ),
    "data of run.json": (
        lambda run, other: in_config(run / "run.json", data=["elsewhere.jsonl"]),
        "run.json",
        "has --data ['elsewhere.jsonl'], but ",
    ),
    "hash of the data": (
        lambda run, other: edit(run / "run.json", data_hash="sha256:0"),
        "run.json",
        "has data_hash 'sha256:0', but ",
    ),
    "model of run.json": (
        lambda run, other: in_config(run / "run.json", model_path="other/model"),
        "run.json",
        "has --model-path 'other/model', but ",
    ),
    "adapter outside the run": (outside, "adapter", "but the run's options put it at "),
    "best loss of the result": (
        lambda run, other: edit(run / "result.json", best_val_loss=0.5),
        "result.json",
        "has best_val_loss 0.5, but ",
    ),
    "early stop of the result": (
        lambda run, other: edit(run / "result.json", stopped_early=True),
        "result.json",
        "has stopped_early True, but ",
    ),
    "perplexity of the base": (
        lambda run, other: edit(run / "evaluation.json", base={"loss": 2.0, "perplexity": 5e4}),
        "evaluation.json",
        "has ",
    ),
    "candidates": (
        lambda run, other: edit(run / "evaluation.json", candidates=9),
        "evaluation.json",
        "has candidates 9, but metrics.jsonl has 2",
    ),
    "slightly better loss": (
        lambda run, other: rewrite(run / "evaluation.json", slightly_better),
        "evaluation.json",
        "after training, but metrics.jsonl has ",
    ),
    "losses in metadata": (loss_of_best, "best", "metadata.json has train_loss 0.5, but "),
    "config beside the adapter": (
        lambda run, other: edit(run.parent / "adapter_config.json", num_layers=2),
        "adapter",
        "has another num_layers than best",
    ),
    "model beside the adapter": (
        lambda run, other: edit(run.parent / "adapter_config.json", model="/another"),
        "adapter",
        "has another model than best",
    ),
    "rows beside the adapter": (
        lambda run, other: rewrite(run.parent / "adapter_config.json", in_notes),
        "adapter",
        "adapter_config.json has another rows than best",
    ),
    "no config beside the adapter": (
        lambda run, other: (run.parent / "adapter_config.json").unlink(),
        "adapter",
        "adapter_config.json is missing",
    ),
    "no trained rows": (
        lambda run, other: (run / "trained_rows.bin").unlink(),
        "files before the first step",
        "trained_rows.bin is missing, but ",
    ),
    "no run.json": (
        lambda run, other: (run / "run.json").unlink(),
        "files before the first step",
        "run.json is missing, but ",
    ),
    "device of run.json": (
        lambda run, other: edit(run / "run.json", device="another"),
        "files before the first step",
        "its hashes are not those in ",
    ),
    "trained rows of another run": (
        lambda run, other: shutil.copy(other / "trained_rows.bin", run) and None,
        "trained_rows.bin",
        "its hashes are not those in ",
    ),
}


@pytest.mark.parametrize("spoil", ["edited", "removed"])
def test_evaluation_has_its_hash_in_the_result(run: Path, spoil: str) -> None:
    if spoil == "edited":
        edit(run / "evaluation.json", only_trained=True, verdict="cannot tell", tokens=7)
        problem = "has changed since the run wrote it"
    else:
        (run / "evaluation.json").unlink()
        problem = "is missing"
    assert problem in bad(run)["evaluation.json"]


def test_finished_run_names_a_missing_result_or_verdict(run: Path) -> None:
    rewrite(run / "result.json", without("evaluation_sha256"))
    (run / "evaluation.json").unlink()
    details = {check.name: check.detail for check in verify(run).checks}
    assert "the run has no verdict" in details["evaluation.json"]
    (run / "result.json").unlink()
    details = {check.name: check.detail for check in verify(run).checks}
    ended = "unfinished: its last step is taken, but there is no result.json"
    assert details["end"].startswith(ended)


@pytest.mark.parametrize("name", EDITS)
def test_file_that_contradicts_a_hashed_copy_is_found_and_named(
    run: Path, other_run: Path, name: str
) -> None:
    change, check, problem = EDITS[name]
    change(run, other_run)
    if check == "evaluation.json":
        edit(run / "result.json", evaluation_sha256=file_hash(run / "evaluation.json"))
    result = verify(run)
    found = {each.name: each.detail for each in result.checks if not each.ok}
    own = next((detail for each, detail in found.items() if each.startswith(check)), "")
    assert problem in own, found


# A replay finds edits whose hashes were written again.


def seal_all(run: Path) -> None:
    for manifest in run.glob("*/manifest.json"):
        sealed(manifest.parent)


def in_all_metrics(run: Path, change: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    for path in [run / "metrics.jsonl", *run.glob("*/metrics.jsonl")]:
        lines_with(path, change)
    seal_all(run)


def validation(step: int, loss: float) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Return a change of the validation after a step, and of the epoch that ends there."""

    def change(line: dict[str, Any]) -> dict[str, Any]:
        if (line["kind"], line.get("step")) == ("validation", step) or (
            step and (line["kind"], line.get("epoch")) == ("epoch", step // 4)
        ):
            return line | {"val_loss": loss, "val_perplexity": math.exp(loss)}
        return line

    return change


def last_validation(run: Path) -> None:
    found = json.loads((run / "result.json").read_text())
    step, loss = found["best_step"], found["best_val_loss"] * 0.99
    in_all_metrics(run, validation(step, loss))
    edit(run / "result.json", best_val_loss=loss)
    for path in run.glob("*/metadata.json"):
        own = json.loads(path.read_text())
        if own["best_step"] == step:
            edit(path, best_val_loss=loss)
        if own["step"] == step and own["val_loss"] is not None:
            edit(path, val_loss=loss, val_perplexity=math.exp(loss))
    seal_all(run)


def first_validation(run: Path) -> None:
    loss = json.loads((run / "result.json").read_text())["initial_val_loss"] * 1.01
    in_all_metrics(run, validation(0, loss))
    edit(run / "result.json", initial_val_loss=loss)


def rate_of_step_2(line: dict[str, Any]) -> dict[str, Any]:
    changed = line["kind"] == "step" and line["step"] == 2
    return line | {"learning_rate": 0.5} if changed else line


def in_difference(found: dict[str, Any]) -> dict[str, Any]:
    return found | {"difference": found["difference"] | {"low": -9.0, "high": 9.0}}


def optimizer(run: Path, name: str = "epoch-2") -> None:
    path = run / name / "optimizer.safetensors"
    found = safetensors.numpy.load_file(path)
    found["m.0"] = found["m.0"] * 0
    safetensors.numpy.save_file(found, path)
    sealed(path.parent)


def config_of_newest(run: Path) -> None:
    edit(run / "epoch-2" / "adapter_config.json", num_layers=7)
    sealed(run / "epoch-2")


def loss_of_newest(run: Path) -> None:
    edit(run / "epoch-2" / "metadata.json", train_loss=0.5)
    sealed(run / "epoch-2")


FORGED: dict[str, tuple[Callable[[Path], None], str, str]] = {
    "last validation": (last_validation, "replay", "the metrics differ: the run has Validation"),
    "first validation": (first_validation, "earlier steps", "the validation before the first"),
    "learning rate": (
        lambda run: in_all_metrics(run, rate_of_step_2),
        "learning rates",
        "step 2 has learning rate 0.5, but ",
    ),
    "only trained": (
        lambda run: edit(run / "evaluation.json", only_trained=True),
        "evaluation.json again",
        "has another only_trained than its replay",
    ),
    "interval": (
        lambda run: rewrite(run / "evaluation.json", in_difference),
        "evaluation.json again",
        "has another low than ",
    ),
    "rows that changed most": (
        lambda run: edit(run / "evaluation.json", gained=[], lost=[]),
        "evaluation.json again",
        "number of entries in ",
    ),
    "optimizer": (optimizer, "replay", "optimizer.safetensors of epoch-2 differs"),
    "optimizer of best": (lambda run: optimizer(run, "best"), "replay", "of best differs"),
    "config": (config_of_newest, "replay", "adapter_config.json (num_layers) of epoch-2"),
    "metadata": (loss_of_newest, "replay", "metadata.json (train_loss) of epoch-2"),
    "ledger": (
        lambda run: rewrite(run / "ledger.json", lambda found: [found[0] | {"notes": {"a": 1}}]),
        "ledger.json again",
        "has another a than ",
    ),
    "plan": (
        lambda run: edit(run / "run.json", template="another"),
        "run.json again",
        "has another template than ",
    ),
}


@pytest.mark.parametrize("name", slow_except(FORGED, "optimizer", "ledger"))
def test_replay_detects_changes_with_updated_hashes(run: Path, name: str) -> None:
    change, check, problem = FORGED[name]
    change(run)
    found = {each.name: each.detail for each in verify(run, replay=True).checks if not each.ok}
    assert problem in found.get(check, ""), found


def test_replay_may_read_the_model_from_another_folder(
    run: Path, model: Path, tmp_path: Path
) -> None:
    shutil.copytree(model, tmp_path / "renamed")
    found = verify(run, replay=True, model_path=str(tmp_path / "renamed"))
    assert found.ok, found.checks


def test_replay_without_the_adapter_that_training_started_from(
    run: Path, model: Path, chat: Path, tmp_path: Path
) -> None:
    output, options = str(tmp_path / "next"), {"epochs": 2, "keep": 2, "samples": 0, "quiet": True}
    start = str(run.parent / "adapters.safetensors")
    train(TrainConfig(str(model), str(chat), output=output, init_adapter=start, **options))
    shutil.rmtree(run.parent)
    found = verify(output, replay=True)
    assert found.ok, found.checks
    details = {check.name: check.detail for check in found.checks}
    assert details["evaluation.json again"].startswith("not judged again")
    assert details["earlier steps"].endswith("nor was the validation before them")
