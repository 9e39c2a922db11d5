"""Options: how values are read, and the errors for other values."""

from __future__ import annotations

import dataclasses
import json
import typing
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.config import TrainConfig
from mlxtune.config.fields import flag
from mlxtune.errors import ConfigError
from tests.configs import config, problems

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
    assert found.data == ("chat.jsonl",)
    assert found.output == str(Path("out") / "a.safetensors")


# File names may contain commas.
PATHS = st.text("ab ,./\u00e9", min_size=1).filter(str.strip)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "rank": st.integers(1, 1000),
    "alpha": st.floats(1e-9, 1e6),
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
    "order": st.sampled_from(["shuffle", "length"]),
    "dtype": st.sampled_from(["auto", "float32", "bfloat16", "float16"]),
    "data": st.lists(PATHS, min_size=1, max_size=3).map(tuple),
    "field": st.just(("prompt=question", "completion=a,b")),
    "thinking": st.sampled_from(["auto", "on", "off"]),
    "turns": st.sampled_from(["all", "last"]),
    "merge_system": st.booleans(),
}


@settings(deadline=None)
@given(st.fixed_dictionaries({"lr": st.floats(1e-3, 1e3)}, optional=VALUES))
def test_options_survive_the_command_line_and_the_saved_config(values: dict[str, Any]) -> None:
    typed = config(**values)

    as_flags = {
        name: ",".join(value) if name == "targets" else str(value)
        for name, value in values.items()
        if value is not None and name not in ("data", "field", "merge_system")
    }
    as_flags |= {name: values[name] for name in values.keys() - as_flags.keys()}
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
        ("alpha", 1e38, "must be at most 1e+06, not 1e+38"),
        ("lr", 0.0, "must be above 0, not 0"),
        ("lr", -1e-4, "must be above 0, not -0.0001"),
        ("rank", 10**6 + 1, "must be at most 1e+06, not 1000001"),
        ("epochs", 0, "must be at least 1, not 0"),
        ("epochs", 10**400, "must be a whole number between -2^63 and 2^63"),
        ("max_seq_len", 1, "must be at least 2, not 1"),
        ("memory_limit", 0, "must be above 0, not 0"),
        ("batch_size", 0, "must be at least 1, not 0"),
        ("val_split", -0.1, "must be at least 0, not -0.1"),
        ("val_split", 0.51, "must be at most 0.5, not 0.51"),
        ("val_split", 0.50000001, "must be at most 0.5, not 0.50000001"),
        ("val_split", 20, "must be at most 0.5, not 20.0: 20% is 0.2"),
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
        ("order", "sorted", "must be one of shuffle, length, not 'sorted'"),
        ("dtype", "int8", "must be one of auto, float32, bfloat16, float16, not 'int8'"),
        ("template", "llama3", "must be one of auto, chatml, qwen3, gemma, plain or FILE.jinja, "),
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
    name
    for name, kind in typing.get_type_hints(TrainConfig).items()
    if kind in (int, float, int | None)
]


@pytest.mark.parametrize(
    "value", [float("nan"), float("inf"), "-inf", "nan", "many", "", True, [1], {"a": 1}, b"1"]
)
def test_non_finite_number_is_named_with_its_option(value: Any) -> None:
    for option in NUMBERS:
        (found,) = problems(**{option: value})
        assert found.startswith(f"{flag(option)} must be a ")


