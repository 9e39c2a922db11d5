"""Kill runs at random moments and resume them: each must end like an undisturbed run.

    python -m tests.long.check_kills [--runs 100] [--kills 3] [--seed 0] [-- --dora ...]
    python -m tests.long.check_kills --runs 10 -- --objective dpo

Trains ../shared/models/stories260k on real rows, once without interruption. Then each run is killed
with SIGKILL at random moments (also inside steps, saves and validations), up to `--kills` times,
and resumed with `mlxtune train --resume`. In the end, its adapter must have the same bytes as the
uninterrupted run's, and its metrics.jsonl the same lines except for times. Options after -- go to
the runs.

Results: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from tests.paths import SHARED

MODEL = SHARED / "models" / "stories260k"
ROWS, EPOCHS = 24, 2
# Many saves that a kill can hit: one every second step, and two at the end of each epoch.
OPTIONS = (
    *("--epochs", str(EPOCHS), "--batch-size", "4", "--save-steps", "2", "--max-seq-len", "224"),
    *("--dropout", "0.1", "--lr", "1e-3", "--targets", "all", "--val-rows", "8", "--quiet"),
    *("--template", "gemma"),
)
_TIMES = (
    *("seconds", "epoch_time_ms", "samples_per_sec"),
    *("memory", "micro_batches", "run_tokens", "padding"),
)
_ENDS_WITHIN = 120.0


@dataclass
class Report:
    """The outcome of the runs. `at` counts the activities that the kills interrupted."""

    runs: int = 0
    kills: int = 0
    started_over: int = 0
    at: Counter[str] = field(default_factory=Counter)
    failures: list[str] = field(default_factory=list)


def metrics_of(folder: Path) -> list[dict[str, object]]:
    """Return the lines of metrics.jsonl without times."""
    lines = (folder / "checkpoints" / "metrics.jsonl").read_text().splitlines()
    return [
        {key: value for key, value in json.loads(line).items() if key not in _TIMES}
        for line in lines
    ]


def start(folder: Path, arguments: list[str]) -> int:
    """Fork a process that runs the command, with all modules loaded; return the process id.

    The command's output goes to log.txt in the folder.
    """
    process = os.fork()
    if process:
        return process
    try:
        os.chdir(folder)
        log = os.open("log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        from mlxtune.cli import main

        main(arguments)
    except SystemExit as end:
        os._exit(end.code if isinstance(end.code, int) else 1)
    except BaseException:  # noqa: BLE001
        import traceback

        traceback.print_exc()
    os._exit(70)


def wait(process: int, seconds: float) -> int | None:
    """Return a process's exit code, or None if it still runs after the given seconds."""
    deadline = time.monotonic() + seconds
    while True:
        ended, status = os.waitpid(process, os.WNOHANG)
        if ended:
            return os.waitstatus_to_exitcode(status)
        if time.monotonic() > deadline:
            return None
        time.sleep(0.001)


def run_to_end(folder: Path, arguments: list[str]) -> float:
    """Run the command; return its duration in seconds. Raises RuntimeError if it fails."""
    began = time.monotonic()
    process = start(folder, arguments)
    code = wait(process, _ENDS_WITHIN)
    if code != 0:
        if code is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
        raise RuntimeError(f"{folder}: ended with {code}: {(folder / 'log.txt').read_text()}")
    return time.monotonic() - began


def place_of(folder: Path) -> str:
    """Return the activity of a killed run, judged by its files."""
    run = folder / "checkpoints"
    if not (run / "metrics.jsonl").exists():
        return "before the first validation"
    if any(run.glob(".*.old")) or any(run.glob(".*.tmp")):
        return "inside a save"
    if (run / "result.json").exists():
        return "after the end"
    last = json.loads((run / "metrics.jsonl").read_bytes().splitlines()[-1] or b"{}")
    return f"after a {last.get('kind', 'line that was cut')}"


