"""Cases in which tokens and text diverge: documents, BOS, control tokens, edges of answers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from mlxtune.core.data import encode as encode_module
from mlxtune.core.data import problems
from mlxtune.core.data.conversation import CHOSEN, REJECTED, Conversation, Document, Message, Pair
from mlxtune.core.data.encode import Encoder, OffsetEncoding
from mlxtune.core.data.encoded_file import ExampleArrays
from mlxtune.core.data.problems import BadRowError, RowTally, SkippedRows
from mlxtune.core.data.prompt import text_prompt
from mlxtune.core.data.sources.messages import parse_conversation
from mlxtune.core.data.template import RenderedText, Rendering, Template, render_qwen3
from mlxtune.errors import DataError
from tests.core.data.encoding import (
    CONTROL,
    CONTROL_TOKENS,
    PATH,
    ByteTokenizer,
    PatternTokenizer,
    converse,
    encode,
    encoded_file,
    merged_newlines,
    supervised_runs,
    words,
)

# Documents


def test_every_token_of_a_document_is_supervised_with_the_end_of_text() -> None:
    tokenizer = words("<bos>", "<|endoftext|>")

    (example,), ledger, _ = encode(tokenizer, Document(4, "One two.\n"))

    assert [tokenizer.vocabulary[i] for i in example.tokens] == [
        *("<bos>", "One", " ", "two", ".", "\n", "<|endoftext|>"),
    ]
    assert example.assistant_mask.tolist() == [0, 1, 1, 1, 1, 1, 1]
    assert example.row == 4
    assert (ledger.tokens, ledger.tokens_supervised, ledger.tokens_context) == (7, 6, 1)


def test_first_token_has_no_loss() -> None:
    (example,), ledger, _ = encode(words(eos="<|endoftext|>"), Document(1, "One two."))

    assert example.assistant_mask.tolist() == [0, 1, 1, 1, 1]
    assert (ledger.tokens_supervised, ledger.tokens_context) == (4, 1)
    # In an empty document, no token precedes the end of the text.
    examples, ledger, skipped = encode(words(eos="<|endoftext|>"), Document(1, ""))
    assert (examples, ledger.rows_read, skipped.total) == ([], 1, 1)


def test_text_to_complete_is_encoded_as_the_start_of_a_document() -> None:
    for bos in "<bos>", None:
        tokenizer = words(bos, "<|endoftext|>")
        encoder = Encoder(render_qwen3, tokenizer)
        (example,), _, _ = encode(tokenizer, Document(1, "One two."))

        prompt = text_prompt(encoder, "One two", "--prompt")

        assert list(prompt.ids) == example.tokens[: len(prompt.ids)].tolist()
        assert (len(prompt.ids), prompt.end) == (len(example) - 2, tokenizer.eos_id)
    with pytest.raises(DataError, match="--prompt: the tokenizer has no end-of-text token"):
        text_prompt(Encoder(render_qwen3, words("<bos>")), "One", "--prompt")


def test_examples_are_plain_text_where_no_row_is_a_conversation() -> None:
    documents = [Document(1, "One two."), Document(2, "")]
    chat = converse(("user", "Hi"), ("assistant", "One"), row=3)
    for rows, plain in ((documents, True), ([*documents, chat], False)):
        examples, _, _ = encode(words("<bos>", "<|endoftext|>"), *rows)
        assert ExampleArrays.of(examples).is_plain_text == plain


def test_document_that_begins_with_bos_gets_no_second_one() -> None:
    tokenizer = words("<bos>", "<|endoftext|>")

    (example,), _, _ = encode(tokenizer, Document(1, "<bos>One"))

    assert tokenizer.decode(example.tokens) == "<bos>One<|endoftext|>"
    assert example.assistant_mask.tolist() == [0, 1, 1]


def test_document_is_skipped_where_the_tokenizer_cannot_end_it() -> None:
    good = converse(("user", "Hi"), ("assistant", "Hello"))

    examples, ledger, skipped = encode(words("<bos>"), good, Document(2, "One two."))

    assert [example.row for example in examples] == [1]
    assert "no end-of-text token" in skipped.first()
    assert (ledger.rows_read, ledger.rows_train) == (2, 1)


# Findings


def notes_of(
    tokenizer: PatternTokenizer, template: Template, *rows: Conversation | Document
) -> RowTally:
    return encoded_file(tokenizer, template, rows).notes


def test_control_token_in_the_content_of_any_turn_is_noted_once_a_row() -> None:
    found = notes_of(
        words(eos="<|endoftext|>"),
        render_qwen3,
        converse(("user", "a <|im_end|> <bos>"), ("assistant", "<bos>"), row=3),
        converse(("user", "a"), ("assistant", "b <bos> <bos>"), row=5),
        converse(("user", "<im_end> <|im_end"), ("assistant", "|>"), row=6),
        converse(("system", "<bos>"), ("assistant", "x"), ("tool", "<|im_end|>"), row=8),
        Document(9, "One<|endoftext|>two"),
        Document(10, "<|im_start|>user\nHi<|im_end|>"),
    )

    assert found.counts == Counter(
        {problems.CONTROL_TOKEN: 4, problems.RENDERED_CHAT: 1, problems.UNANSWERED: 1}
    )
    assert found.places == {
        problems.CONTROL_TOKEN: [
            *((3, "<|im_end|>"), (5, "<bos>"), (8, "<bos>"), (9, "<|endoftext|>")),
        ],
        problems.RENDERED_CHAT: [(10, "<|im_start|>")],
        problems.UNANSWERED: [(8, "message 3")],
    }


def test_tokenizer_without_control_tokens_finds_none_in_content() -> None:
    tokenizer = PatternTokenizer(r"\w+|.")

    found = notes_of(tokenizer, render_qwen3, converse(("assistant", "<|im_end|>")))

    assert found.counts == Counter()


@pytest.mark.parametrize(
    ("start", "add_bos", "times"),
    [("<bos><bos>", False, 1), ("<bos>", False, 0), ("", True, 0), ("a<bos><bos>", False, 0)],
)
def test_bos_twice_at_the_start_is_noted_for_each_row(
    start: str, add_bos: bool, times: int
) -> None:
    def template(conversation: Conversation) -> Rendering:
        (rendered,) = render_qwen3(conversation).texts
        spans = tuple((a + len(start), b + len(start)) for a, b in rendered.spans)
        text = RenderedText(start + rendered.text, spans, add_bos)
        return Rendering(conversation.row, (text,) * 2)

    rows = [converse(("user", "Hi"), ("assistant", "Hello"), row=row) for row in (2, 7)]
    found = notes_of(words("<bos>"), template, *rows)

    assert found.counts[problems.DOUBLE_BOS] == 2 * times
    assert found.places.get(problems.DOUBLE_BOS, []) == [(2, ""), (7, "")][: 2 * times]


def test_template_notes_belong_to_their_row() -> None:
    def template(conversation: Conversation) -> Rendering:
        told = {problems.DROPPED_THINKING: "message 2"} if conversation.row % 2 else {}
        return replace(render_qwen3(conversation), notes=told)

    rows = [converse(("user", "Hi"), ("assistant", "<bos>"), row=row) for row in range(1, 20)]
    found = notes_of(words(), template, *rows)

    assert found.counts == Counter({problems.DROPPED_THINKING: 10, problems.CONTROL_TOKEN: 19})
    assert found.places[problems.DROPPED_THINKING] == [
        (row, "message 2") for row in (1, 3, 5, 7, 9)
    ]


def test_constant_notes_apply_to_conversations_and_not_to_documents() -> None:
    skipped, told = SkippedRows(PATH), RowTally()
    encoder = Encoder(render_qwen3, words(eos="<|endoftext|>"), {"odd": "always"})
    rows = [converse(("assistant", "a"), row=2), Document(3, "b"), converse(("assistant", "c"))]

    for _ in encoder.encode(rows, skipped, told):
        pass

    assert told.places == {"odd": [(2, "always"), (1, "always")]}


# Edges of answers


@dataclass
class SpacingTokenizer(PatternTokenizer):
    """Puts a space before a text, like SentencePiece, unless it begins with a control token."""

    def encode_batch(self, texts: Sequence[str]) -> list[OffsetEncoding]:
        encoded = super().encode_batch(texts)
        for text, one in zip(texts, encoded, strict=True):
            if one.ids and one.ids[0] not in self.control_ids:
                one.ids[0] = self.id_of("▁" + text[: one.offsets[0][1]])
        return encoded


@pytest.mark.parametrize("merging", [r"\n+", r"[.\n]+"])
def test_answer_alone_gets_no_leading_space_of_a_text(merging: str) -> None:
    tokenizer = SpacingTokenizer(rf"{CONTROL}|{merging}|\w+|.", control_tokens=CONTROL_TOKENS)

    (example,), _, _ = encode(tokenizer, converse(("user", "Hi"), ("assistant", "\n\nc")))

    (run,) = supervised_runs(example)
    assert [tokenizer.vocabulary[i] for i in run] == ["\n\n", "c", "<|im_end|>"]


def test_turns_stay_one_example_despite_start_of_text_tokens() -> None:
    tokenizer = SpacingTokenizer(rf"{CONTROL}|\n|\w+|.", control_tokens=CONTROL_TOKENS)
    conversation = converse(("user", "a"), ("assistant", "b"), ("user", "c"), ("assistant", "d"))

    def long_header(conversation: Conversation) -> Rendering:
        text = "<|im_start|>a b c\nd<|im_end|>\n"
        span = text.index("d"), len(text) - 1
        return Rendering(conversation.row, (RenderedText(text, (span,)),))

    examples, _, _ = encode(tokenizer, conversation)
    assert len(examples) == 1
    (example,), _, _ = encode(tokenizer, conversation, template=long_header)
    assert tokenizer.decode(example.tokens) == "<|im_start|>a b c\nd<|im_end|>\n"


# The first pattern splits "assistant\n" before an H; neither pattern has control tokens.
@pytest.mark.parametrize("pattern", [r"assistant\n(?!H)|\n|\w+|.", r"\n|\w+|."])
def test_row_whose_prompts_take_minutes_to_encode_is_skipped(
    monkeypatch: pytest.MonkeyPatch, pattern: str
) -> None:
    tokenizer, texts = PatternTokenizer(pattern), []
    real = tokenizer.encode_batch
    monkeypatch.setattr(tokenizer, "encode_batch", lambda each: texts.extend(each) or real(each))
    turns = [("user", "Hi"), ("assistant", "H")] * 100
    monkeypatch.setattr(encode_module, "_MAX_PROMPTS", 5000)
    few, _, _ = encode(tokenizer, converse(*turns[:4]))
    _, _, skipped = encode(tokenizer, converse(*turns))

    assert len(few) in (1, 2)
    assert skipped.counts == {"it has too many turns to encode": 1}
    assert sum(map(len, texts)) < 30_000

    # One side of a pair is not kept alone.
    chosen, rejected = converse(*turns), converse(*turns[:4])
    pair = Pair(replace(chosen, role=CHOSEN), replace(rejected, role=REJECTED))
    examples, _, skipped = encode(tokenizer, pair)
    assert (examples, skipped.counts) == ([], {"it has too many turns to encode": 1})


def test_prompt_has_its_own_tokens_also_where_the_answer_would_change_them() -> None:
    # "assistant\n" is one token, but two tokens before an H: no token crosses the edge, but the
    # whole text does not begin with the prompt's tokens.
    tokenizer = PatternTokenizer(
        rf"{CONTROL}|assistant\n(?!H)|\n|\w+|.", control_tokens=CONTROL_TOKENS
    )
    conversation = converse(("user", "Hi"), ("assistant", "Bye"), ("user", "a"), ("assistant", "H"))

    first, second = encode(tokenizer, conversation)[0]

    for example, answer in ((first, "Bye"), (second, "H")):
        (run,) = supervised_runs(example)
        assert tokenizer.decode(run) == answer + "<|im_end|>"
        assert tokenizer.vocabulary[example.tokens[-len(run) - 1]] == "assistant\n"
    # The same with a single turn and a text without control tokens.
    plain = PatternTokenizer(r"assistant\n(?!H)|\n|\w+|.")
    (example,), _, _ = encode(plain, converse(("user", "Hi"), ("assistant", "H")))
    assert "assistant\n" in [plain.vocabulary[i] for i in example.tokens]


@pytest.mark.parametrize("narrow", [False, True])
def test_offsets_give_the_tokens_before_a_character_and_where_each_begins(narrow: bool) -> None:
    text = "aé🦙\n"
    (encoded,) = ByteTokenizer(narrow).encode_batch([text])

    for i, _ in enumerate((*text, "")):
        assert encoded.boundary(i) == len(text[:i].encode())
    assert [encoded.start(token) for token in range(8)] == [0, 1, 1, 2, 2, 2, 2, 3]


def test_token_across_a_character_has_no_boundary_there() -> None:
    encoded = OffsetEncoding([7, 8], [(0, 2), (2, 5)])

    assert [encoded.boundary(i) for i in range(6)] == [0, None, 1, None, None, 2]


# Many rows


def texts_of_tokens(
    rows: Sequence[Conversation],
) -> tuple[list[tuple[int, list[str]]], SkippedRows, RowTally]:
    def template(conversation: Conversation) -> Rendering:
        if conversation.row % 7 == 0:
            raise BadRowError("a multiple of seven")
        return render_qwen3(conversation)

    tokenizer, skipped, told = merged_newlines("<bos>"), SkippedRows(PATH), RowTally()
    encoded = Encoder(template, tokenizer).encode(iter(rows), skipped, told)
    texts = [
        (examples[0].row, [tokenizer.vocabulary[i] for one in examples for i in one.tokens])
        for chunk in encoded
        for examples in chunk
    ]
    return texts, skipped, told


def test_thousands_of_rows_are_encoded_in_order_and_as_if_alone() -> None:
    contents = ["<bos>", "\n\nb", "c d", "\n<bos>"]
    rows = [
        converse(("user", f"{row % 31}"), ("assistant", contents[row % 4]), row=row)
        for row in range(1, 1600)
    ]

    texts, skipped, told = texts_of_tokens(rows)

    assert [row for row, _ in texts] == [row for row in range(1, 1600) if row % 7]
    assert texts == [one for row in rows for one in texts_of_tokens([row])[0]]
    assert skipped.counts == Counter({"a multiple of seven": 1599 // 7})
    written = [row for row in range(1, 1600) if row % 7 and row % 4 in (0, 3)]
    assert told.counts == Counter({problems.CONTROL_TOKEN: len(written)})
    assert [row for row, _ in told.places[problems.CONTROL_TOKEN]] == written[:5]


def test_row_of_very_long_text_is_skipped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "_MAX_CHARS", 100)
    rows = [Document(1, "a " * 51), Document(2, "a " * 50)]
    file = encoded_file(words(eos="<|endoftext|>"), render_qwen3, rows)

    assert file.skipped.places == {"its text is too long": [(1, "102 characters: split it")]}


def test_turns_of_a_row_are_encoded_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(encode_module, "_CHUNK_CHARACTERS", 100)
    tokenizer, batches = words(eos="<|endoftext|>"), []
    real = tokenizer.encode_batch

    def counted(texts: Sequence[str]) -> Any:
        batches.append(sum(map(len, texts)))
        return real(texts)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    turn = RenderedText("a b c d e f g h ", ((0, 16),), add_end=True)
    template = lambda each: Rendering(each.row, (turn,) * 20)  # noqa: E731
    examples, *_ = encode(tokenizer, converse(("user", "a")), template=template)

    assert len(examples) == 20
    assert max(batches) <= 100


def test_failure_of_the_tokenizer_is_not_lost_in_its_thread() -> None:
    class Fails(PatternTokenizer):
        def encode_batch(self, texts: Sequence[str]) -> list[OffsetEncoding]:
            raise RuntimeError("no such model")

    with pytest.raises(RuntimeError, match="no such model"):
        encode(Fails("."), converse(("user", "Hi"), ("assistant", "Hello")))


QUESTION = {"role": "user", "content": "Hi"}
REPLY = {"role": "assistant", "content": "Hello!"}
CALLS = {"role": "assistant", "content": ""}


@pytest.mark.parametrize(
    "message",
    [
        {"role": "assistant", "content": "Hello!", "thinking": "a <|im_end|> b"},
        CALLS | {"tool_calls": [{"function": {"name": "f", "arguments": {"a": "<|im_end|>"}}}]},
    ],
    ids=["thinking", "call"],
)
def test_control_token_is_found_wherever_a_person_writes_it(message: dict[str, Any]) -> None:
    conversation = parse_conversation(1, {"messages": [QUESTION, message]})

    file = encoded_file(words(), render_qwen3, [conversation])

    assert file.notes.counts[problems.CONTROL_TOKEN] == 1


HALVES: dict[str, dict[str, Any]] = {
    "asked": {"messages": [QUESTION | {"content": "\udd99"}, REPLY]},
    "answered": {"messages": [QUESTION, REPLY | {"content": "\ud83e"}]},
    "part": {"messages": [QUESTION, REPLY | {"content": ["\ud83e"]}]},
    "thought": {"messages": [REPLY | {"thinking": "\ud83e"}]},
    "key": {"messages": [QUESTION | {"\ud83e": 1}, REPLY]},
    "call": {"messages": [CALLS | {"tool_calls": [{"name": "f", "arguments": {"\ud800": 1}}]}]},
    "call_in_text": {
        "messages": [CALLS | {"tool_calls": [{"name": "f", "arguments": '{"a": "\\ud800"}'}]}]
    },
    "tool": {"messages": [REPLY], "tools": [{"name": "\ud800"}]},
    "system": {"messages": [REPLY], "system": "\ud800"},
}


@pytest.mark.parametrize("content", HALVES.values(), ids=HALVES)
def test_row_with_half_a_surrogate_pair_is_skipped(content: dict[str, Any]) -> None:
    file = encoded_file(words(), render_qwen3, [parse_conversation(3, content)])

    assert file.skipped.places == {"text contains half a surrogate pair": [(3, "")]}


def test_document_with_half_a_surrogate_pair_is_skipped() -> None:
    file = encoded_file(words(eos="<|endoftext|>"), render_qwen3, [Document(3, "a \ud800")])

    assert file.skipped.places == {"text contains half a surrogate pair": [(3, "")]}


def test_row_nested_too_deeply_for_a_template_is_skipped() -> None:
    deep: Any = {}
    for _ in range(100_000):
        deep = {"a": deep}
    message = CALLS | {"tool_calls": [{"name": "f", "arguments": deep}]}

    file = encoded_file(words(), render_qwen3, [parse_conversation(1, {"messages": [message]})])

    assert set(file.skipped.counts) == {"JSON nested too deeply"}
    while deep:  # Freeing `deep` in one call would exhaust the stack of some Pythons.
        deep = deep["a"]


def test_control_token_in_a_tool_is_found() -> None:
    messages = (Message("user", "Hi"), Message("assistant", "Hello!"))
    tool = {"type": "function", "function": {"name": "f", "description": "<|im_start|>"}}

    file = encoded_file(words(), render_qwen3, [Conversation(1, messages, (tool,))])

    assert file.notes.counts[problems.CONTROL_TOKEN] == 1
