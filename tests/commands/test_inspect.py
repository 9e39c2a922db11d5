"""`mlxtune inspect`, from the options to its output and files."""

from __future__ import annotations

import dataclasses
import functools
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from mlxtune import DataError
from mlxtune.commands.inspect import inspect as run_inspect
from mlxtune.config import InspectConfig
from tests.command import ROWS, Cli, files_in, start
from tests.models import CHATML, THINKING, sums, write_chat, write_tokenizer
from tests.slow import slow


@pytest.fixture
def light(tmp_path: Path) -> Path:
    """A folder with only a tokenizer and a template: no config, no weights."""
    folder = tmp_path / "light"
    write_tokenizer(folder)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


# In a terminal


def test_every_part_is_printed_on_stdout_and_nothing_else(inspect: Cli, chat: Path) -> None:
    outcome = inspect()
    assert outcome.code == 0
    assert outcome.err == ""
    for part in (
        "template built-in qwen3",
        f"{ROWS} rows read = 16 train + 4 validation + 0 skipped",
        "Tokens per example  of 20",
        "What --max-seq-len would cut",
        "One epoch  4 steps of 4 rows",
        "Findings  none",
        f"── {chat}:1  train",
        "<|im_start|>assistant↵\n⟦It is 0<|im_end|>⟧↵\n",
    ):
        assert part in outcome.out


