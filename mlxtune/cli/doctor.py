"""`mlxtune doctor`."""

import click

from mlxtune.cli.options import debug_option, json_option


@click.command(epilog="Example: mlxtune doctor")
@json_option
@debug_option
def doctor(as_json: bool) -> None:
    """Check whether training works on this machine, and how fast.

    Each problem comes with its remedy. The exit code is 1 if training is impossible.
    """
    from mlxtune.recipes.doctor import show

    if not show(as_json=as_json):
        raise click.exceptions.Exit(1)
