"""`mlxtune runs`."""

import click

from mlxtune.cli.options import debug_option, json_option


@click.command(epilog="Example: mlxtune runs; mlxtune runs ~/adapters --sort val")
@click.argument("folders", metavar="[DIR]...", type=click.Path(), nargs=-1)
@click.option(
    "--sort",
    type=click.Choice(["when", "name", "val", "train", "speed", "steps"]),
    default="when",
    show_default=True,
    help="Order of the runs: newest, name, lowest loss (val, train), fastest or longest first.",
)
@json_option
@debug_option
def runs(folders: tuple[str, ...], sort: str, as_json: bool) -> None:
    """List the runs below a folder with their results.

    Without a folder, those below the current one.
    """
    from mlxtune.recipes.runs import show

    show(folders, sort=sort, as_json=as_json)
