"""Run the command on thousands of damaged files and folders, and check how it ends.

    python -m tests.long.fuzz [--data N] [--folders N] [--seed S] [--case KIND:NUMBER] [--keep DIR]

Each case is a damaged data file, model folder, config file or run folder; one process runs the
command on many cases. The command must succeed or print one line of error, within 10 s and 2 GB,
and must not change files outside the case's folder. Cases depend only on the seed and their number;
`--case` repeats one and shows the command's output. tests/test_fuzz.py runs some of them.

Results: docs/reliability.md.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import selectors
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.long.fuzz_cases import FOLDERS, Place, command, prepare, run_case
from tests.paths import ROOT

# The maximum memory of a case, in bytes.
MEMORY = 2 * 10**9
# A worker that prints nothing for this many seconds is killed.
_SILENT = 60.0
_ADDRESS_SPACE = 12 * 2**30
_WORKERS = 2

# Workers


def work(place: Place, seed: int, names: list[str]) -> None:
    """Run cases; print a line of JSON before and after each."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    resource.setrlimit(resource.RLIMIT_AS, (_ADDRESS_SPACE, _ADDRESS_SPACE))
    # Import modules now, so that the first case is not slower.
    command("plan", "--model-path", place.model, "--data", place.chat, "--quiet", "--no-cache")
    print(json.dumps({}), file=answers, flush=True)
    for name in names:
        print(json.dumps({"name": name}), file=answers, flush=True)
        found = run_case(place, seed, name)
        found["memory"] = peak_memory()
        print(json.dumps({"name": name} | found), file=answers, flush=True)


def peak_memory() -> int:
    """Return this process's peak memory in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


class Worker:
    """Runs cases in a process, which is replaced when a case ends it."""

    def __init__(self, place: Place, seed: int, names: list[str], number: int) -> None:
        self._place, self._seed, self._left, self._number = place, seed, list(names), number
        self._process: subprocess.Popen[bytes] | None = None

    def run(self) -> Iterator[dict[str, Any] | None]:
        """Yield the result of each case, and None while waiting."""
        while self._left:
            log = self._place.root / f"worker-{self._number}.txt"
            with log.open("wb") as errors:
                yield from self._run_some(errors)
            if self._left:
                said = log.read_text(errors="replace")[-2000:]
                yield {"name": self._left.pop(0), "code": "a crash", "seconds": 0.0} | {
                    "problem": f"ended the process ({self._ended()})",
                    "said": said,
                    "error": "",
                    "memory": 0,
                }

    def _run_some(self, errors: Any) -> Iterator[dict[str, Any] | None]:
        names = self._place.root / f"names-{self._number}.json"
        names.write_text(json.dumps(self._left))
        options = [
            "--work",
            str(self._place.root),
            "--names",
            str(names),
            "--seed",
            str(self._seed),
        ]
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.long.fuzz", *options],
            cwd=ROOT,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            env={**os.environ, "XDG_CACHE_HOME": str(self._place.cases / "cache")},
        )
        assert self._process.stdout is not None
        # Importing the libraries is slow on a busy machine.
        heard, read = time.monotonic() + 10 * _SILENT, b""
        with self._process, selectors.DefaultSelector() as selector:
            selector.register(self._process.stdout, selectors.EVENT_READ)
            while True:
                if not selector.select(0.05):
                    if time.monotonic() - heard > _SILENT:
                        self._process.kill()
                        return
                    yield None
                    continue
                piece = os.read(self._process.stdout.fileno(), 1 << 16)
                if not piece:
                    return
                heard, read = time.monotonic(), read + piece
                *lines, read = read.split(b"\n")
                for line in lines:
                    found = json.loads(line)
                    if "code" in found:
                        self._left.remove(found["name"])
                        yield found

    def _ended(self) -> str:
        assert self._process is not None
        code = self._process.wait()
        return "it hung" if code == -9 else f"exit {code}"


# All cases


def names_of(data: int, folders: int) -> list[str]:
    """Return the names of all cases, as `kind:number`."""
    names = [f"data:{number}" for number in range(data)]
    return names + [f"{FOLDERS[number % len(FOLDERS)]}:{number}" for number in range(folders)]


def fuzz(place: Place, seed: int, names: list[str]) -> list[dict[str, Any]]:
    """Run cases in two processes; return their results."""
    running = [
        Worker(place, seed, names[number::_WORKERS], number).run() for number in range(_WORKERS)
    ]
    results: list[dict[str, Any]] = []
    told = time.monotonic()
    while running:
        for worker in list(running):
            try:
                found = next(worker)
            except StopIteration:
                running.remove(worker)
                continue
            if found is None:
                continue
            results.append(found)
            if found["problem"]:
                print(f"{found['name']}: {found['problem']}", flush=True)
        if time.monotonic() - told > 60:
            told = time.monotonic()
            print(f"  {len(results):,} of {len(names):,} cases", flush=True)
    return results


def report(results: list[dict[str, Any]], seconds: float) -> list[str]:
    """Return the lines of the summary."""
    lines = [f"{len(results):,} cases in {seconds:.0f} s"]
    for kind in ("data", *FOLDERS):
        mine = [each for each in results if each["name"].startswith(f"{kind}:")]
        if mine:
            codes = Counter(str(each["code"]) for each in mine)
            ends = ", ".join(f"exit {code} {count:,}" for code, count in sorted(codes.items()))
            kinds = {re.sub(r"\d+|'[^']*'|/\S+", "", each["error"]) for each in mine}
            slowest = max(mine, key=lambda each: each["seconds"])
            lines.append(
                f"  {kind}: {len(mine):,} cases: {ends}; {len(kinds - {''})} kinds of error; "
                f"slowest {slowest['name']}, {slowest['seconds']:.1f} s"
            )
    peak = max((each["memory"] for each in results), default=0)
    lines.append(f"  peak memory {peak / 1e9:.2f} GB")
    if peak > MEMORY:
        lines.append(f"FAILED: more memory than {MEMORY / 1e9:.0f} GB")
    bad = [each for each in results if each["problem"]]
    lines += [f"FAILED: {each['name']}: {each['problem']}" for each in bad]
    return lines


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--data", type=int, default=20_000)
    parser.add_argument("--folders", type=int, default=2_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--case", help="run this case alone, and show its output")
    parser.add_argument("--keep", type=Path, help="where the files of failed cases stay")
    parser.add_argument("--work", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--names", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.work:
        work(Place(options.work), options.seed, json.loads(options.names.read_text()))
        return 0
    root = options.keep or Path(tempfile.mkdtemp(prefix="mlxtune-fuzz-"))
    place = Place((root / f"seed-{options.seed}").resolve())
    shutil.rmtree(place.root, ignore_errors=True)
    os.environ["XDG_CACHE_HOME"] = str(place.cases / "cache")
    prepare(place)
    if options.case:
        found = run_case(place, options.seed, options.case, show=True)
        print(f"{options.case}: {found['problem'] or 'no problem'}, {found['seconds']:.1f} s")
        return 1 if found["problem"] else 0
    started = time.monotonic()
    results = fuzz(place, options.seed, names_of(options.data, options.folders))
    lines = report(results, time.monotonic() - started)
    print("\n".join(lines))
    (place.root / "results.jsonl").write_text("".join(json.dumps(each) + "\n" for each in results))
    if any(line.startswith("FAILED") for line in lines):
        print(f"seed {options.seed}; the files are in {place.cases}")
        return 1
    shutil.rmtree(place.root if options.keep else root)
    return 0


if __name__ == "__main__":
    sys.exit(main())
