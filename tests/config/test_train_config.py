"""Each config: its defaults, its checks, and its derived values."""

from __future__ import annotations

import dataclasses
import json
import pickle
from pathlib import Path
from typing import Any

import pytest

from mlxtune.config import BenchConfig, InstructConfig, InstructTrainingConfig, TrainConfig
from mlxtune.config.fields import explicit_options
from mlxtune.config.objective_config import OBJECTIVES
from mlxtune.config.train_config import OPTIONS
from mlxtune.errors import ConfigError
from tests.configs import config, problems

# Defaults; their numbers come from issue 2.


def test_run_defaults_match_the_contract() -> None:
    assert dataclasses.asdict(config()) == {
        "model_path": "data/demo",
        "data": ("chat.jsonl",),
        "output": "adapters.safetensors",
        "rank": 8,
        "alpha": 16.0,
        "lr": 1e-4,
        "epochs": 1,
        "max_seq_len": 512,
        "cut": "end",
        "targets": ("q_proj", "v_proj"),
        "memory_limit": 24.0,
        "batch_size": 4,
        "val_split": 0.2,
        "val_data": None,
        "val_rows": 1000,
        "schedule": "warmup-cosine",
        "warmup_fraction": 0.1,
        "lr_min": 1e-6,
        "weight_decay": 0.01,
        "max_grad_norm": 1.0,
        "patience": 5,
        "save_every": 1,
        "checkpoint_dir": None,
        "seed": 42,
        "num_layers": None,
        "dropout": 0.0,
        "max_steps": None,
        "order": "shuffle",
        "dtype": "auto",
        "grad_checkpoint": "auto",
        "parallel": "data",
        "format": "auto",
        "split_at": None,
        "field": (),
        "template": "auto",
        "turns": "all",
        "thinking": "auto",
        "merge_system": False,
        "strict": False,
        "cache_dir": None,
        "no_cache": False,
        "log_every": 10,
        "profile_interval": 0,
        "track": (),
        "target_rank": (),
        "rslora": False,
        "dora": False,
        "lr_ratio": 1.0,
        "objective": "sft",
        "beta": None,
        "dpo_loss": "sigmoid",
        "label_smoothing": 0.0,
        "sft_weight": 0.0,
        "orpo_nll": "answer",
        "cpo_alpha": None,
        "gamma": 1.0,
        "desirable_weight": 1.0,
        "undesirable_weight": 1.0,
        "kto_loss": "kto",
        "grpo_loss": "dapo",
        "clip_low": 0.2,
        "clip_high": 0.2,
        "kl": 0.0,
        "updates": 1,
        "scale_rewards": "group",
        "correct": False,
        "mask_truncated": False,
        "max_new_tokens": 256,
        "reward": (),
        "reward_timeout": 10.0,
        "group_size": 8,
        "temperature": 1.0,
        "top_p": 1.0,
        "init": "lora",
        "init_adapter": None,
        "samples": 3,
        "quiet": False,
        "val_steps": None,
        "save_steps": None,
        "save_minutes": 10.0,
        "keep": 2,
        "overwrite": False,
        "auto": False,
        "on_nonfinite": "skip",
        "wait": False,
        "ignore_ledger": False,
        "allow_sleep": False,
        "pause_on_battery": False,
        "quantize": None,
        "double_quant": False,
        "quantized_compute": "auto",
        "other_base": False,
        "trust_remote_code": False,
    }


def test_trainer_and_pipeline_defaults_match_the_contract() -> None:
    trainer = dataclasses.asdict(InstructTrainingConfig())
    assert (
        trainer
        | {
            "epochs": 1,
            "val_split": 0.2,
            "save_every": 1,
            "patience": 5,
            "checkpoint_dir": "checkpoints",
            "seed": 42,
            "warmup_fraction": 0.1,
            "lr_min": 1e-6,
            "lr": None,
        }
        == trainer
    )

    pipeline = dataclasses.asdict(InstructConfig())
    assert (
        pipeline
        | {
            "rank": 8,
            "alpha": 16.0,
            "lr": 1e-4,
            "max_grad_norm": 1.0,
        }
        == pipeline
    )


