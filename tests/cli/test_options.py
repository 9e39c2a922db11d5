"""Options in YAML and TOML: values, and errors for invalid files."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

from mlxtune.cli import COMMANDS
from mlxtune.cli.options import ConfigCommand, load_config_file
from mlxtune.config import TrainConfig
from mlxtune.config.fields import options_of
from mlxtune.config.known_names import COMMAND_HINTS
from mlxtune.config.known_names import COMMANDS as COMMAND_EQUIVALENTS
from mlxtune.errors import ConfigError
from tests.command import Cli
from tests.configs import config


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
    options, unknown = load_config_file(write(tmp_path, name, content), TrainConfig)

    assert unknown == []
    expected = config(lr=1e-4, max_seq_len=64, targets=("q_proj", "k_proj"), strict=True)
    assert TrainConfig(**options) == expected
    # Options given later win, like flags on the command line.
    assert TrainConfig(**options | {"lr": "2e-4"}).lr == 2e-4


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("run.yaml", "ranck: 4\nepochs: 2\nlearning_speed: 1\nRank: 2\n"),
        ("run.toml", "ranck = 4\nepochs = 2\nlearning_speed = 1\nRank = 2\n"),
    ],
)
def test_all_unknown_options_get_suggestions(tmp_path: Path, name: str, content: str) -> None:
    path = write(tmp_path, name, content)

    options, unknown = load_config_file(path, TrainConfig)

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
        ("run.yaml", "[" * 1000, "is not valid YAML"),
        ("run.yaml", "seed: !!int x", "is not valid YAML"),
        ("run.yaml", "seed: !!timestamp x", "is not valid YAML"),
        ("run.yaml", "lr: 1e-3\nrank: 4\nlr: 2e-3", "not valid YAML: line 3: 'lr' is given twice"),
        ("run.yaml", "batch-size: 2\nbatch_size: 3", ": 'batch_size' is given in two spellings"),
        ("run.toml", "batch-size = 2\nbatch_size = 3", "'batch_size' is given in two spellings"),
        ("run.toml", "rank = ", "is not valid TOML"),
        ("run.toml", "rank = 1\nrank = 2", "is not valid TOML"),
        ("run.toml", "rank = " + "[" * 5000, "is not valid TOML"),
        ("run.toml", "seed = " + "9" * 5000, "is not valid TOML: a number has too many digits"),
        ("run.toml", "a" + ".a" * 5000 + " = 1", "is not valid TOML: line 1: a key has too many"),
        ("run.yaml", "#" * 70_000, "is larger than 64 KB"),
        ("run.yaml", "- rank\n- 8", "must contain names and values"),
        ("run.yaml", "rank", "must contain names and values"),
        ("run.yaml", b"rank: \xff\xfe", "is not text in UTF-8"),
    ],
)
def test_broken_config_file_gives_a_one_line_error(
    tmp_path: Path, name: str, content: str | bytes, reason: str
) -> None:
    path = write(tmp_path, name, content)

    with pytest.raises(ConfigError, match=reason) as raised:
        load_config_file(path, TrainConfig)
    assert str(raised.value).startswith(f"--config {path}")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("content", ["", "# rank: 4\n"], ids=["empty", "commented_out"])
@pytest.mark.parametrize("name", ["run.yaml", "run.toml"])
def test_config_file_without_options_changes_nothing(
    tmp_path: Path, name: str, content: str
) -> None:
    assert load_config_file(write(tmp_path, name, content), TrainConfig) == ({}, [])


def test_missing_config_file_or_a_folder_is_named(tmp_path: Path) -> None:
    for path in (tmp_path / "none.yaml", tmp_path):
        with pytest.raises(ConfigError, match="cannot be read") as raised:
            load_config_file(path, TrainConfig)
        assert str(path) in str(raised.value)


def test_wrong_value_in_a_config_file_is_named_by_its_option(tmp_path: Path) -> None:
    options, _ = load_config_file(
        write(tmp_path, "run.yaml", "rank: many\nepochs: null\n"), TrainConfig
    )

    with pytest.raises(ConfigError) as raised:
        config(**options)
    assert raised.value.problems == [
        "--rank must be a whole number, not 'many'",
        "--epochs is empty: leave it out for its default, 1",
    ]


# Names from other tools


def test_all_options_of_other_tools_get_our_equivalents(cli: Cli) -> None:
    known = ["--model", "m", "--iters=200", "--learning-rate", "1e-5", "--load-in-4bit"]

    assert cli("train", "--data", "d", *known, "--ranck", 3).error == (
        "unknown option --model: use --model-path m; "
        "unknown option --iters: use --max-steps 200 (--epochs bounds the steps too); "
        "unknown option --learning-rate: use --lr 1e-5; "
        "unknown option --load-in-4bit: use --quantize 4 (nf4 is QLoRA's); "
        "unknown option --ranck (did you mean --rank?)"
    )


def test_option_of_another_command_gets_advice(cli: Cli) -> None:
    assert cli("report", "out", "--output=x").error == (
        "unknown option --output: --html FILE writes the page"
    )
    assert cli("push", "out", "--private", "--fix", 1).error == (
        "unknown option --private: leave it out: private is the default; unknown option --fix"
    )
    assert "--system: each row has its own, in" in cli("train", "--system", "Be brief.").error
    assert cli("verify", "out", "--fix").error.startswith("No such option")
    commands = {str(each.name): each for each in COMMANDS}
    for command, name in COMMAND_HINTS:
        assert f"--{name}" not in {
            text for param in commands[command].params for text in param.opts
        }


def test_command_of_other_tools_gets_our_equivalent(cli: Cli) -> None:
    assert cli("lora", "--model", "m").error == "no command lora: use mlxtune train"
    assert COMMAND_EQUIVALENTS.keys().isdisjoint(command.name for command in COMMANDS)
    for here in COMMAND_EQUIVALENTS.values():
        assert here.split()[1] in {c.name for c in COMMANDS}


def test_value_that_looks_like_an_option_of_other_tools_is_a_value() -> None:
    command = next(each for each in COMMANDS if each.name == "generate")

    context = command.make_context("generate", ["--prompt", "--iters"])

    assert context.params["prompt"] == "--iters"


def test_file_of_mlx_lm_is_read_and_each_entry_reported(tmp_path: Path) -> None:
    path = write(tmp_path, "lora.yaml", "model: m\niters: 60\nlearning_rate: 1e-5\n")
    said: list[tuple[str, list[str]]] = []

    options, problems = load_config_file(
        path, TrainConfig, lambda title, lines: said.append((title, list(lines)))
    )

    assert problems == []
    assert options["model_path"] == "m" and options["max_steps"] == 60
    ((title, lines),) = said
    assert title == f"{path} is for mlx-lm; its entries, and what they become:"
    assert lines[0] == "model: m → --model-path m"


def test_mlx_lm_file_problems_are_not_unknown_options(tmp_path: Path) -> None:
    path = write(tmp_path, "lora.yaml", "model: m\niters: 60\noptimizer: sgd\n")

    (problem,) = load_config_file(path, TrainConfig)[1]

    assert "sgd" in problem


def test_entries_of_other_tools_get_our_equivalents(tmp_path: Path) -> None:
    path = write(tmp_path, "run.yaml", "base_model: m\nmicro_batch_size: 2\nrank: 8\nbf16: true\n")

    assert load_config_file(path, TrainConfig)[1] == [
        f"--config {path} has no option 'base_model': use model_path: m",
        f"--config {path} has no option 'micro_batch_size': use batch_size: 2 "
        "(number of rows per step)",
        f"--config {path} has no option 'bf16': use dtype: bfloat16",
    ]


def test_underscores_and_values_without_options_are_answered(cli: Cli) -> None:
    spelt = cli("train", "--batch_size", 4, "--wandb").error
    assert "unknown option --batch_size (did you mean --batch-size 4?)" in spelt
    assert "unknown option --wandb: use --track wandb" in spelt
    assert "a.jsonl): write an option before each value, such as --data a.jsonl;" in (
        cli("train", "a.jsonl").error
    )
    assert "such as --adapter tests;" in cli("eval", "tests", "more").error


@pytest.mark.parametrize(
    "values", [("q_proj", "v_proj"), ("q_proj,", "v_proj"), ("q_proj,v_proj",)]
)
def test_message_suggests_commas_between_names(cli: Cli, values: tuple[str, ...]) -> None:
    error = cli("train", "--targets", *values, "--lr", 1).error
    assert ("use --targets q_proj,v_proj; see --help" in error) is (len(values) > 1)


def test_option_without_a_value_shows_an_example(cli: Cli) -> None:
    named = "--grad-checkpoint needs a value: --grad-checkpoint on"
    assert cli("train", "--grad-checkpoint").error == named
    assert cli("train", "--grad-checkpoint", "--output", "q").error == named
    assert cli("train", "--dtype", "--lr", 1).error.endswith(
        ": --dtype auto|float32|bfloat16|float16"
    )


def test_numbers_are_not_shown_as_paths(cli: Cli) -> None:
    shown = cli("train", "--help-all").out
    for option in ("--lr", "--beta", "--cpo-alpha"):
        assert f"{option} X" in shown


def test_missing_argument_is_named_without_a_flag(cli: Cli) -> None:
    """It has no flag that could be passed."""
    named = []
    for command in (each for each in COMMANDS if isinstance(each, ConfigCommand)):
        options = options_of(command.config)
        arguments = {each.name for each in command.params if isinstance(each, click.Argument)}
        required = {name for name in arguments & options.keys() if options[name].required}
        assert required == {name for name, option in options.items() if option.argument}
        for name in required:
            named.append(command.name)
            problems = cli(str(command.name)).error.split("; ")
            assert f"name {options[name].argument}" in problems
            assert f"--{name} is required" not in problems
            assert "without an option" in cli(str(command.name), f"--{name}", "x").error
    assert named == ["reward", "import"]
