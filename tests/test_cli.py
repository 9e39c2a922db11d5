"""The command as a newcomer and a hostile user meet it: what it prints, writes and exits with."""

from __future__ import annotations

import dataclasses
import gzip
import json
import os
import pty
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from mlxtune.cli import main
from mlxtune.config import TrainConfig, flag
from mlxtune.errors import ConfigError, DataError, MlxTuneError
from tests.models import sums, write_chat, write_model, write_tokenizer

ROWS = 20


@dataclasses.dataclass(frozen=True)
class Outcome:
    """What a person sees of a command that ended."""

    code: int
    out: str
    err: str

    @property
    def error(self) -> str:
        """The message, having checked that it is all there is."""
        assert self.code in (1, 2), self.err
        assert self.out == ""
        lines = self.err.splitlines()
        assert len(lines) == 1, self.err
        assert lines[0].startswith("mlxtune: error: ")
        return lines[0].removeprefix("mlxtune: error: ")


Cli = Callable[..., Outcome]


@pytest.fixture
def cli(capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Cli:
    """Run a command in this process, which has paid for the start of mlx already."""
    # The command puts its own in place, for good.
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def run(*arguments: object) -> Outcome:
        capfd.readouterr()
        with pytest.raises(SystemExit) as exit_:
            main([str(argument) for argument in arguments])
        assert isinstance(exit_.value.code, int)
        return Outcome(exit_.value.code, *capfd.readouterr())

    return run


@pytest.fixture
def train(cli: Cli, model: Path, chat: Path, output: Path) -> Cli:
    """Run `mlxtune train --quiet` on a good model and file; options given later win."""

    def run(*arguments: object, quiet: bool = True) -> Outcome:
        good = ["--model-path", model, "--data", chat, "--output", output]
        return cli("train", *good, *(["--quiet"] if quiet else []), *arguments)

    return run


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model(tmp_path_factory.mktemp("models") / "tiny-qwen3", "qwen3")


@pytest.fixture
def broken(model: Path, tmp_path: Path) -> Path:
    """A copy of the model, to be broken."""
    return Path(shutil.copytree(model, tmp_path / "broken"))


@pytest.fixture
def chat(tmp_path: Path) -> Path:
    return write_chat(tmp_path / "chat.jsonl", sums(ROWS))


@pytest.fixture
def output(tmp_path: Path) -> Path:
    return tmp_path / "out" / "adapters.safetensors"


@pytest.fixture
def config_of_run(monkeypatch: pytest.MonkeyPatch) -> Callable[[], TrainConfig]:
    """Replace the recipe; return the config that it was called with."""
    import mlxtune.train  # noqa: F401

    calls: list[TrainConfig] = []
    recipe = sys.modules["mlxtune.train"]
    monkeypatch.setattr(recipe, "train", lambda config, **_: calls.append(config))

    def config() -> TrainConfig:
        assert len(calls) == 1
        return calls[0]

    return config


def files_in(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def start(*arguments: object, **options: Any) -> subprocess.Popen[str]:
    """Start the command as a person would, in a process of its own."""
    command = [sys.executable, "-m", "mlxtune", *map(str, arguments)]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, **{**pipes, **options})


def finish(process: subprocess.Popen[str], read: str = "", timeout: float = 60) -> Outcome:
    """Wait for the end; `read` is what has been read of stderr."""
    out, err = process.communicate(timeout=timeout)
    return Outcome(process.returncode, out, read + err)


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """Read stderr up to the line that contains the text."""
    assert process.stderr is not None
    read = ""
    for line in process.stderr:
        read += line
        if text in line:
            return read
    raise AssertionError(f"{text!r} was never said:\n{read}")


# Help


def test_help_names_every_option_with_its_default(cli: Cli) -> None:
    outcome = cli("train", "--help")
    assert outcome.code == 0
    assert outcome.err == ""
    said = " ".join(outcome.out.split())
    for field in dataclasses.fields(TrainConfig):
        assert f" {flag(field.name)}" in said
        if isinstance(field.default, str | int | float) and field.default not in ("", False):
            default = field.default if isinstance(field.default, str) else f"{field.default:g}"
            assert re.search(rf"{flag(field.name)} [^\[]*\[default: {re.escape(default)}\]", said)


def test_help_shows_the_default_of_zero(cli: Cli) -> None:
    said = " ".join(cli("train", "--help").out.split())
    assert re.search(r"--dropout X [^\[]*\[default: 0\]", said)


@pytest.mark.parametrize("arguments", [["--help"], ["train", "--help"], ["--version"]])
def test_help_loads_neither_mlx_nor_transformers_nor_numpy(arguments: list[str]) -> None:
    code = (
        "import sys\n"
        "from mlxtune.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True
    )
    loaded = {name.partition(".")[0] for name in process.stderr.split()}
    assert "mlxtune" in loaded
    assert not loaded & {"mlx", "mlx_lm", "transformers", "numpy", "rich"}


def test_no_command_shows_the_help_as_it_is(cli: Cli) -> None:
    outcome = cli()
    assert outcome.code == 2
    assert "error" not in outcome.err
    assert "\n  train  " in outcome.out + outcome.err


# Options


def test_all_problems_of_the_options_are_said_in_one_line(cli: Cli) -> None:
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
def test_misuse_is_one_line_that_names_what_is_wrong(
    cli: Cli, arguments: list[str], named: str
) -> None:
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
        ("run.yaml", "- rank", "must hold names and values"),
        ("run.yaml", "[" * 5000, "not valid YAML"),
        ("run.toml", "a" + " = [" * 5000, "not valid TOML"),
        ("run.yaml", "rank: '\x00'", "not valid YAML"),
        ("run.yaml", "rank: hi\nquiet: 'yes'\ntargets: [q_proj, 3]", "--quiet must be true"),
    ],
)
def test_bad_config_file_is_one_line_that_names_it(
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


def test_problems_of_config_file_and_flags_are_said_together(cli: Cli, tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("rnak: 4\nepochs: 0\n")
    outcome = cli("train", "--config", file, "--lr", "nan")
    for problem in ("'rnak'", "--epochs", "--lr", "--model-path", "--data"):
        assert problem in outcome.error


# The model folder


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def write_text(name: str, text: str) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(text)


def remove(*names: str) -> Callable[[Path], object]:
    return lambda folder: [(folder / name).unlink() for name in names]


def truncate(size: int) -> Callable[[Path], object]:
    return lambda folder: os.truncate(folder / "model.safetensors", size)


def set_config(**changes: Any) -> Callable[[Path], object]:
    return lambda folder: edit_config(folder, **changes)


def to_garbled_sentencepiece(folder: Path) -> None:
    remove("tokenizer.json")(folder)
    (folder / "tokenizer.model").write_bytes(bytes(range(256)) * 8)


DAMAGE = {
    "no config": (remove("config.json"), "has no config.json"),
    "config cut short": (write_text("config.json", "{"), "config.json"),
    "config is a list": (write_text("config.json", "[1]"), "config.json"),
    "config is nested without end": (write_text("config.json", "[" * 100_000), "config.json"),
    "type is no text": (set_config(model_type=3), "model_type"),
    "type is unknown": (set_config(model_type="qwen99"), "no model type 'qwen99'"),
    "type is a path": (set_config(model_type="../x"), "no model type '../x'"),
    "config lacks keys": (write_text("config.json", '{"model_type": "qwen3"}'), "hidden_size"),
    "size is text": (set_config(hidden_size="64"), "config.json"),
    "size is null": (set_config(vocab_size=None), "config.json"),
    "no heads": (set_config(num_attention_heads=0), "config.json"),
    "other size": (set_config(hidden_size=32), "embed_tokens"),
    "a layer too many": (set_config(num_hidden_layers=3), "model.layers.2"),
    "a layer too few": (set_config(num_hidden_layers=1), "model.layers.1"),
    "no weights": (remove("model.safetensors"), "has no weights"),
    "weights are empty": (truncate(0), "download it again"),
    "weights cut in the header": (truncate(1000), "download it again"),
    "weights cut in the data": (truncate(100_000), "download it again"),
    "weights are garbage": (write_text("model.safetensors", "x" * 5000), "download it again"),
    "no tokenizer": (remove("tokenizer.json", "tokenizer_config.json"), "tokenizer"),
    "no tokenizer.json": (remove("tokenizer.json"), "tokenizer"),
    "tokenizer cut short": (write_text("tokenizer.json", "{"), "tokenizer.json"),
    "tokenizer is an empty object": (write_text("tokenizer.json", "{}"), "tokenizer.json"),
    "tokenizer_config cut short": (write_text("tokenizer_config.json", "["), "tokenizer"),
    "sentencepiece is garbage": (to_garbled_sentencepiece, "tokenizer.model"),
}


@pytest.mark.parametrize(("damage", "said"), DAMAGE.values(), ids=DAMAGE.keys())
def test_broken_model_is_one_line_that_names_the_folder_and_a_remedy(
    train: Cli, broken: Path, tmp_path: Path, damage: Callable[[Path], object], said: str
) -> None:
    damage(broken)
    before = files_in(tmp_path)
    outcome = train("--model-path", broken, "--max-steps", 1)
    assert outcome.code == 1
    assert str(broken) in outcome.error
    assert said in outcome.error
    assert re.search("download|upgrade|is this a .*model", outcome.error)
    assert files_in(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("missing", "no such folder: check --model-path"),
        ("chat.jsonl", "is a file: --model-path takes the folder"),
    ],
)
def test_model_path_that_is_no_folder_is_named(
    train: Cli, tmp_path: Path, name: str, said: str
) -> None:
    assert train("--model-path", tmp_path / name).error == f"{tmp_path / name}: {said}" + (
        " that holds it" if name == "chat.jsonl" else ""
    )


@pytest.mark.parametrize("path", ["./missing", "../missing"])
def test_relative_folder_that_is_missing_is_not_looked_for_on_the_hub(
    train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    assert train("--model-path", path).error == f"{path}: no such folder: check --model-path"


def test_model_that_cannot_be_downloaded_is_one_line_and_soon(tmp_path: Path, chat: Path) -> None:
    # A port where nothing listens, and no cache.
    environment = {**os.environ, "HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path)}
    started = time.monotonic()
    arguments = ["--model-path", "nobody/nothing", "--data", chat, "--output", tmp_path / "a/b"]
    error = finish(start("train", *arguments, env=environment)).error
    assert error.startswith("nobody/nothing: no such folder, and downloading it failed: ")
    assert time.monotonic() - started < 30
    assert not (tmp_path / "a").exists()


def test_tokenizer_of_another_model_is_refused(train: Cli, broken: Path, output: Path) -> None:
    # Tokens beyond the vocabulary would read past the end of the embeddings.
    write_tokenizer(broken, extra=[f"<extra_{i}>" for i in range(100)])
    outcome = train("--model-path", broken, "--max-steps", 1)
    assert re.search(
        rf"{broken}: its tokenizer gives token \d+, but the model knows only 320", outcome.error
    )
    assert files_in(output.parent) == []


# The data file


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"\xef\xbb\xbf", "is empty|no rows"),
        (b"\n# a comment\n\n", "no rows|only blank lines and comments"),
        (bytes(range(256)) * 20, "is a binary file"),
        (gzip.compress(b"{}\n"), "is a binary file"),
        ('{"messages": []}\n'.encode("utf-16"), "is a binary file"),
        (b'[\n{"messages": []}\n]\n', "is a JSON array: write one JSON object a line"),
        (b"\x80\x81\n\xfe\n", "none of its 2 rows .*data.jsonl:1: not UTF-8"),
        (b'{"messages": []}\n{"text": "x"}\n3\n', "none of its 3 rows .*data.jsonl:1: no assist"),
    ],
    ids=["empty", "bom", "comments", "binary", "gzip", "utf-16", "array", "bytes", "bad rows"],
)
def test_useless_data_is_one_line_that_names_the_file(
    train: Cli, tmp_path: Path, output: Path, content: bytes, said: str
) -> None:
    file = tmp_path / "data.jsonl"
    file.write_bytes(content)
    outcome = train("--data", file, "--max-steps", 1)
    assert outcome.code == 1
    assert outcome.error.startswith(f"{file}: ")
    assert re.search(said, outcome.error)
    assert files_in(tmp_path) == ["chat.jsonl", "data.jsonl"]