def test_former_options_are_accepted_and_ignored() -> None:
    """Programs may still pass them, by name or by position."""
    assert InstructTrainingConfig(log_interval=5) == InstructTrainingConfig()
    assert InstructTrainingConfig(1, 0.2, 5, "checkpoints", 42, 9, 2e-4).learning_rate == 2e-4
    assert InstructConfig(epochs=3, max_seq_len=2048) == InstructConfig()
    assert InstructConfig(4, 8.0, 2e-4, 3, 2048, 0.5).gradient_clip_norm == 0.5
    changed = dataclasses.replace(InstructConfig(4, max_seq_len=2048), seed=1)
    assert (changed.lora_rank, changed.seed) == (4, 1)
    with pytest.raises(ConfigError, match="unknown option 'max_seq_lens'"):
        InstructConfig(max_seq_lens=2048)  # type: ignore[call-arg]


def test_former_names_of_options_are_accepted() -> None:
    """Programs may pass and read the options by the names that only these two configs had."""
    former = {"lora_rank": 4, "lora_alpha": 2.0, "learning_rate": 1e-3, "gradient_clip_norm": 0.5}
    found = InstructConfig(**former)
    assert found == InstructConfig(rank=4, alpha=2.0, lr=1e-3, max_grad_norm=0.5)
    assert {name: getattr(found, name) for name in former} == former
    assert dataclasses.replace(found, lora_rank=6).rank == 6
    assert explicit_options(found) == {"rank", "alpha", "lr", "max_grad_norm"}
    trainer = InstructTrainingConfig(early_stopping_patience=7, learning_rate=1e-3)
    assert (trainer.patience, trainer.lr) == (7, 1e-3)
    with pytest.raises(ConfigError, match="--rank must be at least 1, not 0"):
        InstructConfig(lora_rank=0)


def test_option_given_by_both_of_its_names_is_an_error() -> None:
    with pytest.raises(ConfigError, match="lora_rank is the former name of rank: pass only one"):
        InstructConfig(rank=4, lora_rank=8)
    assert dataclasses.replace(InstructConfig(rank=4), lora_rank=8).rank == 8


# Laws


def test_end_of_the_cosine_may_not_lie_above_its_peak() -> None:
    (found,) = problems(lr=1e-6, lr_min=1e-5)
    assert found.startswith("--lr-min 1e-05 is above --lr 1e-06")

    assert config(lr=1e-6, lr_min=1e-5, schedule="constant").lr_min == 1e-5


