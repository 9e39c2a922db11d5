"""Names from a hub, a config or a run, checked before they become part of a path."""

import re

# The maximum length of a file's name in bytes.
_MAX_BYTES = 255
_COMMIT = re.compile("[0-9a-f]{40}")


def is_file_name(name: object) -> bool:
    """Return whether a name, joined to a folder, can only name an entry of that folder.

    Such a name has no path separator of any system, is not `.` or `..`, and prints unchanged on a
    terminal.
    """
    return (
        isinstance(name, str)
        and name not in ("", ".", "..")
        and name.isprintable()
        and not any(mark in name for mark in "/\\")
        and len(name.encode(errors="surrogatepass")) <= _MAX_BYTES
    )


def is_relative_path(name: object) -> bool:
    """Return whether a path, with `/` between its parts, stays in the folder it is joined to."""
    return isinstance(name, str) and all(map(is_file_name, name.split("/")))


def is_commit(revision: object) -> bool:
    return isinstance(revision, str) and bool(_COMMIT.fullmatch(revision))
