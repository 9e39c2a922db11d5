"""Rows read in the format that their keys show, and the reasons of rows that are not."""

from __future__ import annotations

import csv
import gzip
import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mlxtune.config.data_config import FIELD_NAMES, parse_fields
from mlxtune.core.data.conversation import Conversation, Document, Message
from mlxtune.core.data.problems import SkippedRows
from mlxtune.core.data.sources.formats import FORMATS
from mlxtune.core.data.sources.recognition import read_rows
from mlxtune.errors import DataError
from tests.core.data.rows import (
    ALPACA,
    ANSWER,
    CHAT,
    PROMPT,
    ROWS,
    SHAREGPT,
    TEXT,
    TOOL,
    USER,
    converted,
    read,
    reason,
)


@pytest.mark.parametrize(
    ("row", "empty"),
    [
        (PROMPT | {"completion": None}, "completion"),
        ({"question": "Hi", "answer": None}, "answer"),
        (ALPACA | {"output": None, "input": None}, "output"),
    ],
)
def test_empty_cell_of_a_table_is_named(tmp_path: Path, row: dict[str, Any], empty: str) -> None:
    _, skipped = read(tmp_path, PROMPT, row)
    assert str(skipped.problems[2]).startswith(f"'{empty}' is empty (its keys: ")


@pytest.mark.parametrize(
    ("row", "ours"),
    [
        ({"question": "Hi", "answer": "Hello!"}, PROMPT),
        ({"input": "Hi", "output": "Hello!"}, PROMPT),
        ({"query": "Hi", "response": "Hello!"}, PROMPT),
        ({"prompt": "Hi", "response": "Hello!"}, PROMPT),
        ({"instruction": "Hi", "response": "Hello!"}, ALPACA),
        ({"instruction": "A", "input": "b", "response": "c"}, None),
    ],
)
def test_keys_known_elsewhere_are_recognized(
    tmp_path: Path, row: dict[str, Any], ours: dict[str, Any] | None
) -> None:
    ours = ours or {"instruction": "A", "input": "b", "output": "c"}

    assert converted(tmp_path, row) == converted(tmp_path, ours)


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        (
            {"question": "a", "query": "b", "answer": "c"},
            "use --field prompt=question --field completion=answer or "
            "--field prompt=query --field completion=answer",
        ),
        (
            {"input": "a", "output": "b", "response": "c"},
            "use --field prompt=input --field completion=output or "
            "--field prompt=input --field completion=response",
        ),
        (
            {"question": "a", "context": "b", "answer": "c"},
            "use --field instruction=question --field output=answer --field input=context or "
            "--field instruction=question --field output=answer without 'context'",
        ),
        (
            {"instruction": "a", "context": "b", "response": "c"},
            "use --field instruction=instruction --field output=response --field input=context or "
            "--field instruction=instruction --field output=response without 'context'",
        ),
        (
            {"question": "a", "choices": ["b", "c"], "answer": "b"},
            "use --field prompt=question --field completion=answer without 'choices', or write "
            "'choices' into 'question'",
        ),
    ],
)
def test_keys_with_two_readings_are_named_with_the_field_that_reads_them(
    tmp_path: Path, row: dict[str, Any], advice: str
) -> None:
    good, skipped = read(tmp_path, row)

    assert not good
    ((kind, detail),) = [(problem.kind, problem.detail) for problem in skipped.problems.values()]
    assert kind == f"two readings of {', '.join(map(repr, row))}"
    assert detail == advice
    readings = [re.findall(r"--field (\S+)", part) for part in advice.split(" or ")]
    assert len(readings) == 2
    read_as = [read(tmp_path, row, fields=parse_fields(pairs))[0] for pairs in readings if pairs]
    assert all(read_as) and read_as[1:] != read_as[:1]


def test_first_recognized_row_decides_the_format(tmp_path: Path) -> None:
    rows = [3, {"id": 1}, {"messages": []}, CHAT, {"prompt": 1}, CHAT | TEXT]

    good, skipped = read(tmp_path, *rows)

    assert [one.row for one in good] == [4, 6]
    assert list(skipped.warnings()) == [
        f"{skipped.path}:{line}; row skipped"
        for line in (
            "1: not a JSON object (a number)",
            "2: no known format (its keys: 'id'; looked for: messages, conversations, "
            "prompt + completion, instruction + output, text, mapping + current_node, contents; "
            "if your keys have other names, use --field NAME=KEY)",
            "3: no assistant turn",
            "5: no 'messages' (its keys: 'prompt')",
        )
    ]


