"""Options of a run that continues an adapter: the adapter's own, unless they are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def with_adapter(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options of a run with the rank, alpha, targets, layers and kind of its `init_adapter`.

    Given options stay, and are an error later if they contradict the adapter.

    Raises ModelError if training cannot continue from the adapter.
    """
    adapter = options.get("init_adapter")
    if not isinstance(adapter, str) or not adapter.strip() or options.get("init", "lora") != "lora":
        return dict(options)
    # Loads mlx, which --help must not.
    from mlxtune.backend.adapters.initialise import options_of

    return options_of(adapter, options) | dict(options)
