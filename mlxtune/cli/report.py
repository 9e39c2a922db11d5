"""`mlxtune report`."""

from __future__ import annotations

import click


@click.command(epilog="Example: mlxtune report out; mlxtune report out/a out/b --html both.html")
@click.argument("runs", metavar="RUN [RUN]...", nargs=-1, required=True)
@click.option(
    "--html",
    metavar="FILE",
    help="Page to write; default: report.html in the run's folder, comparison.html for several.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON; the page only with --html.")
@click.option("--debug", is_flag=True, help="Show the traceback of an error.")
def report(runs: tuple[str, ...], html: str | None, as_json: bool, debug: bool) -> None:
    """Write a page of a run, or of several to compare: curves, plan, data, answers, options."""
    from mlxtune.recipes.report import show

    show(runs, html=html, as_json=as_json)
