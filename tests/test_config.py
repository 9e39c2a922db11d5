"""Every option: its default, what it takes, and what a person hears of what it does not take."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.config import (
    OPTIONS,
    InstructConfig,
    InstructTrainingConfig,
    TrainConfig,
    flag,
    load_config_file,
)
from mlxtune.errors import ConfigError

REQUIRED = {"model_path": "data/demo", "data": "chat.jsonl"}


def config(**changes: Any) -> TrainConfig:
    return TrainConfig(**REQUIRED | changes)


def problems(**changes: Any) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        config(**changes)
    return raised.value.problems


# Defaults: the numbers are issue 2's.


def test_defaults_of_a_run_are_those_that_are_promised() -> None:
    assert dataclasses.asdict(config()) == REQUIRED | {
        "output": "adapters.safetensors",
        "rank": 8,
        "alpha": 16.0,
        "lr": 1e-4,
        "epochs": 1,
        "max_seq_len": 512,
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
        "dtype": "auto",
        "template": "auto",
        "strict": False,
        "log_every": 10,
        "quiet": False,
    }


def test_defaults_of_the_trainer_and_the_pipeline_are_those_that_are_promised() -> None:
    trainer = dataclasses.asdict(InstructTrainingConfig())
    assert (
        trainer
        | {
            "epochs": 3,
            "val_split": 0.2,
            "save_every": 1,
            "early_stopping_patience": 5,
            "checkpoint_dir": "checkpoints",
            "seed": 42,
            "log_interval": 1,
            "warmup_fraction": 0.1,
            "lr_min": 1e-6,
        }
        == trainer
    )

    pipeline = dataclasses.asdict(InstructConfig())
    assert (
        pipeline
        | {
            "lora_rank": 16,
            "lora_alpha": 32.0,
            "learning_rate": 2e-4,
            "epochs": 3,
            "max_seq_len": 512,
            "gradient_clip_norm": 1.0,
        }
        == pipeline
    )


def test_every_option_has_one_line_of_help_and_is_used() -> None:
    used = {
        field.metadata["option"]
        for one in (TrainConfig, InstructTrainingConfig, InstructConfig)
        for field in dataclasses.fields(one)
    }

    assert used == set(OPTIONS)
    assert {field.name for field in dataclasses.fields(TrainConfig)} == set(OPTIONS)
    for bounds in OPTIONS.values():
        assert bounds.help.endswith(".")
        assert "\n" not in bounds.help


def test_flag_of_an_option_is_its_name_with_hyphens() -> None:
    assert flag("max_seq_len") == "--max-seq-len"
    assert flag("lr") == "--lr"


# Conversion


def test_text_becomes_the_type_of_its_option() -> None:
    found = config(
        rank="4",
        alpha="8",
        lr="2e-5",
        targets=" q_proj, v_proj,,q_proj ",
        val_split="0",
        num_layers="3",
        max_steps="10",
    )

    assert (found.rank, found.alpha, found.lr) == (4, 8.0, 2e-5)
    assert found.targets == ("q_proj", "v_proj")
    assert (found.val_split, found.num_layers, found.max_steps) == (0.0, 3, 10)
    for value, kind in ((found.rank, int), (found.alpha, float), (found.val_split, float)):
        assert type(value) is kind


@pytest.mark.parametrize(
    ("given_targets", "targets"),
    [
        ("all", ("all",)),
        (["q_proj", "self_attn.k_proj"], ("q_proj", "self_attn.k_proj")),
        (("o_proj",), ("o_proj",)),
    ],
)
def test_targets_are_names_in_text_or_in_a_list(
    given_targets: Any, targets: tuple[str, ...]
) -> None:
    assert config(targets=given_targets).targets == targets


def test_whole_floats_are_whole_numbers_and_paths_are_text() -> None:
    found = config(rank=4.0, data=Path("chat.jsonl"), output=Path("out") / "a.safetensors")

    assert (found.rank, type(found.rank)) == (4, int)
    assert found.data == "chat.jsonl"
    assert found.output == str(Path("out") / "a.safetensors")


VALUES: dict[str, st.SearchStrategy[Any]] = {
    "rank": st.integers(1, 1000),
    "alpha": st.floats(1e-9, 1e9),
    "lr_min": st.floats(0, 1e-3),
    "epochs": st.integers(1, 10**9),
    "max_seq_len": st.integers(2, 10**6),
    "val_split": st.floats(0, 0.5),
    "warmup_fraction": st.floats(0, 1),
    "dropout": st.floats(0, 0.99),
    "seed": st.integers(0, 2**63 - 1),
    "num_layers": st.none() | st.integers(1, 100),
    "max_steps": st.none() | st.integers(1, 10**9),
    "targets": st.lists(st.sampled_from(["q_proj", "k_proj", "mlp.up_proj"]), min_size=1).map(
        lambda names: tuple(dict.fromkeys(names))
    ),
    "schedule": st.sampled_from(["warmup-cosine", "linear-warmup", "constant"]),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({"lr": st.floats(1e-3, 1e3)}, optional=VALUES))
def test_options_survive_the_command_line_and_the_saved_config(values: dict[str, Any]) -> None:
    typed = config(**values)

    as_flags = {
        name: ",".join(value) if isinstance(value, tuple) else str(value)
        for name, value in values.items()
        if value is not None
    }
    assert config(**as_flags) == typed
    saved = json.loads(json.dumps(dataclasses.asdict(typed)))
    assert TrainConfig(**saved) == typed


# Problems


def test_both_required_options_are_named_when_nothing_is_given() -> None:
    with pytest.raises(ConfigError) as raised:
        TrainConfig()
    assert raised.value.problems == ["--model-path is required", "--data is required"]
    assert str(raised.value) == "--model-path is required; --data is required"


def test_all_problems_are_named_at_once() -> None:
    with pytest.raises(ConfigError) as raised:
        TrainConfig(
            data="chat.jsonl",
            output=" ",
            rank=0,
            alpha=float("nan"),
            lr="fast",  # type: ignore[arg-type]
            val_split=0.6,
            dtype="int8",
            targets=(),
        )
    assert {problem.split()[0] for problem in raised.value.problems} == {
        "--model-path",
        "--output",
        "--rank",
        "--alpha",
        "--lr",
        "--val-split",
        "--dtype",
        "--targets",
    }


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("rank", 0, "must be at least 1, not 0"),
        ("alpha", 0, "must be above 0, not 0"),
        ("lr", 0.0, "must be above 0, not 0"),
        ("lr", -1e-4, "must be above 0, not -0.0001"),
        ("epochs", 0, "must be at least 1, not 0"),
        ("max_seq_len", 1, "must be at least 2, not 1"),
        ("memory_limit", 0, "must be above 0, not 0"),
        ("batch_size", 0, "must be at least 1, not 0"),
        ("val_split", -0.1, "must be at least 0, not -0.1"),
        ("val_split", 0.51, "must be at most 0.5, not 0.51"),
        ("val_split", 0.50000001, "must be at most 0.5, not 0.50000001"),
        ("val_rows", 0, "must be at least 1, not 0"),
        ("warmup_fraction", 1.1, "must be at most 1, not 1.1"),
        ("warmup_fraction", -0.1, "must be at least 0, not -0.1"),
        ("lr_min", -1e-6, "must be at least 0, not -1e-06"),
        ("weight_decay", -1, "must be at least 0, not -1"),
        ("max_grad_norm", -1, "must be at least 0, not -1"),
        ("patience", 0, "must be at least 1, not 0"),
        ("save_every", 0, "must be at least 1, not 0"),
        ("seed", -1, "must be at least 0, not -1"),
        ("seed", -123_456_789, "must be at least 0, not -123456789"),
        ("num_layers", 0, "must be at least 1, not 0"),
        ("dropout", 1, "must be below 1, not 1"),
        ("max_steps", 0, "must be at least 1, not 0"),
        ("log_every", 0, "must be at least 1, not 0"),
        ("schedule", "cosine", "must be one of warmup-cosine, linear-warmup, constant"),
        ("dtype", "int8", "must be one of auto, float32, bfloat16, float16, not 'int8'"),
        ("template", "chatml", "must be one of auto, qwen3, gemma, not 'chatml'"),
    ],
)
def test_value_out_of_bounds_is_named_with_its_option_and_its_bound(
    option: str, value: Any, problem: str
) -> None:
    (found,) = problems(**{option: value})

    assert found.startswith(f"{flag(option)} {problem}")


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("val_split", 0),
        ("val_split", 0.5),
        ("warmup_fraction", 0),
        ("warmup_fraction", 1),
        ("lr_min", 0),
        ("lr_min", 1e-4),
        ("max_grad_norm", 0),
        ("weight_decay", 0),
        ("dropout", 0),
        ("seed", 0),
        ("max_seq_len", 2),
        ("rank", 1),
        ("epochs", 1),
    ],
)
def test_value_on_its_bound_is_taken(option: str, value: Any) -> None:
    assert getattr(config(**{option: value}), option) == value


NUMBERS = [
    field.name
    for field in dataclasses.fields(TrainConfig)
    if field.type in ("int", "float", "int | None")
]


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "-inf", "nan", "many", "", True, [1], {"a": 1}, b"1"]
)
def test_what_is_no_finite_number_is_named_with_its_option(option: str, value: Any) -> None:
    (found,) = problems(**{option: value})

    assert found.startswith(f"{flag(option)} must be a ")


@pytest.mark.parametrize("option", NUMBERS)
@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["huge", "hugely_negative"])
def test_number_beyond_all_floats_is_taken_or_named_but_never_a_crash(
    option: str, value: int
) -> None:
    try:
        found = config(**{option: value})
    except ConfigError as error:
        assert [problem.split()[0] for problem in error.problems] == [flag(option)]
    else:
        assert getattr(found, option) == value > 0


@pytest.mark.parametrize("value", [2.5, "2.5", "1e3", "0x10", "two"])
def test_whole_number_is_not_rounded_from_another(value: Any) -> None:
    assert problems(rank=value) == [f"--rank must be a whole number, not {value!r}"]


@pytest.mark.parametrize(
    ("option", "value", "problem"),
    [
        ("model_path", None, "--model-path must be text, not None"),
        ("data", 5, "--data must be text, not 5"),
        ("data", "  ", "--data is required"),
        ("output", "", "--output is empty: name the adapter file to write"),
        ("strict", "yes", "--strict must be true or false, not 'yes'"),
        ("quiet", 1, "--quiet must be true or false, not 1"),
        ("targets", 5, "--targets must be names separated by commas, not 5"),
        (
            "targets",
            ["q_proj", 5],
            "--targets must be names separated by commas, not ['q_proj', 5]",
        ),
        ("rank", None, "--rank must be a whole number, not None"),
    ],
)
def test_value_of_a_wrong_kind_is_named_with_its_option(
    option: str, value: Any, problem: str
) -> None:
    assert problems(**{option: value}) == [problem]


@pytest.mark.parametrize("targets", ["", " , ", [], ()])
def test_empty_targets_are_told_what_to_name(targets: Any) -> None:
    (found,) = problems(targets=targets)

    assert found.startswith("--targets is empty: ")


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


def test_checkpoints_stand_beside_the_output_unless_told_otherwise(tmp_path: Path) -> None:
    output = str(tmp_path / "a" / "people.safetensors")

    assert config(output=output).checkpoint_path == tmp_path / "a" / "checkpoints"
    assert config(output=output, checkpoint_dir="runs").checkpoint_path == Path("runs")
    assert config().checkpoint_path == Path("checkpoints")


def test_home_is_found_in_paths_and_a_tilde_that_is_no_home_is_a_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    found = config(output="~/a.safetensors", checkpoint_dir="~/runs")
    assert found.output_path == tmp_path / "a.safetensors"
    assert found.checkpoint_path == tmp_path / "runs"

    # As a shell leaves it.
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
        log_every=9,
    )

    assert dataclasses.asdict(found.training()) == {
        "epochs": 7,
        "val_split": 0.3,
        "save_every": 2,
        "early_stopping_patience": 3,
        "checkpoint_dir": "runs",
        "seed": 11,
        "log_interval": 9,
        "warmup_fraction": 0.4,
        "lr_min": 2e-6,
        "batch_size": 5,
        "schedule": "constant",
        "max_steps": 13,
        "val_rows": 17,
    }
    assert dataclasses.asdict(found.pipeline()) == {
        "lora_rank": 2,
        "lora_alpha": 6.0,
        "learning_rate": 3e-4,
        "epochs": 7,
        "max_seq_len": 99,
        "gradient_clip_norm": 0.25,
        "targets": ("k_proj",),
        "num_layers": 4,
        "dropout": 0.1,
        "weight_decay": 0.5,
        "seed": 11,
    }


def test_trainer_of_a_run_without_validation_is_made_all_the_same() -> None:
    assert config(val_split=0).training().epochs == 1


# Config files


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


YAML = """\
# a comment
model-path: data/demo
data: chat.jsonl
lr: 1e-4          # YAML 1.1 reads this as text
max_seq_len: 64
targets: [q_proj, k_proj]
strict: true
num-layers: null
"""
TOML = """\
model-path = "data/demo"
data = "chat.jsonl"
lr = 1e-4
max_seq_len = 64
targets = ["q_proj", "k_proj"]
strict = true
"""


@pytest.mark.parametrize(
    ("name", "content"),
    [("run.yaml", YAML), ("run.yml", YAML), ("run.toml", TOML), ("run.TOML", "\ufeff" + TOML)],
)
def test_yaml_and_toml_give_the_same_options(tmp_path: Path, name: str, content: str) -> None:
    options, unknown = load_config_file(write(tmp_path, name, content))

    assert unknown == []
    expected = config(lr=1e-4, max_seq_len=64, targets=("q_proj", "k_proj"), strict=True)
    assert TrainConfig(**options) == expected
    # As the command does it: what is given as a flag wins.
    assert TrainConfig(**options | {"lr": "2e-4"}).lr == 2e-4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "ranck: 4\nepochs: 2\nlearning_speed: 1\nRank: 2\n"),
        ("run.toml", "ranck = 4\nepochs = 2\nlearning_speed = 1\nRank = 2\n"),
    ],
)
def test_unknown_options_are_all_named_with_what_may_have_been_meant(
    tmp_path: Path, name: str, content: str
) -> None:
    path = write(tmp_path, name, content)

    options, unknown = load_config_file(path)

    assert options == {"epochs": 2}
    assert unknown == [
        f"--config {path} has no option 'ranck' (did you mean rank?)",
        f"--config {path} has no option 'learning_speed'",
        f"--config {path} has no option 'Rank' (did you mean rank?)",
    ]


@pytest.mark.parametrize(
    ("name", "content", "reason"),
    [
        ("run.yaml", "rank: [1", "is not valid YAML"),
        ("run.yaml", "rank: 1\n\trank: 2", "is not valid YAML"),
        ("run.yaml", "[" * 5000, "is not valid YAML"),
        ("run.yaml", "seed: 2024-13-45", "is not valid YAML"),
        ("run.yaml", "seed: !!int x", "is not valid YAML"),
        ("run.yaml", "seed: !!timestamp x", "is not valid YAML"),
        ("run.yaml", "seed: " + "9" * 5000, "is not valid YAML"),
        ("run.toml", "rank = ", "is not valid TOML"),
        ("run.toml", "rank = 1\nrank = 2", "is not valid TOML"),
        ("run.toml", "rank = " + "[" * 5000, "is not valid TOML"),
        ("run.toml", "seed = " + "9" * 5000, "is not valid TOML"),
        ("run.yaml", "- rank\n- 8", "must hold names and values"),
        ("run.yaml", "rank", "must hold names and values"),
        ("run.yaml", b"rank: \xff\xfe", "is not text in UTF-8"),
    ],
)
def test_broken_config_file_is_one_line_that_names_it(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    path = write(tmp_path, name, content)

    with pytest.raises(ConfigError, match=reason) as raised:
        load_config_file(path)
    assert str(raised.value).startswith(f"--config {path} ")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "# rank: 4\n"], ids=["empty", "commented_out"])
@pytest.mark.parametrize("name", ["run.yaml", "run.toml"])
def test_config_file_without_options_changes_nothing(
    tmp_path: Path, name: str, content: str
) -> None:
    assert load_config_file(write(tmp_path, name, content)) == ({}, [])


def test_config_file_that_is_missing_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as raised:
            load_config_file(path)
        assert str(path) in str(raised.value)


def test_wrong_value_in_a_config_file_is_named_by_its_option(tmp_path: Path) -> None:
    options, _ = load_config_file(write(tmp_path, "run.yaml", "rank: many\nepochs: null\n"))

    with pytest.raises(ConfigError) as raised:
        config(**options)
    assert raised.value.problems == [
        "--rank must be a whole number, not 'many'",
        "--epochs must be a whole number, not None",
    ]