@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_missing_file_is_named_with_its_option(train: Cli, tmp_path: Path, option: str) -> None:
    missing = tmp_path / "missing.jsonl"
    assert train(option, missing).error == f"{missing}: no such file: check {option}"


@pytest.mark.parametrize("option", ["--data", "--val-data"])
def test_folder_in_place_of_a_file_is_refused(train: Cli, tmp_path: Path, option: str) -> None:
    assert train(option, tmp_path).error == f"{tmp_path}: is a folder: name a .jsonl file in it"


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read every file")
def test_file_without_permission_is_named(train: Cli, chat: Path) -> None:
    chat.chmod(0)
    assert train().error == f"{chat}: cannot be read: Permission denied"


def test_rows_all_cut_to_nothing_name_the_limit_and_train_nothing(
    train: Cli, chat: Path, output: Path
) -> None:
    outcome = train("--max-seq-len", 8)
    assert outcome.error.startswith(f"{chat}: none of its {ROWS} rows can be trained on")
    assert f"{chat}:1: no supervised token within --max-seq-len 8" in outcome.error
    assert re.search(r"the answer begins at token \d+", outcome.error)
    assert files_in(output.parent) == []


def test_refused_command_leaves_no_folder_behind(train: Cli, output: Path) -> None:
    assert train("--max-seq-len", 8).code == 1
    assert not output.parent.exists()


