"""Answers of `mlxtune serve`: equal to generated ones, each from its own adapter."""

from __future__ import annotations

import json
import random
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from mlxtune import GenerateConfig, TrainConfig, train
from mlxtune.commands.generate import answer_rows
from tests.paths import DATA
from tests.serve.served import (
    DEMO,
    GEMMA,
    TOOL,
    TOOL_PROMPT,
    answer_of,
    ask,
    generated,
    messages,
    server_of,
    train_tool_caller,
    write_adapter,
)
from tests.slow import long, slow

if TYPE_CHECKING:
    from mlxtune.serve.api_server import ApiServer

PROMPTS = [
    "A table for two, Sunday at noon. Ida Park",
    "Party of four on Tuesday, half past three. Diana Wardcroft.",
    "Is Friday at 21:00 still free? There are five of us. Julia Sumley",
]


@pytest.mark.parametrize("streamed", [False, slow(True)])
def test_served_answers_equal_generated_ones(
    server: ApiServer, adapters: list[Path], streamed: bool
) -> None:
    for adapter in (None, *adapters):
        name = "base" if adapter is None else adapter.name
        answer = answer_of(server, name, messages(PROMPTS[0]), stream=streamed)
        assert answer == generated(PROMPTS[0], adapter)


@pytest.mark.slow
def test_served_answer_of_another_family_equals_the_generated_one(tmp_path: Path) -> None:
    run = write_adapter(tmp_path / "run", 1, base=GEMMA)
    expected = generated(PROMPTS[0], run, base=GEMMA)
    with server_of(run) as server:
        for streamed in (False, True):
            answer = answer_of(server, "run", messages(PROMPTS[0]), stream=streamed)
            assert answer == expected


@pytest.mark.parametrize("count", [8, long(100)])
def test_interleaved_requests_are_answered_by_their_own_adapters(
    server: ApiServer, count: int
) -> None:
    names = ["base", "run-0", "run-1", "run-2"]
    expected = {(n, p): answer_of(server, n, messages(p)) for n in names for p in PROMPTS}
    assert len({tuple(expected[name, p] for p in PROMPTS) for name in names}) == len(names)
    asked = random.Random(0).choices(list(expected), k=count)

    def answer(each: tuple[str, str]) -> str:
        return answer_of(server, each[0], messages(each[1]), stream=len(each[1]) % 2 == 0)

    with ThreadPoolExecutor(count) as pool:
        assert list(pool.map(answer, asked)) == [expected[each] for each in asked]


def test_stop_text_ends_an_answer_inside_a_token(server: ApiServer) -> None:
    whole = answer_of(server, "base", messages(PROMPTS[0]))
    for start in (5, 6, 7, 8):
        stop = whole[start : start + 4]
        for streamed in (False, True):
            cut = answer_of(server, "base", messages(PROMPTS[0]), stop=stop, stream=streamed)
            assert cut == whole[: whole.index(stop)]


def test_length_of_an_answer_is_limited(server: ApiServer) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        options = {name: 3, "messages": messages(PROMPTS[0])}
        _, response = ask(server, model="run-0", **options)
        assert response["choices"][0]["finish_reason"] == "length"
        assert response["usage"]["completion_tokens"] == 3


@pytest.mark.parametrize("streamed", [slow(False), True])
def test_log_probabilities_have_the_form_of_the_protocol(server: ApiServer, streamed: bool) -> None:
    options: dict[str, Any] = {"logprobs": True, "top_logprobs": 5, "stream": streamed}
    _, response = ask(server, model="base", messages=messages(PROMPTS[0]), **options)
    chunks = response if streamed else [response]
    scored = [each for chunk in chunks for each in chunk["choices"][0]["logprobs"]["content"]]
    spelled = b"".join(bytes(each["bytes"]) for each in scored).decode()
    assert spelled == answer_of(server, "base", messages(PROMPTS[0]))
    for each in scored:
        scores = [top["logprob"] for top in each["top_logprobs"]]
        assert len(scores) == 5
        assert scores == sorted(scores, reverse=True)
        best = each["top_logprobs"][0]
        assert best["token"] == each["token"]
        assert best["logprob"] == pytest.approx(each["logprob"], abs=1e-5)


