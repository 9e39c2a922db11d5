"""Hashes of texts that near copies share."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import replace

import numpy as np
import pytest
import regex

from mlxtune.core.data.corpus import Corpus, CorpusRows
from mlxtune.core.data.encode import Example
from mlxtune.core.data.encoded_file import ExampleArrays
from mlxtune.core.data.near_copies import TextHash, normalize
from mlxtune.core.run.trained_rows import identities_of

END = 256


class Bytes:
    """A tokenizer with a token for each byte, and one that ends a message."""

    bos_id = eos_id = None
    control_tokens = ("<|im_end|>",)
    control_ids = frozenset({END})

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        return [b"<|im_end|>" if token == END else bytes([token]) for token in ids]


def example(*messages: str, supervised: int = 1) -> Example:
    tokens = np.array([t for text in messages for t in (*text.encode(), END)], dtype=np.int32)
    mask = np.zeros(len(tokens), dtype=np.uint8)
    mask[-supervised:] = 1
    return Example(1, tokens, mask)


@pytest.mark.parametrize(
    "messages",
    [
        (" Where is  the café?", "There"),
        ("Where is\nthe cafe\u0301", "There."),
        ("WHERE IS THE CAFÉ!", "there…"),
        ("Ｗhere is the café?", "There"),
        ("Where, is: the 'café'", '"There"'),
        ("Wh\u00adere\u200b is the ca\u2060fé?", "There\ufe0f\ufeff"),
    ],
)
def test_near_copies_have_one_hash_despite_other_tokens_and_masks(
    messages: tuple[str, str],
) -> None:
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    row = example("Where is the café?", "There.")
    assert hash_of(example(*messages, supervised=3)) == hash_of(row)


@pytest.mark.parametrize(
    "messages",
    [
        ("Where is the café?", "Here."),
        ("Where is the cafe?", "There."),
        ("Where is thecafé?", "There."),
        ("There.", "Where is the café?"),
    ],
)
def test_different_text_hashes_differently(messages: tuple[str, ...]) -> None:
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    assert hash_of(example(*messages)) != hash_of(example("Where is the café?", "There."))


# Default_Ignorable_Code_Point in DerivedCoreProperties.txt of Unicode 16.
IGNORABLE = (
    "00AD 034F 061C 115F-1160 17B4-17B5 180B-180F 200B-200F 202A-202E 2060-206F 3164 FE00-FE0F "
    "FEFF FFA0 FFF0-FFF8 1BCA0-1BCA3 1D173-1D17A E0000-E0FFF"
)


def test_no_character_without_a_glyph_makes_a_text_new() -> None:
    """Every code point, apart from white space, as categories and Unicode's ranges say."""
    edges = [[int(edge, 16) for edge in each.split("-")] for each in IGNORABLE.split()]
    ignorable = {code for each in edges for code in range(each[0], each[-1] + 1)}
    unseen = [
        character
        for character in map(chr, range(0x110000))
        if unicodedata.category(character)[0] == "C" or ord(character) in ignorable
        if not character.isspace()
    ]

    def is_kept(characters: Iterable[str]) -> bool:
        return normalize(f"caf{''.join(characters)}\u00e9 now") != "caf\u00e9 now"

    blocks = (unseen[start : start + 2000] for start in range(0, len(unseen), 2000))
    kept = [each for block in blocks if is_kept(block) for each in block if is_kept(each)]
    # Characters that Unicode added since this Python's version have glyphs.
    assert not any(ord(each) in ignorable or regex.match(r"\p{Cn}", each) for each in kept)
    assert {unicodedata.category(each) for each in kept} <= {"Cn"}
    assert normalize("a\x00b\x7f") == "ab"
    assert normalize("in\u2800two") == "in two"


def test_points_within_numbers_and_names_stay() -> None:
    assert normalize("Run 3.14 of a.txt.  Now!") == "run 3.14 of a.txt now"


