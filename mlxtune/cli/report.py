"""`mlxtune report`."""

import click

from mlxtune.cli.options import debug_option


@click.command(epilog="Example: mlxtune report out; mlxtune report out/a out/b --html both.html")
@click.argument("runs", metavar="RUN [RUN]...", type=click.Path(), nargs=-1, required=True)
@click.option(
    "--html",
    type=click.Path(),
    help="Page to write; default: report.html in the run's folder, comparison.html for several.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the page only with --html.")
@debug_option
def report(runs: tuple[str, ...], html: str | None, as_json: bool) -> None:
    """Write an HTML page about a run, or comparing several.

    It shows curves, the plan, the data, sample answers and options.
    """
    from mlxtune.recipes.report import show

    show(runs, html=html, as_json=as_json)