# LoRA


@pytest.mark.parametrize(
    ("targets", "said"),
    [
        ("q_proj,q_porj", "no projection is named q_porj (did you mean q_proj?)"),
        ("self_attn.qproj", "did you mean self_attn.q_proj?"),
        ("nonsense", "no projection is named nonsense; this model has"),
        ("lm_head", "no projection is named lm_head; this model has"),
    ],
)
def test_target_that_matches_nothing_is_an_error_that_lists_what_there_is(
    train: Cli, output: Path, targets: str, said: str
) -> None:
    outcome = train("--targets", targets, "--max-steps", 1)
    assert outcome.code == 1
    assert outcome.error.startswith("--targets: ")
    assert said in outcome.error
    assert "mlp.down_proj, mlp.gate_proj, mlp.up_proj, self_attn.k_proj" in outcome.error
    assert files_in(output.parent) == []


def test_more_layers_than_the_model_has_are_refused(train: Cli) -> None:
    assert train("--num-layers", 99).error == "--num-layers 99: the model has 2 layers"


# Outputs


def test_output_that_is_a_folder_is_refused(train: Cli, tmp_path: Path) -> None:
    outcome = train("--output", tmp_path)
    assert outcome.error == f"{tmp_path}: is a folder: --output takes the name of a file"


