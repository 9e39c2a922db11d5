"""`mlxtune reward`: the table of rewards before any training."""

from __future__ import annotations

import json
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.command import Cli, finish, start
from tests.core.files.test_processes import alive
from tests.waiting import wait_until

ROWS = [
    {"prompt": "2 + 3?", "completion": "5", "sum": 5},
    {"prompt": "2 + 4?", "completion": "6", "sum": 6},
    {"prompt": "2 + 5?", "completion": "7", "sum": 7},
]


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    return write(tmp_path / "rows.jsonl", ROWS)


@pytest.fixture
def check(tmp_path: Path) -> Path:
    file = tmp_path / "check.py"
    file.write_text(
        "def reward(prompt, completion, row): return float(completion) == row['sum']\n"
        "def constant(prompt, completion, row): return 1\n"
    )
    return file


def write(path: Path, rows: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_table_shows_own_other_and_empty_answers(cli: Cli, rows: Path) -> None:
    outcome = cli("reward", "number", "length:1=0.5", "--data", rows, "--rows", 2)
    assert (outcome.code, outcome.err) == (0, "")
    assert cells(outcome.out) == [
        ["row", "answer", "text", "number", "length:1", "×", "0.5", "sum"],
        ["rows.jsonl:1", "the", "row's", "5", "1", "1", "1.5"],
        ["rows.jsonl:1", "another", "row's", "6", "0", "1", "0.5"],
        ["rows.jsonl:1", "empty", "0", "0", "0"],
        ["rows.jsonl:2", "the", "row's", "6", "1", "1", "1.5"],
        ["rows.jsonl:2", "another", "row's", "5", "0", "1", "0.5"],
        ["rows.jsonl:2", "empty", "0", "0", "0"],
        [],
        ["mean", "of", "answers", "number", "length:1", "×", "0.5", "sum"],
        ["the", "row's", "1", "1", "1.5"],
        ["another", "row's", "0", "1", "0.5"],
        ["empty", "0", "0", "0"],
    ]


def test_problems_name_row_and_function_and_fail(cli: Cli, rows: Path, check: Path) -> None:
    outcome = cli("reward", check, "exact", "--data", rows, "--rows", 1)
    assert outcome.code == 1
    assert outcome.err == (
        f"no reward for an empty answer: {rows}:1: reward check.reward: raised ValueError: could "
        "not convert string to float: '' (line 1): return 0 if such an answer is wrong\n"
    )
    assert cells(outcome.out)[2] == ["rows.jsonl:1", "empty", "–", "0", "–"]


def test_problems_name_the_answer(cli: Cli, rows: Path, tmp_path: Path) -> None:
    file = tmp_path / "check.py"
    file.write_text("def reward(prompt, completion, row): return None\n")
    lines = cli("reward", file, "--data", rows, "--rows", 2).err.splitlines()
    nouns = ("the row's answer", "another row's answer", "an empty answer")
    assert lines[:3] == [
        f"no reward for {noun}: {rows}:1: reward check.reward: returned None, not a number"
        for noun in nouns
    ]
    answers = write(tmp_path / "answers.jsonl", [{"row": 1, "answer": "5"}])
    outcome = cli("reward", file, "--data", rows, "--answers", answers)
    assert outcome.err.startswith(f"no reward: {rows}:1: ")


def test_constant_reward_is_a_warning(cli: Cli, rows: Path, check: Path) -> None:
    outcome = cli("reward", f"{check}:constant", "--data", rows)
    assert outcome.code == 0
    assert outcome.err.startswith("warning: check.constant gives all of these answers the same")


def test_weight_like_a_tolerance_is_a_warning(cli: Cli, rows: Path) -> None:
    outcome = cli("reward", "number=0.01", "--data", rows)
    assert outcome.code == 0
    assert outcome.err.startswith("warning: reward number=0.01 has the weight 0.01: if it is the")


@pytest.mark.parametrize(
    ("value", "warned"),
    [
        ("len(completion) and float(completion) == row['sum']", []),
        ("-len(completion)", ["another row's answers get", "empty answers get a mean of 0, the"]),
        (
            "len(completion)",
            ["another row's answers get a mean of 1, the rows' own 1: score a wrong"],
        ),
        ("1 if not completion else float(completion) == row['sum']", ["empty answers get a mean"]),
        ("3", ["check.reward gives all of these answers the same value"]),
    ],
)
def test_wrong_answers_that_score_high_are_a_warning(
    cli: Cli, rows: Path, tmp_path: Path, value: str, warned: list[str]
) -> None:
    file = tmp_path / "check.py"
    file.write_text(f"def reward(prompt, completion, row): return {value}\n")
    outcome = cli("reward", file, "--data", rows)
    lines = outcome.err.splitlines()
    assert outcome.code == 0 and len(lines) == len(warned)
    assert all(map(str.startswith, lines, (f"warning: {each}" for each in warned)))


def test_json_has_every_answer(cli: Cli, rows: Path, check: Path) -> None:
    outcome = cli("reward", check, "exact=2", "--data", rows, "--json")
    result = json.loads(outcome.out)
    assert result["rewards"] == [
        {"name": "check.reward", "weight": 1},
        {"name": "exact", "weight": 2},
    ]
    assert [len(result["answers"]), outcome.code] == [9, 1]
    assert result["answers"][1] == {
        "row": f"{rows}:1",
        "kind": "another row's",
        "answer": "6",
        "values": {"check.reward": 0, "exact": 0},
        "total": 0,
        "problems": [],
    }
    assert result["means"]["empty"] == {"check.reward": None, "exact": 0, "sum": None}


def test_answers_of_a_file_are_scored(cli: Cli, rows: Path, tmp_path: Path) -> None:
    given = [{"row": 1, "answer": "5"}, {"row": 3, "answer": "so 7"}, {"row": 9, "answer": "9"}]
    answers = write(tmp_path / "answers.jsonl", given)
    outcome = cli("reward", "exact", "number", "--data", rows, "--answers", answers, "--json")
    scored = json.loads(outcome.out)["answers"]
    assert [(each["row"], each["total"]) for each in scored] == [(f"{rows}:1", 2), (f"{rows}:3", 1)]
    write(answers, given[2:])
    outcome = cli("reward", "exact", "--data", rows, "--answers", answers)
    assert outcome.error == f"{answers} has no answer to the first 3 rows: raise --rows"
    write(answers, [{"text": "5"}])
    outcome = cli("reward", "exact", "--data", rows, "--answers", answers)
    assert "no 'row' and 'answer': pass what generate --data writes" in outcome.error


def test_prompts_without_answers_are_tried_with_empty_ones(
    cli: Cli, tmp_path: Path, check: Path
) -> None:
    rows = write(tmp_path / "prompts.jsonl", [{"ask": "a", "sum": 1}, {"text": "b"}])
    outcome = cli("reward", f"{check}:constant", "--data", rows, "--field", "prompt=ask", "--json")
    assert [each["kind"] for each in json.loads(outcome.out)["answers"]] == ["empty"]
    assert f"warning: {rows}:2: no 'ask' (its keys: 'text'); row skipped\n" in outcome.err
    # Not that the reward is constant, which a right one is for empty answers.
    assert outcome.err.splitlines()[-1] == (
        "warning: the rows have no answers, so only empty ones are tried: sample some with mlxtune "
        "generate --data and --output, and pass them as --answers"
    )
    assert "the same value" not in outcome.err


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ([], "name a REWARD, such as json"),
        (["--reward", "json"], "option --reward: name a REWARD without an option, such as json"),
        (["exakt", "regex=("], "reward 'exakt' is unknown (did you mean exact?): name a FILE.py"),
        (["exakt", "regex=("], "reward 'regex=(' is not a pattern"),
        (["missing.py"], "reward missing.py cannot be read: No such file or directory"),
        (["exact=0", "number=0"], "every reward has the weight 0"),
        (["exact", "exact=2"], "two rewards have the same name"),
        (["exact", "--field", "x"], "--field 'x' is not a pair"),
        (["exact", "--answers", "a", "--data", "b"], "--answers belong to one file"),
        (["exact", "--reward-timeout", "0"], "--reward-timeout must be above 0"),
    ],
)
def test_wrong_option_is_an_error(cli: Cli, rows: Path, arguments: list[str], problem: str) -> None:
    assert problem in cli("reward", *arguments, "--data", rows).error