@pytest.mark.parametrize(
    "texts",
    [
        ('{"a": [1, -2], "b": {}}', '{"a":[1,-2],"b":{}}', "{ 'a' : [ 1 , \u22122 ], 'b': { } }"),
        ("A well-known “fact”: don’t", "a well known 'fact' \u2014 don't."),
        ("¿Qué?", "qué"),
        ("नमस्ते।", "नमस्ते"),
    ],
)
def test_spacing_and_punctuation_do_not_count(texts: tuple[str, ...]) -> None:
    assert len(set(map(normalize, texts))) == 1


@pytest.mark.parametrize(
    "texts",
    [
        ("-1", "1", "+1", "1%", "$1", "#1"),
        ("1.5", "15", "1 5", ".15", "-1.5"),
        ("3 - 1", "3 + 1", "3 1", "31"),
        ("[[1], [2, 3]]", "[[1, 2], [3]]"),
        ("a != b", "a = b", "a == b", "a < b", "a > b"),
        ("if (!done)", "if (done)"),
        ("C", "C++", "C#"),
        ("snake_case", "snake case"),
        ("a * b", "a ** b", "a b"),
        ("f(*x)", "f(**x)", "f(x)"),
        ("👍", "👎"),
    ],
)
def test_signs_points_and_symbols_count(texts: tuple[str, ...]) -> None:
    assert len(set(map(normalize, texts))) == len(texts)


@pytest.mark.parametrize(
    "content",
    [
        '{"b": [1, {"d": "ü", "c": null}], "a": "x/y"}',
        '{"a":"x\\/y", "b":[1,{"c":null,"d":"\\u00fc"}]}',
        '{"A": "X/Y", "B": [1, {"D": "Ü", "C": NULL}]}',
        "{“b”:\u00a0[1,{“d”: “u\u0308”, “c”: null}], “a”: “x/\u200by”}",
        '```json\n{"a": "x/y", "b": [1, {"c": null, "d": "ü"}]}\n```',
        '<think>\n\n</think>\n\n{"a": "x/y", "b": [1, {"c": null, "d": "ü"}]}',
    ],
)
def test_equal_json_values_are_near_copies(content: str) -> None:
    assert normalize('{"a_b": 1, "ab": 2}') == normalize('{"AB": 2, "A_B": 1}')
    same = "Here: " + '{"a": "x/y", "b": [1, {"c": null, "d": "ü"}]}'
    assert normalize(f"Here: {content}") == normalize(same)
    assert normalize(f"Here: {content}") != normalize(same.replace("1", "2"))
    assert normalize(f"Here: {content}") != normalize(same.replace("d", "e"))


@pytest.mark.parametrize(
    "text",
    [
        "**Where** is *it*?",
        "_Where_ is __it__",
        "**Where is it?**",
        "_Where _ is _ it_",
        "Where is it 🙂",
        "Wh\u034fere is it",
        "☀ Where is it",
    ],
)
def test_emphasis_pictures_and_unseen_characters_do_not_count(text: str) -> None:
    assert normalize(text) == "where is it"


def near(text: str) -> tuple[int, list[int]]:
    """Return the hash of a text, and the hashes with its exchanges; controls are between bars."""
    controls = text.split("|")[1::2]
    hash_of = TextHash(lambda: Controls(controls))  # type: ignore[arg-type,return-value]
    tokens = []
    for i, part in enumerate(text.split("|")):
        tokens += [END + controls.index(part)] if i % 2 else part.encode()
    row = Example(1, np.array(tokens, dtype=np.int32), np.ones(len(tokens), dtype=np.uint8))
    return hash_of(row), hash_of.with_pairs(row)


CHATML = "|<im_start>|{}\n{}|<im_end>|\n"
LLAMA = "|<start>|{}|<head>|\n\n{}|<eot>|"
TURN = "|<start_of_turn>|{}\n{}|<end_of_turn>|"
GEMMA = "<start_of_turn>{}\n{}<end_of_turn>\n"  # plain text here
TURNS = (("user", "Hello"), ("assistant", "Hi"), ("user", "Where is it?"), ("assistant", "There."))


