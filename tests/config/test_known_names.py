"""Names from other tools: errors name mlxtune's option, from a table that matches the options."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

import mlxtune.cli.table  # noqa: F401, defines every config
from mlxtune.config import OPTIONS, EvalConfig, TrainConfig
from mlxtune.config.fields import every_option, flags_of, options_of
from mlxtune.config.known_names import KNOWN, as_flag, suggestion
from mlxtune.config.mlx_lm_file import is_mlx_lm_file, translate
from mlxtune.errors import ConfigError


def mlx_lm_defaults() -> dict[str, Any]:
    """Return the keys that mlx_lm.lora reads, and their defaults, from its own source."""
    package = importlib.util.find_spec("mlx_lm")
    assert package is not None and package.origin is not None
    source = ast.parse((Path(package.origin).parent / "lora.py").read_text(encoding="utf-8"))
    for node in source.body:
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "CONFIG_DEFAULTS":
            found = ast.literal_eval(node.value)
            assert isinstance(found, dict)
            return found
    raise AssertionError("mlx_lm.lora has no CONFIG_DEFAULTS")


def test_known_names_lead_to_options_that_exist() -> None:
    names = {ours.partition("=")[0] for known in KNOWN.values() for ours in known.ours}

    assert names <= {*every_option(), "resume"}
    assert KNOWN.keys().isdisjoint(OPTIONS)
    assert all(known.ours or known.differs for known in KNOWN.values())


def test_every_option_of_mlx_lm_is_ours_or_known() -> None:
    names = {*mlx_lm_defaults()} - {"config"}

    assert names <= {*KNOWN, *OPTIONS}
    assert translate(mlx_lm_defaults()).problems == []


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("learning_rate", "2e-5", ", here: --lr 2e-5"),
        ("iters", "200", ", here: --max-steps 200 (--epochs bounds the steps too)"),
        ("lora-r", "16", ", here: --rank 16"),
        ("num_train_epochs", "3", ", here: --epochs 3"),
        ("load_in_4bit", None, ", here: --quantize 4 (nf4 is QLoRA's)"),
        ("use_dora", "true", ", here: --dora"),
        ("adapter_path", "my out", ", here: --output 'my out'"),
        ("full_finetuning", None, ": full fine-tuning is out of scope: mlxtune trains LoRA, "),
        ("modules_to_save", None, ": new tokens are out of scope: LoRA trains no embeddings"),
        ("image_folder", None, ": images are out of scope: only a model's text part is trained"),
        ("ranck", "3", " (did you mean --rank?)"),
        ("batch-size", "3", " (did you mean --batch-size 3?)"),
        ("ref_model", "m", ": the reference is the model before the first step"),
        ("limit", "20", ": all rows are used: to use fewer, run head -n 20 FILE > SMALL"),
        ("zzz", "3", ""),
    ],
)
def test_name_is_answered_with_ours_and_what_differs(name: str, value: Any, answer: str) -> None:
    own, flags = options_of(TrainConfig), flags_of(TrainConfig)

    assert suggestion(name, value, own, as_flag, flags).startswith(answer)


def test_name_is_answered_by_the_options_of_its_command() -> None:
    own = options_of(EvalConfig)

    assert suggestion("adapter_path", "out", own, as_flag) == ", here: --adapter out"
    # A known name without a counterpart in this command gets no suggestion by spelling.
    assert suggestion("temp", "1", own, as_flag) == ""


def test_python_names_are_answered_all_at_once() -> None:
    unknown: dict[str, Any] = {"learning_rate": 2e-5, "use_rslora": True, "lora_r": 8, "epoch": 1}
    with pytest.raises(ConfigError) as raised:
        TrainConfig(model_path="m", data=("d",), **unknown)

    assert raised.value.problems == [
        "no option 'learning_rate', here: lr=2e-05",
        "no option 'use_rslora', here: rslora=True",
        "no option 'lora_r', here: rank=8",
        "no option 'epoch' (did you mean epochs?)",
    ]


# mlx-lm's config files

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


def test_file_is_mlx_lm_s_by_keys_that_only_it_has() -> None:
    every = every_option()

    assert is_mlx_lm_file({"model": "m", "data": "d"}, every)
    assert is_mlx_lm_file({"adapter-path": "m", "ranck": 1}, every)
    assert not is_mlx_lm_file({"model_path": "m", "data": "d", "learning_rate": 1}, every)
    assert not is_mlx_lm_file({"model": "m", "rank": 8}, every)
    assert not is_mlx_lm_file({"data": "d", "seed": 1}, every)


def test_missing_entry_s_default_is_named() -> None:
    (line,) = translate({"iters": 10, "num_layers": 4, "lora_parameters": {}}).lines[3:]

    assert line == (
        "not in the file, so mlxtune's default applies: learning_rate (--lr 1e-4, mlx-lm 1e-5), "
        "max_seq_length (--max-seq-len 512, mlx-lm 2048)"
    )
