"""`mlxtune doctor`."""

from __future__ import annotations

import click


@click.command(epilog="Example: mlxtune doctor")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def doctor(as_json: bool, debug: bool) -> None:
    """Say whether training works on this machine, what is slow, and how to mend it; 1 if not."""
    from mlxtune.recipes.doctor import show

    if not show(as_json=as_json):
        raise click.exceptions.Exit(1)