def test_data_without_a_prompt_is_an_error(cli: Cli, tmp_path: Path) -> None:
    rows = write(tmp_path / "rows.jsonl", [{"text": "a"}])
    outcome = cli("reward", "exact", "--data", rows)
    assert outcome.code == 1
    assert outcome.err.splitlines()[-1] == (
        f"mlxtune: error: {rows} has no row with a prompt: give rows of sft, or a 'prompt'"
    )


@pytest.mark.slow
def test_interrupt_ends_a_hanging_function_and_its_processes(rows: Path, tmp_path: Path) -> None:
    pids, file = tmp_path / "pids", tmp_path / "hangs.py"
    file.write_text(
        "import os, time\n"
        "def reward(prompt, completion, row):\n"
        "    parent, new = os.getpid(), os.fork()\n"
        "    if new:\n"
        "        open('tmp', 'w').write(f'{parent} {new}')\n"
        f"        os.rename('tmp', {str(pids)!r})\n"
        "    time.sleep(600)\n"
    )
    options = ("--data", rows, "--reward-timeout", 600)
    process = start("reward", file, *options, cwd=tmp_path)
    wait_until(pids.exists)
    process.send_signal(signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 130
    assert "Traceback" not in outcome.err
    processes = list(map(int, pids.read_text().split()))
    wait_until(lambda: not any(map(alive, processes)))
