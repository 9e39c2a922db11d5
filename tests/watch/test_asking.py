"""Questions to the model on the live page: one at a time, in a process that always ends."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune import train
from mlxtune.config import TrainConfig
from mlxtune.core.files.remembered import mark
from mlxtune.core.run.stored_run import read_run
from mlxtune.errors import ConfigError, OutputError
from mlxtune.watch import asking as module
from mlxtune.watch.answer_helper import answer_questions
from mlxtune.watch.asking import Asker, Question, problem_of
from tests.models import sums, write_chat
from tests.runs import write_run
from tests.waiting import wait_until

# A fake worker that answers each question immediately, unless the question is a command.
WORKER = """
import json, sys, time
for line in sys.stdin:
    question = json.loads(line)
    print(json.dumps({"status": "answering"}), flush=True)
    if question == "wait": time.sleep(600)
    if question == "fail": raise SystemExit(1)
    if question == "nonsense": print("nonsense", flush=True)
    print(json.dumps({"base": "ba"}), flush=True)
    print(json.dumps({"adapter": "ad"}), flush=True)
    print(json.dumps({"base": "se", "notes": ["cut"]}), flush=True)
    print(json.dumps({"status": ""}), flush=True)
"""


@pytest.fixture
def run(tmp_path: Path) -> Path:
    run = write_run(tmp_path / "out")
    mark(run)
    return run


@pytest.fixture
def asker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """An asker with the fake worker."""
    (tmp_path / "fake_answer_worker.py").write_text(WORKER)
    monkeypatch.setattr(module, "_HELPER", "fake_answer_worker")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")
    asker = Asker()
    yield asker
    asker.close()


def answered(asker: Asker, run: Path) -> Question:
    asked = asker.question_of(run)
    assert asked is not None
    wait_until(lambda: not asked.status)
    return asked


def test_answers_stream_and_the_process_is_kept(asker: Asker, run: Path) -> None:
    grown: list[str] = []
    asker.on_change = lambda: grown.append(getattr(asker.question_of(run), "base", ""))
    asker.ask(run, "2 + 2?")
    asked = answered(asker, run)
    assert (asked.base, asked.adapter, asked.notes, asked.problem) == ("base", "ad", ["cut"], "")
    assert "ba" in grown
    process = asker._process
    asker.ask(run, "3 + 3?")
    assert answered(asker, run).text == "3 + 3?"
    assert asker._process is process
    assert asker.question_of(run.parent) is None


def test_one_question_at_a_time(asker: Asker, run: Path) -> None:
    asker.ask(run, "wait")
    with pytest.raises(OutputError, match="another question"):
        asker.ask(run, "2 + 2?")
    asker.cancel()
    assert answered(asker, run).problem == "stopped"
    asker.ask(run, "2 + 2?")
    assert answered(asker, run).base == "base"


def test_answer_times_out(asker: Asker, run: Path) -> None:
    asker._seconds = 0.5
    asker.ask(run, "wait")
    assert "not complete within" in answered(asker, run).problem


@pytest.mark.parametrize("question", ["fail", "nonsense"])
def test_crashed_process_is_a_problem_and_is_restarted(
    asker: Asker, run: Path, question: str
) -> None:
    asker.ask(run, question)
    assert answered(asker, run).problem == "the process that answers has ended"
    asker.ask(run, "2 + 2?")
    assert answered(asker, run).base == "base"


def test_idle_process_ends(asker: Asker, run: Path) -> None:
    asker._kept_seconds = 0.1
    asker.ask(run, "2 + 2?")
    answered(asker, run)
    wait_until(lambda: asker._process is None)


@pytest.mark.parametrize("question", ["", " ", None, 7, "x" * 20_000])
def test_question_must_be_text_within_limits(asker: Asker, run: Path, question: object) -> None:
    with pytest.raises(ConfigError):
        asker.ask(run, question)
    assert asker.question_of(run) is None


def test_untrusted_or_unfinished_run_cannot_be_asked(tmp_path: Path) -> None:
    strange = write_run(tmp_path / "strange")
    with pytest.raises(OutputError, match="not made by you"):
        Asker().ask(strange, "2 + 2?")
    unfinished = write_run(tmp_path / "unfinished", finished=False)
    mark(unfinished)
    assert "once the run has ended" in problem_of(read_run(unfinished))


def test_run_sets_no_option_of_its_process_but_the_adapter(run: Path) -> None:
    about = json.loads((run / "run.json").read_text())
    about["config"] |= {"trust_remote_code": True, "memory_limit": "1"}
    (run / "run.json").write_text(json.dumps(about))
    options = module._options_of(read_run(run))
    assert options.keys() == {"adapter", "max_new_tokens"}


def test_worker_answers_with_both_models(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    chat = write_chat(tmp_path / "chat.jsonl", sums(8))
    output = str(tmp_path / "out" / "adapters.safetensors")
    quick: dict[str, Any] = {"targets": ("all",), "lr": 0.1, "max_steps": 2, "val_split": 0.0}
    train(TrainConfig(str(model), str(chat), output=output, quiet=True, **quick))
    options = module._options_of(read_run(tmp_path / "out" / "checkpoints"))
    options["max_new_tokens"] = 5
    lines = list(answer_questions(options, iter(['"2 + 2?"', '" "', "[1]"])))
    first = lines[: lines.index({"status": ""}) + 1]
    assert first[0] == {"status": "answering"}
    names = [name for line in first for name in line if name in ("base", "adapter")]
    assert names[:4] == ["base", "adapter", "base", "adapter"], "in turn"
    assert {"notes": ["the base's answer was cut off"]} in first
    texts = {name: "".join(line.get(name, "") for line in first) for name in ("base", "adapter")}
    assert texts["base"] != texts["adapter"]
    assert sum("problem" in line for line in lines) >= 1
