"""Text to tokens and mask, with tokenizers that are easy to follow."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mlxtune.core.data import problems
from mlxtune.core.data.conversation import Conversation, Document, Message, Pair, Row
from mlxtune.core.data.encode import Encoder
from mlxtune.core.data.ledger import Ledger
from mlxtune.core.data.problems import RowTally, SkippedRows
from mlxtune.core.data.template import PendingRendering, RenderedText, Rendering, render_qwen3
from tests.core.data.encoding import (
    ByteTokenizer,
    PatternTokenizer,
    converse,
    encode,
    merged_newlines,
    supervised_runs,
    triples,
    words,
)


def test_answer_and_its_end_of_turn_token_are_supervised_as_in_the_picture() -> None:
    picture = r"""
tokens          <bos> <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n Hello ! <|im_end|> \n
assistant_mask    0        0        0   0  0      0       0      0           0      0   1   1     1       0
"""  # noqa: E501
    tokens, mask = (line.split()[1:] for line in picture.strip().split("\n"))
    tokenizer = words(bos="<bos>")

    (example,), _, _ = encode(tokenizer, converse(("user", "Hi"), ("assistant", "Hello!")))

    assert [tokenizer.vocabulary[i] for i in example.tokens] == [
        token.replace(r"\n", "\n") for token in tokens
    ]
    assert example.assistant_mask.tolist() == [int(one) for one in mask]
    assert (example.tokens.dtype, example.assistant_mask.dtype) == (np.int32, np.uint8)
    assert (len(example), example.supervised) == (14, 3)


def test_every_assistant_turn_is_supervised_and_later_user_turns_are_not() -> None:
    tokenizer = words()

    (example,), _, _ = encode(
        tokenizer,
        converse(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d e")),
    )

    assert [tokenizer.decode(run) for run in supervised_runs(example)] == [
        "b<|im_end|>",
        "d e<|im_end|>",
    ]


def test_bos_is_added_exactly_once_if_defined() -> None:
    conversation = converse(("user", "Hi"), ("assistant", "Hello"))
    (rendered,) = render_qwen3(conversation).texts

    def with_bos(conversation: Conversation) -> Rendering:
        start = len("<bos>")
        spans = tuple((a + start, b + start) for a, b in rendered.spans)
        return Rendering(conversation.row, (RenderedText("<bos>" + rendered.text, spans),))

    def forbids_bos(conversation: Conversation) -> Rendering:
        return Rendering(conversation.row, (replace(rendered, add_bos=False),))

    for template, bos, count in (
        (render_qwen3, None, 0),
        (render_qwen3, "<bos>", 1),
        (with_bos, "<bos>", 1),
        (forbids_bos, "<bos>", 0),
    ):
        tokenizer = words(bos)
        (example,), _, _ = encode(tokenizer, conversation, template=template)

        assert example.tokens.tolist().count(tokenizer.id_of("<bos>")) == count
        assert tokenizer.decode(example.tokens).removeprefix("<bos>") == rendered.text
        assert [tokenizer.decode(run) for run in supervised_runs(example)] == ["Hello<|im_end|>"]


def test_answer_is_tokenized_separately_if_a_token_would_cross_its_edge() -> None:
    tokenizer = merged_newlines()

    (merged, apart), _, _ = encode(
        tokenizer,
        converse(("user", "a\n\nb"), ("assistant", "\n\nc\n\nd")),
        converse(("user", "a\n\nb"), ("assistant", "c\n\nd"), row=2),
    )

    # Encoded as a whole, "assistant\n" and "\n\nc" would share a token of three newlines.
    assert [tokenizer.vocabulary[i] for i in merged.tokens] == [
        *("<|im_start|>", "user", "\n", "a", "\n\n", "b", "<|im_end|>", "\n"),
        *("<|im_start|>", "assistant", "\n", "\n\n", "c", "\n\n", "d", "<|im_end|>"),
    ]
    assert merged.assistant_mask.tolist() == [0] * 11 + [1] * 5
    assert [tokenizer.decode(run) for run in supervised_runs(apart)] == ["c\n\nd<|im_end|>"]


def test_each_turn_is_an_example_where_a_token_would_cross_the_edge_of_one() -> None:
    tokenizer = merged_newlines(bos="<bos>")
    conversation = converse(
        ("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "\n\nd"), row=3
    )

    (first, second), ledger, skipped = encode(tokenizer, conversation)

    turn = r"<|im_start|> user \n a <|im_end|> \n <|im_start|> assistant \n b <|im_end|>"
    later = turn + r" \n <|im_start|> user \n c <|im_end|> \n <|im_start|> assistant \n \n\n d"
    for example, pieces, prompt in (
        (first, f"<bos> {turn}", 10),
        (second, f"<bos> {later} <|im_end|>", 22),
    ):
        assert [tokenizer.vocabulary[i] for i in example.tokens] == [
            piece.replace(r"\n", "\n") for piece in pieces.split()
        ]
        assert example.assistant_mask.tolist() == [0] * prompt + [1] * (len(example) - prompt)
        assert example.row == 3
    assert skipped.total == 0
    assert ledger == Ledger(
        path="chat.jsonl",
        rows_read=1,
        rows_train=1,
        examples=2,
        tokens=len(first) + len(second),
        tokens_supervised=2 + 3,
        tokens_context=10 + 22,
    )


def test_row_without_any_supervised_token_is_skipped() -> None:
    conversation = converse(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "\nd"))
    # As above, without BOS: 9 + 2 tokens, then 21 + 3.
    for limit, kept, supervised, context, truncated in (
        (24, 2, 5, 30, 0),
        (22, 2, 3, 30, 2),
        (21, 1, 2, 9, 24),
        (10, 1, 1, 9, 25),
        (9, 0, 0, 0, 35),
    ):
        examples, ledger, skipped = encode(merged_newlines(), conversation, max_seq_len=limit)

        assert len(examples) == kept
        assert skipped.total == (kept == 0)
        assert ledger.adds_up()
        assert ledger == Ledger(
            path="chat.jsonl",
            rows_read=1,
            rows_train=int(kept > 0),
            rows_skipped=skipped.counts,
            rows_truncated=int(truncated > 0),
            examples=kept,
            tokens=35,
            tokens_supervised=supervised,
            tokens_context=context,
            tokens_truncated=truncated,
            notes=Counter({problems.TRUNCATED_ANSWER: 1} if kept and limit < 24 else {}),
        )
    assert "the answer starts at token 10" in skipped.first()


def test_token_that_crosses_the_end_of_a_turn_is_split_there() -> None:
    tokenizer = triples()
    (rendered,) = render_qwen3(converse(("user", "Hi"), ("assistant", "Hello!"))).texts

    (example,), _, _ = encode(tokenizer, converse(("user", "Hi"), ("assistant", "Hello!")))

    assert tokenizer.decode(example.tokens) + "\n" == rendered.text
    assert [tokenizer.decode(run) for run in supervised_runs(example)] == ["Hello!<|im_end|>"]


@pytest.mark.parametrize("narrow", [False, True])
def test_all_bytes_of_a_character_carry_the_same_mask(narrow: bool) -> None:
    tokenizer = ByteTokenizer(narrow)

    (example,), _, _ = encode(tokenizer, converse(("user", "é🦙"), ("assistant", "🦙é")))

    answer = "🦙é<|im_end|>".encode()
    assert supervised_runs(example) == [list(answer)]


def test_example_is_cut_at_max_seq_len_and_what_is_lost_is_counted() -> None:
    conversation = converse(("user", "Hi"), ("assistant", "one two three"))
    # <|im_start|> user \n Hi <|im_end|> \n <|im_start|> assistant \n, then
    # one _ two _ three <|im_end|>, then \n: 9 + 6 + 1 tokens.
    for limit in range(10, 18):
        (example,), ledger, skipped = encode(words(), conversation, max_seq_len=limit)

        kept = min(limit, 16)
        assert len(example) == kept
        assert example.assistant_mask.tolist() == ([0] * 9 + [1] * 6 + [0])[:kept]
        assert skipped.total == 0
        assert ledger == Ledger(
            path="chat.jsonl",
            rows_read=1,
            rows_train=1,
            rows_truncated=int(limit < 16),
            examples=1,
            tokens=16,
            tokens_supervised=min(kept - 9, 6),
            tokens_context=9 + (kept == 16),
            tokens_truncated=16 - kept,
            notes=Counter({problems.TRUNCATED_ANSWER: 1} if limit < 15 else {}),
        )


def test_row_cut_before_its_first_supervised_token_is_skipped_and_counted() -> None:
    conversation = converse(("user", "Hi"), ("assistant", "Hello"), row=7)

    examples, ledger, skipped = encode(words(), conversation, max_seq_len=9)

    assert examples == []
    (warning,) = skipped.warnings()
    assert warning.startswith("chat.jsonl:7: no supervised token within --max-seq-len 9 ")
    assert "the answer starts at token 10" in warning
    assert ledger.as_dict() == {
        "path": "chat.jsonl",
        "rows_read": 1,
        "rows_train": 0,
        "rows_validation": 0,
        "rows_skipped": {"no supervised token within --max-seq-len 9": 1},
        "rows_truncated": 1,
        "examples": 0,
        "tokens": 12,
        "tokens_supervised": 0,
        "tokens_context": 0,
        "tokens_truncated": 12,
        "notes": {},
    }
    assert ledger.adds_up()


def test_row_refused_by_template_is_skipped_alone() -> None:
    tools = converse(("tool", "4"), ("assistant", "Hello"), row=2)
    good = [converse(("user", "Hi"), ("assistant", "Hello"), row=i) for i in (1, 3)]

    examples, ledger, skipped = encode(words(), good[0], tools, good[1], template="gemma")

    assert [example.row for example in examples] == [1, 3]
    assert skipped.first() == "chat.jsonl:2: the gemma template does not support tools"
    assert (ledger.rows_read, ledger.rows_train) == (3, 2)


def test_row_whose_answer_has_no_token_at_all_is_skipped_and_counted() -> None:
    conversation = converse(("user", "Hi"), ("assistant", "Hello"))

    for pattern in (r"user|Hi", r"nothing"):
        examples, ledger, skipped = encode(PatternTokenizer(pattern), conversation)

        assert examples == []
        assert skipped.total == ledger.rows_read == 1
        assert ledger.adds_up()


def test_rows_beyond_one_batch_of_the_tokenizer_keep_their_order() -> None:
    rows = range(1, 3000)
    conversations = (converse(("assistant", f"{i}"), row=i) for i in rows)

    examples, ledger, _ = encode(ByteTokenizer(narrow=False), *conversations)

    assert [example.row for example in examples] == list(rows)
    assert [bytes(supervised_runs(example)[0]) for example in examples] == [
        b"%d<|im_end|>" % i for i in rows
    ]
    assert ledger.rows_read == len(rows)


def test_deeply_nested_tools_are_kept_or_skipped() -> None:
    def nested(depth: int) -> dict[str, Any]:
        value: Any = 0
        for _ in range(depth):
            value = [value]
        return {"name": "f", "parameters": value}

    depths = [1, 10, 100, *range(300, 2000, 10), 100_000]
    conversations = [
        Conversation(i, (Message("assistant", "Hello"),), (nested(depth),))
        for i, depth in enumerate(depths, start=1)
    ]

    examples, ledger, skipped = encode(ByteTokenizer(narrow=False), *conversations)

    assert len(examples) + skipped.total == ledger.rows_read == len(depths)
    assert set(skipped.counts) == {"JSON nested too deeply"}
    assert [example.row for example in examples[:3]] == [1, 2, 3]


def test_renderings_start_a_few_rows_at_a_time_before_they_are_needed() -> None:
    seen: list[list[int]] = []
    ahead: list[int] = []

    def template(conversation: Conversation) -> Rendering:
        assert conversation.row in [*seen[-2], *seen[-1]]
        ahead.append(seen[-1][-1] - conversation.row)
        return render_qwen3(conversation)

    def start(conversations: Sequence[Conversation]) -> Iterable[PendingRendering]:
        seen.append([each.row for each in conversations])
        return [partial(template, each) for each in conversations]

    rows = [converse(("assistant", "a"), row=i) for i in range(1, 601)]
    encoder = Encoder(template, ByteTokenizer(narrow=False), start=start)
    chunks = encoder.encode(rows, SkippedRows(Path()), RowTally())
    encoded = [example.row for chunk in chunks for row in chunk for example in row]

    assert encoded == [row for rows in seen for row in rows] == list(range(1, 601))
    assert max(map(len, seen)) == 32
    # The next texts are already being rendered.
    assert ahead[0] == 63


def test_each_row_gets_the_renderings_of_its_own_conversations() -> None:
    """Rows that need no rendering, or fail before it, do not shift those of later rows."""
    half = "\ud800"
    rows: list[Row] = [
        converse(("user", half), ("assistant", "a"), row=1),
        Document(2, "text"),
        converse(("user", "b"), ("assistant", "b"), row=3),
        Pair(converse(("assistant", half), row=4), converse(("assistant", "d"), row=4)),
        Pair(converse(("assistant", "e"), row=5), converse(("assistant", "f"), row=5)),
        converse(("user", "g"), ("assistant", "g"), row=6),
    ]
    skipped = SkippedRows(Path())
    encoder = Encoder(render_qwen3, ByteTokenizer(narrow=False, eos="</s>"))
    chunks = encoder.encode(rows, skipped, RowTally())
    texts = [
        (example.row, bytes(example.tokens[example.assistant_mask == 1].tolist()[:1]))
        for chunk in chunks
        for row in chunk
        for example in row
    ]

    assert texts == [(2, b"e"), (3, b"b"), (5, b"e"), (5, b"f"), (6, b"g")]
    assert skipped.counts == {"text contains half a surrogate pair": 2}
