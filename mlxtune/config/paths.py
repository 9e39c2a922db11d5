"""Where a person's files are."""

from __future__ import annotations

import os
from pathlib import Path


def user_cache() -> Path:
    """Return the folder of what this user's runs keep and share: encoded data, hashes, the memory
    that is reserved.
    """
    import platformdirs

    return Path(platformdirs.user_cache_path("mlxtune"))


def as_path(text: str) -> Path:
    """Return the path that an option names, `~` and `~name` being homes."""
    # Unlike Path.expanduser, leaves alone what is no home of anybody.
    return Path(os.path.expanduser(text))  # noqa: PTH111
