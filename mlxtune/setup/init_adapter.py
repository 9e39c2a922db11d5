"""Options of a run that goes on training an adapter: those it has, unless they are given.

What it needs is imported in the functions, as in train.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_adapter(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a run, completed by what the adapter that they name says of itself.

    Rank, alpha, targets, layers and kind are then those under which `init_adapter` was trained;
    one that is given stays, and is an error later where it contradicts. Without an `init_adapter`
    they are returned as they are.

    Raises ModelError when it is no adapter that can be gone on with.
    """
    adapter = options.get("init_adapter")
    if not isinstance(adapter, str) or not adapter.strip() or options.get("init", "lora") != "lora":
        return dict(options)
    from mlxtune.backend.adapters.initialise import options_of

    return options_of(adapter, options) | dict(options)
