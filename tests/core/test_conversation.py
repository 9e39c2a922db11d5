"""Data files to conversations: what is read, what is skipped, and what a person hears of it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.core.conversation import (
    BadRow,
    Conversation,
    Message,
    SkippedRows,
    check_data_file,
    read_conversations,
)
from mlxtune.errors import DataError

USER = {"role": "user", "content": "Hi"}
ANSWER = {"role": "assistant", "content": "Hello!"}
GOOD = json.dumps({"messages": [USER, ANSWER]}).encode()
BOM = b"\xef\xbb\xbf"


def write(folder: Path, content: bytes) -> Path:
    path = folder / "chat.jsonl"
    path.write_bytes(content)
    return path


def read(path: Path) -> tuple[list[Conversation], SkippedRows]:
    skipped = SkippedRows(path)
    return list(read_conversations(path, skipped)), skipped


def row(*messages: Any, **keys: Any) -> bytes:
    return json.dumps({"messages": list(messages), **keys}).encode()


def test_messages_tools_and_tool_calls_are_kept_as_they_stand(tmp_path: Path) -> None:
    tool = {"type": "function", "function": {"name": "add"}}
    call = {"type": "function", "function": {"name": "add", "arguments": {"a": 1}}}
    content = row(
        {"role": "system", "content": " Be brief.\n"},
        {"role": "user", "content": "1 + 1? 🦙"},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "2", "name": "ignored"},
        {"role": "assistant", "content": "Two."},
        tools=[tool],
        id="ignored",
    )

    conversations, skipped = read(write(tmp_path, content))

    assert skipped.total == 0
    assert conversations == [
        Conversation(
            row=1,
            messages=(
                Message("system", " Be brief.\n"),
                Message("user", "1 + 1? 🦙"),
                Message("assistant", "", (call,)),
                Message("tool", "2"),
                Message("assistant", "Two."),
            ),
            tools=(tool,),
        )
    ]


@pytest.mark.parametrize("newline", [b"\n", b"\r\n"], ids=["LF", "CRLF"])
@pytest.mark.parametrize("bom", [b"", BOM], ids=["plain", "BOM"])
@pytest.mark.parametrize("ending", [True, False], ids=["ended", "unended"])
def test_rows_are_numbered_by_line_and_blank_lines_and_comments_are_no_rows(
    tmp_path: Path, newline: bytes, bom: bytes, ending: bool
) -> None:
    lines = [b"# made by hand", GOOD, b"", b"  \t", b"  # indented", GOOD, b"oops", GOOD]
    content = bom + newline.join(lines) + newline * ending

    conversations, skipped = read(write(tmp_path, content))

    assert [conversation.row for conversation in conversations] == [2, 6, 8]
    assert {conversation.messages for conversation in conversations} == {
        (Message("user", "Hi"), Message("assistant", "Hello!"))
    }
    assert skipped.counts == {"not valid JSON": 1}


def test_byte_order_mark_before_the_first_row_is_dropped(tmp_path: Path) -> None:
    conversations, skipped = read(write(tmp_path, BOM + GOOD))

    assert len(conversations) == 1
    assert skipped.total == 0


NESTED = b"[" * 100_000 + b"]" * 100_000
BAD_ROWS: list[tuple[str, bytes, str, str]] = [
    # name, line, the kind that is counted, what else the reason says
    ("half_an_object", b'{"messages": [', "not valid JSON", "column 15"),
    ("two_objects", GOOD + GOOD, "not valid JSON", f"column {len(GOOD) + 1}"),
    ("latin_1", b'{"messages": "caf\xe9"}', "not UTF-8", "byte 18"),
    ("number_of_5000_digits", b"9" * 5000, "not valid JSON", "5000 digits"),
    ("nested_without_end", b"[" * 100_000, "JSON nested too deeply", ""),
    ("nested_to_an_end", b'{"a": %s}' % NESTED, "JSON nested too deeply", ""),
    ("text_for_an_object", b'"messages"', "not a JSON object", "text"),
    ("null_for_an_object", b"null", "not a JSON object", "null"),
    ("other_keys", b'{"prompt": "a", "text": 1}', "no 'messages'", "'prompt', 'text'"),
    ("no_keys", b"{}", "no 'messages'", "none"),
    ("messages_null", b'{"messages": null}', "'messages' is not a list", "null"),
    ("messages_object", b'{"messages": {}}', "'messages' is not a list", "an object"),
    ("messages_empty", b'{"messages": []}', "no assistant turn", ""),
    ("no_assistant", row(USER), "no assistant turn", ""),
    ("message_is_text", row(USER, "Hello!"), "a message is not an object", "message 2 is text"),
    ("no_role", row(USER, {"content": "Hello!"}), "a message has no role", "message 2"),
    ("role_number", row({"role": 1, "content": ""}), "a message has no role", "message 1"),
    ("unknown_role", row({"role": "human", "content": "Hi"}, ANSWER), "unknown role", "'human'"),
    ("no_content", row({"role": "user"}, ANSWER), "content is not text", "message 1 is null"),
    ("content_number", row(USER | {"content": 5}, ANSWER), "content is not text", "a number"),
    ("content_parts", row(USER, ANSWER | {"content": [{}]}), "content is not text", "a list"),
    ("content_bool", row(USER, ANSWER | {"content": True}), "content is not text", "truth value"),
    ("empty_answer", row(USER, ANSWER | {"content": ""}), "empty answer", "message 2"),
    ("blank_answer", row(USER, ANSWER | {"content": " \n"}), "empty answer", "message 2"),
    ("later_empty", row(ANSWER, USER, ANSWER | {"content": ""}), "empty answer", "message 3"),
    ("null_answer", row(USER, ANSWER | {"content": None}), "content is not text", "null"),
    ("no_calls", row(USER, ANSWER | {"content": "", "tool_calls": []}), "empty answer", ""),
    ("calls_text", row(ANSWER | {"tool_calls": "f()"}), "'tool_calls' is not a list", ""),
    ("calls_list", row(ANSWER | {"tool_calls": [[]]}), "'tool_calls' is not a list", ""),
    ("tools_object", row(USER, ANSWER, tools={}), "'tools' is not a list of objects", ""),
    ("half_a_pair", row(USER, ANSWER | {"content": "\ud83e"}), "half a surrogate", "message 2"),
    ("half_in_a_question", row(USER | {"content": "\udd99"}, ANSWER), "half a surrogate", "1"),
    ("half_in_a_tool", row(USER, ANSWER, tools=[{"name": "\ud800"}]), "half a surrogate", ""),
    (
        "half_in_a_call",
        row(USER, ANSWER | {"tool_calls": [{"name": "f", "arguments": {"\ud800": 1}}]}),
        "half a surrogate",
        "",
    ),
]


@pytest.mark.parametrize(
    ("line", "kind", "detail"),
    [case[1:] for case in BAD_ROWS],
    ids=[case[0] for case in BAD_ROWS],
)
def test_bad_row_is_skipped_with_its_path_line_and_reason(
    tmp_path: Path, line: bytes, kind: str, detail: str
) -> None:
    path = write(tmp_path, b"\n".join([GOOD, b"", line, GOOD]))

    conversations, skipped = read(path)

    assert [conversation.row for conversation in conversations] == [1, 4]
    assert skipped.total == 1
    (counted,) = skipped.counts
    assert kind in counted
    (warning,) = skipped.warnings()
    assert warning.startswith(f"{path}:3: {counted}")
    assert detail in warning
    assert warning.endswith("; row skipped")
    assert skipped.first() == warning.removesuffix("; row skipped")


def test_reason_is_one_short_line_whatever_the_row_holds(tmp_path: Path) -> None:
    path = write(
        tmp_path,
        b"\n".join(
            [
                row({"role": "\x1b[31m\nuser\u2028\ud800" + "x" * 10_000, "content": "Hi"}),
                json.dumps({"\x07\n" + "k" * 10_000: 1} | dict.fromkeys("abcdefghij")).encode(),
            ]
        ),
    )

    _, skipped = read(path)

    for warning in skipped.warnings():
        assert warning.isprintable()
        assert len(warning) < len(str(path)) + 400


def test_first_five_rows_of_a_kind_are_shown_and_the_others_counted(tmp_path: Path) -> None:
    lines = [b"oops", GOOD, row(USER)] * 7
    path = write(tmp_path, b"\n".join(lines))

    _, skipped = read(path)

    warnings = list(skipped.warnings())
    assert [warning for warning in warnings if "not valid JSON (" in warning] == warnings[:5]
    assert [warning.split(":")[1] for warning in warnings[:5]] == ["1", "4", "7", "10", "13"]
    assert warnings[5] == f"{path}: 2 more rows skipped: not valid JSON"
    assert [warning.split(":")[1] for warning in warnings[6:11]] == ["3", "6", "9", "12", "15"]
    assert warnings[11] == f"{path}: 2 more rows skipped: no assistant turn"
    assert len(warnings) == 12
    assert skipped.total == 14


def test_first_names_the_row_that_stands_first_in_the_file() -> None:
    skipped = SkippedRows(Path("chat.jsonl"))
    skipped.add(9, BadRow("empty answer", "message 2"))
    skipped.add(4, BadRow("no assistant turn"))
    skipped.add(10, BadRow("empty answer", "message 4"))

    assert skipped.first() == "chat.jsonl:4: no assistant turn"


def test_line_of_20_megabytes_is_read_like_any_other(tmp_path: Path) -> None:
    answer = "lorem 🦙 " * 2_000_000
    content = row(USER, {"role": "assistant", "content": answer})
    assert len(content) > 20_000_000

    conversations, skipped = read(write(tmp_path, content + b"\n" + GOOD))

    assert skipped.total == 0
    assert [conversation.row for conversation in conversations] == [1, 2]
    assert conversations[0].messages[1].content == answer


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "is empty"),
        (b"\x1f\x8b\x08\x00 gzip", "is a binary file"),
        (GOOD.decode().encode("utf-16"), "is a binary file"),
        (BOM + b"\n  [" + GOOD + b"]", "is a JSON array"),
    ],
    ids=["empty", "gzip", "utf_16", "array"],
)
def test_file_that_is_not_json_lines_is_an_error_that_names_it(
    tmp_path: Path, content: bytes, reason: str
) -> None:
    path = write(tmp_path, content)

    with pytest.raises(DataError, match=reason) as raised:
        check_data_file(path)
    assert str(raised.value).startswith(f"{path}: ")
    with pytest.raises(DataError, match=reason):
        read(path)


def test_missing_file_and_folder_are_errors_that_name_them(tmp_path: Path) -> None:
    for path, reason in ((tmp_path / "none.jsonl", "no such file"), (tmp_path, "is a folder")):
        with pytest.raises(DataError, match=reason) as raised:
            read(path)
        assert str(path) in str(raised.value)


def test_path_that_the_system_refuses_is_an_error_that_names_it(tmp_path: Path) -> None:
    path = tmp_path / ("x" * 300)

    with pytest.raises(DataError) as raised:
        read(path)
    assert str(path) in str(raised.value)


JSON_VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda children: st.lists(children) | st.dictionaries(st.text(), children),
    max_leaves=5,
)
MESSAGES = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "tool", "human"]) | JSON_VALUES,
        "content": st.text() | JSON_VALUES,
        "tool_calls": st.lists(st.dictionaries(st.text(), JSON_VALUES)) | JSON_VALUES,
    },
)
ROWS = st.builds(
    lambda messages, rest: json.dumps(rest | {"messages": messages}).encode(),
    st.lists(MESSAGES | JSON_VALUES, max_size=4) | JSON_VALUES,
    st.dictionaries(st.sampled_from(["tools", "id"]), JSON_VALUES),
)
LINES = st.one_of(
    st.just(GOOD),
    ROWS,
    JSON_VALUES.map(lambda value: json.dumps(value).encode()),
    st.binary(),
    st.sampled_from(
        [b"", b"#", b" ", BOM, b"\r", b"\xff", b"\x0b\x0c", b'{"messages": "\\ud800"}']
    ),
)


@settings(deadline=None)
@given(
    lines=st.lists(LINES, max_size=8), newline=st.sampled_from([b"\n", b"\r\n"]), bom=st.booleans()
)
def test_rows_read_are_those_yielded_and_those_skipped_whatever_the_bytes(
    lines: list[bytes], newline: bytes, bom: bool
) -> None:
    content = BOM * bom + newline.join(lines)
    stripped = [line.strip() for line in content.removeprefix(BOM).split(b"\n")]
    rows = [i for i, line in enumerate(stripped, start=1) if line and not line.startswith(b"#")]

    with tempfile.TemporaryDirectory() as folder:
        path = write(Path(folder), content)
        try:
            conversations, skipped = read(path)
        except DataError:
            first = content.removeprefix(BOM).lstrip()[:1]
            head = content[:8192]
            assert not content or first == b"[" or b"\0" in head or head.startswith(b"\x1f\x8b")
            return

    yielded = [conversation.row for conversation in conversations]
    assert yielded == sorted(set(yielded))
    assert set(yielded) <= set(rows)
    assert len(yielded) + skipped.total == len(rows)
    for conversation in conversations:
        assert any(message.role == "assistant" for message in conversation.messages)
        assert all(isinstance(message.content, str) for message in conversation.messages)
    assert len(list(skipped.warnings())) <= 6 * len(skipped.counts)
