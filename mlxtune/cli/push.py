"""`mlxtune push`."""

import click

from mlxtune.cli.options import debug_option


@click.command(epilog="Example: mlxtune push out me/bookings --dry-run")
@click.argument("run", metavar="RUN", type=click.Path())
@click.argument("repository", metavar="OWNER/NAME")
@click.option("--public", is_flag=True, help="Make the repository public; default: private.")
@click.option(
    "--base-model",
    default="",
    metavar="OWNER/NAME",
    help="The base model on Hugging Face, if it was trained from another folder.",
)
@click.option(
    "--model-path", default="", type=click.Path(), help="Folder of the base model, if it has moved."
)
@click.option("--yes", is_flag=True, help="Upload without asking.")
@click.option("--dry-run", is_flag=True, help="Show the card and the files, and stop.")
@debug_option
def push(
    run: str,
    repository: str,
    public: bool,
    base_model: str,
    model_path: str,
    yes: bool,
    dry_run: bool,
) -> None:
    """Upload a run's adapter with a model card to Hugging Face.

    It shows both first, and asks. Neither data nor paths are uploaded.
    """
    from mlxtune.recipes.push import show

    show(
        run,
        repository,
        public=public,
        base_model=base_model,
        model_path=model_path,
        yes=yes,
        dry_run=dry_run,
    )
