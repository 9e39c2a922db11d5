"""`mlxtune runs`."""

from __future__ import annotations

import click


@click.command(epilog="Example: mlxtune runs; mlxtune runs ~/adapters --sort val")
@click.argument("folders", metavar="[DIR]...", nargs=-1)
@click.option(
    "--sort",
    type=click.Choice(["when", "name", "val", "train", "speed", "steps"]),
    default="when",
    show_default=True,
    help="What stands first: the newest, the lowest loss, the fastest, the longest.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def runs(folders: tuple[str, ...], sort: str, as_json: bool, debug: bool) -> None:
    """List the runs below a folder, by default this one, with their results."""
    from mlxtune.recipes.runs import show

    show(folders, sort=sort, as_json=as_json)
