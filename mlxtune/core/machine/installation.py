"""The installed package: its distribution's name, its version, and commands that add to it."""

import importlib.util
import shlex
import sys
from pathlib import Path

# PyPI cannot take `mlxtune`, which it does not tell apart from another project's `mlx-tune`.
DISTRIBUTION = "mlxtune-lora"
# The version of a package that is imported from a folder without being installed.
UNINSTALLED = "unknown"


def installed_version(distribution: str = DISTRIBUTION) -> str | None:
    """Return the version of an installed distribution, by default mlxtune's; None if absent."""
    # This import would take a third of the time of `mlxtune --help`.
    from importlib import metadata

    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:
        return None


def installs_extra(extra: str) -> str:
    """Return the command that adds an extra to this installation.

    It keeps the installed mlxtune, from an index or a clone: pip and uv see that its version serves
    and look no further.
    """
    return pip_command("install", f"'{DISTRIBUTION}[{extra}]'")


def pip_command(verb: str, packages: str) -> str:
    """Return pip's command for this environment, typed in any shell.

    The environments of `pipx` and `uv tool` are not active in a shell, and uv's have no pip.
    """
    prefix = Path(sys.prefix)
    if (prefix / "pipx_metadata.json").exists():
        return f"pipx runpip {shlex.quote(prefix.name)} {verb} {packages}"
    if importlib.util.find_spec("pip") is None:
        return f"uv pip {verb} --python {shlex.quote(sys.prefix)} {packages}"
    return f"pip {verb} {packages}"
