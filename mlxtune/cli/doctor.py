"""`mlxtune doctor`."""

import click

from mlxtune.cli.options import debug_option, json_option
from mlxtune.config import as_path
from mlxtune.errors import ConfigError


@click.command(epilog="Example: mlxtune doctor; mlxtune doctor --prove")
@click.option(
    "--prove",
    is_flag=True,
    help="Train small models here for a minute or two, and compare with what should come out.",
)
@click.option(
    "--share",
    metavar="FILE",
    is_flag=False,
    flag_value="mlxtune-proof.json",
    help="With --prove: write the result to a file without names or paths, for others to see.",
)
@click.option(
    "--model-path",
    metavar="PATH",
    help="Under mlx.launch: check that all machines have this model.",
)
@click.option(
    "--data",
    metavar="PATH",
    multiple=True,
    help="Under mlx.launch: check that all machines have this data; may be repeated.",
)
@json_option
@debug_option
def doctor(
    prove: bool,
    share: str | None,
    as_json: bool,
    model_path: str | None,
    data: tuple[str, ...],
) -> None:
    """Check whether training works on this machine, and how fast.

    Under mlx.launch, check all machines and the network between them. Each problem comes with its
    remedy. The exit code is 1 if training is impossible or, with --prove, if something is not as it
    should be.
    """
    if share is not None and not prove:
        raise ConfigError(["--share is the result of --prove: give both"])
    if prove:
        from mlxtune.recipes import prove as recipe

        fine = recipe.show(as_json=as_json, share=None if share is None else as_path(share))
    else:
        from mlxtune.recipes.doctor import show

        fine = show(as_json=as_json, model_path=model_path, data=data)
    if not fine:
        raise click.exceptions.Exit(1)
