"""Inspections for tests of views, made from chat data in Qwen's style."""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Sequence
from typing import Any

from mlxtune.core.data.findings import Finding, Place
from mlxtune.core.data.inspection import (
    Cost,
    Distribution,
    Inspection,
    LengthLimit,
    Piece,
    ShownExample,
)

PATH = "data/chat.jsonl"
HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
    "'\"&lt;${x}$style [bold red]red[/] :smile: \x1b[31m\x1b]0;owned\x07\x9b2J\x00"
    "\r\u202e\u2066\u200b\ufeff\ud800\x08\x7f\u2028"
    "https://evil.example/x.png<iframe src=//evil.example></iframe>-->"
)


def plain(text: str, supervised: bool = False) -> list[Piece]:
    """Split a text into pieces of about a word, each a single token if it is ASCII."""
    parts = re.findall(r" ?\w+|\n|[^\w\s]+|\s", text)
    assert "".join(parts) == text
    return [Piece(part, 1 if part.isascii() else 2, False, supervised) for part in parts]


def chat(*turns: tuple[str, str]) -> tuple[Piece, ...]:
    """Return messages as Qwen's template writes them, with supervised answers."""
    pieces = []
    for role, content in turns:
        answer = role == "assistant"
        pieces += [Piece("<|im_start|>", 1, True, False), *plain(f"{role}\n")]
        pieces += [*plain(content, answer), Piece("<|im_end|>", 1, True, answer), *plain("\n")]
    return tuple(pieces)


def example(row: int, *turns: tuple[str, str], **changes: Any) -> ShownExample:
    pieces = changes.pop("pieces", None) or chat(*turns)
    values = {
        "path": PATH,
        "row": row,
        "part": 1,
        "parts": 1,
        "split": "train",
        "tokens": sum(piece.tokens for piece in pieces),
        "supervised": sum(piece.tokens for piece in pieces if piece.supervised),
        "cut": 0,
        "pieces": pieces,
    }
    return ShownExample(**values | changes)


def long_text(words: int) -> str:
    return " ".join(f"word{i}" for i in range(words))


SHOWN = (
    example(1, ("user", "A table at half past seven?"), ("assistant", '{"time": "19:30"}')),
    example(5, ("user", "Hi"), ("assistant", "Hello!"), part=1, parts=2),
    example(
        *(5, ("user", "Hi"), ("assistant", "Hello!"), ("user", "Bye"), ("assistant", "So long.")),
        **{"part": 2, "parts": 2},
    ),
    example(
        *(9, ("system", "  Be   brief. \n\n"), ("user", "Grüße, 日本語, مرحبا 👩‍💻\tTab")),
        *[("assistant", " Ünïcödé ")],
        split="validation",
    ),
    example(12, ("user", HOSTILE), ("assistant", HOSTILE), kinds=("looks wrong",)),
    example(20, ("user", "Tell me."), ("assistant", long_text(900) + " the end.")),
    example(
        *(33, ("user", "Count."), ("assistant", "One, two, three, four")),
        **{"split": "validation", "cut": 1234, "kinds": ("answer cut off",)},
    ),
)


def pair(row: int, chosen: Sequence[str], rejected: Sequence[str]) -> list[ShownExample]:
    """Return both sides of a pair; the odd parts of each answer are marked as different."""
    prompt = chat(("user", "A table at half past seven?"))
    return [
        example(
            row,
            pieces=(
                *prompt,
                *(Piece(text, 1, False, True, i % 2 == 1) for i, text in enumerate(parts)),
            ),
            role=role,
        )
        for role, parts in (("chosen", chosen), ("rejected", rejected))
    ]


PAIRED = [
    *pair(2, ["19:", "30", " for 4"], ["19:", "00", " for 4"]),
    example(3, ("user", "Hi"), ("assistant", "Hello!"), role="desirable"),
]

LEDGER: dict[str, Any] = {
    "path": PATH,
    "rows_read": 1010,
    "rows_train": 800,
    "rows_validation": 200,
    "rows_skipped": {"no assistant turn": 7, "not valid JSON": 3},
    "rows_truncated": 51,
    "examples": 1200,
    "tokens": 50_000,
    "tokens_supervised": 20_000,
    "tokens_context": 29_000,
    "tokens_truncated": 1000,
}

INSPECTION = Inspection(
    model="models/Qwen3-4B-4bit",
    template="qwen3",
    thinking="off",
    turns="all",
    max_seq_len=512,
    batch_size=4,
    files=(LEDGER,),
    examples=1200,
    tokens=Distribution(p50=75, p95=129, max=2153, mean=80.25, total=50_000),
    supervised=Distribution(p50=39, p95=76, max=986, mean=42.125, total=20_400),
    limits=(
        LengthLimit(128, 951, 12, 16_291, 13_758),
        LengthLimit(512, 51, 0, 1000, 348),
        LengthLimit(4096, 0, 0, 0, 0),
    ),
    cost=Cost(steps=200, tokens=64_197, supervised=33_580, validation_tokens=15_626),
    findings=(
        Finding(
            *("warning", "answer cut off", 51, "Raise --max-seq-len to 2153."),
            (Place(PATH, 33, "1,300 tokens"), Place(PATH, 999)),
        ),
        Finding("error", "looks wrong", 1, "Mend the template.", (Place(PATH, 12, "odd <b>"),)),
    ),
    shown=SHOWN,
)

EMPTY = dataclasses.replace(
    INSPECTION,
    files=(),
    examples=0,
    tokens=Distribution(0, 0, 0, 0.0, 0),
    supervised=Distribution(0, 0, 0, 0.0, 0),
    limits=(),
    cost=Cost(0, 0, 0, 0),
    findings=(),
    shown=(),
)


def with_text(text: str) -> Inspection:
    """Return an inspection with the text in every field that comes from data or a path."""
    finding = Finding("error", text, 3, text, (Place(text, 1, text), Place(text, 2, text)))
    return dataclasses.replace(
        INSPECTION,
        model=text,
        template=text,
        thinking=text,
        turns=text,
        files=(LEDGER | {"path": text, "rows_skipped": {text: 10}},),
        findings=(finding,),
        shown=(
            example(
                1,
                pieces=tuple(Piece(text, 1, i == 2, i > 0) for i in range(3)),
                path=text,
                split=text,
                kinds=(text,),
                cut=1,
            ),
        ),
    )