@pytest.mark.parametrize("value", [10**400, -(10**400)], ids=["huge", "hugely_negative"])
def test_number_beyond_all_floats_is_taken_or_named_but_never_a_crash(value: int) -> None:
    for option in NUMBERS:
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
        ("model_path", None, "--model-path is required"),
        ("data", 5, "--data must be text or a list of texts, not 5"),
        ("data", ["a.jsonl", 5], "--data must be text or a list of texts, not ['a.jsonl', 5]"),
        *(
            (
                "reward",
                given,
                f"--reward takes no function: put it into a file, and name it: {name}",
            )
            for given, name in (
                (json.dumps, "FILE.py:dumps"),
                (["json", json.dumps], "FILE.py:dumps"),
                (lambda prompt, completion, row: 1, "FILE.py:FUNCTION"),
            )
        ),
        ("data", "  ", "--data is required"),
        ("data", [" ", ""], "--data is required"),
        ("data", [], "--data is required"),
        ("data", None, "--data is required"),
        ("field", "prompt", "--field 'prompt' is not a pair such as prompt=question"),
        ("field", ["prompt=a", "prompt=b"], "--field prompt is given twice, as 'a' and 'b'"),
        ("memory_limit", "12GB", "--memory-limit must be a number, not '12GB': leave out GB"),
        ("memory_limit", "512 MB", "--memory-limit must be a number, not '512 MB': use 0.512"),
        ("max_seq_len", "2k", "--max-seq-len must be a whole number, not '2k': use 2048 or 2000"),
        (
            "max_steps",
            "1.5M",
            "--max-steps must be a whole number, not '1.5M': use 1572864 or 1500000",
        ),
        ("val_split", "20%", "--val-split must be a number, not '20%': use 0.2"),
        ("warmup_fraction", ".5%", "--warmup-fraction must be a number, not '.5%': use 0.005"),
        ("rank", "8x", "--rank must be a whole number, not '8x': leave out x"),
        ("thinking", "yes", "--thinking must be one of auto, on, off, not 'yes'"),
        ("turns", "first", "--turns must be one of all, last, not 'first'"),
        ("merge_system", "on", "--merge-system must be true or false, not 'on'"),
        ("cache_dir", " ", "--cache-dir is empty: pass a value, or leave it out"),
        ("output", "", "--output is empty: pass a value, or leave it out"),
        ("strict", "yes", "--strict must be true or false, not 'yes'"),
        ("quiet", 1, "--quiet must be true or false, not 1"),
        (
            "data",
            [{"text": "a"}],
            "--data must be paths: pass rows as train(data=rows), not in a config",
        ),
        (
            "data",
            {"prompt": ["a"]},
            "--data must be rows, not columns: pass a list of objects, one for each row",
        ),
        ("targets", 5, "--targets must be names separated by commas, not 5"),
        (
            "targets",
            ["q_proj", 5],
            "--targets must be names separated by commas, not ['q_proj', 5]",
        ),
        ("rank", None, "--rank is empty: leave it out for its default, 8"),
    ],
)
def test_value_of_a_wrong_kind_is_named_with_its_option(
    option: str, value: Any, problem: str
) -> None:
    assert problems(**{option: value}) == [problem]


@pytest.mark.parametrize(
    ("given_data", "data"),
    [
        ("a.jsonl", ("a.jsonl",)),
        (Path("a.jsonl"), ("a.jsonl",)),
        # A comma is part of the name; the reader refuses duplicates.
        ("a,b.jsonl", ("a,b.jsonl",)),
        (["b.jsonl", Path("a"), "b.jsonl"], ("b.jsonl", "a", "b.jsonl")),
        (("a.jsonl", " "), ("a.jsonl",)),
    ],
)
def test_data_is_one_path_or_several_in_the_order_given(
    given_data: Any, data: tuple[str, ...]
) -> None:
    assert config(data=given_data).data == data


@pytest.mark.parametrize("targets", ["", " , ", [], ()])
def test_empty_targets_error_names_the_choices(targets: Any) -> None:
    (found,) = problems(targets=targets)

    assert found.startswith("--targets is empty: ")


def test_choices_are_read_in_any_case() -> None:
    read = config(objective="DPO", dpo_loss="Sigmoid", quantize="NF4", track="TensorBoard")
    assert (read.objective, read.dpo_loss, read.quantize) == ("dpo", "sigmoid", "nf4")
    assert read.track == ("tensorboard",)
