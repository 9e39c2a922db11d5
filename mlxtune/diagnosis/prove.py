"""`mlxtune doctor --prove`: checks that mlxtune keeps its promises on this device.

Each part of the checks has its own processes, so that a crash ends only that part. The result is a
table, and JSON without names to share.
"""

import getpass
import os
import platform
import re
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

from rich.console import Console

from mlxtune.core.files import writing
from mlxtune.core.files.processes import HelperTimeoutError
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.formatting import pluralize
from mlxtune.diagnosis import checks
from mlxtune.diagnosis.checks import MachineProof, ProofCheck
from mlxtune.diagnosis.doctor import read_machine
from mlxtune.diagnosis.workbench import BASE, DENSE, GEMMA, QWEN, Workbench
from mlxtune.errors import ModelError, one_line
from mlxtune.views.console import RunConsole
from mlxtune.views.first_result import COMPILING, FirstResult
from mlxtune.views.output import print_json
from mlxtune.views.terminal import plain_table, result_console, styled

# On the CPU, mlx-lm takes seconds for each row.
_CPU_TIMING_OPTIONS = ("--steps", "2", "--batch-size", "2")
_GPU_TIMING_OPTIONS = ("--steps", "8", "--batch-size", "4")
_HEADINGS = {
    checks.GRADIENTS: "loss and gradients",
    checks.MATMULS: "products in real sizes",
    checks.DTYPE: "gradients in 16 bits",
    checks.BYTES: "bytes of the adapter",
    checks.MEMORY: "peak memory",
    checks.SPEED: "speed of steps",
    checks.PEER: "beside mlx-lm",
    checks.CACHE: "MLX's cache",
}
_WORDS = {True: "pass", False: "FAIL", None: "–"}
_STYLES = {True: "green", False: "bold red", None: ""}
# A path: text with a separator, and all that follows up to punctuation, a quote or a bracket.
_PATH = re.compile(r"(?:\b[A-Za-z]:)?[\w.@+~-]*[/\\][^:;,'\"()\[\]]*")
# Replacing shorter names would break words.
_MIN_NAME_CHARS = 2
# A group of checks: their kind, their name, and the function that runs them.
Part = tuple[str, str, Callable[[], Iterator[ProofCheck]]]


def prove(
    on_progress: Callable[[str], None] = lambda text: None,
    on_check: Callable[[ProofCheck], None] = lambda check: None,
    on_late: Callable[[], None] = lambda: None,
) -> MachineProof:
    """Check with small models that mlxtune keeps its promises on this machine.

    Compares the gradients of every way to compute a step with the plain way's, repeated and resumed
    runs byte for byte, peak memory with its prediction, and speed and losses with mlx-lm's. Takes a
    minute or two. `on_progress` is called with the number and name of each part, `on_check` with
    each finished check, and `on_late`, in another thread, if a part is slow on a GPU, which
    may be compiling kernels.

    Raises ModelError if MLX does not start; other failures are in the checks.
    """
    began, checks = time.monotonic(), []
    machine = read_machine()
    device = machine.device
    if device is None:
        problem = machine.device_problem
        raise ModelError(f"MLX does not start: {problem}: mlxtune doctor shows more")
    with scratch_folder("prove") as folder:
        bench = Workbench(folder.resolve())
        late = on_late if device.kind != "CPU" else lambda: None
        for check in carry_out(parts(bench, device.kind), on_progress, lambda: FirstResult(late)):
            on_check(check)
            checks.append(check)
    # Keeps the version numbers only: a Linux kernel's builder chooses the text after them.
    numbers = re.match(r"[\d.]*", machine.release)
    names = (machine.name, numbers and numbers[0].rstrip("."))
    return MachineProof(
        checks=checks,
        machine={
            "system": " ".join(filter(None, names)),
            "processor": machine.chip or machine.processor,
            "memory": machine.memory.total,
        },
        device={"kind": device.kind, "name": device.name, "memory_limit": device.limit},
        versions={"python": machine.python}
        | {package.name: package.installed for package in machine.packages if package.installed},
        seconds=round(time.monotonic() - began, 1),
    )


