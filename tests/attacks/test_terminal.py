"""Control characters in a stranger's run are shown and never executed, and forge no line."""

from __future__ import annotations

import ast
import json
import re
import shutil
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune import TrainConfig, train
from mlxtune.core.run import checkpoint
from tests.command import Cli, Outcome
from tests.models import sums, write_chat
from tests.slow import long_except
from tests.sources import PACKAGE, tree_of

FORGED = "FORGED"
TITLE = f"\n{FORGED}\u202e\x1b]0;owned\x07\x9b2J"

COMMANDS = ("runs", "verify", "report", "push")
RECORDS = ("run.json", "ledger.json", "result.json", "evaluation.json")


def planted(value: Any) -> Any:
    """Return a record with a control sequence at the start of every text."""
    if isinstance(value, dict):
        return {name: planted(each) for name, each in value.items()}
    if isinstance(value, list):
        return [planted(each) for each in value]
    return f"{TITLE}{value}"[: max(len(value), 30)] if isinstance(value, str) else value


@pytest.fixture(scope="module")
def made(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("stranger")
    output = str(folder / "out" / "adapters.safetensors")
    chat = write_chat(folder / "chat.jsonl", sums(20))
    options = {"max_steps": 2, "save_steps": 1, "samples": 0, "quiet": True}
    train(TrainConfig(str(model), str(chat), output=output, **options))  # type: ignore[arg-type]
    return folder / "out"


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "out")) / "checkpoints"


def is_plain(outcome: Outcome) -> bool:
    assert "Traceback" not in outcome.err
    lines = (outcome.out + outcome.err).split("\n")
    return all(line.isprintable() and not line.startswith(FORGED) for line in lines)


def test_push_shows_a_card_without_acting_on_it(cli: Cli, run: Path) -> None:
    for name in ("run.json", "ledger.json", "evaluation.json"):
        record = json.loads((run / name).read_text())
        text = json.dumps(record).replace("chat.jsonl", json.dumps(f"a{TITLE}b")[1:-1])
        (run / name).write_text(text)
    outcome = cli("push", run.parent, "me/sums", "--dry-run")
    assert outcome.code == 0, outcome.err
    assert is_plain(outcome)
    assert "owned" in outcome.out


@pytest.mark.parametrize(
    "pair",
    long_except(
        [(command, record) for command in COMMANDS for record in RECORDS],
        *[("runs", "run.json"), ("report", "result.json"), ("push", "ledger.json")],
    ),
)
def test_records_do_not_control_the_terminal(cli: Cli, run: Path, pair: tuple[str, str]) -> None:
    command, record = pair
    (run / record).write_text(json.dumps(planted(json.loads((run / record).read_text()))))
    more = ["me/sums", "--dry-run"] if command == "push" else []
    assert is_plain(cli(command, run.parent if command == "push" else run, *more))


@pytest.mark.parametrize("command", ["train"])
def test_options_of_a_checkpoint_do_not_control_the_terminal(
    cli: Cli, run: Path, command: str
) -> None:
    for folder in checkpoint.checkpoint_folders(run):
        metadata = json.loads((folder / "metadata.json").read_text())
        (folder / "metadata.json").write_text(json.dumps(planted(metadata)))
        (folder / "manifest.json").unlink()
        checkpoint.write_json(folder / "manifest.json", checkpoint._manifest(folder))
    assert is_plain(cli(command, *(["--resume"] if command == "train" else []), run))


def test_warning_of_a_library_does_not_control_the_terminal(cli: Cli, tmp_path: Path) -> None:
    # The command installs this format for all warnings.
    assert cli("runs", tmp_path).code == 0
    line = warnings.formatwarning(f"{TITLE}\nand more", UserWarning, "file.py", 1)
    assert line == f"warning: {FORGED}\\u202e\\x1b]0;owned\\x07\\x9b2J and more\n"


# A path with a line break. Each command gets it in all its options that are paths.


@pytest.fixture
def forged(run: Path, tmp_path: Path) -> Path:
    """A folder whose name has a line break, with data, a run, a model and an adapter in it."""
    folder = tmp_path / f"x\n{FORGED}"
    run.parent.rename(folder)
    write_chat(folder / "chat.jsonl", sums(20))
    (folder / "bad.jsonl").write_text(
        '{"messages": 1}\n' * 3 + '{"prompt": "a", "completion": "b"}'
    )
    return folder


