"""Runs with LoRA's family: trained, stopped, resumed, checked."""

from __future__ import annotations

import json
import shutil
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import safetensors.numpy

from mlxtune import PlanConfig, TrainConfig, plan, resume, train
from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.initialize import with_adapter
from mlxtune.backend.step.pipeline import InstructPipeline
from mlxtune.config.fields import flag
from mlxtune.core.training.trainer import InstructTrainer
from mlxtune.errors import ConfigError, ModelError, TrainingInterrupted
from tests.command import Cli
from tests.configs import train_to
from tests.models import sums, write_chat
from tests.slow import slow, slow_except

MEMBERS: dict[str, dict[str, Any]] = {
    "dora": {"dora": True, "rslora": True, "lr_ratio": 4, "target_rank": {"q_proj": 3}},
    "pissa": {"init": "pissa", "target_rank": {"v_proj": 5}},
}


@pytest.fixture(scope="module")
def chat(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_chat(tmp_path_factory.mktemp("data") / "chat.jsonl", sums(20))


def config(model: Path, chat: Path, folder: Path, **options: Any) -> TrainConfig:
    output = str(folder / "adapters.safetensors")
    given = {"lr": 1e-2, "rank": 4, "dropout": 0.1, "quiet": True, "samples": 0}
    given |= {"save_steps": 2, **options}
    return TrainConfig(str(model), str(chat), output=output, **given)


def starting_from(start: Path, **given: Any) -> dict[str, Any]:
    """Return the options of a run that starts from an adapter."""
    return with_adapter({"init_adapter": str(start), **given}, AdapterFile.find(str(start)))


@pytest.mark.parametrize("member", slow_except(MEMBERS, "pissa"))
def test_run_stopped_within_an_epoch_resumes_to_the_same_files(
    cli: Cli, model: Path, chat: Path, tmp_path: Path, member: str
) -> None:
    train(config(model, chat, tmp_path / "whole", **MEMBERS[member]))
    with pytest.raises(TrainingInterrupted):
        train_to(config(model, chat, tmp_path / "out", **MEMBERS[member]), 3)
    resume(tmp_path / "out")
    for name in ("adapters.safetensors", "adapter_config.json"):
        whole, again = (tmp_path / run / name for run in ("whole", "out"))
        assert whole.read_bytes() == again.read_bytes()
    outcome = cli("verify", tmp_path / "out", "--replay", "--json")
    found = json.loads(outcome.out)
    assert found["ok"], found
    assert any(check["name"] == "replay" for check in found["checks"])


@pytest.mark.parametrize("member", [slow("plain"), *slow_except(MEMBERS, "dora")])
def test_copy_of_the_best_checkpoint_equals_its_adapter_loaded_and_written(
    model: Path, chat: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, member: str
) -> None:
    recipe = import_module("mlxtune.commands.train")
    loaded, write = tmp_path / "loaded" / "adapters.safetensors", recipe.write_adapter

    def write_both(pipeline: InstructPipeline, trainer: InstructTrainer, *rest: Any) -> None:
        with monkeypatch.context() as patched:
            patched.setattr(pipeline, "load", None)
            write(pipeline, trainer, *rest)
        pipeline.load(trainer.best_folder)
        pipeline.write(loaded)

    monkeypatch.setattr(recipe, "write_adapter", write_both)
    # Random answers: their loss rises soon, so that the model's last state is not the best.
    random = [[("user", f"What is {i}?"), ("assistant", "zqxj%~" * 3)] for i in range(3)]
    options = {"val_data": str(write_chat(tmp_path / "random.jsonl", random)), "epochs": 12}
    options |= {"patience": 1, "schedule": "constant", **MEMBERS.get(member, {})}
    training = train(config(model, chat, tmp_path / "out", **options)).training
    assert training is not None
    assert training.best_step is not None
    assert training.best_step < len(training.steps)
    for name in ("adapters.safetensors", "adapter_config.json"):
        assert (tmp_path / "out" / name).read_bytes() == loaded.with_name(name).read_bytes()


@pytest.fixture(scope="module")
def first(model: Path, chat: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of DoRA with unequal ranks, to continue from."""
    folder = tmp_path_factory.mktemp("first")
    train(config(model, chat, folder, **MEMBERS["dora"], num_layers=1))
    return folder


def test_run_continues_from_an_adapter_with_its_options(
    cli: Cli, model: Path, chat: Path, first: Path, tmp_path: Path
) -> None:
    start = Path(shutil.copytree(first, tmp_path / "start"))
    (tmp_path / "run.yaml").write_text("lr: 1e-30\nlr_min: 0\nquiet: true\nsave_steps: 1\n")
    arguments = ["train", "--model-path", model, "--data", chat, "--init-adapter", start]
    output = ["--output", tmp_path / "out" / "adapters.safetensors", "--max-steps", "1"]
    outcome = cli(*arguments, *output, "--config", tmp_path / "run.yaml")
    assert outcome.code == 0, outcome.err
    # At a negligible rate, the written adapter equals the initial one.
    ours, theirs = (
        safetensors.numpy.load_file(folder / "adapters.safetensors")
        for folder in (tmp_path / "out", start)
    )
    assert ours.keys() == theirs.keys()
    assert all(abs(ours[name] - theirs[name]).max() < 1e-6 for name in ours)
    said, before = (
        json.loads((folder / "adapter_config.json").read_text())
        for folder in (tmp_path / "out", start)
    )
    assert said["mlxtune"] == before["mlxtune"]
    assert said["num_layers"] == before["num_layers"] == 1
    assert said["lora_parameters"]["keys"] == before["lora_parameters"]["keys"]


@pytest.mark.slow
def test_python_continues_from_an_adapter_as_the_command_line_does(
    cli: Cli, model: Path, chat: Path, first: Path, tmp_path: Path
) -> None:
    options: dict[str, Any] = {"model_path": model, "data": chat, "init_adapter": first}
    options |= {"max_steps": 1, "lr": 1e-2, "seed": 7, "samples": 0}
    flags = [part for name, value in options.items() for part in (flag(name), value)]
    outcome = cli("train", *flags, "--quiet", "--output", tmp_path / "flags")
    assert outcome.code == 0, outcome.err
    options["quiet"] = True
    train(**options, output=tmp_path / "keywords")
    train(TrainConfig(**options, output=str(tmp_path / "config")))
    train(replace(TrainConfig(**options | {"seed": 8}), seed=7, output=str(tmp_path / "copy")))
    for name in ("adapters.safetensors", "adapter_config.json"):
        by_flags = (tmp_path / "flags" / name).read_bytes()
        for folder in ("keywords", "config", "copy"):
            assert (tmp_path / folder / name).read_bytes() == by_flags, folder


def test_adapter_to_continue_from_names_its_base(
    cli: Cli, model: Path, chat: Path, first: Path, tmp_path: Path
) -> None:
    options = {"data": chat, "max_steps": 1, "samples": 0, "quiet": True, "init_adapter": first}
    train(**options, output=tmp_path / "named")
    train(**options, output=tmp_path / "given", model_path=model)
    named, given = (
        (tmp_path / name / "adapters.safetensors").read_bytes() for name in ("named", "given")
    )
    assert named == given
    assert cli("plan", "--init-adapter", first).code == 0
    # Another user's adapter downloads nothing, and an adapter without a base needs one.
    stray = tmp_path / "stray"
    stray.mkdir()
    weights = safetensors.numpy.load_file(first / "adapters.safetensors")
    safetensors.numpy.save_file(weights, stray / "adapters.safetensors")
    settings = json.loads((first / "adapter_config.json").read_text())
    for base, problem in (
        ("org/model", "to download the model, pass --model-path org/model"),
        ("", "names no base model: pass --model-path"),
    ):
        (stray / "adapter_config.json").write_text(json.dumps(settings | {"model": base}))
        assert cli("train", "--data", chat, "--init-adapter", stray).error.endswith(problem)
    assert cli("train", "--data", chat).error.startswith("--model-path is required")


def test_plan_counts_the_parameters_of_an_adapter_to_continue_from(
    cli: Cli, model: Path, first: Path
) -> None:
    explicit = plan(model_path=model, rank=4, num_layers=1, **MEMBERS["dora"])
    predicted = plan(model_path=model, init_adapter=first)
    assert predicted.trainable_parameters == explicit.trainable_parameters
    by_flags = cli("plan", "--model-path", model, "--init-adapter", first, "--json")
    assert json.loads(by_flags.out)["lora"]["trainable_parameters"] == explicit.trainable_parameters


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"rank": 8}, "its rank is 4, but --rank and --target-rank give 8"),
        ({"target_rank": {"q_proj": 8}}, "its rank is 4, but --rank and --target-rank give 8"),
        ({"alpha": 3.0}, "but --alpha 3 gives"),
        ({"dora": False}, "its type is dora, but --dora is off"),
        ({"targets": ("q_proj",), "target_rank": {}}, "but --targets gives self_attn.q_proj"),
    ],
)
def test_option_that_contradicts_the_adapter_is_named_before_data(
    model: Path,
    chat: Path,
    first: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: dict[str, Any],
    problem: str,
) -> None:
    given: dict[str, Any] = {"init_adapter": str(first), "output": str(tmp_path), **options}
    monkeypatch.setattr("mlxtune.session.session.load_dataset", None)
    monkeypatch.setattr("mlxtune.backend.models.loading.read_weights", None)
    for function, kind in ((train, TrainConfig), (plan, PlanConfig)):
        with pytest.raises(ModelError, match=problem):
            function(model_path=model, data=chat, **given)
        with pytest.raises(ModelError, match=problem):
            function(kind(str(model), (str(chat),), **given))


def test_resumed_run_needs_the_adapter_no_more_and_knows_which_it_was(
    model: Path, chat: Path, first: Path, tmp_path: Path
) -> None:
    start = Path(shutil.copytree(first, tmp_path / "start"))
    options = starting_from(start, num_layers=1)
    train(config(model, chat, tmp_path / "whole", **options))
    with pytest.raises(TrainingInterrupted):
        train_to(config(model, chat, tmp_path / "out", **options), 3)
    other = Path(shutil.copytree(tmp_path / "whole", tmp_path / "other"))
    with pytest.raises(ModelError, match="the run did not start from"):
        resume(tmp_path / "out", init_adapter=str(other))
    shutil.rmtree(start)
    resume(tmp_path / "out")
    files = [tmp_path / run / "adapters.safetensors" for run in ("whole", "out")]
    assert files[0].read_bytes() == files[1].read_bytes()
    metadata = json.loads((tmp_path / "out/checkpoints/best/metadata.json").read_text())
    assert len(metadata["init_adapter_hash"]) == 64


@pytest.mark.parametrize("start", [".", "checkpoints/best"])
def test_initial_adapter_that_the_run_would_replace_is_refused(
    model: Path, chat: Path, tmp_path: Path, start: str
) -> None:
    """Its verdict compares the two, and its replay starts from the first."""
    train(config(model, chat, tmp_path, template="gemma"))
    before = (tmp_path / "adapters.safetensors").read_bytes()
    start = str(tmp_path / start)
    with pytest.raises(ConfigError, match=r"would replace .*choose another --output"):
        train(config(model, chat, tmp_path, init_adapter=start, overwrite=True))
    assert (tmp_path / "adapters.safetensors").read_bytes() == before
    assert not list(tmp_path.glob("checkpoints/previous*"))


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"rank": 7}, "its rank is 4, but --rank and --target-rank give 7"),
        ({"alpha": 5.0}, r"its scale is 8, but --alpha 5 gives 2\.5"),
        ({"dora": False}, "its type is dora, but --dora is off"),
        (
            {"targets": ("k_proj",), "target_rank": ()},
            r"its targets are .*q_proj.*, but --targets gives self_attn\.k_proj: leave",
        ),
        ({"target_rank": {"q_proj": 2}}, "q_proj has non-zero values beyond rank 2"),
    ],
)
def test_option_that_contradicts_the_adapter_is_an_error_that_names_both(
    model: Path, chat: Path, first: Path, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    options = starting_from(first, **changes)
    with pytest.raises(ModelError, match=problem):
        train(config(model, chat, tmp_path, **options))
    assert not (tmp_path / "adapters.safetensors").exists()


def test_training_continues_from_the_lora_equivalent_of_pissa(
    model: Path, chat: Path, tmp_path: Path
) -> None:
    train(config(model, chat, tmp_path / "first", init="pissa", max_steps=2))
    options = starting_from(tmp_path / "first")
    assert (options["rank"], options["alpha"]) == (8, 32.0)
    train(config(model, chat, tmp_path / "next", **options, lr_min=0.0, max_steps=1))


@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"init": "pissa", "dora": True}, "--init pissa changes the weights whose row norms"),
        ({"init": "pissa", "init_adapter": "x"}, "--init pissa starts from the weights"),
        ({"init": "gaussian"}, "--init must be lora, pissa or pissa_niter_N"),
        ({"target_rank": ("q_proj",)}, "--target-rank 'q_proj' must be like q_proj=16"),
        ({"lr_ratio": 0}, "--lr-ratio must be above 0"),
    ],
)
def test_options_that_make_no_sense_together_are_named(
    options: dict[str, Any], problem: str
) -> None:
    with pytest.raises(ConfigError, match=problem):
        TrainConfig("model", "data", **options)


def test_missing_adapter_names_its_option(cli: Cli, model: Path) -> None:
    outcome = cli("train", "--model-path", model, "--data", "x", "--init-adapter", "nowhere")
    assert outcome.code != 0
    assert "nowhere: no such file or folder: check --init-adapter" in outcome.err
    assert "Traceback" not in outcome.err
