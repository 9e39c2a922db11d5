"""What a notebook shows of a run that has ended: its result in words, and its loss curve."""

from dataclasses import dataclass

from markupsafe import Markup

from mlxtune.core.run.run import Run
from mlxtune.core.run.summary import RunView
from mlxtune.views.pages.charts import draw
from mlxtune.views.pages.page import asset, render
from mlxtune.views.pages.run_charts import loss_chart


@dataclass(frozen=True)
class ResultCard:
    """Shows a run; `code` is what to type next."""

    run: Run
    code: str

    def html(self) -> str:
        """Return the card as HTML that needs no script and no network."""
        view = RunView.of(self.run)
        picture, _ = draw(loss_chart(self.run, view), 0)
        return str(
            render(
                "result_card.html",
                view=view,
                chart=picture,
                style=Markup(asset("result_card.css") + asset("chart.css")),
                next=self.code,
            )
        )

    def text(self) -> str:
        """Return the card without its picture."""
        view = RunView.of(self.run)
        figures = (f"{value}  {name}" for name, value in view.figures.items())
        return "\n".join([f"{view.headline}.", view.verdict.line, *figures, self.code])