@pytest.mark.parametrize("zipped", [False, True])
def test_row_of_another_format_is_an_error_that_names_both(tmp_path: Path, zipped: bool) -> None:
    content = "\n".join(["# mixed", json.dumps(CHAT), json.dumps(ALPACA)]).encode()
    path = tmp_path / "data.jsonl"
    path.write_bytes(gzip.compress(content) if zipped else content)
    rows = read_rows(path, SkippedRows(path))

    assert next(rows).row == 2
    with pytest.raises(DataError) as raised:
        next(rows)
    assert str(raised.value) == (
        f"{path}:3: is in the alpaca format, but the file is in the chat format from row "
        "2 on: give each format its own file, or name one with --format to skip the others"
    )


def test_rows_of_an_array_are_not_called_lines(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([TEXT, PROMPT], indent=2))

    with pytest.raises(
        DataError,
        match=r"json\[2\]: is in the prompt .* in the text format from row 1 on: ",
    ):
        list(read_rows(path, SkippedRows(path)))


@pytest.mark.parametrize("name", ROWS)
def test_named_format_takes_its_rows_and_skips_the_others(tmp_path: Path, name: str) -> None:
    good, skipped = read(tmp_path, *ROWS.values(), format=name)

    assert [one.row for one in good] == [list(ROWS).index(name) + 1]
    assert skipped.counts == {f"no '{FORMATS[name].keys[0]}'": len(ROWS) - 1}


