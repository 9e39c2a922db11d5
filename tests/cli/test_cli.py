"""The command line: help, options, --config, messages and --debug."""

from __future__ import annotations

import dataclasses
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.config import BenchConfig, DataConfig, InspectConfig, TrainConfig
from mlxtune.config.fields import flag
from mlxtune.core.machine.installation import DISTRIBUTION
from mlxtune.errors import ConfigError, DataError, MlxTuneError
from tests.command import Cli, Outcome, files_in, read_terminal, start


@pytest.fixture
def config_of_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[], TrainConfig]:
    """Replace `run_training`; return a function that returns the config of its only call."""
    calls: list[TrainConfig] = []
    monkeypatch.setattr(
        "mlxtune.commands.train.run_training", lambda options, _: calls.append(options.config)
    )

    def config() -> TrainConfig:
        assert len(calls) == 1
        return calls[0]

    return config


# Help


@pytest.mark.parametrize(
    ("name", "config"),
    [("train", TrainConfig), ("inspect", InspectConfig), ("bench", BenchConfig)],
)
def test_help_names_every_option_with_its_default(
    cli: Cli, name: str, config: type[DataConfig]
) -> None:
    outcome = cli(name, "--help-all" if name == "train" else "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    said = " ".join(outcome.out.split())
    for field in dataclasses.fields(config):
        assert f" {flag(field.name)}" in said
        if isinstance(field.default, str | int | float) and field.default not in ("", False):
            default = field.default if isinstance(field.default, str) else f"{field.default:g}"
            assert re.search(rf"{flag(field.name)} [^\[]*\[default: {re.escape(default)}\]", said)


def test_help_shows_the_default_of_zero(cli: Cli) -> None:
    said = " ".join(cli("train", "--help-all").out.split())
    assert re.search(r"--dropout X [^\[]*\[default: 0\]", said)


def test_version_loads_neither_mlx_nor_transformers_nor_numpy() -> None:
    code = (
        "import sys\n"
        "from mlxtune.cli import main\n"
        "try: main(['--version'])\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in process.stderr.split()}
    assert "mlxtune" in loaded
    assert not loaded & {"mlx", "mlx_lm", "transformers", "numpy", "rich"}


def test_version_is_the_installed_one(cli: Cli) -> None:
    from importlib.metadata import version

    outcome = cli("--version")
    assert outcome.code == 0
    below = f"mlx {version('mlx')}, mlx-lm {version('mlx-lm')}"
    assert outcome.out.strip() == f"mlxtune, version {version(DISTRIBUTION)} ({below})"


def test_no_command_shows_the_help_as_it_is(cli: Cli) -> None:
    outcome = cli()
    assert outcome.code == 2
    assert "error" not in outcome.err
    assert "\n  inspect  " in outcome.out + outcome.err
    assert "\n  train  " in outcome.out + outcome.err


# Options


def test_all_option_problems_are_in_one_line(cli: Cli) -> None:
    wrong = {
        "--rank": "0",
        "--alpha": "-1",
        "--lr": "nan",
        "--epochs": "1.5",
        "--max-seq-len": "x",
        "--val-split": "0.6",
        "--memory-limit": "inf",
        "--dtype": "int8",
        "--dropout": "1",
        "--seed": "-1",
    }
    outcome = cli("train", *(word for pair in wrong.items() for word in pair))
    assert outcome.code == 2
    for name in ("--model-path", "--data", *wrong):
        assert f"{name} " in outcome.error
    assert "must be one of auto, float32, bfloat16, float16" in outcome.error
    assert "must be at most 0.5" in outcome.error


@pytest.mark.parametrize("value", ["1e30", "1e308"])
def test_memory_limit_beyond_any_machine_is_refused_or_capped(train: Cli, value: str) -> None:
    outcome = train("--memory-limit", value, "--dry-run")
    assert outcome.code == 0 or "--memory-limit" in outcome.error


def test_peak_below_the_end_of_the_schedule_is_refused(train: Cli) -> None:
    outcome = train("--lr", "1e-7")
    assert outcome.code == 2
    assert "--lr-min 1e-06 is above --lr 1e-07" in outcome.error


@pytest.mark.parametrize("arguments", [["--epoch", "3"], ["--epoch=3"]])
def test_unknown_option_is_named_with_the_one_that_was_meant(
    train: Cli, arguments: list[str]
) -> None:
    outcome = train(*arguments)
    assert outcome.code == 2
    assert "'--epoch'" in outcome.error
    assert "'--epochs'" in outcome.error


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["train", "--lr"], "--lr"),
        (["train", "surplus"], "surplus"),
        (["trian"], "train"),
        (["train", "--targets", ","], "--targets"),
        (["train", "--output", ""], "--output"),
        (["train", "--checkpoint-dir", ""], "--checkpoint-dir"),
        (["train", "--val-data", ""], "--val-data"),
    ],
)
def test_misuse_gives_a_one_line_error(cli: Cli, arguments: list[str], named: str) -> None:
    outcome = cli(*arguments)
    assert outcome.code == 2
    assert named in outcome.error


