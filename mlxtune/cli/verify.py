"""`mlxtune verify`."""

from __future__ import annotations

import click


@click.command(epilog="Example: mlxtune verify out --replay")
@click.argument("run", metavar="RUN")
@click.option("--replay", is_flag=True, help="Train again from the first checkpoint, and compare.")
@click.option("--model-path", default="", metavar="PATH", help="Where the base model is now.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON for programs.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def verify(run: str, replay: bool, model_path: str, as_json: bool, debug: bool) -> None:
    """Check the folder of a run: files, records, adapters against the model; 1 if any is bad."""
    from mlxtune.recipes.verify import show

    if not show(run, replay=replay, model_path=model_path, as_json=as_json):
        raise click.exceptions.Exit(1)