@pytest.mark.parametrize(
    ("row", "advice"),
    [
        ({"a b": "x", "c": "y"}, "use --field prompt='a b' --field completion=c)"),
        (
            {"Id": "7", "Frage": "Wie spät?", "Antwort": "Elf Uhr."},
            "use --field prompt=Frage --field completion=Antwort)",
        ),
        (
            {"question": "Who is it?", "context": "It is Ada.", "answers": {"text": ["Ada"]}},
            "'answers' is an object: write the answer as text under 'answer')",
        ),
        (
            {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": CHAT},
            "the row is under 'body': save that object in place of this one)",
        ),
        (
            {"chat": {"turn_1": {"Human": "Hi", "MOSS": "Hello!"}}, "num_turns": 1},
            "the turns are under 'chat': write them as 'messages': "
            '[{"role": "user", "content": …}, {"role": "assistant", …}])',
        ),
        (
            {"reply": "It is Ada.", "context": "Who is it?"},
            "if your keys have other names, use --field NAME=KEY)",
        ),
        ({"a" * 201: "x", "\x1b[31m": "y"}, "use --field prompt=KEY --field completion=KEY)"),
        ({"data": [PROMPT], "id": 1}, "the rows are under 'data': save that list as the file)"),
        (
            {"How do I reset it?": "a", "You open the settings.": "b"},
            "if these are the values of a row, write a line of column names above it)",
        ),
        ({"a": 1, "b": 2, "c": 3}, "if your keys have other names, use --field NAME=KEY)"),
    ],
)
def test_unknown_keys_get_advice(tmp_path: Path, row: dict[str, Any], advice: str) -> None:
    assert reason(tmp_path, row).endswith(f"; {advice}")


@pytest.mark.parametrize("turns", [CHAT["messages"], SHAREGPT["conversations"]])
@pytest.mark.parametrize("as_array", [True, False])
def test_bare_messages_are_wrapped_and_not_skipped_one_by_one(
    tmp_path: Path, turns: list[Any], as_array: bool
) -> None:
    path = tmp_path / "data.json"
    lines = "\n".join(map(json.dumps, turns))
    path.write_text(json.dumps(turns, indent=2) if as_array else lines)

    with pytest.raises(DataError) as raised:
        list(read_rows(path, SkippedRows(path)))

    wrap = 'wrap the messages of each conversation, as in [{"messages": […]}]'
    assert str(raised.value) == f"{path} is a list of messages: {wrap}"
    good, skipped = read(tmp_path, *turns, CHAT)
    assert (len(good), skipped.total) == (1, len(turns))


def test_list_of_messages_in_an_array_is_named(tmp_path: Path) -> None:
    path = tmp_path / "data.json"
    path.write_text(json.dumps([CHAT["messages"], [3]]))
    assert list(read_rows(path, skipped := SkippedRows(path))) == []
    assert [str(problem) for problem in skipped.problems.values()] == [
        'not a JSON object (a list: write {"messages": […]} around it)',
        "not a JSON object (a list)",
    ]


def test_key_of_another_spelling_is_named(tmp_path: Path) -> None:
    row = {"Customer Message": "a", "Reply": "b"}
    fields = {"prompt": "customer_message", "completion": "Reply"}

    assert reason(tmp_path, row, fields=fields) == (
        "no 'customer_message' (did you mean 'Customer Message'?)"
    )


def test_null_counts_as_absent_and_is_reported(tmp_path: Path) -> None:
    assert reason(tmp_path, {"messages": None}).startswith(
        "'messages' is empty (its keys: 'messages' (empty))"
    )
    nulls = dict.fromkeys(["messages", "conversations", "text", "system", "tools", "history"])
    assert converted(tmp_path, ALPACA | {"input": None} | nulls) == converted(tmp_path, ALPACA)
    assert converted(tmp_path, PROMPT | nulls) == converted(tmp_path, PROMPT)


def test_reason_is_one_short_line_for_any_keys(tmp_path: Path) -> None:
    said = reason(tmp_path, {"\x07\n" + "k" * 10_000: 1} | dict.fromkeys("abcdefghij"))

    assert said.isprintable()
    assert len(said) < 400


# Names of fields


@pytest.mark.parametrize(
    ("row", "pairs", "same"),
    [
        ({"question": "Hi", "answer": "Hello!"}, "prompt=question completion=answer", PROMPT),
        ({"prompt": "Hi", "reply": "Hello!"}, "instruction=prompt output=reply", ALPACA),
        ({"input": "Hi", "output": "Hello!"}, "prompt=input completion=output", PROMPT),
        (
            {"completion": "Hi", "prompt": "Hello!"},
            "prompt=completion completion=prompt",
            PROMPT,
        ),
        (PROMPT | {"question": "Hi", "prompt": "?"}, "prompt=question", PROMPT),
        (
            {"chat": [{"who": "user", "said": "Hi"}, {"who": "assistant", "said": "Hello!"}]},
            "messages=chat role=who content=said",
            CHAT,
        ),
        (
            {"conversations": [{"who": "human", "text": "Hi"}, {"who": "bot", "text": "Hello!"}]},
            "from=who value=text",
            SHAREGPT,
        ),
        (
            {"prompt": [{"who": "user", "content": "Hi"}], "completion": "Hello!"},
            "role=who",
            PROMPT,
        ),
        (CHAT, "prompt=question", CHAT),
    ],
)
def test_renamed_keys_are_read_as_ours(
    tmp_path: Path, row: dict[str, Any], pairs: str, same: dict[str, Any]
) -> None:
    assert converted(tmp_path, row, fields=parse_fields(pairs.split())) == converted(tmp_path, same)


@pytest.mark.parametrize("name", ["data.jsonl", "data.csv"])
@pytest.mark.parametrize(
    ("row", "key"),
    [
        (CHAT, "messages"),
        (SHAREGPT, "conversations"),
        (ALPACA | {"history": [["a", "b"]]}, "history"),
        ({"chat": CHAT["messages"]}, "chat"),
    ],
)
def test_list_may_be_json_text(tmp_path: Path, name: str, row: dict[str, Any], key: str) -> None:
    path = tmp_path / name
    texts = [row | {key: json.dumps(row[key])}, row | {key: "[{'a'"}]
    if name == "data.csv":
        with path.open("w", newline="") as file:
            csv.writer(file).writerows([row, *(text.values() for text in texts)])
    else:
        path.write_text("\n".join(map(json.dumps, texts)))
    skipped = SkippedRows(path)
    fields = {"messages": "chat"} if key == "chat" else {}

    (found,) = read_rows(path, skipped, fields=fields)

    assert isinstance(found, Conversation)
    assert found.messages == converted(tmp_path, row, fields=fields).messages
    assert "is text that is not JSON (single quotes instead of double" in skipped.first()


def test_reason_names_the_key_that_the_file_lacks(tmp_path: Path) -> None:
    fields = {"prompt": "question", "completion": "answer"}

    # A renamed field is not read under its default name.
    assert reason(tmp_path, PROMPT, fields=fields, format="prompt") == (
        "no 'question' (its keys: 'prompt', 'completion')"
    )
    assert "looked for: messages, conversations, question + answer, " in reason(
        tmp_path, PROMPT, fields=fields
    )


def test_rows_whose_answers_are_sampled_need_only_a_prompt(tmp_path: Path) -> None:
    row = {"id": "a"}
    assert "prompt + completion, " in reason(tmp_path, row)
    assert "conversations, prompt, " in reason(tmp_path, row, objective="grpo")


def test_exact_keys_of_a_format_leave_other_answers_to_a_note(tmp_path: Path) -> None:
    """As docs/guide.md says; without one of the exact keys, there are two readings."""
    row = PROMPT | {"response": "Good day!"}
    one = converted(tmp_path, row)
    assert one.messages[-1].content == PROMPT["completion"]
    assert ("key 'response' of a row is not read", "") in one.unread
    renamed = {"question": row.pop("prompt"), "answer": row.pop("completion"), **row}
    assert reason(tmp_path, renamed).startswith("two readings of 'question', 'response', 'answer'")


@pytest.mark.parametrize("objective", ["sft", "dpo", "grpo"])
def test_export_of_slack_is_refused(tmp_path: Path, objective: str) -> None:
    message = {"type": "message", "user": "U1", "text": "Hi", "ts": "1715500501.000200"}
    with pytest.raises(DataError, match="is an export of Slack, which does not say who answers"):
        read(tmp_path, message, objective=objective)
    for options in ({"format": "text"}, {"fields": {"text": "text"}}):
        (one,), _ = read(tmp_path, message, **options)
        assert isinstance(one, Document) and one.text == "Hi"
    good, _ = read(tmp_path, message | {"ts": "10:15"}, message | {"type": "note"})
    assert len(good) == 2


@pytest.mark.parametrize("row", [PROMPT, {"question": "Hi", "answer": "Hello!"}, CHAT])
@pytest.mark.parametrize("zero", [0, 0.0, "0"])
def test_class_label_is_ignored_with_field_label_empty(
    tmp_path: Path, row: dict[str, Any], zero: Any
) -> None:
    rows = [row | {"label": label, "": False} for label in (zero, 1)]
    good, skipped = read(tmp_path, *rows)
    assert (len(good), skipped.total) == (1, 1)
    assert "or --field label= if it is a class" in str(skipped.first())
    good, skipped = read(tmp_path, *rows, fields=parse_fields(["label="]))
    assert (len(good), skipped.total, skipped.absent) == (2, 0, {})
    assert "--field label=" not in reason(tmp_path, row | {"label": False})


def test_pairs_of_fields_are_parsed() -> None:
    assert parse_fields(()) == {}
    assert parse_fields(["label="]) == {"label": ""}
    assert parse_fields(["prompt=a=b", "from= who"]) == {"prompt": "a=b", "from": " who"}
    for name in FIELD_NAMES:
        assert parse_fields([f"{name}=x"]) == {name: "x"}


@pytest.mark.parametrize(
    ("pairs", "said"),
    [
        (["prompt"], "'prompt' is not a pair such as prompt=question"),
        (["prompt="], "'prompt=' is not a pair such as prompt=question"),
        (["=x"], "'' is not a field"),
        (["promt=x"], "'promt' is not a field, did you mean prompt?"),
        (["context=x"], "'context' is not a field, did you mean input?"),
        (["xyz=x"], f"'xyz' is not a field (known: {', '.join(FIELD_NAMES)})"),
        (["prompt=a", "prompt=b"], "prompt is given twice, as 'a' and 'b'"),
    ],
)
def test_bad_field_pair_raises_a_one_line_error(pairs: list[str], said: str) -> None:
    with pytest.raises(ValueError) as raised:
        parse_fields(pairs)
    assert str(raised.value).startswith(said)
    assert str(raised.value).isprintable()


# Real data, every kind of file, any value


def test_real_chat_data_is_read_whole(shared: Path) -> None:
    read_in_all = 0
    for path in sorted((shared / "chat").glob("*.jsonl")):
        skipped = SkippedRows(path)
        conversations = list(read_rows(path, skipped))
        rows = [json.loads(line) for line in path.read_bytes().splitlines()]
        assert skipped.total == 0
        for number, (one, row) in enumerate(zip(conversations, rows, strict=True), start=1):
            assert isinstance(one, Conversation)
            assert one.row == number
            assert [dict(message.fields) for message in one.messages] == row["messages"]
            assert list(one.tools) == row.get("tools", [])
        read_in_all += len(conversations)
    assert read_in_all == 10_463


def test_real_conversations_are_the_same_in_every_format(shared: Path, tmp_path: Path) -> None:
    names = {"system": "system", "user": "human", "assistant": "gpt", "tool": "observation"}
    path = shared / "chat" / "lf_glaive_toolcall_en.jsonl"
    rows = [json.loads(line) for line in path.read_bytes().splitlines()]
    rewritten = []
    for row in rows:
        entries: list[dict[str, Any]] = []
        for message in row["messages"]:
            calls = [call["function"] for call in message.get("tool_calls", ())]
            if calls:
                entries.append({"from": "function_call", "value": json.dumps(calls)})
            else:
                entries.append({"from": names[message["role"]], "value": message["content"]})
        tools = json.dumps([tool["function"] for tool in row.get("tools", ())])
        rewritten.append({"conversations": entries, "tools": tools})

    good, skipped = read(tmp_path, *rewritten)

    assert skipped.total == 0
    assert good == list(read_rows(path, SkippedRows(path)))


TEXTS = st.text(st.characters(exclude_categories=["Cs"]), max_size=5)
MESSAGES = st.lists(
    st.fixed_dictionaries(
        {"role": st.sampled_from(["user", "assistant", "tool", "human"]), "content": TEXTS},
        optional={
            "weight": st.sampled_from([0, 1]),
            "thinking": TEXTS,
            "tool_calls": st.lists(
                st.fixed_dictionaries({"name": TEXTS, "arguments": st.just('{"a": [1.5]}')}),
                max_size=2,
            ),
        },
    ),
    min_size=1,
    max_size=3,
)


@given(
    rows=st.lists(
        st.fixed_dictionaries({"messages": MESSAGES}, optional={"tools": st.just([TOOL])})
        | st.fixed_dictionaries({"messages": st.just([USER, ANSWER]), "n": st.integers(0, 9)}),
        min_size=1,
        max_size=6,
    )
)
@settings(max_examples=5)
def test_rows_are_the_same_from_every_kind_of_file(rows: list[dict[str, Any]]) -> None:
    pa = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
    from pyarrow import parquet

    lines = "\n".join(map(json.dumps, rows)).encode()
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"data.{kind}" for kind in ("jsonl", "gz", "json", "parquet")]
        paths[0].write_bytes(lines)
        paths[1].write_bytes(gzip.compress(lines))
        paths[2].write_text(json.dumps(rows, indent=1))
        columns = {key: [row.get(key) for row in rows] for row in rows for key in row}
        parquet.write_table(pa.table(columns), paths[3])
        ledgers = [SkippedRows(path) for path in paths]
        found = [
            list(read_rows(path, skipped)) for path, skipped in zip(paths, ledgers, strict=True)
        ]

    assert found[1:] == [found[0]] * 3
    assert [skipped.counts for skipped in ledgers[1:]] == [ledgers[0].counts] * 3
    assert len(found[0]) + ledgers[0].total == len(rows)