# --config


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("run.yaml", "rank: 2\nlr: 1e-3\ntargets: [k_proj, o_proj]\nmax-steps: 7\nquiet: true\n"),
        ("run.YML", "rank: 2\nlr: 1e-3\ntargets: k_proj,o_proj\nmax_steps: 7\nquiet: true\n"),
        (
            "run.toml",
            'rank = 2\nlr = 1e-3\ntargets = ["k_proj", "o_proj"]\nmax_steps = 7\nquiet = true\n',
        ),
    ],
)
def test_flags_win_over_the_config_file_and_it_over_the_defaults(
    cli: Cli,
    tmp_path: Path,
    config_of_run: Callable[[], TrainConfig],
    name: str,
    text: str,
) -> None:
    file = tmp_path / name
    file.write_text(text)
    cli("train", "--config", file, "--model-path", "m", "--data", "d", "--rank", "16")
    assert config_of_run() == TrainConfig(
        model_path="m",
        data="d",
        rank=16,
        lr=1e-3,
        targets=("k_proj", "o_proj"),
        max_steps=7,
        quiet=True,
    )


def test_config_file_serves_for_required_options(
    cli: Cli, tmp_path: Path, config_of_run: Callable[[], TrainConfig]
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("model-path: m\ndata: d\n")
    assert cli("train", "--config", file).code == 0
    assert config_of_run().model_path == "m"


@pytest.mark.parametrize(
    ("name", "text", "said"),
    [
        ("run.yaml", "rank: [1", "not valid YAML"),
        ("run.toml", "rank = ", "not valid TOML"),
        ("run.yaml", "rnak: 4", "'rnak' (did you mean rank?)"),
        ("run.yaml", "rank: '\x00'", "not valid YAML"),
        ("run.yaml", "rank: hi\nquiet: 'yes'\ntargets: [q_proj, 3]", "--quiet must be true"),
    ],
)
def test_bad_config_file_gives_a_one_line_error(
    cli: Cli, tmp_path: Path, name: str, text: str, said: str
) -> None:
    file = tmp_path / name
    file.write_text(text)
    outcome = cli("train", "--model-path", "m", "--data", "d", "--config", file)
    assert outcome.code == 2
    assert said in outcome.error
    assert "--" in outcome.error
    assert "<unicode string>" not in outcome.error
    assert len(outcome.error) < 400


@pytest.mark.parametrize("name", ["missing.yaml", "."])
def test_config_file_that_cannot_be_read_is_named(cli: Cli, tmp_path: Path, name: str) -> None:
    outcome = cli("train", "--config", tmp_path / name)
    assert outcome.code == 2
    assert f"--config {tmp_path / name} cannot be read" in outcome.error
    assert "Errno" not in outcome.error


def test_problems_of_config_file_and_flags_are_reported_together(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rnak: 4\nepochs: 0\n")
    outcome = cli("train", "--config", file, "--lr", "nan")
    for problem in ("'rnak'", "--epochs", "--lr", "--model-path", "--data"):
        assert problem in outcome.error


# Messages


def test_failing_run_is_reported(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    from mlxtune.views import run_text

    monkeypatch.setattr(run_text, "risen_loss_line", lambda s, *_: f"rose in {len(s)} steps")
    outcome = train("--max-seq-len", 32, "--val-split", 0, quiet=False)
    for problem in (
        "warning: rose in 5 steps",
        " 5 steps are too few to learn from: ",
        "of the supervised tokens: --max-seq-len ",
        " free now",
    ):
        assert problem in outcome.err


def test_good_run_is_plain_lines_on_stderr_when_piped(
    cli: Cli, model: Path, chat: Path, output: Path
) -> None:
    arguments = ["--model-path", model, "--data", chat, "--output", output, "--max-steps", 2]
    outcome = cli("train", *arguments, "--log-every", 1)
    assert outcome.code == 0
    assert outcome.out == ""
    assert "\x1b" not in outcome.err
    assert "\r" not in outcome.err
    stages = [line.split()[0] for line in outcome.err.splitlines() if not line.startswith(" ")]
    order = ["Memory", "Model", "LoRA", "Data", "Template", "Plan", "Validation", "Training"]
    # A GPU that cannot use the package's kernels says so.
    stages = [stage for stage in stages if stage not in ("SwiGLU", "Attention")]
    ends = ["Done", "Verdict", "Samples", "Report", "Next", "Try"]
    assert list(dict.fromkeys(stages)) == [*order, *ends]
    assert "step 2/2  loss " in outcome.err
    assert outcome.err.splitlines()[-1].endswith(f"mlxtune chat --adapter {output.parent}")


@pytest.mark.parametrize("extra", [[], ["--dry-run"]])
def test_quiet_run_without_problems_prints_no_lines(train: Cli, extra: list[str]) -> None:
    assert train("--max-steps", 1, *extra) == Outcome(0, "", "")


def test_every_stage_is_set_apart_from_its_message(train: Cli) -> None:
    train("--max-steps", 1)
    # Train again in the same folder, so that the earlier run is reported too.
    lines = train("--max-steps", 1, quiet=False).err.splitlines()
    assert any("earlier run" in line for line in lines)
    for line in lines:
        assert re.match(r"[A-Z]\w+ +\S| {5,}\S", line)


def test_command_ends_with_a_single_error_line(train: Cli, chat: Path) -> None:
    outcome = train("--max-seq-len", 8, quiet=False)
    *stages, error = outcome.err.splitlines()
    assert error.startswith(f"mlxtune: error: {chat}")
    assert not any("error" in line for line in stages)


def test_dry_run_prints_the_plan_and_writes_no_files(
    train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.step.pipeline import InstructPipeline

    monkeypatch.setattr(InstructPipeline, "start_batch", None)
    outcome = train("--dry-run", quiet=False)
    assert outcome.code == 0
    assert "20 rows read, 16 for training, 4 for validation" in outcome.err
    assert re.search(r"^Plan +4 steps of 4 rows, 1 epoch; ", outcome.err, re.MULTILINE)
    assert files_in(tmp_path) == ["chat.jsonl"]


def test_dry_run_makes_no_folder(train: Cli, output: Path) -> None:
    assert train("--dry-run").code == 0
    assert not output.parent.exists()


@pytest.mark.slow
def test_terminal_shows_a_live_bar(model: Path, chat: Path, output: Path) -> None:
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "100"}
    arguments = [
        "--model-path",
        model,
        "--data",
        chat,
        "--output",
        output,
        "--epochs",
        3,
    ]
    with start("train", *arguments, "--samples", 0, stderr=end, env=environment) as process:
        os.close(end)
        shown = "".join(read_terminal(terminal))
        os.close(terminal)
    assert process.returncode == 0
    assert re.search(r"step \d+/12 ", shown)
    assert "loss " in shown
    assert "\x1b[2K" in shown  # the bar erases its line


# --debug


def test_debug_shows_the_traceback(train: Cli, chat: Path) -> None:
    with pytest.raises(DataError, match="none of its 20 rows"):
        train("--max-seq-len", 8, "--debug")


def test_debug_shows_the_traceback_of_an_option(cli: Cli) -> None:
    with pytest.raises(ConfigError, match="--lr must be a number"):
        cli("train", "--debug", "--lr", "x")


def test_bug_keeps_its_traceback(train: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise ZeroDivisionError("ours")

    monkeypatch.setattr("mlxtune.backend.models.loading.read_weights", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        train()


def test_every_mlxtune_error_is_one_line(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MlxTuneError("first\n\nsecond\r\n  third")

    monkeypatch.setattr("mlxtune.commands.train.run_training", fail)
    assert cli("train", "--model-path", "m", "--data", "d").error == r"first\n\nsecond\r\n  third"
