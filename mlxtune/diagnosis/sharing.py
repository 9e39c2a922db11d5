"""A proof as it is shared: without names, paths and hashes. Pure."""

import re
from collections.abc import Sequence
from typing import Any

from mlxtune.diagnosis.proving import MachineProof

# What stands around a separator, spaces included: everything up to a bracket, a quote or a colon.
_PATH = re.compile(r"(?:\b[A-Za-z]:)?[\w.@+~-]*[/\\][^:;,'\"()\[\]]*")
# Shorter names would take words apart.
_SHORTEST_NAME = 2


def shareable(proof: MachineProof, names: Sequence[str]) -> dict[str, Any]:
    """Return a proof for JSON without what tells whose machine it is.

    Hashes, paths and the `names` (of the host, the user and the home folder) are left out, also of
    the errors that ended checks. No text has a separator of paths.
    """
    found = proof.as_dict()
    for check in found["checks"]:
        check["found"] = _PATH.sub("…", _without(check["found"], names))
        check["expected"] = _without(check["expected"], names)
        numbers = check["values"].items()
        check["values"] = {key: value for key, value in numbers if not isinstance(value, str)}
    found["machine"]["system"] = _without(found["machine"]["system"], names)
    return {key: _plain(value) for key, value in found.items()}


def _without(text: str, names: Sequence[str]) -> str:
    """Return a text without some names, in any case of letters, where they stand as words."""
    # A host is also known by the first part of its name.
    every = {part for name in names for part in (name, name.partition(".")[0])}
    for name in sorted(every, key=len, reverse=True):
        if len(name) >= _SHORTEST_NAME:
            text = re.sub(rf"(?<!\w){re.escape(name)}(?!\w)", "…", text, flags=re.IGNORECASE)
    return text


def _plain(value: Any) -> Any:
    """Return a value of JSON whose texts have no separator of paths."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list):
        return [_plain(each) for each in value]
    return re.sub(r"[/\\]", " ", value) if isinstance(value, str) else value