@pytest.mark.parametrize("template", [CHATML, LLAMA, TURN, GEMMA])
def test_exchange_is_found_in_a_longer_conversation(template: str) -> None:
    conversation = "".join(template.format(*turn) for turn in (*TURNS, ("user", "Thanks")))
    own, hashes = near(conversation)
    assert near(conversation.replace("There", "Here"))[0] != own
    assert hashes[0] == own
    for turns in (TURNS[:2], TURNS[2:]):
        exchange = near("".join(template.format(*turn) for turn in turns))
        assert exchange[0] in hashes
        assert exchange[1] == [exchange[0]]
        assert near("".join(CHATML.format(*turn) for turn in turns))[0] == exchange[0]
        assert near("\n".join(text for _, text in turns))[0] == exchange[0]
    assert near("".join(template.format(*turn) for turn in TURNS[1:3]))[0] not in hashes


def test_every_second_message_is_an_answer_where_no_roles_are_named() -> None:
    _, hashes = near("|[INST]|Hello|[/INST]|Hi|[INST]|Where is it?|[/INST]|There.")
    assert set(hashes) > {near("|[INST]|Where is it?|[/INST]|There.")[0], near("Hello Hi")[0]}
    assert near("Hi Where is it?")[0] not in hashes


@pytest.mark.parametrize(
    ("system", "rest"),
    [
        ("|im_start|system\n{}|im_end|\n", "|im_start|user\nHi|im_end|\n|im_start|assistant\nYo"),
        ("|start|system|head|\n\n{}|eot|", "|start|user|head|\n\nHi|eot||start|assistant|head|Yo"),
        ("|[SYSTEM_PROMPT]|{}|[/SYSTEM_PROMPT]|", "|[INST]|Hi|[/INST]|Yo"),
        ("|<system>|\n{}|<end>|\n", "|<user>|\nHi|<end>||<assistant>|\nYo"),
        ("|start|system|in|Cut-off|end||start|developer|in|{}|end|", "|start|user|in|Hi|end|"),
    ],
)
def test_system_message_does_not_count(system: str, rest: str) -> None:
    bare, _ = near("|bos|" + rest)
    for message in ("Be brief.", "Be\nlong", "system", ""):
        assert near("|bos|" + system.format(message) + rest)[0] == bare
    assert near("|bos|" + system.format("Be brief.") + rest.replace("Hi", "Ho"))[0] != bare


class Controls(Bytes):
    def __init__(self, names: list[str]) -> None:
        self._names = names
        self.control_ids = frozenset(range(END, END + len(names)))

    def token_bytes(self, ids: list[int]) -> list[bytes]:
        return [self._names[i - END].encode() if i >= END else bytes([i]) for i in ids]


@pytest.mark.parametrize(
    ("shared", "rows", "left"),
    [("Be brief.\n\nOnly JSON.\n\n", 6, 0), ("Be brief.\n\n", 4, 4), ("", 6, 0)],
)
def test_paragraphs_that_all_rows_start_with_do_not_count(
    shared: str, rows: int, left: int
) -> None:
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]

    def corpus(start: str, first: int = 0) -> CorpusRows:
        numbers = range(first, first + rows)
        texts = [(f"{start}Text {i}.\n\nIs it long?", "Yes") for i in numbers]
        files = [[replace(example(*text), row=i + 1) for i, text in enumerate(texts)]]
        return Corpus([ExampleArrays.of(file).truncate() for file in files]).select()

    trained = identities_of(corpus("Answer in words.\n\n"), hash_of)
    assert len(corpus(shared).without(trained, hash_of)) == left
    assert len(corpus("Answer in words.\n\n").without(trained, hash_of)) == 0
    assert len(corpus(shared).without(identities_of(corpus(""), hash_of), hash_of)) == left
    assert len(corpus(shared, first=rows).without(trained, hash_of)) == rows


def answered(*messages: str) -> Example:
    return example(*messages, supervised=len(messages[-1].rpartition("\n")[2]) + 1)


def rows_of(*texts: tuple[str, ...]) -> CorpusRows:
    """Return rows with these messages, of which the last one is trained, without its role."""
    file = [replace(answered(*messages), row=i + 1) for i, messages in enumerate(texts)]
    return Corpus([ExampleArrays.of(file).truncate()]).select()


