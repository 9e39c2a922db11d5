"""Names from other tools: errors name mlxtune's option, from a table that matches the options."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import Any

import pytest

from mlxtune.cli import COMMANDS  # also defines every config
from mlxtune.config import OPTIONS, EvalConfig, TrainConfig
from mlxtune.config.config_file import translate
from mlxtune.config.fields import every_option, flags_of, options_of
from mlxtune.config.known_names import (
    EQUIVALENTS,
    FLAGS,
    as_entry,
    as_flag,
    as_keyword,
    suggestion,
)
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
    names = {ours.partition("=")[0] for known in EQUIVALENTS.values() for ours in known.ours}

    assert names <= {*every_option(), "resume"}
    assert EQUIVALENTS.keys().isdisjoint(OPTIONS)
    assert all(known.ours or known.differs for known in EQUIVALENTS.values())


def test_flags_that_no_file_can_set_are_answered_as_flags() -> None:
    train = next(command for command in COMMANDS if command.name == "train")
    flags = {param.opts[0].removeprefix("--") for param in train.params}

    assert {*FLAGS} == {name.replace("-", "_") for name in flags} - {*OPTIONS, "help_all"}
    for write in (as_entry, as_keyword):
        said = suggestion("dry_run", "True", OPTIONS, write)
        assert said == ": it is a flag of the command, --dry-run"


def test_every_option_of_mlx_lm_is_ours_or_known() -> None:
    names = {*mlx_lm_defaults()} - {"config"}

    assert names <= {*EQUIVALENTS, *OPTIONS}
    assert translate(mlx_lm_defaults()).problems == []


@pytest.mark.parametrize(
    ("name", "value", "answer"),
    [
        ("learning_rate", "2e-5", ": use --lr 2e-5"),
        ("iters", "200", ": use --max-steps 200 (--epochs bounds the steps too)"),
        ("lora-r", "16", ": use --rank 16"),
        ("stage", "sft", ": use --objective sft (sft, dpo or another of --help-all)"),
        ("cutoff_len", "2048", ": use --max-seq-len 2048"),
        ("finetuning_type", "lora", ": mlxtune trains LoRA, or DoRA with --dora, but not all "),
        ("grad-accum", "4", ": use --batch-size N (number of rows per step"),
        ("num_train_epochs", "3", ": use --epochs 3"),
        ("load_in_4bit", None, ": use --quantize 4 (nf4 is QLoRA's)"),
        ("use_dora", "true", ": use --dora"),
        ("adapter_path", "my out", ": use --output 'my out'"),
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
def test_foreign_name_gets_our_name_and_the_difference(name: str, value: Any, answer: str) -> None:
    own, flags = options_of(TrainConfig), flags_of(TrainConfig)

    assert suggestion(name, value, own, as_flag, flags).startswith(answer)


def test_name_is_answered_by_the_options_of_its_command() -> None:
    own = options_of(EvalConfig)

    assert suggestion("adapter_path", "out", own, as_flag) == ": use --adapter out"
    # A known name without a counterpart in this command gets no suggestion by spelling.
    assert suggestion("lora_r", "8", own, as_flag) == ""


def test_all_unknown_python_names_get_suggestions() -> None:
    unknown: dict[str, Any] = {"learning_rate": 2e-5, "use_rslora": True, "lora_r": 8, "epoch": 1}
    with pytest.raises(ConfigError) as raised:
        TrainConfig(model_path="m", data=("d",), **unknown)

    assert raised.value.problems == [
        "unknown option 'learning_rate': use lr=2e-05",
        "unknown option 'use_rslora': use rslora=True",
        "unknown option 'lora_r': use rank=8",
        "unknown option 'epoch' (did you mean epochs?)",
    ]
