"""`mlxtune verify`."""

import click

from mlxtune.cli.options import debug_option, json_option


@click.command(epilog="Example: mlxtune verify out --replay")
@click.argument("run", metavar="RUN", type=click.Path())
@click.option("--replay", is_flag=True, help="Train again from the first checkpoint, and compare.")
@click.option(
    "--model-path", default="", type=click.Path(), help="Folder of the base model, if it has moved."
)
@json_option
@debug_option
def verify(run: str, replay: bool, model_path: str, as_json: bool) -> None:
    """Check the files of a run, and its adapters against the model.

    The exit code is 1 if a check fails.
    """
    from mlxtune.recipes.verify import show

    if not show(run, replay=replay, model_path=model_path, as_json=as_json):
        raise click.exceptions.Exit(1)
