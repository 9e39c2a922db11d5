"""Shows the result of `mlxtune doctor --prove` as a table, or as JSON without names."""

import re
from collections.abc import Sequence
from itertools import groupby
from typing import Any

from rich.console import Console

from mlxtune.core.text import count
from mlxtune.diagnosis.checks import (
    BYTES,
    CACHE,
    DTYPE,
    GRADIENTS,
    MEMORY,
    PEER,
    PRODUCTS,
    SPEED,
    MachineProof,
    ProofCheck,
)
from mlxtune.views.tables import plain_table, shown

_HEADINGS = {
    GRADIENTS: "loss and gradients",
    PRODUCTS: "products in real sizes",
    DTYPE: "gradients in 16 bits",
    BYTES: "bytes of the adapter",
    MEMORY: "peak memory",
    SPEED: "speed of steps",
    PEER: "beside mlx-lm",
    CACHE: "MLX's cache",
}
_WORDS = {True: "pass", False: "FAIL", None: "–"}
_STYLES = {True: "green", False: "bold red", None: ""}
# A path: text with a separator, and all that follows up to punctuation, a quote or a bracket.
_PATH = re.compile(r"(?:\b[A-Za-z]:)?[\w.@+~-]*[/\\][^:;,'\"()\[\]]*")
# Replacing shorter names would break words.
_SHORTEST_NAME = 2


def show_proof(proof: MachineProof, console: Console) -> None:
    """Print a line for each check, the advice on failures, and a summary."""
    table = plain_table(["check", "expected", "found", "", "s"])
    for column in table.columns[1:3]:
        column.justify = "left"
    for kind, checks in groupby(proof.checks, key=lambda check: check.kind):
        table.add_row(shown(_HEADINGS[kind], "bold"))
        for check in checks:
            cells = map(shown, (f"  {check.name}", check.expected, check.found))
            result = shown(_WORDS[check.passed], _STYLES[check.passed])
            table.add_row(*cells, result, f"{check.seconds:.1f}")
    console.print(table)
    for check in proof.failures:
        console.print(shown(check.advice), soft_wrap=True)
    console.print(shown(summary(proof), "bold"), soft_wrap=True)


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
        return f"{count(len(proof.checks), 'check')}, nothing failed{late}, in {took}"
    failed = f"{len(proof.failures)} of {count(len(proof.checks), 'check')} failed, in {took}"
    return f"{failed}: attach the output of mlxtune doctor --prove --json to an issue"


def shareable(proof: MachineProof, names: Sequence[str]) -> dict[str, Any]:
    """Return a proof as a JSON value that does not reveal whose machine made it.

    The value has no hashes, no paths and none of the `names` (of the host, the user and the home
    folder), not even in errors. No text contains a path separator.
    """
    found = proof.as_dict()
    for check in found["checks"]:
        check["found"] = _PATH.sub("…", _without(check["found"], names))
        numbers = check["values"].items()
        check["values"] = {key: value for key, value in numbers if not isinstance(value, str)}
    return _anonymous(found, names)


def _anonymous(value: Any, names: Sequence[str]) -> Any:
    """Return a JSON value with names and path separators replaced in its strings."""
    if isinstance(value, dict):
        return {key: _anonymous(each, names) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_anonymous(each, names) for each in value]
    return re.sub(r"[/\\]", " ", _without(value, names)) if isinstance(value, str) else value


def _without(text: str, names: Sequence[str]) -> str:
    """Return text with an ellipsis in place of `names`, matched as whole words in any case."""
    # The part of a host's name before the first dot also identifies it.
    every = {part for name in names for part in (name, name.partition(".")[0])}
    for name in sorted(every, key=len, reverse=True):
        if len(name) >= _SHORTEST_NAME:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text, flags=re.IGNORECASE)
    return text
