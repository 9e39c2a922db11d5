"""An evaluation as lines of text. Nothing here prints."""

from collections.abc import Iterator, Sequence

from mlxtune.core.run.evaluation import Evaluation, Generated, RowLosses, verdict_line
from mlxtune.core.text import count
from mlxtune.views import run_text
from mlxtune.views.visible import escape

_NAME = 12
# The samples that are shown, and the characters of each text.
_SAMPLES = 4
_LONGEST = 400


def evaluation_lines(evaluation: Evaluation) -> Iterator[str]:
    """Yield the losses, the verdict, the rows that changed most, and sampled answers."""
    yield f"{'Base':<{_NAME}}{run_text.loss_and_perplexity(evaluation.base.loss)}"
    if evaluation.adapted is not None:
        yield f"{'Adapted':<{_NAME}}{run_text.loss_and_perplexity(evaluation.adapted.loss)}"
        yield f"{'Verdict':<{_NAME}}{verdict_line(evaluation)}"
        yield from _rows("Gained most", evaluation.gained)
        yield from _rows("Lost most", evaluation.lost)
    if evaluation.generated is not None:
        yield from _answers(evaluation.generated)


def _rows(name: str, rows: Sequence[RowLosses]) -> Iterator[str]:
    for i, each in enumerate(rows):
        yield (
            f"{'' if i else name:<{_NAME}}{each.path}:{each.row}: {each.base_loss:.4f} to "
            f"{each.adapted_loss:.4f} over {count(each.tokens, 'token')}"
        )


def _answers(generated: Generated) -> Iterator[str]:
    match, rows = generated.exact_match, generated.rows
    if not rows:
        return
    parts = [f"base {match.base:,}"]
    if match.adapted is not None:
        parts.append(f"adapted {match.adapted:,} ({match.adapted / rows:.1%})")
    parts[0] += f" ({match.base / rows:.1%})"
    answers = count(rows, "answer")
    yield f"{'Exact match':<{_NAME}}{', '.join(parts)}, of {answers}, match exactly"
    for sample in generated.samples[:_SAMPLES]:
        yield ""
        yield f"{sample.path}:{sample.row}"
        sides = (("prompt", sample.prompt), ("expected", sample.expected), ("base", sample.base))
        for name, text in (*sides, ("adapted", sample.adapted)):
            if text is not None:
                yield f"  {name:<{_NAME - 2}}{_short(text, from_end=name == 'prompt')}"


def _short(text: str, *, from_end: bool) -> str:
    shown = escape(text)
    if len(shown) <= _LONGEST:
        return shown
    return f"…{shown[-_LONGEST:]}" if from_end else f"{shown[:_LONGEST]}…"