def test_supervised_tokens_are_green_where_there_is_color(
    inspect: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm-256color")
    shown = inspect("--row", 1).out
    row = shown[shown.index("── ") :]
    assert "".join(re.findall(r"\x1b\[1;(?:7;)?32m([^\x1b]+)", row)) == "It is 0<|im_end|>"
    whole = re.sub(r"\x1b\[[\d;]+m", "", row)
    assert whole.endswith("<|im_start|>assistant↵\nIt is 0<|im_end|>↵\n")
    assert "⟦" not in shown


def test_quiet_prints_nothing_when_all_is_well(inspect: Cli) -> None:
    outcome = inspect("--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")


def test_folder_without_weights_and_config_is_enough(cli: Cli, light: Path, chat: Path) -> None:
    outcome = cli("inspect", "--model-path", light, "--data", chat, "--no-cache")
    assert outcome.code == 0
    assert "template the model's own" in outcome.out
    assert "⟦It is 0<|im_end|>⟧" in outcome.out


@pytest.fixture
def one_tokenizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Load each tokenizer only once, as loading takes more than a second."""
    from mlxtune.session import reader

    monkeypatch.setattr(reader, "load_tokenizer", functools.cache(reader.load_tokenizer))


@pytest.mark.slow
@pytest.mark.usefixtures("one_tokenizer")
def test_real_tokenizer_folder_is_enough(cli: Cli, shared: Path) -> None:
    folder, data = shared / "tokenizers" / "qwen3", shared / "chat" / "lf_glaive_toolcall_en.jsonl"
    outcome = cli("inspect", "--model-path", folder, "--data", data)
    assert outcome.code == 0
    assert "300 rows read = 239 train + 60 validation + 1 skipped" in outcome.out
    # From Qwen3's documentation: the prompt of a request without thinking, and its answer.
    shown = cli("inspect", "--model-path", folder, "--data", data, "--row", 3).out
    assert "<|im_start|>assistant↵\n<think>↵\n↵\n</think>↵\n↵\n⟦" in shown
    assert "<|im_end|>⟧" in shown


@pytest.mark.slow
def test_closed_output_pipe_does_not_crash(light: Path, chat: Path) -> None:
    process = start("inspect", "--model-path", light, "--data", chat)
    assert process.stdout is not None
    process.stdout.close()
    assert process.stderr is not None
    said = process.stderr.read()
    process.stderr.close()
    assert process.wait() == 1
    assert said == ""


# --row


def test_row_is_shown_alone_and_whole(inspect: Cli, tmp_path: Path) -> None:
    long = "word " * 400
    rows = [
        "# a comment",
        "",
        *sums(3),
        [("user", "Hi"), ("assistant", long + "end")],
        *sums(9)[3:],
    ]
    file = write_chat(tmp_path / "long.jsonl", rows)
    shown = inspect("--data", file, "--row", 6, "--max-seq-len", 4096).out
    assert re.findall(rf"{file}:(\d+)  train|{file}:(\d+)  validation", shown) in (
        [("6", "")],
        [("", "6")],
    )
    assert "not shown here" in shown
    assert "end<|im_end|>⟧" in shown


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (2, "{file}:2: not valid JSON (Expecting property name enclosed in double quotes"),
        (3, "{file}:3: no assistant turn; row skipped"),
        (4, "{file}:4: no supervised token within --max-seq-len 64 (the answer starts at token "),
        (15, "{file}:15: no 'messages' (its keys: 'words'); row skipped"),
        (5, "{file} has no row 5: --row takes the number of a row that is not blank"),
        (99, "{file} has no row 99: --row takes the number of a row that is not blank"),
    ],
)
def test_skipped_or_missing_row_is_an_error_with_the_reason(
    inspect: Cli, tmp_path: Path, row: int, said: str
) -> None:
    user = {"messages": [{"role": "user", "content": "x"}]}
    long = [("user", "word " * 99), ("assistant", "end")]
    # Row 15 is the sixth with its problem; a warning keeps only five rows.
    rows = [*sums(1), "{no", user, long, "", *sums(5)[1:], *[{"words": 1}] * 9]
    file = write_chat(tmp_path / "bad.jsonl", rows)
    outcome = inspect("--data", file, "--row", row, "--max-seq-len", 64)
    assert outcome.code == 1
    assert outcome.error.startswith(said.format(file=file))


def test_row_whose_answers_are_sampled_is_its_prompt_alone(inspect: Cli, tmp_path: Path) -> None:
    """Its encoding has a placeholder for the answer, which no number or text shows."""
    rows, dump = tmp_path / "rows.jsonl", tmp_path / "dump.jsonl"
    given = [{"prompt": f"Hello {i}"} for i in range(8)]
    given.append({"prompt": "Hello 9", "completion": "Hi"})
    rows.write_text("\n".join(map(json.dumps, given)))
    options = ("--data", rows, "--objective", "grpo", "--html", tmp_path / "page.html")
    text = inspect(*options).out + inspect(*options, "--row", 1).out
    text += (tmp_path / "page.html").read_text()
    assert "The answer." not in text
    assert "0 supervised" in text
    result = json.loads(inspect("--data", rows, "--objective", "grpo", "--json").out)
    inspect("--data", rows, "--objective", "grpo", "--dump", dump)
    lines = read_lines(dump)
    supervised = {each["row"]: sum(each["assistant_mask"]) for each in lines}
    assert {row for row, count in supervised.items() if count} == {9}
    (ledger,) = result["files"]
    tokens = sum(len(each["tokens"]) for each in lines)
    assert ledger["tokens"] == result["tokens"]["total"] == tokens
    assert ledger["tokens_supervised"] == result["supervised"]["total"] == supervised[9]
    assert result["cost"]["tokens"] + result["cost"]["validation_tokens"] == tokens
    assert all(each["cut"] == 0 for each in result["shown"])


def test_row_of_every_file_is_shown(inspect: Cli, tmp_path: Path) -> None:
    files = [write_chat(tmp_path / f"{i}.jsonl", sums(15)[i * 3 : i * 3 + 3]) for i in range(5)]
    data = [word for file in files[:4] for word in ("--data", file)]
    shown = inspect(*data, "--val-data", files[4], "--row", 2).out
    assert re.findall(r"── (\S+):2  (train|validation),", shown) == [
        *((str(file), "train") for file in files[:4]),
        (str(files[4]), "validation"),
    ]


# --html and --dump


def test_html_is_one_page_with_the_rows(inspect: Cli, tmp_path: Path) -> None:
    page = tmp_path / "new" / "page.html"
    outcome = inspect("--html", page, "--quiet")
    assert (outcome.code, outcome.out, outcome.err) == (0, "", "")
    assert files_in(tmp_path) == ["chat.jsonl", "new/page.html"]
    text = page.read_text(encoding="utf-8")
    assert text.startswith("<!doctype html>")
    for row in range(1, ROWS + 1):
        assert f"chat.jsonl:{row}" in text


def test_html_prints_the_path_of_the_page(inspect: Cli, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    assert inspect("--html", page).out.endswith(f"\npage: {page}\n")
    assert "page: " not in inspect("--html", page, "--json").out


def test_html_overwrites_only_our_own_page(
    inspect: Cli, train: Cli, tmp_path: Path, output: Path
) -> None:
    page = tmp_path / "page.html"
    for _ in range(2):
        assert inspect("--html", page).code == 0
    assert train("--max-steps", 1).code == 0
    for other in (output, output.parent / "checkpoints/report.html"):
        before = other.read_bytes()
        error = inspect("--html", other).error
        assert error == f"{other} is not a page of mlxtune inspect: choose another file with --html"
        assert other.read_bytes() == before


def test_dump_is_one_line_for_each_example(inspect: Cli, chat: Path, tmp_path: Path) -> None:
    dump = tmp_path / "new" / "dump.jsonl"
    assert inspect("--dump", dump).code == 0
    lines = read_lines(dump)
    assert [line["row"] for line in lines] == list(range(1, ROWS + 1))
    for line in lines:
        assert set(line) == {"path", "row", "role", "tokens", "assistant_mask"}
        assert line["role"] == "answer"
        assert line["path"] == str(chat)
        assert len(line["tokens"]) == len(line["assistant_mask"])
        assert set(line["assistant_mask"]) == {0, 1}


def test_dump_names_the_file_of_each_example(inspect: Cli, tmp_path: Path) -> None:
    files = [write_chat(tmp_path / f"{i}.jsonl", sums(9)[i * 3 : i * 3 + 3]) for i in range(3)]
    dump = tmp_path / "dump.jsonl"
    arguments = ["--data", files[1], "--data", files[0], "--val-data", files[2], "--dump", dump]
    assert inspect(*arguments).code == 0
    assert [(line["path"], line["row"]) for line in read_lines(dump)] == [
        (str(file), row) for file in (files[1], files[0], files[2]) for row in (1, 2, 3)
    ]


def test_dump_goes_with_row_and_json_and_holds_every_example(inspect: Cli, tmp_path: Path) -> None:
    dump, page = tmp_path / "dump.jsonl", tmp_path / "page.html"
    outcome = inspect("--dump", dump, "--html", page, "--json", "--row", 2)
    assert [each["row"] for each in json.loads(outcome.out)["shown"]] == [2]
    assert len(read_lines(dump)) == ROWS
    assert page.is_file()


@pytest.mark.parametrize(
    "options",
    [
        slow([]),
        ["--max-seq-len", 40, "--val-split", 0.4, "--seed", 7],
        slow(["--val-split", 0, "--turns", "last"]),
        slow(["--template", "gemma"]),
        # The folder's own template makes an example of each turn.
        ["--thinking", "on", "--model-path", "broken", "--max-seq-len", 90],
    ],
)
def test_dump_is_exactly_what_train_gives_the_model(
    inspect: Cli,
    train: Cli,
    tmp_path: Path,
    broken: Path,
    monkeypatch: pytest.MonkeyPatch,
    options: list[object],
) -> None:
    (broken / "chat_template.jinja").write_text(THINKING)
    options = [broken if option == "broken" else option for option in options]
    from mlxtune.backend.step.pipeline import InstructPipeline

    trained, validated = [], []
    step, logps = InstructPipeline.start_batch, InstructPipeline.logps

    def note_step(self: Any, examples: Any, **kinds: Any) -> Any:
        trained.extend(examples)
        return step(self, examples, **kinds)

    def note_evaluation(self: Any, examples: Any, *kinds: Any) -> Any:
        examples = list(examples)
        validated.extend(examples)
        return logps(self, examples, *kinds)

    monkeypatch.setattr(InstructPipeline, "start_batch", note_step)
    monkeypatch.setattr(InstructPipeline, "logps", note_evaluation)
    turns = [("user", "a"), ("assistant", "b"), ("user", "c" * 30), ("assistant", "d")]
    file = write_chat(tmp_path / "a.jsonl", ["", *sums(12), {"words": 1}, turns, *sums(3)])
    dump = tmp_path / "dump.jsonl"

    assert inspect("--data", file, "--dump", dump, *options).code == 0
    assert train("--data", file, *options).code == 0

    # The held-out rows are read before and after the one epoch.
    held_out = validated[: len(validated) // 2]
    used = [(e.row, e.tokens.tolist(), e.assistant_mask.tolist()) for e in (*trained, *held_out)]
    lines = [(line["row"], line["tokens"], line["assistant_mask"]) for line in read_lines(dump)]
    assert sorted(used) == sorted(lines)
    assert bool(held_out) == (0 not in options)
    assert (len(lines) == len({row for row, *_ in lines}) + 1) == (broken in options)
    found = json.loads(inspect("--data", file, *options, "--json", "--html", tmp_path / "a").out)
    shown = {each["row"] for each in found["shown"] if each["split"] == "validation"}
    assert shown == {example.row for example in held_out}


# Without unneeded imports


@pytest.mark.slow
def test_separate_process_loads_no_model(light: Path, chat: Path, tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from mlxtune.cli import main\n"
        "try: main(sys.argv[1:])\n"
        "finally: print(*sys.modules, file=sys.stderr)"
    )
    arguments = ["inspect", "--model-path", str(light), "--data", str(chat), "--row", "2"]
    process = subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True,
        text=True,
        check=True,
        cwd=tmp_path,
    )
    assert "⟦It is 8!<|im_end|>⟧" in process.stdout
    loaded = process.stderr.split()
    assert "mlxtune.backend.text.tokenizer" in loaded
    assert "mlxtune.backend.step.pipeline" not in loaded
    assert "torch" not in loaded


def test_config_file_of_a_run_serves_for_inspect_too(
    cli: Cli, tmp_path: Path, model: Path, chat: Path
) -> None:
    file = tmp_path / "run.yaml"
    file.write_text(f"model-path: {model}\ndata: [{chat}]\nrank: 4\nlr: 1e-3\nmax-seq-len: 99\n")
    found = json.loads(cli("inspect", "--config", file, "--json", "--row", 1).out)
    assert (found["max_seq_len"], found["files"][0]["rows_read"]) == (99, ROWS)
    file.write_text(file.read_text() + "row: 3\nhtml: page.html\n")
    assert cli("train", "--config", file, "--dry-run", "--quiet").code == 0
    file.write_text(file.read_text() + "rwo: 3\n")
    assert "has no option 'rwo' (did you mean row?)" in cli("inspect", "--config", file).error


def test_data_options_of_both_commands_are_the_same() -> None:
    from mlxtune.config import DataConfig, TrainConfig

    shared = {field.name: field.default for field in dataclasses.fields(DataConfig)}
    for command in (TrainConfig, InspectConfig):
        fields = {field.name: field.default for field in dataclasses.fields(command)}
        assert fields | shared == fields


def test_error_of_python_is_the_packages_own(model: Path, chat: Path) -> None:
    with pytest.raises(DataError, match="has no row 99"):
        run_inspect(InspectConfig(str(model), str(chat), row=99))
