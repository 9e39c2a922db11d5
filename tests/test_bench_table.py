"""The tables of README and the documentation are those of docs/measured and docs/devices."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.long.measured_pages import PAGES, filled, sections


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_page_has_the_tables_of_the_measurements(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert "<!-- measured: " in text
    assert text == filled(text, sections()), "run python -m tests.long.measured_pages"


def test_unknown_table_in_a_page_is_an_error() -> None:
    with pytest.raises(KeyError, match="mac"):
        filled("<!-- measured: mac -->\n<!-- end -->", {})