def test_sampled_answer_is_repeated_by_its_seed(server: ApiServer) -> None:
    def sampled(seed: int) -> str:
        return answer_of(server, "base", messages(PROMPTS[0]), temperature=2.0, seed=seed)

    assert sampled(1) == sampled(1)
    assert len({sampled(seed) for seed in range(4)}) > 1


@pytest.mark.slow
def test_tool_call_has_the_form_of_the_protocol(tmp_path: Path) -> None:
    asked = {"messages": messages(TOOL_PROMPT), "tools": [TOOL], "max_tokens": 100}
    with server_of(train_tool_caller(tmp_path)) as server:
        _, whole = ask(server, model="caller", stream=False, **asked)
        _, streamed = ask(server, model="caller", stream=True, **asked)
    for part, response in (("message", [whole]), ("delta", streamed)):
        choices = [each["choices"][0] for each in response]
        (call,) = [call for each in choices for call in each[part].get("tool_calls", [])]
        assert call["type"] == "function"
        assert call["function"]["name"] == "book"
        assert json.loads(call["function"]["arguments"]) == {"people": 4}
        assert choices[-1]["finish_reason"] == "tool_calls"


def test_requests_for_one_model_are_kept_together_but_none_waits_for_ever() -> None:
    from mlxtune.serve.answering import _MAX_OVERTAKEN, _RequestQueue

    queue = _RequestQueue()
    for name in "abab":
        queue.put((None, SimpleNamespace(model=SimpleNamespace(name=name)), None))
    assert [queue.get()[1].model.name for _ in range(4)] == ["a", "a", "b", "b"]
    waiting = ["a", *"b" * 2 * _MAX_OVERTAKEN]
    for name in waiting:
        queue.put((None, SimpleNamespace(model=SimpleNamespace(name=name)), None))
    taken = [queue.get()[1].model.name for _ in waiting]
    assert taken.index("a") == _MAX_OVERTAKEN


# Rows of data


def _data(folder: Path) -> dict[str, Path]:
    """Write three data sets: bookings, the guest's name, and the day after a system message."""
    rows = [json.loads(line) for line in (DATA / "bookings.jsonl").read_text().splitlines()]
    paths = {"bookings": DATA / "bookings.jsonl"}
    for key, system in (("name", []), ("day", [{"role": "system", "content": "Which day?"}])):
        paths[key] = folder / f"{key}.jsonl"
        with paths[key].open("w") as file:
            for row in rows:
                *_, question, answer = row["messages"]
                found = json.loads(answer["content"])[key]
                turns = [*system, question, {"role": "assistant", "content": f"It is {found}."}]
                file.write(json.dumps({"messages": turns}) + "\n")
    return paths


@pytest.mark.parametrize("base", [long(DEMO), long(GEMMA)], ids=lambda path: path.name)
def test_every_row_of_data_is_answered_as_generated(base: Path, tmp_path: Path) -> None:
    """Adapters of three data sets answer 200 rows each, all at once."""
    expected: list[tuple[str, list[Any], str]] = []
    for name, data in _data(tmp_path).items():
        run = tmp_path / name
        options = {"max_steps": 20, "lr": 2e-3, "val_split": 0.0, "quiet": True}
        train(TrainConfig(model_path=str(base), data=str(data), output=str(run), **options))
        rows = tmp_path / f"{name}-rows.jsonl"
        rows.write_text("".join(data.read_text().splitlines(keepends=True)[:200]))
        output = answer_rows(
            GenerateConfig(
                adapter=str(run),
                data=str(rows),
                output=str(tmp_path / f"{name}-answers.jsonl"),
                quiet=True,
                max_new_tokens=60,
            )
        )
        lines = map(json.loads, output.read_text().splitlines())
        expected += [(name, line["messages"], line["answer"]) for line in lines]
    assert len(expected) == 600
    random.Random(0).shuffle(expected)
    runs = [tmp_path / name for name in ("bookings", "name", "day")]
    with server_of(*runs, max_new_tokens=60) as server, ThreadPoolExecutor(32) as pool:
        for streamed in (False, True):

            def answer(each: tuple[str, list[Any], str], streamed: bool = streamed) -> str:
                return answer_of(server, each[0], each[1], stream=streamed)

            answers = list(pool.map(answer, expected))
            assert answers == [answer for _, _, answer in expected]