JSON_VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.text(st.characters(), max_size=5)
    | st.sampled_from(["[]", '{"name": "f"}', "gpt", "\ud800"]),
    lambda children: (
        st.lists(children, max_size=3)
        | st.dictionaries(
            st.sampled_from(["role", "content", "from", "value", "name", "weight"]) | st.text(),
            children,
            max_size=3,
        )
    ),
    max_leaves=8,
)
ENTRIES = st.lists(
    st.fixed_dictionaries(
        {},
        optional={
            "from": st.sampled_from(["human", "gpt", "function_call"]) | JSON_VALUES,
            "role": st.sampled_from(["user", "assistant"]) | JSON_VALUES,
            "value": JSON_VALUES,
            "content": JSON_VALUES,
            "tool_calls": JSON_VALUES,
        },
    ),
    max_size=3,
)
ANY_ROW = (
    st.dictionaries(
        st.sampled_from(FIELD_NAMES), ENTRIES | st.lists(JSON_VALUES) | JSON_VALUES, max_size=6
    )
    | st.sampled_from(list(ROWS.values()))
    | JSON_VALUES
)


@given(
    rows=st.lists(ANY_ROW, max_size=4),
    format=st.sampled_from(("auto", *FORMATS)),
    fields=st.dictionaries(
        st.sampled_from(FIELD_NAMES), st.sampled_from([*FIELD_NAMES, "other"]), max_size=3
    ),
)
def test_each_row_is_yielded_or_skipped_for_any_content(
    rows: list[Any], format: str, fields: dict[str, str]
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "data.jsonl"
        path.write_text("# any\n" + "\n".join(map(json.dumps, rows)))
        skipped = SkippedRows(path)
        good: list[Conversation | Document] = []
        try:
            good += read_rows(path, skipped, format=format, fields=fields)
        except DataError as error:
            # The file has two formats; the rows before the second are accounted for.
            assert format == "auto"
            assert ", but the file is in " in str(error)
            stopped = int(str(error).removeprefix(f"{path}:").partition(":")[0]) - 1
        else:
            stopped = len(rows) + 1

    assert len(good) + skipped.total == stopped - 1
    for one in good:
        if isinstance(one, Conversation):
            assert any(m.role == "assistant" and m.trained for m in one.messages)
            assert all(isinstance(m, Message) and m.fields for m in one.messages)
        else:
            one.text.encode()
    for warning in skipped.warnings():
        assert warning.isprintable()
