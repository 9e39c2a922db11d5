"""The live page in a headless browser: two tabs of a running run, and a restarted server."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from mlxtune.core.files.remembered import mark
from mlxtune.core.run.run_folder import STOP, lock_run
from mlxtune.watch import live as module
from mlxtune.watch.asking import Asker, Question
from mlxtune.watch.live import LiveSite
from mlxtune.watch.server import PageServer, start_server
from tests.browser import Tab, browsing, needs_browser
from tests.runs import as_lines, step_line, write_run
from tests.views.pages.markup import hostile_run
from tests.waiting import wait_until

# This expression is true if the page says that the server is gone.
GONE = "document.getElementById('gone') && !document.getElementById('gone').hidden"
pytestmark = [needs_browser, pytest.mark.slow]


class FakeAsker(Asker):
    """Answers immediately, without a model."""

    def ask(self, run: Path, question: object) -> None:
        self._question = Question(run, str(question), base="<i>4</i>", adapter="four", status="")
        self.on_change()


@contextmanager
def serving(folder: Path) -> Iterator[PageServer]:
    live = LiveSite(folder, FakeAsker())
    server = start_server(live, live.folder)
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}).start()
    try:
        yield server
    finally:
        live.close()
        server.shutdown()
        server.server_close()


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.05)


def text(part: str) -> str:
    return f"(document.querySelector('[data-part={part}]')?.innerText || '')"


def overflow(tab: Tab) -> int:
    return int(tab.evaluate("document.documentElement.scrollWidth - innerWidth"))


def test_two_tabs_follow_a_run_through_a_restart_to_its_stop(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out", finished=False)
    lock = lock_run(run)
    with browsing(tmp_path) as browser:
        tabs = [browser.new_tab(), browser.new_tab()]
        with serving(run) as server:
            for tab in tabs:
                tab.open(server.address)
                tab.wait_for(f"{text('head')}.includes('step 60 of 80')")
            with (run / "metrics.jsonl").open("ab") as file:
                file.write(as_lines([step_line(61, 40)]))
            for tab in tabs:
                tab.wait_for(f"{text('head')}.includes('step 61 of 80')")
            first = tabs[0]
            for width in (390, 1280):
                for theme in ("light", "dark"):
                    first.show_as(width, 900, theme)
                    assert overflow(first) <= 0, (width, theme)
            assert first.evaluate("document.querySelectorAll('path.line').length") >= 5
            # A chart that was just replaced still shows values on hover.
            told = first.evaluate(
                "(() => { const plot = document.querySelector('.plot'); const b = plot"
                ".getBoundingClientRect(); plot.dispatchEvent(new PointerEvent('pointermove', "
                "{clientX: b.right, clientY: b.top, bubbles: true})); "
                "return plot.querySelector('.tip').innerText })()"
            )
            assert "step 61" in told
            address = server.address
        for tab in tabs:
            tab.wait_for(GONE)
        with (run / "metrics.jsonl").open("ab") as file:
            file.write(as_lines([step_line(62, 40)]))
        with serving(run) as server:
            assert server.address == address
            for tab in tabs:
                tab.wait_for(f"{text('head')}.includes('step 62 of 80')")
                tab.wait_for(f"!({GONE})")
            # The first click only opens a confirmation.
            first.evaluate("document.querySelector('[data-stop]').click()")
            assert first.wait_for("document.getElementById('confirm').open")
            first.evaluate("document.getElementById('cancel').click()")
            assert not (run / STOP).exists()
            first.evaluate("document.querySelector('[data-stop]').click()")
            first.evaluate("document.getElementById('stop').click()")
            wait_until((run / STOP).exists)
            first.wait_for(f"{text('head')}.includes('Stopping after this step')")
            lock.release()
            first.wait_for(f"{text('head')}.includes('unfinished')")
        for tab in tabs:
            assert all(url.startswith((address, "data:")) for url in tab.requested), tab.requested
            # The only console messages are about the stopped server.
            assert [each for each in tab.said if "ERR_CONNECTION_REFUSED" not in each] == []


def test_page_reconnects_after_an_error(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out")
    with browsing(tmp_path) as browser, serving(run) as server:
        tab = browser.new_tab()
        tab.open(server.address)
        tab.wait_for(f"{text('head')}.includes('epochs')")
        assert not tab.evaluate(GONE)
        # With a different token, the server answers 404, and the browser's EventSource gives up.
        token, server.token = server.token, "other"
        tab.evaluate("document.querySelector('[data-view]').click()")
        tab.wait_for(GONE)
        server.token = token
        tab.wait_for(f"!({GONE})")


def test_model_answers_and_hostile_text_stays_text(tmp_path: Path) -> None:
    run = hostile_run(tmp_path)
    mark(run)
    with browsing(tmp_path) as browser, serving(run) as server:
        tab = browser.new_tab()
        tab.open(server.address)
        tab.wait_for("!document.querySelector('[data-part=can_ask]').hidden")
        tab.evaluate("document.getElementById('question').value = '<img src=x onerror=alert(1)>'")
        tab.evaluate("document.getElementById('ask').click()")
        shown = tab.wait_for(text("answers"))
        assert "<img src=x onerror=alert(1)>" in shown
        assert "<i>4</i>" in shown
        assert "four" in shown
        # The typed question stays while parts of the page are replaced.
        assert tab.evaluate("document.getElementById('question').value")
        assert tab.evaluate("document.querySelectorAll('img, main script').length") == 0
        assert tab.said == []


def test_several_runs_and_back(tmp_path: Path) -> None:
    write_run(tmp_path / "a")
    write_run(tmp_path / "b", epochs=3)
    with browsing(tmp_path) as browser, serving(tmp_path) as server:
        tab = browser.new_tab()
        tab.open(server.address)
        tab.wait_for("document.title.startsWith('2 runs')")
        for width in (390, 1280):
            tab.show_as(width, 900, "light")
            assert overflow(tab) <= 0
        tab.evaluate("document.querySelectorAll('.link')[1].click()")
        tab.wait_for(f"{text('head')}.includes('3 epochs')")
        tab.evaluate("document.querySelector('[data-part=back] button').click()")
        tab.wait_for("document.title.startsWith('2 runs')")
        assert tab.said == []
