"""Notes: problems in rows that are kept anyway, by kind, with advice and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

CONTROL_TOKEN = "control token written in content"
DOUBLE_BOS = "BOS twice at the start"
DROPPED_CONTENT = "text beside a tool call left out by the template"
DROPPED_SYSTEM = "system message left out by the template"
DROPPED_THINKING = "thinking left out by the template"
DROPPED_TOOLS = "tools left out by the template"
DUPLICATE = "duplicate row"
LEAK = "validation row that is also trained on"
MERGED_SYSTEM = "system message merged into the first user turn"
NO_END_OF_TURN = "end-of-turn token unknown to the tokenizer"
NO_PROMPT = "assistant turn with no prompt before it"
TRUNCATED_ANSWER = "answer cut at --max-seq-len"

ADVICE = {
    CONTROL_TOKEN: "the model reads it as a real control token: remove it from the text",
    DOUBLE_BOS: "the model's template writes it twice: fix the template",
    DROPPED_CONTENT: "it is not trained on: remove it, or split the turn in two",
    DROPPED_SYSTEM: "training and inference do not show it to the model: try --merge-system",
    DROPPED_THINKING: "it is not trained on: use --thinking auto, or a model with a thinking mode",
    DROPPED_TOOLS: "training and inference do not show them: use a model that supports tools",
    DUPLICATE: "each copy is trained on: keep one, unless the copies are intended",
    LEAK: "the validation loss looks better than it is: remove it from one of the two",
    MERGED_SYSTEM: "--merge-system did this: merge it likewise at inference",
    NO_END_OF_TURN: "the model does not know it and will not stop there: choose another --template",
    NO_PROMPT: "there is nothing to answer, so it is context and not trained on",
    TRUNCATED_ANSWER: "the model learns neither its end nor when to stop: raise --max-seq-len",
}
# Kinds of notes that `train` refuses.
ERRORS = (DOUBLE_BOS,)


@dataclass(frozen=True, slots=True)
class Note:
    """A problem in a row that is kept; `kind` is one of those above."""

    kind: str
    detail: str = ""


@dataclass(kw_only=True)
class RowTally:
    """How many rows of a file by kind, and (number, detail) of the first few of each kind."""

    counts: Counter[str] = field(default_factory=Counter)
    places: dict[str, list[tuple[int, str]]] = field(default_factory=dict)
    places_per_kind: int = 5

    def count(self, row: int, kind: str, detail: str = "") -> None:
        """Count the row with this 1-based number."""
        self.counts[kind] += 1
        places = self.places.setdefault(kind, [])
        if len(places) < self.places_per_kind:
            places.append((row, detail))


class Notes(RowTally):
    """The notes on the rows of one file."""

    def add(self, row: int, notes: Iterable[Note]) -> None:
        """Count a row once for each kind of note on it."""
        for kind, detail in {note.kind: note.detail for note in notes}.items():
            self.count(row, kind, detail)
