"""`mlxtune doctor --prove`: what mlxtune promises, checked on the device at hand.

What is checked runs in other processes, so that a crash fails one check and leaves the others.
"""

import getpass
import platform
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from functools import partial
from pathlib import Path

from mlxtune.core.files import files
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.machine import facts
from mlxtune.core.machine.children import ChildTimeoutError, probe_device
from mlxtune.diagnosis import proving, requirements
from mlxtune.diagnosis.proving import MachineProof, ProofCheck
from mlxtune.diagnosis.views import shareable, show_proof
from mlxtune.diagnosis.workbench import BASE, DENSE, GEMMA, QWEN, Workbench
from mlxtune.errors import ModelError, one_line
from mlxtune.views.console import RunConsole
from mlxtune.views.output import print_json
from mlxtune.views.tables import result_console

# On the CPU, mlx-lm takes seconds for a row.
_CPU_TIMED = ("--steps", "2", "--batch-size", "2")
_GPU_TIMED = ("--steps", "8", "--batch-size", "4")
# The kind and name of some checks, and what carries them out.
Part = tuple[str, str, Callable[[], Iterator[ProofCheck]]]


def prove(on_progress: Callable[[str], None] = lambda text: None) -> MachineProof:
    """Check with small models that this machine computes what mlxtune promises.

    Compares the gradients of every way to compute a step, the bytes of adapters, memory with its
    prediction, and steps with mlx-lm's. Takes a minute or two. `on_progress` is called with the
    name of each part.

    Raises ModelError when MLX does not start; all else that fails is among the checks.
    """
    began = time.monotonic()
    device, problem = probe_device()
    if device is None:
        raise ModelError(f"MLX does not start: {problem}: mlxtune doctor shows more")
    with scratch_folder("prove") as folder:
        bench = Workbench(folder.resolve())
        checks = list(carry_out(parts(bench, device.kind), on_progress))
    system = facts.read_system()
    # What follows the numbers of a Linux kernel's release is the choice of who built it.
    numbers = re.match(r"[\d.]*", system.get("release") or "")
    names = (system.get("name"), numbers and numbers[0].rstrip("."))
    return MachineProof(
        checks=checks,
        machine={
            "system": " ".join(filter(None, names)),
            "processor": system.get("chip") or platform.machine(),
            "memory": system["memory"].total,
        },
        device={"kind": device.kind, "name": device.name, "memory_limit": device.limit},
        versions={"python": platform.python_version()}
        | {each.name: each.installed for each in requirements.packages() if each.installed},
        seconds=time.monotonic() - began,
    )


def show(*, as_json: bool, share: Path | None = None) -> bool:
    """Print the table, and JSON if asked for; return whether all checks passed.

    `share` is a file for the result without names and paths. Raises OutputError.
    """
    if share is not None:
        files.check_outputs([share], [], "--share")
    with closing(RunConsole()) as console:
        proof = prove(console.show)
    if as_json:
        print_json(proof.as_dict())
    show_proof(proof, result_console(stderr=as_json))
    if share is not None:
        files.write_json(share, shareable(proof, _names()))
        with closing(RunConsole()) as console:
            console.say("Share", f"{share} has no names or paths: attach it to an issue")
    return proof.passed


def _names() -> list[str]:
    """Return the names of the host, the user and the home folder, as far as there are some."""
    found = [platform.node(), Path.home().name]
    # A container may run as a user that has no name.
    with suppress(OSError, KeyError, ImportError):
        found.append(getpass.getuser())
    return found


def parts(bench: Workbench, device: str) -> list[Part]:
    """Return all parts, as they are on a kind of device."""
    # docs/reliability.md says why.
    promised = device != "CUDA"
    timed = _CPU_TIMED if device == "CPU" else _GPU_TIMED
    found: list[Part] = []
    for name in (QWEN, GEMMA, BASE):
        found.append((proving.GRADIENTS, name, partial(_gradients, bench, name)))
    found.append((proving.GRADIENTS, "kernels", partial(_kernels, bench)))
    found.append((proving.DTYPE, "kernels", partial(_kernels16, bench)))
    for name in (DENSE, BASE):
        found.append((proving.DTYPE, name, partial(_dtype, bench, name)))
    for name in (QWEN, BASE):
        what = f"{name}: run twice"
        found.append((proving.BYTES, what, partial(_twice, bench, name, what, promised)))
    for how, stop in (("Ctrl-C", signal.SIGINT), ("kill -9", signal.SIGKILL)):
        what = f"{QWEN}: {how}, resume"
        found.append((proving.BYTES, what, partial(_resumed, bench, stop, what, promised)))
    margin = proving.MEMORY_MARGIN if device == "CPU" else proving.GPU_MEMORY_MARGIN
    found.append((proving.MEMORY, BASE, partial(_memory, bench, margin)))
    found.append((proving.SPEED, DENSE, partial(_speed, bench)))
    found.append((proving.PEER, BASE, partial(_peer, bench, timed)))
    return found