def main(*, as_json: bool, anonymous: Path | None = None) -> bool:
    """Print the table, and JSON on request; return whether no check failed.

    If no live progress line can be shown, print each check when it ends. `anonymous` is a file to
    write the result to, without names and paths. Raises OutputError if `anonymous` cannot be
    written.
    """
    if anonymous is not None:
        writing.check_outputs([anonymous], [], "--share")
    with closing(RunConsole()) as console:

        def say(check: ProofCheck) -> None:
            if not console.is_live:
                console.say(check.kind, check_line(check))

        proof = prove(console.show, say, lambda: console.say("Kernels", COMPILING))
        if as_json:
            print_json(proof.as_dict())
        # Without a live line, stderr has each check already.
        table = console.is_live or not (as_json or _is_one_output())
        show_proof(proof, result_console(stderr=as_json), table=table)
        if anonymous is not None:
            writing.write_json(anonymous, shareable(proof, _private_names()))
            console.say("Share", f"{anonymous} has no names or paths: attach it to an issue")
    return proof.passed


def _is_one_output() -> bool:
    """Return whether stdout and stderr are the same file or pipe."""
    try:
        out, err = (os.fstat(stream.fileno()) for stream in (sys.stdout, sys.stderr))
    except (OSError, ValueError):  # a stream of a program that calls this
        return False
    return (out.st_dev, out.st_ino) == (err.st_dev, err.st_ino)


def _private_names() -> list[str]:
    """Return the names of the host, the user and the home folder, if there are any."""
    names = [platform.node(), Path.home().name]
    # A container's user may have no name.
    with suppress(OSError, KeyError, ImportError):
        names.append(getpass.getuser())
    return names


def parts(bench: Workbench, device: str) -> list[Part]:
    """Return the parts of the proof for a kind of device."""
    # docs/reliability.md explains why CUDA's bytes may differ.
    promised = device != "CUDA"
    timed = _CPU_TIMING_OPTIONS if device == "CPU" else _GPU_TIMING_OPTIONS

    def model_part(kind: str, job: str, name: str) -> Part:
        def part() -> Iterator[ProofCheck]:
            rows = bench.step if kind in (checks.GRADIENTS, checks.DTYPE) else bench.rows
            yield from bench.measure_model(job, name, rows)

        return kind, name, part

    def twice(model: str) -> Part:
        name = f"{model}: run twice"

        def part() -> Iterator[ProofCheck]:
            first, second = (bench.train(model, run) for run in ("straight", "again"))
            yield checks.check_same_bytes(name, first, second, promised=promised)

        return checks.BYTES, name, part

    def resumed(how: str, stop: signal.Signals) -> Part:
        name = f"{QWEN}: {how}, resume"

        def part() -> Iterator[ProofCheck]:
            straight = bench.train(QWEN)
            result, step = bench.resumed(QWEN, stop)
            yield checks.check_same_bytes(
                name, straight, result, promised=promised, stopped_after=step
            )

        return checks.BYTES, name, part

    def peer() -> Iterator[ProofCheck]:
        benchmark = bench.bench(BASE, *timed)
        yield from checks.check_peer(benchmark)
        yield from checks.check_cache(benchmark)

    return [
        *(model_part(checks.GRADIENTS, "gradients", name) for name in (QWEN, GEMMA, BASE)),
        (checks.GRADIENTS, "kernels", partial(bench.measure, "kernels")),
        (checks.MATMULS, "products", partial(bench.measure, "products")),
        (checks.DTYPE, "kernels", partial(bench.measure, "kernels16")),
        *(model_part(checks.DTYPE, "dtype", name) for name in (DENSE, BASE)),
        *(twice(name) for name in (QWEN, BASE)),
        resumed("Ctrl-C", signal.SIGINT),
        resumed("kill -9", signal.SIGKILL),
        model_part(checks.MEMORY, "memory", BASE),
        model_part(checks.SPEED, "steps", DENSE),
        (checks.PEER, BASE, peer),
    ]