@pytest.mark.parametrize(
    ("option", "below"),
    [
        ("--output", "chat.jsonl/adapters.safetensors"),
        ("--output", "chat.jsonl/deeper/adapters.safetensors"),
        ("--checkpoint-dir", "chat.jsonl"),
        ("--checkpoint-dir", "chat.jsonl/deeper"),
    ],
)
def test_output_below_a_file_names_the_option_and_the_file(
    train: Cli, tmp_path: Path, chat: Path, option: str, below: str
) -> None:
    outcome = train(option, tmp_path / below, "--max-steps", 1)
    assert outcome.code == 1
    assert str(chat) in outcome.error
    assert option in outcome.error
    assert "free space" not in outcome.error
    assert files_in(tmp_path) == ["chat.jsonl"]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
@pytest.mark.parametrize("option", ["--output", "--checkpoint-dir"])
def test_folder_without_permission_is_found_before_training(
    train: Cli, tmp_path: Path, option: str
) -> None:
    locked = tmp_path / "locked"
    locked.mkdir(mode=0o500)
    outcome = train(option, locked / "new" / "file")
    assert str(locked) in outcome.error
    assert "Permission denied" in outcome.error


@pytest.mark.parametrize("name", ["chat.jsonl", "val.jsonl", "broken/model.safetensors"])
def test_output_never_replaces_what_the_run_reads(
    train: Cli, broken: Path, chat: Path, tmp_path: Path, name: str
) -> None:
    shutil.copy(chat, tmp_path / "val.jsonl")
    before = (tmp_path / name).read_bytes()
    arguments = ["--model-path", broken, "--val-data", tmp_path / "val.jsonl", "--max-steps", 1]
    outcome = train(*arguments, "--output", tmp_path / name)
    assert (tmp_path / name).read_bytes() == before
    assert "--output" in outcome.error


