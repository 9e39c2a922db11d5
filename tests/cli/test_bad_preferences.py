"""Invalid preference data gives a one-line error with the remedy."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.command import Cli, files_in

PAIRS = [
    {"prompt": f"{i} plus {i}?", "chosen": str(2 * i), "rejected": str(2 * i + 1)}
    for i in range(1, 11)
]
ANSWERS = [{"prompt": pair["prompt"], "completion": pair["chosen"]} for pair in PAIRS]
LABELED = [row | {"label": True} for row in ANSWERS]
DPO = ("--objective", "dpo")


def write(folder: Path, rows: list[dict[str, str]]) -> Path:
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


@pytest.mark.parametrize(
    ("rows", "options", "problem"),
    [
        (PAIRS, (), "a preference pair ('chosen' and 'rejected': use --objective dpo)"),
        (
            ANSWERS,
            DPO,
            "an answer without a preference (prompt format: add 'chosen' and 'rejected', or use "
            "--objective sft)",
        ),
        (LABELED, DPO, "an answer with a label, not a pair (use --objective kto)"),
        (
            PAIRS,
            ("--objective", "kto"),
            "a preference pair ('chosen' and 'rejected': use --objective dpo, or make two rows "
            "of it, each with its answer as 'completion' and 'label' true or false)",
        ),
    ],
)
def test_rows_of_another_objective_are_one_line_that_names_it(
    train: Cli,
    tmp_path: Path,
    output: Path,
    rows: list[dict[str, str]],
    options: tuple[str, ...],
    problem: str,
) -> None:
    path = write(tmp_path, rows)
    outcome = train("--data", path, *options)
    assert outcome.error == (
        f"{path}: none of its 10 rows can be used; the first: {path}:1: {problem}"
    )
    assert files_in(output.parent) == []


def test_pairs_that_are_all_too_long_name_the_limit(train: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, PAIRS)
    error = train("--data", path, *DPO, "--max-seq-len", 4).error
    assert f"{path}:1: longer than --max-seq-len 4 (an answer to compare is not cut" in error


def test_pairs_of_one_prompt_cannot_be_split(train: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, [pair | {"prompt": "How many?"} for pair in PAIRS])
    assert train("--data", path, *DPO).error == (
        f"{path}: rows that have the same prompt cannot be both trained on and held out: "
        "add rows or set --val-split 0"
    )


def test_strict_names_the_first_bad_pair(train: Cli, tmp_path: Path) -> None:
    path = write(tmp_path, [*PAIRS, PAIRS[0] | {"rejected": "2"}])
    assert train("--data", path, *DPO, "--strict").error.startswith(
        f"{path}:11: chosen and rejected are the same; 1 of 11 rows is bad"
    )


def test_resumed_run_keeps_its_beta_and_its_reference(
    train: Cli, cli: Cli, tmp_path: Path, output: Path
) -> None:
    path = write(tmp_path, PAIRS)
    assert train("--data", path, *DPO, "--max-steps", 1).code == 0
    resume = ("train", "--resume", output.parent, "--max-steps", 2, "--quiet")
    assert cli(*resume, "--beta", 0.2).error == (
        "--beta 0.2: the run has the default (0.1, or 2.0 for simpo), and its result depends on "
        "it: leave it out, or start a new run with --init-adapter"
    )
    reference = output.parent / "checkpoints" / "reference.json"
    reference.write_text(reference.read_text().replace("-", "-1", 1))
    error = cli(*resume, "--no-cache").error
    assert error.startswith(f"{reference} is missing") and "over with --overwrite" in error
