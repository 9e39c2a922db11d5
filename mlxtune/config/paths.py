"""The user's cache folder, and paths with `~`."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder that this user's runs share: encoded data, hashes, reserved memory."""
    import platformdirs

    return Path(platformdirs.user_cache_path("mlxtune"))


def as_path(text: str) -> Path:
    """Return the path that an option names, with `~` and `~name` expanded."""
    # Unlike Path.expanduser, leaves unknown names alone.
    return Path(os.path.expanduser(text))  # noqa: PTH111
