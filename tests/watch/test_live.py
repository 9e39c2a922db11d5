"""The live page: its content, its updates and its requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from mlxtune.core.run.run_folder import LOCK, STOP, lock_run
from mlxtune.errors import OutputError
from mlxtune.watch import live as module
from mlxtune.watch.asking import Asker
from mlxtune.watch.live import LiveSite, run_key
from tests.runs import EVALUATION, as_lines, step_line, write_rewarded_run, write_run
from tests.views.pages.markup import hostile_run


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_POLL_SECONDS", 0.01)
    monkeypatch.setattr(module, "_SCAN_SECONDS", 0.0)
    monkeypatch.setattr(module, "_KEEPALIVE_SECONDS", 0.05)


Events = Iterator[tuple[str, str] | None]


def following(live: LiveSite, view: str = "", last: str = "") -> Events:
    return live.follow(view, last)


def parts_of(events: Events) -> dict[str, Any]:
    """Return the parts of the page in the next event, after any None, which means no event."""
    event = next(each for each in events if each is not None)
    parts: dict[str, Any] = json.loads(event[1])
    return parts


def test_first_event_has_all_parts_of_a_run(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out", finished=False)
    lock = lock_run(run)
    parts = parts_of(following(LiveSite(tmp_path / "out", Asker())))
    assert "is at step 60 of 80" in parts["head"]
    assert "<b>75%</b> about 4.0s left" in parts["head"]
    assert f'data-stop="{run_key(run)}"' in parts["head"]
    assert "20 MB of 24 GB" in parts["head"]
    assert "peak memory, 26 MB predicted; the limit is 24 GB" in parts["head"]
    assert parts["title"] == f"75% · {tmp_path / 'out'}"
    assert parts["charts"].count("<figure") == len(parts["chart_data"]) == 5
    assert "50</b> rows read" in parts["data"]
    assert (parts["can_ask"], parts["samples"], parts["answers"]) == (False, "", "")
    lock.release()


def test_run_with_rewards_shows_its_newest_answers(tmp_path: Path) -> None:
    parts = parts_of(following(LiveSite(write_rewarded_run(tmp_path / "out"), Asker())))
    assert "brief answer 2 of step 12" in parts["sampled"]
    assert "of step 11 " not in parts["sampled"].partition("Best and worst")[2]
    assert "<select" not in parts["sampled"]
    assert parts["chart_data"][0]["series"][0]["name"] == "sum of rewards"
    write_rewarded_run(tmp_path / "other")
    head = parts_of(following(LiveSite(tmp_path, Asker())))["head"]
    assert "reward of sampled answers" in head and "loss" not in head
    (tmp_path / "out/checkpoints/samples.jsonl.gz").write_bytes(b"damaged")
    parts = parts_of(following(LiveSite(tmp_path / "out", Asker())))
    assert "cannot be read" in parts["sampled"]


def test_later_events_have_only_changed_parts(tmp_path: Path) -> None:
    run = write_run(tmp_path / "out", finished=False)
    events = following(LiveSite(run, Asker()))
    parts_of(events)
    with (run / "metrics.jsonl").open("ab") as file:
        file.write(as_lines([step_line(61, 40)]))
    changed = parts_of(events)
    assert "step 61 of 80" in changed["head"]
    assert changed.keys() == {"head", "charts", "chart_data"}


def test_unchanged_run_sends_empty_events(tmp_path: Path) -> None:
    events = following(LiveSite(write_run(tmp_path), Asker()))
    parts_of(events)
    assert next(events) is None


def test_reconnected_page_receives_only_changed_parts(tmp_path: Path) -> None:
    run = write_run(tmp_path)
    first = next(following(LiveSite(run, Asker())))
    assert first is not None
    again = following(LiveSite(run, Asker()), last=first[0])
    assert next(again) is None
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    changed = parts_of(again)
    assert "Answers side by side" in changed["samples"]
    assert "charts" not in changed
    assert parts_of(following(LiveSite(run, Asker()), last="other")).keys() > {"charts", "data"}


def test_several_runs_are_side_by_side_and_each_has_its_view(tmp_path: Path) -> None:
    a, b = write_run(tmp_path / "a"), write_run(tmp_path / "b", finished=False)
    lock = lock_run(b)
    live = LiveSite(tmp_path, Asker())
    parts = parts_of(following(live))
    assert parts["title"] == "2 runs"
    assert parts["head"].count("<progress") == 1
    assert parts["head"].count("data-stop") == 1
    assert f'data-view="{run_key(a)}"' in parts["head"]
    own = parts_of(following(live, run_key(a)))
    assert own["back"]
    assert own["title"] == str(tmp_path / "a")
    # The view of an unknown run shows all runs.
    assert parts_of(following(live, "../../etc"))["title"] == "2 runs"
    lock.release()


def test_new_run_appears_and_archived_runs_do_not(tmp_path: Path) -> None:
    a = write_run(tmp_path / "a")
    write_run(tmp_path / "x").rename(a / "previous-1")
    (tmp_path / "x" / "adapters.safetensors").unlink()
    live = LiveSite(tmp_path, Asker())
    events = following(live)
    assert parts_of(events)["title"] == str(tmp_path / "a")
    write_run(tmp_path / "b")
    assert parts_of(events)["title"] == "2 runs"


def test_only_the_newest_runs_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MAX_RUNS", 2)
    for name in "abc":
        write_run(tmp_path / name)
    head = parts_of(following(LiveSite(tmp_path, Asker())))["head"]
    assert str(tmp_path / "a") not in head
    assert str(tmp_path / "c") in head


def test_folder_without_a_run_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(OutputError, match="holds no run"):
        LiveSite(tmp_path, Asker())
    with pytest.raises(OutputError, match="no such folder"):
        LiveSite(tmp_path / "none", Asker())


def test_stop_is_requested_and_shown(tmp_path: Path) -> None:
    run = write_run(tmp_path, finished=False)
    lock = lock_run(run)
    live = LiveSite(run, Asker())
    events = following(live)
    parts_of(events)
    assert live.act("stop", {"run": run_key(run)})
    assert (run / STOP).is_file()
    changed = parts_of(events)
    assert "Stopping after this step" in changed["head"]
    assert "data-stop" not in changed["head"]
    lock.release()
    assert "unfinished" in parts_of(events)["head"]


def test_stop_needs_a_shown_run_in_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path, finished=False)
    live = LiveSite(run, Asker())
    for name in ("../..", str(run), None, ["a"]):
        with pytest.raises(OutputError, match="no longer exists"):
            live.act("stop", {"run": name})
    with pytest.raises(OutputError, match="no process is training here"):
        live.act("stop", {"run": run_key(run)})
    assert not (run / STOP).exists()
    assert not live.act("remove", {"run": run_key(run)})


def test_server_is_idle_without_a_page_and_a_run_in_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path, finished=False)
    live = LiveSite(run, Asker())
    live._last_closed_at -= 1000
    assert live.idle_seconds() >= 1000
    events = following(live)
    next(events)
    assert live.idle_seconds() < 1
    live._last_closed_at -= 1000
    assert live.idle_seconds() < 1
    events.close()  # type: ignore[attr-defined]
    live._last_closed_at -= 1000
    lock = lock_run(run)
    assert live.idle_seconds() < 1
    lock.release()
    live._last_closed_at -= 1000
    assert live.idle_seconds() >= 1000


def test_hostile_text_stays_text(tmp_path: Path) -> None:
    live = LiveSite(hostile_run(tmp_path), Asker())
    parts = parts_of(following(live))
    # The page's script inserts these as text.
    text = json.dumps(parts | {"title": "", "why_not": ""}) + live.page()
    assert "<img" not in text
    assert "<script>owned" not in text
    assert live.page().count("<script") == 1


@pytest.mark.parametrize("name", ["run.json", "metrics.jsonl", "ledger.json", "evaluation.json"])
def test_too_large_file_is_a_problem_on_the_page(tmp_path: Path, name: str) -> None:
    run = write_run(tmp_path)
    with (run / name).open("wb") as file:
        file.truncate(2**40)  # a sparse file
    parts = parts_of(following(LiveSite(run, Asker())))
    assert f"{name} is too large" in parts["head"]


def test_error_in_a_page_does_not_end_the_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: object, **__: object) -> None:
        raise RuntimeError("<b>broken</b>\n")

    monkeypatch.setattr(module, "render_run", broken)
    parts = parts_of(following(LiveSite(write_run(tmp_path), Asker())))
    assert parts["problem"] == "The run cannot be shown: <b>broken</b>"


def test_symlinked_lock_is_not_a_run_in_progress(tmp_path: Path) -> None:
    run = write_run(tmp_path, finished=False)
    (run / LOCK).symlink_to("/etc/passwd")
    assert "data-stop" not in parts_of(following(LiveSite(run, Asker())))["head"]


def test_evaluation_replaces_the_answers_after_the_last_validation(
    tmp_path: Path,
) -> None:
    run = write_run(tmp_path, finished=False)
    sample = {"path": "chat.jsonl", "row": 7, "prompt": "2 + 2?", "expected": "4<|im_end|>"}
    samples = [sample | {"base": "<b>4</b>", "adapted": None}, sample | {"base": "4<|im_end|>"}]
    samples[1]["adapted"] = None
    (run / "samples.json").write_text(json.dumps({"step": 40, "samples": samples}))
    events = following(LiveSite(run, Asker()))
    latest = parts_of(events)["latest"]
    assert "after step 40" in latest
    assert "&lt;b&gt;4&lt;/b&gt;" in latest
    assert latest.count("✓ exact") == 1
    assert "im_end" not in latest
    (run / "evaluation.json").write_text(json.dumps(EVALUATION))
    assert parts_of(events)["latest"] == ""
    (run / "evaluation.json").unlink()
    (run / "samples.json").write_text('{"step": "no"}')
    assert "samples.json holds no samples" in parts_of(events)["head"]


def test_folder_whose_name_is_not_utf_8_has_a_key(tmp_path: Path) -> None:
    assert len(run_key(tmp_path / "bad\udcff\udcfe")) == 16