def carry_out(
    all_parts: Sequence[Part], on_progress: Callable[[str], None]
) -> Iterator[ProofCheck]:
    """Yield the checks of all parts; an error in one becomes a failed check."""
    for number, (kind, name, part) in enumerate(all_parts, 1):
        on_progress(f"{number}/{len(all_parts)} {kind}: {name}")
        began = time.monotonic()
        try:
            for check in part():
                yield check if check.seconds else check.taking(time.monotonic() - began)
        except ChildTimeoutError as error:
            late = proving.unfinished_check(kind, name, one_line(error))
            yield late.taking(time.monotonic() - began)
        except Exception as error:  # noqa: BLE001
            # Whatever it is, it belongs in the report, and the other checks still run.
            failed = proving.failed_check(kind, name, one_line(error))
            yield failed.taking(time.monotonic() - began)


def _gradients(bench: Workbench, name: str) -> Iterator[ProofCheck]:
    for found in bench.measure("gradients", bench.model(name), bench.step):
        check = proving.check_gradients(name, found["way"], found["loss"], found["gradient"])
        yield check.taking(found["seconds"])


def _kernels(bench: Workbench) -> Iterator[ProofCheck]:
    for found in bench.measure("kernels"):
        if "error" in found:
            check = proving.failed_check(proving.GRADIENTS, found["way"], found["error"])
        else:
            check = proving.check_gradients("", found["way"], found["loss"], found["gradient"])
        yield check.taking(found["seconds"])


def _kernels16(bench: Workbench) -> Iterator[ProofCheck]:
    for found in bench.measure("kernels16", exact=False):
        if "error" in found:
            check = proving.failed_check(proving.DTYPE, found["way"], found["error"])
        else:
            check = proving.check_dtype("", found["way"], found["cosine"], found["norm"])
        yield check.taking(found["seconds"])


def _dtype(bench: Workbench, name: str) -> Iterator[ProofCheck]:
    expected = bench.scratch / f"{name}.npz"
    list(bench.measure("reference", bench.model(name), bench.step, expected))
    for found in bench.measure("dtype", bench.model(name), bench.step, expected, exact=False):
        values = (found["cosine"], found["norm"], found["unpacked"])
        yield proving.check_dtype(name, found["way"], *values).taking(found["seconds"])


def _twice(bench: Workbench, name: str, what: str, promised: bool) -> Iterator[ProofCheck]:
    first, second = (bench.trained(name, run) for run in ("straight", "again"))
    yield proving.check_bytes(what, first, second, promised=promised)


def _resumed(
    bench: Workbench, stop: signal.Signals, what: str, promised: bool
) -> Iterator[ProofCheck]:
    straight = bench.trained(QWEN)
    found, step = bench.resumed(QWEN, stop)
    yield proving.check_bytes(what, straight, found, promised=promised, stopped_after=step)


def _memory(bench: Workbench, margin: float) -> Iterator[ProofCheck]:
    for found in bench.measure("memory", bench.model(BASE), bench.rows):
        name = f"{BASE}: {found['tokens']:,} tokens"
        check = proving.check_memory(name, found["predicted"], found["measured"], margin)
        yield check.taking(found["seconds"])


def _speed(bench: Workbench) -> Iterator[ProofCheck]:
    for found in bench.measure("steps", bench.model(DENSE), bench.rows, exact=False):
        check = proving.check_speed(f"{DENSE}: {found['shapes']}", found["tokens_per_s"])
        yield check.taking(found["seconds"])


def _peer(bench: Workbench, timed: Sequence[str]) -> Iterator[ProofCheck]:
    yield from proving.check_peer(bench.bench(BASE, *timed))