LOOKING: dict[str, list[str]] = {
    "verify": ["verify", "{}"],
    "report": ["report", "{}"],
    "two reports": ["report", "{}", "{}/checkpoints"],
    "runs": ["runs", "{}"],
    "no runs": ["runs", "{}/checkpoints/best"],
    "inspect": ["inspect", "--data", "{}/chat.jsonl", "--html", "{}/page.html"],
    "a row": ["inspect", "--data", "{}/chat.jsonl", "--row", "3"],
    "bad rows": ["inspect", "--data", "{}/bad.jsonl"],
    "no data": ["inspect", "--data", "{}/none.jsonl"],
    "plan": ["plan", "--data", "{}/bad.jsonl", "--data", "{}/chat.jsonl"],
    "train": ["train", "--data", "{}/chat.jsonl", "--output", "{}/new/a.safetensors", "--dry-run"],
    "resume": ["train", "--resume", "{}", "--dry-run"],
    "push": ["push", "{}", "me/sums", "--dry-run"],
    "no model": ["generate", "--model-path", "{}/none", "--prompt", "hi"],
    "no adapter": ["generate", "--adapter", "{}/none", "--prompt", "hi"],
    "generate": ["generate", "--adapter", "{}", "--prompt", "hi", "--max-new-tokens", "1"],
    "eval": ["eval", "--adapter", "{}", "--data", "{}/chat.jsonl"],
    "fuse": ["fuse", "--adapter", "{}/adapters.safetensors", "--output", "{}/fused"],
    "export": ["export", "--adapter", "{}", "--output", "{}/exported", "--format", "peft"],
    "import": ["import", "{}/checkpoints/best", "--output", "{}/imported"],
    "doctor": ["doctor", "--data", "{}/bad.jsonl"],
}


@pytest.mark.parametrize("command", LOOKING)
def test_path_forges_no_line(
    cli: Cli, forged: Path, model: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(forged.parent)
    arguments = [each.replace("{}", forged.name) for each in LOOKING[command]]
    if "--data" in arguments and "--adapter" not in arguments:
        arguments += ["--model-path", str(model)]
    outcome = cli(*arguments)
    assert is_plain(outcome)
    shown = command not in ("doctor", "resume", "push")
    assert ("x\\nFORGED" in outcome.out + outcome.err) == shown


# Code that bypasses mlxtune/views/output.py

PRINTS = {
    "views/output.py": "the module itself",
    "cli/__init__.py": "the last line, through printable; makes the streams",
    "core/data/sources/parquet_helper.py": "a helper's lines of JSON, for its parent",
    "backend/text/template_helper.py": "a helper's lines of JSON, for its parent",
    "backend/text/tokenizer_helper.py": "a helper's lines of JSON, for its parent",
    "benchmark/bench_helper.py": "a helper's lines of JSON, for its parent",
    "watch/answer_helper.py": "a helper's lines of JSON, for its parent",
}
TEXTS = {
    "views/output.py": "answers through escape_controls",
    "views/terminal.py": "`shown` makes them of escaped text",
    "views/console.py": "each through printable",
    "views/inspection_view.py": "each through visible.escape or stretches",
}


def modules(containing: str) -> Iterator[tuple[str, ast.AST]]:
    """Yield the path and the syntax tree of each module whose text matches `containing`."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if re.search(containing, text):
            yield str(path.relative_to(PACKAGE)), tree_of(path)


def writes(node: ast.AST) -> bool:
    """Return whether a node prints, or uses sys.stdout or sys.stderr for more than `isatty`."""
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
        return node.func.id == "print"
    if not isinstance(node, ast.Attribute):
        return False
    if isinstance(node.value, ast.Attribute) and node.value.attr in ("stdout", "stderr"):
        owner = node.value.value
        return isinstance(owner, ast.Name) and owner.id == "sys" and node.attr != "isatty"
    return node.attr in ("echo", "secho", "echo_via_pager")


def test_only_the_output_module_prints() -> None:
    found = {
        name
        for name, tree in modules(r"print\(|std(out|err)|echo")
        for node in ast.walk(tree)
        if writes(node)
    }
    flushes = {"backend/text/tokenizer.py", "backend/workers/heartbeat.py"}
    assert found - flushes == PRINTS.keys()


def test_texts_for_a_terminal_are_made_in_few_places() -> None:
    found = {
        name
        for name, tree in modules("rich.text")
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module == "rich.text"
    }
    assert found == TEXTS.keys()
