"""The table of `mlxtune doctor --prove` on a terminal."""

from itertools import groupby

from rich.console import Console

from mlxtune.core.text import count
from mlxtune.diagnosis.proving import (
    BYTES,
    DTYPE,
    GRADIENTS,
    MEMORY,
    PEER,
    SPEED,
    MachineProof,
)
from mlxtune.views.tables import plain_table, shown

_HEADINGS = {
    GRADIENTS: "loss and gradients",
    DTYPE: "gradients in 16 bits",
    BYTES: "bytes of the adapter",
    MEMORY: "peak memory",
    SPEED: "speed of steps",
    PEER: "beside mlx-lm",
}
_RESULTS = {True: shown("pass", "green"), False: shown("FAIL", "bold red"), None: shown("–")}


def show_proof(proof: MachineProof, console: Console) -> None:
    """Print a line for each check, and the result."""
    table = plain_table(["check", "expected", "found", "", "s"])
    for column in table.columns[1:3]:
        column.justify = "left"
    for kind, checks in groupby(proof.checks, key=lambda check: check.kind):
        table.add_row(shown(_HEADINGS[kind], "bold"))
        for check in checks:
            cells = (f"  {check.name}", check.expected, check.found)
            table.add_row(
                *map(shown, cells),
                _RESULTS[check.passed],
                f"{check.seconds:.1f}",
            )
    console.print(table)
    for check in proof.failures:
        console.print(shown(check.advice), soft_wrap=True)
    console.print(shown(summary(proof), "bold"), soft_wrap=True)


def summary(proof: MachineProof) -> str:
    """Return the result in a line."""
    device = f"{proof.device['name']} ({proof.device['kind']})"
    took = f"{proof.seconds:.0f} s on {device}"
    if proof.passed:
        late = f", {len(proof.unfinished)} did not end in time" if proof.unfinished else ""
        return f"{count(len(proof.checks), 'check')}, nothing failed{late}, in {took}"
    failed = f"{len(proof.failures)} of {count(len(proof.checks), 'check')} failed, in {took}"
    return f"{failed}: attach the output of mlxtune doctor --prove --json to an issue"