def carry_out(
    all_parts: Sequence[Part],
    on_progress: Callable[[str], None],
    first_result: Callable[[], FirstResult],
) -> Iterator[ProofCheck]:
    """Yield the checks of all parts; an error or timeout in a part becomes a check.

    `first_result` returns what waits for a part's first check.
    """
    for number, (kind, name, part) in enumerate(all_parts, 1):
        on_progress(f"{number}/{len(all_parts)} {kind}: {name}")
        began, first = time.monotonic(), first_result()
        first.wait()
        try:
            for check in part():
                first.arrived()
                yield check if check.seconds else check.taking(time.monotonic() - began)
        except Exception as error:  # noqa: BLE001
            # Reports any error as a check, so that the other parts still run.
            late = isinstance(error, HelperTimeoutError)
            ended = checks.unfinished_check if late else checks.failed_check
            yield ended(kind, name, one_line(error)).taking(time.monotonic() - began)
        finally:
            first.stop()


# The result


def show_proof(proof: MachineProof, console: Console, *, table: bool = True) -> None:
    """Print a line for each check if `table`, the advice on failures, and a summary."""
    if table:
        _show_checks(proof, console)
    for check in proof.failures:
        console.print(styled(check.advice), soft_wrap=True)
    console.print(styled(summary(proof), "bold"), soft_wrap=True)


def _show_checks(proof: MachineProof, console: Console) -> None:
    table = plain_table(["check", "expected", "found", "", "s"])
    for column in table.columns[1:3]:
        column.justify = "left"
    for kind, group in groupby(proof.checks, key=lambda check: check.kind):
        table.add_row(styled(_HEADINGS[kind], "bold"))
        for check in group:
            cells = map(styled, (f"  {check.name}", check.expected, check.found))
            result = styled(_WORDS[check.passed], _STYLES[check.passed])
            table.add_row(*cells, result, f"{check.seconds:.1f}")
    console.print(table)


def check_line(check: ProofCheck) -> str:
    """Return a check as a line, to print before the other checks end."""
    took = f"{check.seconds:.1f} s"
    return f"{_WORDS[check.passed]}  {check.name}: {check.found}, expected {check.expected}, {took}"


def summary(proof: MachineProof) -> str:
    """Return the result as one line."""
    device = f"{proof.device['name']} ({proof.device['kind']})"
    took = f"{proof.seconds:.0f} s on {device}"
    if proof.passed:
        late = f", {len(proof.unfinished)} did not end in time" if proof.unfinished else ""
        return f"{pluralize(len(proof.checks), 'check')}, nothing failed{late}, in {took}"
    failed = f"{len(proof.failures)} of {pluralize(len(proof.checks), 'check')} failed, in {took}"
    return f"{failed}: attach the output of mlxtune doctor --prove --json to an issue"


def shareable(proof: MachineProof, names: Sequence[str]) -> dict[str, Any]:
    """Return a proof as a JSON value that does not reveal whose machine made it.

    The value has no hashes, no paths and none of the `names` (of the host, the user and the home
    folder), not even in errors. No text contains a path separator.
    """
    content = proof.as_dict()
    for check in content["checks"]:
        check["found"] = _PATH.sub("…", _redacted(check["found"], names))
        numbers = check["values"].items()
        check["values"] = {key: value for key, value in numbers if not isinstance(value, str)}
    return _anonymous(content, names)


def _anonymous(value: Any, names: Sequence[str]) -> Any:
    """Return a JSON value with names and path separators replaced in its strings."""
    if isinstance(value, dict):
        return {key: _anonymous(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_anonymous(each, names) for each in value]
    return re.sub(r"[/\\]", " ", _redacted(value, names)) if isinstance(value, str) else value


def _redacted(text: str, names: Sequence[str]) -> str:
    """Return text with an ellipsis in place of `names`, matched as whole words in any case."""
    # The part of a host's name before the first dot also identifies it.
    every = {part for name in names for part in (name, name.partition(".")[0])}
    for name in sorted(every, key=len, reverse=True):
        if len(name) >= _MIN_NAME_CHARS:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text, flags=re.IGNORECASE)
    return text
