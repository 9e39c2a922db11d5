"""Random damage to files, as by a disk, an editor, an export script or an attacker.

All randomness comes from the given generator, so that a case can be repeated.
"""

from __future__ import annotations

import copy
import gzip
import io
import json
import re
from random import Random
from typing import Any

# Values of the wrong kind or size.
STRANGE: tuple[Any, ...] = (
    *(None, True, False, 0, 1, -1, 2, 7, 10**6, 2**31, 2**63, 10**12, 10**400, -(10**30)),
    *(0.5, -0.0, 1e308, 1e-308, float("nan"), float("inf"), "", " ", "0", "64", "auto", "None"),
    *("\ud800", "\x00", "\x1b[31m\x07", "a\r\nb", "\u2028", "é" * 300, "../../x", "/dev/null"),
    *("<|im_end|>", "<|im_start|>assistant\n", "<think>", "</think>", "{{ 1/0 }}", "{%"),
    *("{{ 'a' * 10**10 }}", "x" * 100_000, [], [[]], {}, [None], [0, "a"], {"a": 1}, {"": {}}),
    *({"role": "assistant", "content": "x"}, ["user", "x"], {"text": "x", "type": "image"}),
    *([{"name": "f", "arguments": {}}], '{"name": "f"}', '[{"a": [', "[" * 5000, "\\u12"),
)
_TURNS = [
    {"role": "user", "content": "What is 1 + 1?"},
    {"role": "assistant", "content": "Two."},
    {"role": "user", "content": "Und nun? ☃"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nThree.", "weight": 1},
]
_CALL = {"type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
_TOOL = {"type": "function", "function": {"name": "f", "description": "d", "parameters": {}}}
ROWS: dict[str, list[dict[str, Any]]] = {
    "chat": [
        {"messages": _TURNS[:2]},
        {"messages": [{"role": "system", "content": "Be brief."}, *_TURNS]},
        {"messages": _TURNS[:2], "tools": [_TOOL], "system": "Hi"},
        {
            "messages": [
                _TURNS[0],
                {"role": "assistant", "content": None, "tool_calls": [_CALL]},
                {"role": "tool", "content": [{"type": "text", "text": "2"}], "name": "f"},
                {"role": "assistant", "content": "2", "reasoning_content": "so"},
            ]
        },
    ],
    "sharegpt": [
        {
            "conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}],
            "tools": json.dumps([{"name": "f", "parameters": {}}]),
        },
        {
            "conversations": [
                {"from": "human", "value": "a"},
                {"from": "function_call", "value": '{"name": "f", "arguments": {"x": 1}}'},
                {"from": "observation", "value": "1"},
                {"from": "gpt", "value": "c", "weight": 0},
                {"from": "gpt", "value": "d"},
            ]
        },
    ],
    "prompt": [
        {"prompt": "a", "completion": "b"},
        {"prompt": _TURNS[:1], "completion": _TURNS[1:2]},
    ],
    "alpaca": [
        {"instruction": "a", "input": "", "output": "b"},
        {"instruction": "a", "input": "c", "output": "b", "history": [["d", "e"]], "system": "s"},
    ],
    "text": [{"text": "One two three."}, {"text": "Ünder 雪 \U0001f600"}],
}


# Values


def strange(rng: Random) -> Any:
    """Return a value of the wrong kind or size, sometimes a mark that `as_json` nests deeply."""
    if rng.random() < 0.05:
        return f"nested {rng.choice((10, 200, 900, 3000, 100_000))} deep"
    return copy.deepcopy(rng.choice(STRANGE))


def as_json(value: Any, **how: Any) -> str:
    """Return a value as JSON, with Python's spelling for values that JSON lacks."""
    text = json.dumps(value, **how)
    for found in re.findall(r'"nested (\d+) deep"', text):
        opening, closing = ("[", "]") if int(found) % 9 else ('{"a":', "}")
        nested = opening * int(found) + "1" + closing * int(found)
        text = text.replace(f'"nested {found} deep"', nested, 1)
    return text


def spots(value: Any) -> list[tuple[Any, Any]]:
    """Return the first 5,000 or so places in a JSON value, each as a container and a key."""
    found: list[tuple[Any, Any]] = []
    level = [value]
    while level and len(found) < 5000:
        here = level.pop()
        keys = here.keys() if isinstance(here, dict) else range(len(here))
        for key in list(keys):
            found.append((here, key))
            if isinstance(here[key], dict | list):
                level.append(here[key])
    return found


def mutate_value(rng: Random, value: Any) -> Any:
    """Return a copy of a JSON value with a mistake in one place."""
    value = copy.deepcopy(value)
    if not isinstance(value, dict | list) or not value or rng.random() < 0.03:
        return strange(rng)
    container, key = rng.choice(spots(value))
    kind = rng.randrange(6)
    if kind == 0:
        del container[key]
    elif kind == 1 and isinstance(container, dict):
        container[f"{key}s" if rng.random() < 0.5 else str(strange(rng))[:50]] = container[key]
    elif kind == 2:
        container[key] = [container[key]] * rng.choice((0, 1, 2, 50))
    elif kind == 3:
        others = spots(value)
        other, name = rng.choice(others)
        container[key] = copy.deepcopy(other[name])
    elif kind == 4 and isinstance(container[key], int | float) and abs(container[key]) < 1e300:
        container[key] = container[key] * rng.choice((-1, 0, 0.5, 2, 3, 10**9, 1e-9))
    else:
        container[key] = strange(rng)
    return value


def as_text(rng: Random, value: Any) -> str:
    """Return a value as JSON, with random escapes and indentation."""
    return as_json(value, ensure_ascii=rng.random() < 0.5, indent=rng.choice((None, None, 1)))


def as_bytes(text: str) -> bytes:
    return text.encode("utf-8", errors="surrogatepass")


def read_json(content: bytes) -> Any:
    """Parse JSON; return None if it is invalid, or nested too deeply."""
    try:
        return None if max(content.count(b"["), content.count(b"{")) > 500 else json.loads(content)
    except (ValueError, RecursionError):
        return None


# Bytes


def mutate_bytes(rng: Random, content: bytes) -> bytes:
    """Return content with random damage, in one place or throughout."""
    data = bytearray(content)
    place = rng.randrange(len(data) + 1)
    length = rng.choice((1, 1, 2, 8, 64, 1000))
    kind = rng.randrange(12)
    if kind <= 2 and data:
        for _ in range(rng.choice((1, 1, 2, 10))):
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    elif kind == 3:
        del data[place:]
    elif kind == 4:
        del data[place : place + length]
    elif kind == 5:
        data[place:place] = rng.randbytes(length)
    elif kind == 6:
        start = rng.randrange(len(data) + 1)
        data[place:place] = data[start : start + rng.choice((10, 100, 5000))]
    elif kind == 7:
        piece = rng.choice((b"[", b'{"a":', b"\0", b"\n", b'"', b"\xff", b"1", b"-", b"\\u"))
        data[place:place] = piece * rng.choice((1, 3, 400, 30_000))
    elif kind == 8:
        times = rng.choice((0, 2, 20)) if len(data) < 100_000 else 1
        return bytes(data) * times
    elif kind == 9:
        text = content.decode("utf-8", errors="replace")
        coding = rng.choice(("utf-16", "utf-32-le", "utf-8-sig", "latin-1", "cp037"))
        return text.encode(coding, errors="replace")
    elif kind == 10:
        return bytes(data).replace(
            b"\n", rng.choice((b"\r\n", b"\r", b"", b"\n\n\n", b"\xe2\x80\xa8"))
        )
    else:
        lines = bytes(data).splitlines(keepends=True) or [b""]
        rng.shuffle(lines)
        return b"".join(lines + rng.choices(lines, k=rng.randrange(4)))
    return bytes(data)


# Data files


def data_file(rng: Random) -> tuple[str, bytes]:
    """Return the name and content of a damaged data file."""
    names = [rng.choice(list(ROWS))] if rng.random() < 0.8 else list(ROWS)
    rows: list[Any] = [
        copy.deepcopy(rng.choice(ROWS[rng.choice(names)]))
        for _ in range(rng.choice((1, 2, 6, 6, 30)))
    ]
    for _ in range(rng.choice((0, 1, 1, 2, 4))):
        place = rng.randrange(len(rows))
        rows[place] = mutate_value(rng, rows[place])
    if rng.random() < 0.05:
        content, name = _parquet(rng, rows), "data.parquet"
    elif rng.random() < 0.15:
        content, name = as_bytes(as_text(rng, rows)), "data.json"
    else:
        lines = [as_json(row, ensure_ascii=rng.random() < 0.5) for row in rows]
        content, name = as_bytes("".join(line + "\n" for line in lines)), "data.jsonl"
    for _ in range(rng.choice((0, 0, 1, 1, 3))):
        content = mutate_bytes(rng, content)
    if rng.random() < 0.1:
        content, name = gzip.compress(content, 1), f"{name}.gz"
        if rng.random() < 0.6:
            content = mutate_bytes(rng, content)
    return name, content


def _parquet(rng: Random, rows: list[Any]) -> bytes:
    import pyarrow
    from pyarrow import parquet

    try:
        table = pyarrow.Table.from_pylist([row for row in rows if isinstance(row, dict)])
        file = io.BytesIO()
        parquet.write_table(table, file, compression=rng.choice(("none", "snappy", "gzip")))
    except Exception:  # noqa: BLE001  rows that have no place in a table
        return b"PAR1" + rng.randbytes(200) + b"PAR1"
    return file.getvalue()


# A conversation to answer


def messages_file(rng: Random) -> bytes:
    """Return a damaged conversation for `generate --messages`."""
    value: Any = copy.deepcopy(rng.choice(ROWS["chat"]))
    value["messages"] = value["messages"][: rng.choice((1, 1, 3, 4))]
    if value["messages"][-1]["role"] == "assistant" and rng.random() < 0.9:
        value["messages"].pop()
    if rng.random() < 0.5:
        value = value["messages"]
    for _ in range(rng.choice((0, 1, 1, 2))):
        value = mutate_value(rng, value)
    content = as_bytes(as_text(rng, value))
    for _ in range(rng.choice((0, 0, 0, 1, 2))):
        content = mutate_bytes(rng, content)
    return content


# Config files

_CONFIG: dict[str, Any] = {"rank": 4, "lr": 0.001, "targets": ["q_proj"], "epochs": 1, "seed": 3}
_CONFIG |= {"field": {"prompt": "question"}, "val-split": 0.5, "strict": False, "alpha": 8}


def config_file(rng: Random) -> tuple[str, bytes]:
    """Return the name and content of a damaged config file."""
    options = dict(rng.sample(list(_CONFIG.items()), rng.randrange(1, len(_CONFIG))))
    for _ in range(rng.choice((0, 1, 2))):
        options = mutate_value(rng, options)
    if rng.random() < 0.3:
        text, name = _toml(options), "config.toml"
    else:
        # JSON is nearly always valid YAML.
        text, name = as_json(options, indent=rng.choice((None, 2))), "config.yaml"
        if isinstance(options, dict) and rng.random() < 0.5:
            text = "".join(f"{key}: {as_json(value)}\n" for key, value in options.items())
    content = as_bytes(text)
    for _ in range(rng.choice((0, 0, 1, 2))):
        content = mutate_bytes(rng, content)
    return name, content


def _toml(options: Any) -> str:
    if not isinstance(options, dict):
        return as_json(options)
    return "".join(f"{key} = {as_json(value)}\n" for key, value in options.items())