def attempt(
    folder: Path, train: list[str], length: float, kills: int, draw: random.Random
) -> Report:
    """Kill a run up to `kills` times, then let it end; return the report."""
    report = Report(runs=1)
    resumes = False
    for _ in range(draw.randint(1, kills)):
        arguments = ["train", "--resume", "--quiet"] if resumes else train
        process = start(folder, arguments)
        if wait(process, draw.uniform(0, length)) is None:
            os.kill(process, signal.SIGKILL)
            os.waitpid(process, 0)
            report.kills += 1
            report.at[place_of(folder)] += 1
        resumes = has_checkpoint(folder)
        report.started_over += not resumes
    run_to_end(folder, ["train", "--resume", "--quiet"] if resumes else train)
    return report


def has_checkpoint(folder: Path) -> bool:
    from mlxtune.core.run.checkpoint import checkpoint_folders

    return bool(checkpoint_folders(folder / "checkpoints"))


def as_pair(row: str) -> str:
    """Return a row of chat data as a pair; the rejected answer is the right one reversed."""
    *prompt, answer = json.loads(row)["messages"]
    right = answer["content"]
    return json.dumps({"prompt": prompt, "chosen": right, "rejected": right[::-1]})


@contextmanager
def prepared(scratch: Path, more: Sequence[str] = ()) -> Iterator[list[str]]:
    """Yield the command of the run, with its data in a folder and its modules loaded."""
    os.environ["XDG_CACHE_HOME"] = str(scratch / "cache")
    rows = (SHARED / "chat" / "wikisql_train.jsonl").read_text().splitlines()[:ROWS]
    if "--objective" in more:
        rows = list(map(as_pair, rows))
    (scratch / "rows.jsonl").write_text("\n".join(rows) + "\n")
    import mlxtune.commands.train  # noqa: F401

    rows_file = str(scratch / "rows.jsonl")
    yield ["train", "--model-path", str(MODEL), "--data", rows_file, *OPTIONS, *more]


def check(runs: int, kills: int, seed: int, scratch: Path, more: Sequence[str] = ()) -> Report:
    """Run all attempts in a folder; failures are in the report, not raised."""
    total = Report()
    with prepared(scratch, more) as train:
        whole = scratch / "whole"
        whole.mkdir()
        run_to_end(whole, train)  # a first run fills the caches of encoded data and hashes
        again = scratch / "again"
        again.mkdir()
        length = run_to_end(again, train)
        adapter, metrics = (whole / "adapters.safetensors").read_bytes(), metrics_of(whole)
        for number in range(runs):
            folder = scratch / f"run-{number}"
            folder.mkdir()
            try:
                report = attempt(folder, train, length, kills, random.Random(f"{seed}/{number}"))
            except RuntimeError as problem:
                total.failures.append(str(problem))
                continue
            total.runs += 1
            total.kills += report.kills
            total.started_over += report.started_over
            total.at += report.at
            if (folder / "adapters.safetensors").read_bytes() != adapter:
                total.failures.append(f"{folder}: another adapter")
            if metrics_of(folder) != metrics:
                total.failures.append(f"{folder}: other metrics")
            sys.stderr.write(f"\r{number + 1} of {runs}, {len(total.failures)} failed ")
    return total


def main() -> None:
    """Run all attempts and print the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--runs", type=int, default=100)
    parser.add_argument("--kills", type=int, default=3)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("options", nargs="*", help="further options of the runs, after --")
    given = parser.parse_args()
    scratch = Path(tempfile.mkdtemp(prefix="mlxtune-kills-"))
    began = time.monotonic()
    report = check(given.runs, given.kills, given.seed, scratch, given.options)
    print(f"\n{report.runs} runs, {report.kills} kills in {time.monotonic() - began:.0f} s")
    for place, count in report.at.most_common():
        print(f"  {count:4} {place}")
    print(f"  {report.started_over:4} times there was nothing to resume yet")
    for failure in report.failures:
        print(failure)
    print("all adapters and metrics equal" if not report.failures else f"see {scratch}")
    sys.exit(bool(report.failures))


if __name__ == "__main__":
    main()