def test_output_named_as_the_adapters_own_config_is_refused(train: Cli, tmp_path: Path) -> None:
    outcome = train("--output", tmp_path / "adapter_config.json", "--max-steps", 1)
    assert "--output" in outcome.error
    assert not (tmp_path / "adapter_config.json").exists()


def test_output_inside_a_checkpoint_is_written_or_refused_before_training(
    train: Cli, tmp_path: Path
) -> None:
    inside = tmp_path / "ck" / "best" / "adapters.safetensors"
    outcome = train(
        *("--output", inside, "--checkpoint-dir", tmp_path / "ck", "--val-split", 0),
        *("--max-steps", 1),
    )
    assert inside.is_file() or (outcome.code == 1 and files_in(tmp_path) == ["chat.jsonl"])


# Rows


BAD_ROWS = {
    "{not json": "not valid JSON (Expecting property name enclosed in double quotes at column 2)",
    "[1]": "not a JSON object (a list)",
    '{"text": "x"}': "no 'messages' (its keys: 'text')",
    '{"messages": "x"}': "'messages' is not a list (text)",
    '{"messages": [1]}': "a message is not an object (message 1 is a number)",
    '{"messages": [{"role": "user", "content": "x"}]}': "no assistant turn",
    '{"messages": [{"role": "bot", "content": "x"}]}': "unknown role (message 1: 'bot'; ",
    '{"messages": [{"role": "assistant", "content": " "}]}': "empty answer (message 1)",
    '{"messages": [{"role": "assistant", "content": 3}]}': "content is not text (message 1 is ",
    '{"messages": [{"content": "x"}]}': "a message has no role (message 1)",
    "[" * 200_000: "JSON nested too deeply",
    '{"messages": ' * 200_000: "JSON nested too deeply",
}


def test_bad_rows_are_skipped_with_path_line_and_reason(
    train: Cli, tmp_path: Path, output: Path
) -> None:
    # Line 1 is a comment and line 2 blank; the numbers are those an editor shows.
    file = write_chat(tmp_path / "mixed.jsonl", ["# bad first", "", *BAD_ROWS, *sums(ROWS)])
    outcome = train("--data", file, "--max-steps", 1)
    assert outcome.code == 0
    said = sorted(outcome.err.splitlines())
    assert len(said) == len(BAD_ROWS)
    for line, reason in enumerate(BAD_ROWS.values(), start=3):
        assert any(warning.startswith(f"warning: {file}:{line}: {reason}") for warning in said)
    (ledger,) = json.loads((output.parent / "checkpoints" / "ledger.json").read_text())
    assert ledger["path"] == str(file)
    assert ledger["rows_read"] == ROWS + len(BAD_ROWS)
    assert sum(ledger["rows_skipped"].values()) == len(BAD_ROWS)


def test_first_five_of_a_kind_are_shown_and_the_others_counted(train: Cli, tmp_path: Path) -> None:
    file = write_chat(tmp_path / "mixed.jsonl", [*sums(4), *[{"text": "x"}] * 12])
    lines = train("--data", file, "--dry-run").err.splitlines()
    assert lines == [
        *(
            f"warning: {file}:{line}: no 'messages' (its keys: 'text'); row skipped"
            for line in range(5, 10)
        ),
        f"warning: {file}: 7 more rows skipped: no 'messages'",
    ]


