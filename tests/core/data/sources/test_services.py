"""Exports of chat services become conversations."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.data.sources import services
from tests.core.data.rows import (
    reason,
    told,
)


def node(role: str, *parts: Any, parent: str, kind: str = "text", **others: Any) -> dict[str, Any]:
    content = {"content_type": kind, "parts": list(parts)}
    message = {"author": {"role": role}, "content": content, "recipient": "all", **others}
    return {"message": message, "parent": parent, "children": []}


EXPORT = {
    "root": {"message": None, "parent": None, "children": ["system"]},
    "system": node("system", "", parent="root", weight=0.0),
    "hidden": node(
        "user", "x", parent="system", metadata={"is_visually_hidden_from_conversation": True}
    ),
    "question": node("user", "What is ", "1 + 1?", parent="hidden", weight=1.0),
    "other": node("assistant", "3", parent="question"),
    "thoughts": node("assistant", "Hm.", parent="question", kind="thoughts"),
    "answer": node("assistant", "2", parent="thoughts", weight=1.0),
}


def exported(**nodes: Any) -> dict[str, Any]:
    return {"title": "Sums", "mapping": EXPORT | nodes, "current_node": "answer", "id": "1"}


def test_chatgpt_export_is_read_along_the_path_to_its_current_node(tmp_path: Path) -> None:
    assert told(tmp_path, exported()) == [
        ("user", "What is 1 + 1?", True),
        ("assistant", "2", True),
    ]


IMAGE = {"content_type": "image_asset_pointer", "asset_pointer": "file-service://1"}


@pytest.mark.parametrize(
    ("row", "said"),
    [
        (exported() | {"mapping": []}, "'mapping' is not an object (a list)"),
        (exported() | {"current_node": ["answer"]}, "no assistant turn"),
        (exported(question=node("user", "?", parent="answer"), answer={}), "no assistant turn"),
        (exported(thoughts=node("tool", "2", parent="question")), "a ChatGPT conversation with"),
        (
            exported(thoughts=node("assistant", "q", parent="question", recipient="web")),
            "a ChatGPT conversation with tools",
        ),
        (
            exported(question=node("user", IMAGE, "What is it?", parent="root")),
            "images, audio and video are out of scope (message 1: 'image_asset_pointer')",
        ),
    ],
)
def test_chatgpt_conversation_that_is_more_than_text_is_named(
    tmp_path: Path, row: dict[str, Any], said: str
) -> None:
    assert reason(tmp_path, row).startswith(said)


def test_turns_of_an_export_are_counted_before_they_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    read_nodes: list[Any] = []
    monkeypatch.setattr(services, "_from_node", read_nodes.append)
    monkeypatch.setattr(services, "_MAX_TURNS", 4)
    said = "a ChatGPT conversation with too many turns (over 4)"
    assert reason(tmp_path, exported()) == said
    assert read_nodes == []


def test_cyclic_nodes_terminate(tmp_path: Path) -> None:
    row = exported(question=node("user", "Why?", parent="answer"))
    assert ("user", "Why?", True) in told(tmp_path, row)
