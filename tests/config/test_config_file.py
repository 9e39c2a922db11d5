"""Config files of mlx-lm become options, and each entry is named."""

from __future__ import annotations

from typing import Any

import pytest

import mlxtune.cli.table  # noqa: F401, defines every config
from mlxtune.config import TrainConfig
from mlxtune.config.config_file import is_mlx_lm_file, translate
from mlxtune.config.fields import every_option

EXAMPLE = {
    **{"model": "mlx_model", "train": True, "fine_tune_type": "lora", "training_mode": "normal"},
    **{"optimizer": "adamw", "data": "/path/to/data", "seed": 0, "num_layers": 16},
    **{"batch_size": 4, "iters": 1000, "val_batches": 25, "learning_rate": "1e-5"},
    **{"steps_per_report": 10, "steps_per_eval": 200, "resume_adapter_file": None},
    **{"adapter_path": "adapters", "save_every": 100, "test": False, "test_batches": 100},
    **{"max_seq_length": 2048, "grad_checkpoint": False},
    "lora_parameters": {"keys": ["self_attn.q_proj"], "rank": 8, "scale": 20.0, "dropout": 0.0},
}


def test_example_of_mlx_lm_becomes_a_run_and_every_entry_is_named() -> None:
    found = translate(EXAMPLE)

    assert found.problems == []
    assert [line.partition(":")[0] for line in found.lines] == list(EXAMPLE)
    assert found.lines[9] == (
        "iters: 1000 → --max-steps 1000 --epochs 1000, as many passes as the steps take"
    )
    assert found.options == {
        **{"model_path": "mlx_model", "weight_decay": 0.01, "data": "/path/to/data", "seed": 0},
        **{"num_layers": 16, "batch_size": 4, "max_steps": 1000, "epochs": 1000, "lr": "1e-5"},
        **{"schedule": "constant", "log_every": 10, "val_steps": 200, "output": "adapters"},
        **{"save_steps": 100, "max_seq_len": 2048, "grad_checkpoint": "auto"},
        **{"rank": 8, "alpha": 160.0, "targets": ["self_attn.q_proj"]},
    }
    TrainConfig(**found.options)


@pytest.mark.parametrize(
    ("entries", "options"),
    [
        ({"fine_tune_type": "dora"}, {"dora": True}),
        ({"optimizer": "adam"}, {"weight_decay": 0}),
        (
            {"optimizer": "adamw", "optimizer_config": {"adamw": {"weight_decay": 0.05}}},
            {"weight_decay": 0.05},
        ),
        ({"num_layers": -1}, {}),
        ({"training_mode": "dpo"}, {"objective": "dpo"}),
        (
            {"batch_size": 2, "grad_accumulation_steps": 4, "iters": 100, "save_every": 20},
            {"batch_size": 8, "max_steps": 25, "epochs": 25, "save_steps": 5},
        ),
        ({"mask_prompt": True}, {"turns": "last"}),
        ({"report_to": "wandb, swanlab"}, {"track": ["wandb"]}),
        ({"lora_parameters": {"rank": 4, "scale": 2}}, {"rank": 4, "alpha": 8, "targets": ["all"]}),
        (
            {
                "iters": 1000,
                "lr_schedule": {
                    **{"name": "cosine_decay", "warmup": 100, "arguments": ["1e-5", 1000, "1e-7"]}
                },
            },
            {
                **{"max_steps": 1000, "epochs": 1000, "schedule": "warmup-cosine", "lr": 1e-5},
                **{"warmup_fraction": 0.1, "lr_min": 1e-7},
            },
        ),
    ],
)
def test_entry_becomes_options(entries: dict[str, Any], options: dict[str, Any]) -> None:
    assert translate(entries).options == options


@pytest.mark.parametrize(
    ("entries", "problem"),
    [
        ({"fine_tune_type": "full"}, "fine_tune_type: 'full': full fine-tuning is out of scope"),
        ({"optimizer": "muon"}, "optimizer: 'muon': the optimizer is always AdamW"),
        ({"iters": "many"}, "iters: 'many': must be a number"),
        ({"ranck": 4}, "'ranck' is not an option of mlx-lm or mlxtune"),
    ],
)
def test_entry_without_counterpart_is_a_problem(entries: dict[str, Any], problem: str) -> None:
    assert translate(entries).problems[0].startswith(problem)


def test_mlx_lm_file_is_recognized_by_its_own_keys() -> None:
    every = every_option()

    assert is_mlx_lm_file({"model": "m", "data": "d"}, every)
    assert is_mlx_lm_file({"adapter-path": "m", "ranck": 1}, every)
    assert not is_mlx_lm_file({"model_path": "m", "data": "d", "learning_rate": 1}, every)
    assert not is_mlx_lm_file({"model": "m", "rank": 8}, every)
    assert not is_mlx_lm_file({"data": "d", "seed": 1}, every)


def test_default_of_missing_entry_is_named() -> None:
    (line,) = translate({"iters": 10, "num_layers": 4, "lora_parameters": {}}).lines[3:]

    assert line == (
        "not in the file, so mlxtune's default applies: learning_rate (--lr 1e-4, mlx-lm 1e-5), "
        "max_seq_length (--max-seq-len 512, mlx-lm 2048)"
    )
