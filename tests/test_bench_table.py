"""The tables of docs/performance.md against mlx-lm, and the script that measures them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.long.measured import Card, read_cards
from tests.long.measured_pages import PAGES, card_table, filled, machines, sections, summary


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_the_tables_of_the_measurements(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- measured: " in text
    assert text == filled(text, sections()), "run python -m tests.long.measured_pages"


def card(name: str, date: str, **cases: dict[str, Any]) -> dict[str, Any]:
    return {
        "schema_version": 1,
        "device": name,
        "driver": None,
        "cuda": "13.0",
        "versions": {"mlx": "1", "mlx-lm": "2", "transformers": "3"},
        "date": date,
        "commit": None,
        "cases": cases,
    }


def case(title: str, **sides: dict[str, Any]) -> dict[str, Any]:
    return {"title": title, "steps": 10, "tokens": 1000, "sides": sides}


def result(seconds: float, gb: float, **more: Any) -> dict[str, Any]:
    return {"seconds": [2 * seconds, seconds], "peak_memory": gb * 1e9, **more}


@pytest.fixture
def cards(tmp_path: Path) -> list[Card]:
    fast, slow = result(1, 2), {"mlx-lm": result(1.5, 4), "PEFT": result(2, 8)}
    stopped = {"mlx-lm": {"skipped": "stopped after 60 s, in the warm-up"}, "PEFT": slow["PEFT"]}
    differs = {"mlx-lm": result(9, 9, losses_agree=False), "PEFT": {"failed": "no memory"}}
    old = card("Old", "2026-01-01", a=case("one", mlxtune=fast, **slow))
    new = card(
        *("New", "2026-02-01"),
        a=case("one", mlxtune=fast, **stopped),
        b=case("two", mlxtune=fast, **differs),
        c=case("three", mlxtune={"failed": "no kernel"}, **slow),
    )
    for one in (old, new):
        (tmp_path / f"{one['device']}.json").write_text(json.dumps(one))
    (tmp_path / "wikisql.json").write_text('{"ratio": {}}')
    (tmp_path / "tiny.json").write_text(json.dumps(old | {"tiny": True}))
    return read_cards(tmp_path)


def test_card_has_a_row_for_each_case_of_ours_and_tells_what_peers_lack(cards: list[Card]) -> None:
    assert [one.device for one in cards] == ["New", "Old"]
    assert card_table(cards[0]).splitlines()[2:] == [
        "| one | 100 | 100 ms, 2.0 GB | stopped after 60 s | 200 ms, 8.0 GB | | **2.0×**, 0.25 |",
        "| two | 100 | 100 ms, 2.0 GB | 900 ms, 9.0 GB | failed | the losses differ | |",
    ]


def test_summary_has_a_row_for_each_card_and_peer_and_says_that_macs_are_unmeasured(
    cards: list[Card],
) -> None:
    cpu = {"ratio": {"real_tokens_per_s": 3.5, "peak_memory": 0.5}}
    assert summary(cards, [cpu]).splitlines()[2:] == [
        "| New, bfloat16, 1 case | transformers + PEFT | 2.0 times | 0.25 of theirs |",
        "| Old, bfloat16, 1 case | mlx-lm | 1.5 times | 0.50 of theirs |",
        "| Old, bfloat16, 1 case | transformers + PEFT | 2.0 times | 0.25 of theirs |",
        "| two x86-64 cores, float32, 1 case | mlx-lm | 3.5 times | 0.50 of theirs |",
        "| a Mac | | not measured | not measured |",
    ]
    assert machines(cards).splitlines()[2].startswith("| New | unknown, 13.0 | 1, 2, 3 |")


def test_unknown_table_in_a_page_is_an_error() -> None:
    with pytest.raises(KeyError, match="mac"):
        filled("<!-- measured: mac -->\n<!-- end -->", {})