def test_strict_makes_a_bad_row_an_error(train: Cli, tmp_path: Path, output: Path) -> None:
    file = write_chat(tmp_path / "mixed.jsonl", [*sums(4), {"text": "x"}, "3"])
    outcome = train("--data", file, "--strict", "--max-steps", 1)
    assert outcome.code == 1
    assert outcome.error.startswith(f"{file}:5: no 'messages'")
    assert "2 of 6 rows" in outcome.error
    assert files_in(output.parent) == []


def test_strict_accepts_a_file_of_good_rows(train: Cli, output: Path) -> None:
    assert train("--strict", "--max-steps", 1).code == 0
    assert output.is_file()


def test_control_characters_of_a_file_do_not_reach_the_terminal(train: Cli, tmp_path: Path) -> None:
    rows = [{"messages": [{"role": "\x1b[31m\nred", "content": "x"}]}, {"\x1b]0;title\x07": 1}]
    file = write_chat(tmp_path / "mixed.jsonl", [*sums(4), *rows])
    outcome = train("--data", file, "--dry-run")
    assert len(outcome.err.splitlines()) == 2
    assert "\x1b" not in outcome.err


def test_single_row_with_a_split_names_the_way_out(train: Cli, tmp_path: Path) -> None:
    file = write_chat(tmp_path / "one.jsonl", sums(1))
    assert train("--data", file).error == (
        f"{file}: one row cannot be both trained on and held out: add rows or set --val-split 0"
    )


def test_single_row_trains_without_validation(train: Cli, tmp_path: Path, output: Path) -> None:
    file = write_chat(tmp_path / "one.jsonl", sums(1))
    assert train("--data", file, "--val-split", 0) == Outcome(0, "", "")
    assert output.is_file()


def test_fewer_rows_than_a_batch_train_all_the_same(
    train: Cli, tmp_path: Path, output: Path
) -> None:
    file = write_chat(tmp_path / "few.jsonl", sums(3))
    assert train("--data", file, "--batch-size", 64) == Outcome(0, "", "")
    assert output.is_file()


# What is said


def test_good_run_is_plain_lines_on_stderr_when_piped(
    model: Path, chat: Path, output: Path
) -> None:
    arguments = ["--model-path", model, "--data", chat, "--output", output, "--max-steps", 2]
    outcome = finish(start("train", *arguments, "--log-every", 1))
    assert outcome.code == 0
    assert outcome.out == ""
    assert "\x1b" not in outcome.err
    assert "\r" not in outcome.err
    stages = [line.split()[0] for line in outcome.err.splitlines() if not line.startswith(" ")]
    order = ["Memory", "Model", "LoRA", "Data", "Template", "Plan", "Validation", "Training"]
    assert list(dict.fromkeys(stages)) == [*order, "Done", "Try"]
    assert "step 2/2  loss " in outcome.err
    assert f"--model {model} --adapter-path {output.parent}" in outcome.err.splitlines()[-1]


@pytest.mark.parametrize("extra", [[], ["--dry-run"]])
def test_quiet_says_nothing_when_all_is_well(train: Cli, extra: list[str]) -> None:
    assert train("--max-steps", 1, *extra) == Outcome(0, "", "")


def test_every_stage_is_set_apart_from_its_message(train: Cli) -> None:
    train("--max-steps", 1)
    # The second run has something to say of the first one's checkpoints.
    lines = train("--max-steps", 1, quiet=False).err.splitlines()
    assert any("earlier run" in line for line in lines)
    for line in lines:
        assert re.match(r"[A-Z]\w+ +\S| {5,}\S", line)


def test_error_is_the_last_line_and_the_only_one_of_its_kind(train: Cli, chat: Path) -> None:
    outcome = train("--max-seq-len", 8, quiet=False)
    *stages, error = outcome.err.splitlines()
    assert error.startswith(f"mlxtune: error: {chat}")
    assert not any("error" in line for line in stages)


