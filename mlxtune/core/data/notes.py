"""What is worth a look in the rows of a file, short of skipping them: kinds, advice, and counts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field

CONTROL_TOKEN = "control token written in content"
DOUBLE_BOS = "BOS twice at the start"
DROPPED_CONTENT = "what is said beside a tool call left out by the template"
DROPPED_SYSTEM = "system message left out by the template"
DROPPED_THINKING = "thinking left out by the template"
DROPPED_TOOLS = "tools left out by the template"
DUPLICATE = "duplicate row"
LEAK = "validation row that is also trained on"
MERGED_SYSTEM = "system message merged into the first user turn"
NO_END_OF_TURN = "end-of-turn is no token of this tokenizer"
NO_PROMPT = "assistant's turn before any question"
TRUNCATED_ANSWER = "answer cut at --max-seq-len"

# What to do about each.
ADVICE = {
    CONTROL_TOKEN: "the model reads it as a real control token: take it out of the text",
    DOUBLE_BOS: "the model's template writes it twice: mend the template",
    DROPPED_CONTENT: "it is not trained on: take it out, or split the turn in two",
    DROPPED_SYSTEM: "neither training nor inference shows it to the model: try --merge-system",
    DROPPED_THINKING: "it is not trained on: leave --thinking at auto, or use a model that thinks",
    DROPPED_TOOLS: "neither training nor inference shows them to the model: use one that has tools",
    DUPLICATE: "each copy is trained on: keep one, unless that is meant",
    LEAK: "the validation loss looks better than it is: take it out of one of the two",
    MERGED_SYSTEM: "by --merge-system: merge it likewise at inference",
    NO_END_OF_TURN: "the model will not know it, nor stop there: name another --template",
    NO_PROMPT: "nothing stands before it to answer: it is context and not trained on",
    TRUNCATED_ANSWER: "its end is not learned, nor when to stop: raise --max-seq-len",
}
# Kinds that `train` refuses.
ERRORS = (DOUBLE_BOS,)


@dataclass(frozen=True, slots=True)
class Note:
    """Something of a row that is worth telling; `kind` is one of those above."""

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