def test_configs_cannot_be_changed_once_checked() -> None:
    for one in (config(), InstructTrainingConfig(), InstructConfig()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            one.seed = -1  # type: ignore[misc]


@pytest.mark.parametrize(
    "changes",
    [{"epochs": 0}, {"val_split": 0}, {"val_split": 0.51}, {"early_stopping_patience": 0}],
)
def test_trainers_own_laws_hold_for_its_config(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        InstructTrainingConfig(**changes)


@pytest.mark.parametrize(
    "changes", [{"lora_rank": 0}, {"lora_alpha": 0}, {"learning_rate": float("inf")}]
)
def test_pipelines_own_laws_hold_for_its_config(changes: dict[str, Any]) -> None:
    with pytest.raises(ConfigError):
        InstructConfig(**changes)


# Derived parts


def test_checkpoints_are_next_to_the_output_by_default(tmp_path: Path) -> None:
    output = str(tmp_path / "a" / "people.safetensors")

    assert config(output=output).checkpoint_path == tmp_path / "a" / "checkpoints"
    assert config(output=output, checkpoint_dir="runs").checkpoint_path == Path("runs")
    assert config().checkpoint_path == Path("checkpoints")


def test_output_without_an_extension_is_the_adapters_folder(tmp_path: Path) -> None:
    for given in (tmp_path, tmp_path / "new"):
        found = config(output=str(given))
        assert found.output_path == given / "adapters.safetensors"
        assert found.checkpoint_path == given / "checkpoints"

    file = tmp_path / "earlier"  # an adapter of an earlier version, which a run may resume
    file.touch()
    assert config(output=str(file)).output_path == file


def test_home_is_found_in_paths_and_other_tildes_are_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = config(output="~/a.safetensors", checkpoint_dir="~/runs")
    assert found.output_path == tmp_path / "a.safetensors"
    assert found.checkpoint_path == tmp_path / "runs"

    # A shell passes the name of an unknown user's home unexpanded.
    stranger = "~nobody-of-that-name/a.safetensors"
    assert config(output=stranger).output_path == Path(stranger)


def test_trainer_and_pipeline_get_each_option_of_the_run() -> None:
    found = config(
        rank=2,
        alpha=6,
        lr=3e-4,
        epochs=7,
        max_seq_len=99,
        targets="k_proj",
        batch_size=5,
        val_split=0.3,
        val_rows=17,
        schedule="constant",
        warmup_fraction=0.4,
        lr_min=2e-6,
        weight_decay=0.5,
        max_grad_norm=0.25,
        patience=3,
        save_every=2,
        checkpoint_dir="runs",
        seed=11,
        num_layers=4,
        dropout=0.1,
        max_steps=13,
        order="length",
        log_every=9,
        val_steps=40,
        save_steps=50,
        save_minutes=2.5,
        keep=4,
        on_nonfinite="stop",
        target_rank=("q_proj=3",),
        rslora=True,
        dora=True,
        lr_ratio=4,
        init_adapter="out",
    )

    assert dataclasses.asdict(found.trainer_config()) == {
        "epochs": 7,
        "val_split": 0.3,
        "save_every": 2,
        "patience": 3,
        "checkpoint_dir": "runs",
        "seed": 11,
        "warmup_fraction": 0.4,
        "lr_min": 2e-6,
        "batch_size": 5,
        "schedule": "constant",
        "max_steps": 13,
        "order": "length",
        "val_rows": 17,
        "val_steps": 40,
        "save_steps": 50,
        "save_minutes": 2.5,
        "keep": 4,
        "on_nonfinite": "stop",
        "lr": 3e-4,
    }
    assert dataclasses.asdict(found.pipeline_config()) == {
        "rank": 2,
        "alpha": 6.0,
        "lr": 3e-4,
        "max_grad_norm": 0.25,
        "targets": ("k_proj",),
        "num_layers": 4,
        "dropout": 0.1,
        "weight_decay": 0.5,
        "seed": 11,
        "target_rank": ("q_proj=3",),
        "rslora": True,
        "dora": True,
        "lr_ratio": 4.0,
        "init": "lora",
        "init_adapter": "out",
    }


def test_trainer_config_allows_no_validation() -> None:
    assert config(val_split=0).trainer_config().val_split == 0


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_default_rate_of_every_objective_is_the_documented_one(objective: str) -> None:
    made = TrainConfig("m", ("d",), objective=objective, reward=("json",) * (objective == "grpo"))
    assert made.lr == (1e-4 if objective == "sft" else 5e-6)
    assert "default: 0.0001, or 5e-06 for preferences and rewards" in OPTIONS["lr"].help


@pytest.mark.parametrize("kind", [TrainConfig, BenchConfig])
def test_copy_with_another_objective_has_the_rate_of_that(kind: Any) -> None:
    first = kind("m", ("d",))
    other = dataclasses.replace(first, objective="dpo")
    assert (first.lr, other.lr) == (1e-4, 5e-6)
    assert other == kind("m", ("d",), objective="dpo")
    assert dataclasses.replace(other, objective="sft") == first
    chosen = kind("m", ("d",), lr=1e-4)
    assert dataclasses.replace(chosen, objective="dpo").lr == 1e-4
    assert json.loads(json.dumps(dataclasses.asdict(other)))["lr"] == 5e-6
    assert pickle.loads(pickle.dumps(other)) == other