def test_dry_run_says_the_plan_and_writes_nothing(
    train: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.pipeline import InstructPipeline

    monkeypatch.setattr(InstructPipeline, "train_batch", None)
    outcome = train("--dry-run", quiet=False)
    assert outcome.code == 0
    assert "20 rows read, 16 train, 4 validate" in outcome.err
    assert re.search(r"^Plan +4 steps of 4 rows, 1 epoch; ", outcome.err, re.MULTILINE)
    assert files_in(tmp_path) == ["chat.jsonl"]


def test_dry_run_makes_no_folder(train: Cli, output: Path) -> None:
    assert train("--dry-run").code == 0
    assert not output.parent.exists()


@pytest.mark.parametrize("columns", [100, 60])
def test_terminal_shows_a_live_bar(model: Path, chat: Path, output: Path, columns: int) -> None:
    terminal, end = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": str(columns)}
    arguments = ["--model-path", model, "--data", chat, "--output", output, "--epochs", 3]
    with start("train", *arguments, stderr=end, env=environment) as process:
        os.close(end)
        shown = "".join(read_terminal(terminal))
        os.close(terminal)
    assert process.returncode == 0
    assert re.search(r"step \d+/12 ", shown)
    assert "loss " in shown
    assert "\x1b[2K" in shown  # the bar is drawn over itself, and wiped in the end


def read_terminal(terminal: int) -> Iterator[str]:
    while True:
        try:
            chunk = os.read(terminal, 4096)
        except OSError:  # how Linux says that the other end was closed
            return
        if not chunk:
            return
        yield chunk.decode(errors="replace")


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

    import mlxtune.train  # noqa: F401

    monkeypatch.setattr(sys.modules["mlxtune.train"], "load_model", fail)
    with pytest.raises(ZeroDivisionError, match="ours"):
        train()


def test_every_error_of_ours_is_one_line_whatever_it_holds(
    cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise MlxTuneError("first\n\nsecond\r\n  third")

    import mlxtune.train  # noqa: F401

    monkeypatch.setattr(sys.modules["mlxtune.train"], "train", fail)
    assert cli("train", "--model-path", "m", "--data", "d").error == "first second third"


# A loss that is not finite


def test_loss_that_is_not_finite_stops_and_names_step_and_learning_rate(
    train: Cli, output: Path
) -> None:
    outcome = train("--lr", "1e30", "--max-grad-norm", 0, "--schedule", "constant")
    assert outcome.code == 1
    assert re.match(r"step \d: the (loss|gradient norm) is (nan|inf)", outcome.error)
    assert "learning rate 1e+30" in outcome.error
    assert "--lr" in outcome.error
    assert not output.exists()


def test_last_good_checkpoint_stays_and_is_named_when_the_loss_is_not_finite(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend import pipeline

    sound = pipeline.cross_entropy_sum
    calls = SimpleNamespace(training=0)

    def fails_in_the_third_epoch(model: Any, *arrays: Any) -> Any:
        calls.training += model.training
        return sound(model, *arrays) * (float("nan") if calls.training > 9 else 1.0)

    monkeypatch.setattr(pipeline, "cross_entropy_sum", fails_in_the_third_epoch)
    error = train("--epochs", 4).error
    checkpoints = output.parent / "checkpoints"
    assert re.match(r"step 10: the loss is nan at learning rate \S+", error)
    assert f"{checkpoints / 'best'}" in error or f"{checkpoints / 'epoch-2'}" in error
    kept = {path.parent.name for path in checkpoints.glob("*/adapters.safetensors")}
    assert kept == {"best", "epoch-1", "epoch-2"}
    assert not output.exists()


def test_validation_loss_that_is_not_finite_names_step_and_learning_rate(
    train: Cli, output: Path
) -> None:
    error = train("--lr", "1e39", "--schedule", "constant", "--max-steps", 1).error
    assert "step 1" in error
    assert "1e+39" in error
    assert not output.exists()


def test_adapter_that_is_not_finite_is_never_written(train: Cli, output: Path) -> None:
    # Nothing is computed with the weights after the last step when there is no validation.
    arguments = ["--lr", "1e39", "--schedule", "constant", "--val-split", 0, "--max-steps", 1]
    error = train(*arguments).error
    assert "step 1" in error
    assert "1e+39" in error
    assert not list(output.parent.rglob("adapters.safetensors"))


# Ctrl-C


@pytest.fixture
def long_run(model: Path, chat: Path, output: Path) -> list[object]:
    paths = ["--model-path", model, "--data", chat, "--output", output]
    return ["train", *paths, "--epochs", 10_000, "--patience", 10_000, "--log-every", 1]


def test_interrupt_finishes_the_step_saves_and_says_where(
    long_run: list[object], model: Path, output: Path
) -> None:
    from mlx_lm.utils import load

    process = start(*long_run)
    read = read_until(process, "step 3/")
    process.send_signal(signal.SIGINT)
    outcome = finish(process, read)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    lines = outcome.err.splitlines()
    assert len(set(lines)) == len(lines)  # the handler prints while a line may be under way
    said = re.fullmatch(r"mlxtune: interrupted after step (\d+); saved to (.+)", lines[-1])
    assert said, outcome.err
    step, folder = int(said[1]), Path(said[2])
    assert step >= 3
    assert folder == output.parent / "checkpoints" / f"step-{step}"
    assert json.loads((folder / "metadata.json").read_text())["step"] == step
    load(str(model), adapter_path=str(folder))
    assert not output.exists()


def test_interrupt_in_a_step_lets_the_step_end(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.pipeline import InstructPipeline

    whole = InstructPipeline.train_batch

    def interrupted(self: Any, examples: Any, *, step: int, **options: Any) -> Any:
        if step == 2:
            signal.raise_signal(signal.SIGINT)
        return whole(self, examples, step=step, **options)

    monkeypatch.setattr(InstructPipeline, "train_batch", interrupted)
    outcome = train("--epochs", 2)
    folder = output.parent / "checkpoints" / "step-2"
    assert outcome.code == 130
    warning, last = outcome.err.splitlines()
    assert warning.startswith("warning: stopping after this step")
    assert last == f"mlxtune: interrupted after step 2; saved to {folder}"
    assert (folder / "adapters.safetensors").is_file()


def test_second_interrupt_ends_at_once(model: Path, tmp_path: Path, output: Path) -> None:
    # Steps long enough to be interrupted twice.
    rows = write_chat(tmp_path / "many.jsonl", sums(4000))
    paths = ["--model-path", model, "--data", rows, "--output", output, "--val-split", 0]
    process = start("train", *paths, "--batch-size", 4000)
    read = read_until(process, "Plan")
    time.sleep(0.3)
    process.send_signal(signal.SIGINT)
    read += read_until(process, "stopping")
    process.send_signal(signal.SIGINT)
    outcome = finish(process, read)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    assert outcome.err.splitlines()[-1] == "mlxtune: interrupted"
    assert "saved" not in outcome.err
    assert not list(output.parent.rglob("*.safetensors"))


@pytest.mark.parametrize("stage", ["Memory", "Model", "LoRA"])
def test_interrupt_while_loading_ends_without_a_traceback(
    train: Cli, output: Path, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    from mlxtune.console import RunConsole

    say = RunConsole.say

    def interrupted(self: RunConsole, said: str, message: str) -> None:
        say(self, said, message)
        if said == stage:
            signal.raise_signal(signal.SIGINT)

    monkeypatch.setattr(RunConsole, "say", interrupted)
    assert train() == Outcome(130, "", "mlxtune: interrupted\n")
    assert files_in(output.parent) == []


def test_interrupt_of_a_process_that_loads_its_model_ends_it(long_run: list[object]) -> None:
    process = start(*long_run)
    read = read_until(process, "Memory")
    process.send_signal(signal.SIGINT)
    outcome = finish(process, read)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    assert outcome.err.splitlines()[-1].startswith("mlxtune: interrupted")