def test_first_of_rows_that_say_the_same_is_distinct() -> None:
    rows = rows_of(("Hi!", "Ho"), ("Ha", "Ho"), ("hi", "Ho."), ("Hi!", "Ho"), ("Hi", "He"))
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    assert rows.distinct(hash_of).indices == [0, 1, 4]
    assert rows.distinct().indices == [0, 1, 2, 4]
    assert rows.only(np.array([3, 2])).distinct(hash_of).indices == [3]
    assert rows.only(np.zeros(0, dtype=np.int64)).distinct(hash_of).indices == []


def chat(*messages: str, system: str = "") -> tuple[str, ...]:
    """Return messages with their roles, which alternate; the last one is an answer."""
    roles = ("assistant", "user")
    texts = [f"{roles[(len(messages) - i) % 2]}\n{text}" for i, text in enumerate(messages, 1)]
    return (f"system\n{system}", *texts) if system else (*texts,)


def judged(trained: list[tuple[str, ...]], *rows: tuple[str, ...]) -> list[int]:
    """Return the indices of the rows that remain to be judged by rewards."""
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    known = identities_of(rows_of(*trained), hash_of)
    return [*rows_of(*rows).without(known, hash_of, by_prompt=True).indices]


@pytest.mark.parametrize("system", ["", "Be brief."])
@pytest.mark.parametrize(
    "row",
    [
        chat("Where is the café?", "Here"),
        chat("Where is the café?", "."),
        chat(" WHERE is\nthe café", "There"),
        chat("Where is the café?", "Here", system="You are a bot."),
        chat("Where is the café?", "Here", system="Be brief."),
    ],
)
def test_prompt_that_was_trained_on_is_found_under_any_answer(
    system: str, row: tuple[str, ...]
) -> None:
    trained = [chat("Where is the café?", "There", system=system), chat("Who?", "I", system=system)]
    other = chat("Where is the bar?", "There", system=system)
    assert judged(trained, row, other) == [1]
    # The losses of another answer are still judged.
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    known = identities_of(rows_of(*trained), hash_of)
    rows = rows_of(chat("Where is the café?", "Here", system=system), other)
    assert len(rows.without(known, hash_of)) == 2


def test_only_the_whole_prompt_counts() -> None:
    trained = [chat("Hi", "Ho", "Go on", "Yes")]
    rows = [chat("Go on", "No"), chat("Hi", "He", "Go on", "No"), chat("Hi", "Ho", "Go", "No")]
    assert judged(trained, *rows, chat("Hi", "Ho", "Go on", "No")) == [0, 1, 2]


def test_prompt_of_each_trained_answer_counts() -> None:
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    turns = [answered(*chat("Hi", "Ho")), answered(*chat("Hi", "Ho", "Go on", "Yes"))]
    long = turns[1]
    mask = long.assistant_mask.copy()
    mask[: len(turns[0])] = turns[0].assistant_mask
    both = hash_of.of_prompts(replace(long, assistant_mask=mask))
    assert both == [hash_of.of_prompts(each)[0] for each in turns]


def test_system_message_counts_if_only_it_varies() -> None:
    tasks = [chat("Go", f"{end}", system=f"Count to {end}.") for end in range(4)]
    assert judged(tasks[:3], *tasks) == [3]
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    assert len(rows_of(*tasks).distinct(hash_of, by_prompt=True)) == 4


def test_rows_with_one_prompt_are_not_distinct_by_prompt() -> None:
    hash_of = TextHash(Bytes)  # type: ignore[arg-type]
    rows = rows_of(chat("Hi", "1"), chat("hi!", "2"), chat("Ho", "1"), ("?", "1"), ("!", "1"))
    assert rows.distinct(hash_of, by_prompt=True).indices == [0, 2, 3, 4]


def test_prompts_without_words_are_new() -> None:
    assert judged([("?", "Yes"), ("", "Yes")], ("!", "No"), ("Who", "I")) == [0, 1]


def test_shared_start_of_prompts_does_not_count() -> None:
    trained = [chat(f"Be brief.\n\nText {i}", "Yes") for i in range(6)]
    rows = [chat(f"Only JSON.\n\nText {i}", "No") for i in range(1, 8)]
    assert judged(trained, *rows) == [5, 6]
    assert judged(trained, *[chat(f"Text {i}", "No") for i in range(1, 8)]) == [5, 6]
