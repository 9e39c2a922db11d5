"""`mlxtune doctor`."""

import click

from mlxtune.cli.options import debug_option, json_option


@click.command(epilog="Example: mlxtune doctor; mlxtune doctor --prove")
@click.option(
    "--prove",
    is_flag=True,
    help="Train small models here for a minute or two, and compare with what should come out.",
)
@json_option
@debug_option
def doctor(prove: bool, as_json: bool) -> None:
    """Check whether training works on this machine, and how fast.

    Each problem comes with its remedy. The exit code is 1 if training is impossible or, with
    --prove, if something is not as it should be.
    """
    if prove:
        from mlxtune.recipes.prove import show
    else:
        from mlxtune.recipes.doctor import show

    if not show(as_json=as_json):
        raise click.exceptions.Exit(1)
