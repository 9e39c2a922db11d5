"""`mlxtune generate` and `mlxtune chat` from the command line."""

from __future__ import annotations

import io
import json
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from mlxtune import GenerateConfig, TrainConfig, generate, train
from mlxtune.backend.text.generate import Generator
from mlxtune.core.files.writing import append_line
from mlxtune.errors import OutputError
from tests.command import Cli, Outcome, unless_given
from tests.models import write_model
from tests.paths import DATA
from tests.waiting import SECONDS

DEMO = DATA / "demo-qwen3"
PROMPT = "A table for two, Sunday at noon. Ida Park"


@pytest.fixture
def say(cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A function that runs a command on the demo's model with the given standard input."""

    def run(command: str, *arguments: object, stdin: str | bytes = "") -> Outcome:
        content = stdin.encode() if isinstance(stdin, str) else stdin
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(content), encoding="utf-8"))
        options = unless_given(arguments, model_path=DEMO, max_new_tokens=8)
        return cli(command, *options, *arguments)

    return run


@pytest.fixture(scope="module")
def expected() -> str:
    """Return mlx-lm's greedy answer to the prompt."""
    import mlxtune.backend  # noqa: F401, I001
    import mlx.core as mx
    from mlx_lm import generate as theirs
    from mlx_lm.utils import load

    model, tokenizer = load(str(DEMO))
    model.set_dtype(mx.float32)
    asked = [{"role": "user", "content": PROMPT}]
    ids = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    return str(theirs(model, tokenizer, ids, max_tokens=8))


def test_prompt_messages_and_standard_input_are_answered_alike(
    say: Any, tmp_path: Path, expected: str
) -> None:
    message = {"role": "user", "content": PROMPT}
    listed, line = tmp_path / "list.json", tmp_path / "line.jsonl"
    listed.write_text(json.dumps([message], indent=1))
    line.write_text(json.dumps({"messages": [message]}) + "\n")
    step_variants: list[tuple[list[object], str]] = [
        (["--prompt", PROMPT], ""),
        (["--messages", listed], ""),
        (["--messages", line], ""),
        (["--messages", "-"], json.dumps([message])),
        ([], PROMPT + "\r\n"),
    ]
    for arguments, stdin in step_variants:
        outcome = say("generate", "--quiet", *arguments, stdin=stdin)
        assert (outcome.code, outcome.out, outcome.err) == (0, expected + "\n", "")


def test_json_has_the_text_and_its_figures(say: Any, expected: str) -> None:
    found = json.loads(say("generate", "--prompt", PROMPT, "--json").out)
    assert found["text"] == expected
    assert (found["tokens"], found["finish_reason"]) == (8, "length")
    assert found["tokens_per_second"] > 0
    ended = json.loads(say("generate", "--prompt", PROMPT, "--json", "--max-new-tokens", 99).out)
    assert ended["finish_reason"] == "stop"
    assert ended["text"].startswith(expected)
    assert "<|im_end|>" not in ended["text"]


def test_system_and_stop_and_seed_are_heeded(say: Any, expected: str) -> None:
    word = expected.split()[2]
    stopped = say("generate", "--prompt", PROMPT, "--stop", f" {word}", "--quiet")
    assert stopped.out == expected.partition(f" {word}")[0] + "\n"
    plain, told = (
        json.loads(say("generate", "--prompt", PROMPT, "--json", *system).out)["prompt_tokens"]
        for system in ((), ("--system", "Be brief."))
    )
    assert told > plain
    options = ["--prompt", PROMPT, "--quiet", "--temperature", 2, "--seed"]
    one, same, other = (say("generate", *options, seed).out for seed in (1, 1, 2))
    assert one == same != other


@pytest.mark.parametrize("command", [("generate", "--max-new-tokens", 1), ("chat",)])
def test_thinking_that_the_template_does_not_know_is_warned_of(
    say: Any, command: tuple[object, ...]
) -> None:
    asked = say(*command, "--thinking", "on", stdin="/quit")
    assert "warning: --thinking on changes nothing: the template has no thinking" in asked.err


def test_newline_may_be_a_stop() -> None:
    assert GenerateConfig(str(DEMO), stop=("\n", "")).stop == ("\n",)


def test_python_receives_the_text_as_a_stream(expected: str) -> None:
    said: list[str] = []
    config = GenerateConfig(str(DEMO), prompt=PROMPT, max_new_tokens=8, quiet=True)
    assert generate(config, said.append).text == "".join(said) == expected
    assert len(said) > 3


@pytest.mark.parametrize(
    ("arguments", "stdin", "said"),
    [
        ([], "", "standard input is empty"),
        ([], " \n", "standard input is empty"),
        ([], b"\xff\xfe", "standard input is not text in UTF-8 (byte 1)"),
        (["--prompt", " "], "", "--prompt is empty: pass a value, or leave it out"),
        (["--prompt", "a", "--messages", "b"], "", "--prompt and --messages are both given"),
        (["--messages", "nowhere.json"], "", "nowhere.json cannot be read: No such file"),
        (
            ["--messages", "-"],
            '[{"role":\n}]',
            "standard input: not valid JSON (Expecting value at",
        ),
        (["--prompt", "a", "--top-p", 0], "", "--top-p must be above 0"),
        (["--prompt", "a", "--temperature", -1], "", "--temperature must be at least 0"),
        (["--prompt", "a", "--adapter", "nowhere"], "", "nowhere: no such file or folder"),
    ],
)
def test_malformed_input_ends_in_one_line(
    say: Any, arguments: list[object], stdin: Any, said: str
) -> None:
    assert said in say("generate", *arguments, stdin=stdin).error


def test_model_without_a_template_completes_text_and_takes_no_messages(
    cli: Cli, tmp_path: Path
) -> None:
    folder = write_model(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").unlink()
    model = ["--model-path", folder]
    outcome = cli("generate", *model, "--prompt", "Once", "--max-new-tokens", 1)
    assert "completed as plain text: the model has no chat template" in outcome.err
    assert not re.search("^(Memory|Model) ", outcome.err, re.MULTILINE)
    for command in (["generate", "--prompt", "Once", "--system", "Be brief."], ["chat"]):
        error = cli(*command, *model).error
        assert "complete plain text with mlxtune generate --prompt alone" in error
        assert "train" not in error.partition("has no")[2]


def test_adapter_of_plain_text_completes_text_unless_a_template_is_named(
    say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxtune.session.trained_model.is_trained_on_text", lambda adapter: True)
    ask = partial(say, "generate", "--prompt", PROMPT)
    assert "completed as plain text, as the adapter was trained" in ask().err
    for asked in (["--template", "auto"], ["--system", "Be brief."]):
        assert "the model's own template" in ask(*asked).err
    assert "trained on plain text: mlxtune generate" in say("chat").err


def test_pipe_without_a_writer_does_not_block(say: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    assert "not valid JSON" in say("generate", "--messages", tmp_path / "pipe").error
    assert "cannot be read" in say("generate", "--messages", tmp_path).error


def test_prompt_beyond_the_models_context_is_refused(say: Any) -> None:
    long = "a, " * 3000
    assert "the model reads at most" in say("generate", "--quiet", stdin=long).error
    outcome = say("chat", "--quiet", stdin=f"{long}\n{PROMPT}\n")
    assert outcome.code == 0
    assert "the message was dropped" in outcome.err
    assert outcome.out.strip()


def test_line_without_an_end_is_not_read_for_ever(
    say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlxtune.commands.chat._MAX_LINE_CHARS", 100)
    outcome = say("chat", "--quiet", stdin="a" * 1000)
    assert outcome.code == 1
    assert "has a line of more than 100 characters" in outcome.err


def test_second_system_message_is_refused(say: Any, tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    path.write_text('[{"role": "system", "content": "a"}, {"role": "user", "content": "b"}]')
    error = say("generate", "--messages", path, "--system", "c").error
    assert error == f"{path}: already has a system message: leave out --system"


@pytest.mark.parametrize("messages", ["5", '"abc"', "null", "{}"])
def test_messages_must_be_a_list_even_with_a_system_message(
    say: Any, tmp_path: Path, messages: str
) -> None:
    path = tmp_path / "m.json"
    path.write_text(f'{{"messages": {messages}}}')
    error = say("generate", "--messages", path, "--system", "c").error
    assert error.startswith(f"{path}: 'messages' is not a list")


def test_escape_codes_of_a_model_never_reach_the_terminal(
    say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.text.tokenizer import FastTokenizer

    monkeypatch.setattr(FastTokenizer, "token_bytes", lambda _, ids: [b"\x1b[2J" for _ in ids])
    out = say("generate", "--prompt", "a", "--quiet", "--max-new-tokens", 2).out
    assert out == "\\x1b[2J\\x1b[2J\n"


def test_conversation_continues_after_memory_runs_out(
    say: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.backend.text import generate as room

    whole, calls = room.generate_step, iter(range(9))

    def failing(*args: Any, **options: Any) -> Any:
        if next(calls) < 2:
            raise RuntimeError("[malloc] Unable to allocate 78643200 bytes.")
        yield from whole(*args, **options)

    monkeypatch.setattr(room, "generate_step", failing)
    assert "memory ran out" in say("generate", "--quiet", "--prompt", "a").error
    outcome = say("chat", "--quiet", stdin=f"{PROMPT}\n{PROMPT}\n")
    assert outcome.code == 0
    assert "memory ran out" in outcome.err
    assert outcome.out.split()


# Chat


def test_conversation_through_a_pipe_is_answered_turn_by_turn_and_saved(
    say: Any, tmp_path: Path, expected: str
) -> None:
    saved = tmp_path / "saved.jsonl"
    table = tmp_path / "table.csv"
    table.write_text("a,b\n")
    lines = ["/save", PROMPT, "", "And Monday?", f"/save {table}", f"/save {saved}"]
    lines += ["/reset", PROMPT]
    lines += ["//help is said", "/nope", "/adapter", "/help", "/quit", "never said"]
    outcome = say("chat", "--system", "Be kind.", stdin="\n".join(lines))
    assert outcome.code == 0
    assert len(outcome.out.splitlines()) >= 4
    for said in (
        *("nothing to save yet", f"appended to {saved}", "new conversation"),
        *("unknown command: /nope", "there is no adapter", "/save [FILE]"),
    ):
        assert said in outcome.err
    assert f"{table}: conversations are JSON lines" in outcome.err
    assert table.read_text() == "a,b\n"
    (row,) = map(json.loads, saved.read_text().splitlines())
    roles = [message["role"] for message in row["messages"]]
    assert roles == ["system", "user", "assistant", "user", "assistant"]
    assert row["messages"][2]["content"] in outcome.out
    # The last answer equals the answer of `generate` to the conversation before it.
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(row["messages"][:-1]))
    again = say("generate", "--messages", path, "--quiet").out
    assert again == row["messages"][4]["content"] + "\n"


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An adapter that changes the answers of the demo's model."""
    output = tmp_path_factory.mktemp("adapted") / "adapters.safetensors"
    options: dict[str, Any] = {"targets": ("all",), "lr": 0.05, "max_steps": 2, "val_split": 0.0}
    data = str(DATA / "bookings_test.jsonl")
    train(TrainConfig(str(DEMO), data, output=str(output), quiet=True, **options))
    return output


def test_both_models_answer_each_with_its_own_conversation(
    say: Any, adapter: Path, tmp_path: Path, expected: str
) -> None:
    saved = tmp_path / "saved.jsonl"
    lines = [PROMPT, "And Monday?", f"/save {saved}", "/base", "/reset", PROMPT, "/both", "/reset"]
    outcome = say("chat", "--adapter", adapter, "--both", stdin="\n".join([*lines, PROMPT]))
    assert outcome.code == 0, outcome.err
    assert f"the base model {DEMO} and the adapter {adapter} answer side by side" in outcome.err
    assert f"the base model {DEMO} answers from now on" in outcome.err
    said = outcome.out
    assert said.startswith(f"base model: {expected}\nadapter: ")
    assert said.count(expected) == 3
    (row,) = map(json.loads, saved.read_text().splitlines())
    answers = [message["content"] for message in row["messages"] if message["role"] == "assistant"]
    assert len(answers) == 2
    # The adapter's answers are saved, and each continues the adapter's own conversation.
    path = tmp_path / "asked.json"
    path.write_text(json.dumps(row["messages"][:-1]))
    again = say("generate", "--adapter", adapter, "--messages", path, "--quiet").out
    assert again == answers[1] + "\n"
    assert f"adapter: {answers[1]}\n" in said


def test_chat_says_which_model_answers_and_both_needs_an_adapter(say: Any, adapter: Path) -> None:
    assert f"the base model {DEMO} answers; /help" in say("chat").err
    assert f"the adapter {adapter} answers; /help" in say("chat", "--adapter", adapter).err
    assert "--both compares the base model with an adapter" in say("chat", "--both").error


def test_saved_conversations_are_read_by_train(say: Any, cli: Cli, tmp_path: Path) -> None:
    saved = tmp_path / "saved.jsonl"
    saved.write_text('{"messages": []}')  # without a newline at its end
    say("chat", stdin=f"{PROMPT}\n/save {saved}\nAnd Monday?\n/save\n")
    assert len(saved.read_text().splitlines()) == 3
    options = ["--model-path", DEMO, "--data", saved, "--val-split", 0]
    found = json.loads(cli("inspect", *options, "--json").out)
    assert found["files"][0]["rows_train"] == 2


def test_line_is_appended_whole_or_not_at_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "lines.jsonl"
    append_line(path, "one")
    append_line(path, "two")
    assert path.read_text() == "one\ntwo\n"

    def full(descriptor: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("mlxtune.core.files.writing._sync", full)
    with pytest.raises(OutputError, match="No space left"):
        append_line(path, "three")
    assert path.read_text() == "one\ntwo\n"


def start_in_terminal(*arguments: object) -> tuple[subprocess.Popen[bytes], int]:
    ours, its = os.openpty()
    command = [sys.executable, "-m", "mlxtune", *map(str, arguments)]
    process = subprocess.Popen(command, stdin=its, stdout=its, stderr=its, start_new_session=True)
    os.close(its)
    return process, ours


def read_until(terminal: int, pattern: bytes) -> bytes:
    seen = b""
    while not re.search(pattern, seen):
        ready, _, _ = select.select([terminal], [], [], SECONDS)
        if not ready:
            raise AssertionError(f"{pattern!r} was never printed:\n{seen.decode()}")
        seen += os.read(terminal, 4096)
    return seen


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs terminals")
def test_ctrl_c_stops_the_answer_and_not_the_program_and_ctrl_d_ends_it() -> None:
    # With this seed, the answer is long enough.
    endless = ["--max-new-tokens", 10**6, "--temperature", 3, "--seed", 1]
    process, terminal = start_in_terminal("chat", "--model-path", DEMO, *endless, "--quiet")
    try:
        read_until(terminal, rb"> ")
        # No answer is being written. A signal that comes before readline waits for a key takes
        # effect after the line.
        process.send_signal(signal.SIGINT)
        os.write(terminal, b"\n")
        read_until(terminal, rb"Ctrl-D or /quit quits(.|\s)*> ")
        os.write(terminal, b"Hello\n")
        read_until(terminal, rb"Hello\s+(.|\s){3}")
        process.send_signal(signal.SIGINT)
        read_until(terminal, rb"\n(.*)> ")
        os.write(terminal, b"/reset\n")
        read_until(terminal, rb"new conversation(.|\s)*> ")
        os.write(terminal, b"\x04")
        assert process.wait(SECONDS) == 0
    finally:
        process.kill()
        process.wait()
        os.close(terminal)


@pytest.mark.slow
def test_ctrl_c_ends_generate_with_130() -> None:
    command = [sys.executable, "-m", "mlxtune", "generate", "--model-path", str(DEMO)]
    endless = ["--prompt", "Hello", "--max-new-tokens", "1000000", "--temperature", "3"]
    endless += ["--seed", "1"]
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    with subprocess.Popen([*command, *endless], **pipes) as process:
        try:
            assert process.stdout is not None
            process.stdout.read(1)
            process.send_signal(signal.SIGINT)
            _, err = process.communicate(timeout=SECONDS)
        finally:
            process.kill()
    assert process.returncode == 130
    assert "Traceback" not in err
    assert err.splitlines()[-1] == "mlxtune: interrupted"


# The rows of a file

ASKED = [
    "A table for two, Sunday at noon. Ida Park",
    "Hello",
    "Four on Friday, one o'clock.",
]


def prompts_file(folder: Path) -> Path:
    path = folder / "prompts.jsonl"
    message = {"role": "user", "content": ASKED[2]}
    rows = [
        {"Question": ASKED[0], "id": 7},
        {"prompt": ASKED[1], "completion": "not this"},
        {"wrong": "key"},
        {"messages": [message, {"role": "assistant", "content": "left out"}]},
    ]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rows_of_a_file_get_the_answers_of_single_prompts_in_order(
    say: Any, tmp_path: Path
) -> None:
    output = tmp_path / "new" / "answers.jsonl"
    outcome = say("generate", "--quiet", "--data", prompts_file(tmp_path), "--output", output)

    assert (outcome.code, outcome.out) == (0, "")
    assert "prompts.jsonl:3: no 'prompt' or 'messages'" in outcome.err
    found = lines_of(output)
    assert [line["row"] for line in found] == [1, 2, 3, 4]
    assert found[2]["error"].endswith("(its keys: 'wrong'): rename one")
    alone = [str(generate(model_path=DEMO, prompt=each, max_new_tokens=8)) for each in ASKED]
    assert [line["answer"] for line in found if "answer" in line] == alone
    assert found[3]["messages"][-1]["role"] == "user"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", '{"prompt": " "}\n{"prompt": null, "id": 1}\n{"prompt": "Hi"}\n'),
        ("a.csv", 'prompt,id\n" ",1\n,2\nHi,3\n'),
    ],
)
def test_empty_prompts_are_named_and_counted(
    say: Any, tmp_path: Path, name: str, content: str
) -> None:
    data, output = tmp_path / name, tmp_path / "answers.jsonl"
    data.write_text(content)
    outcome = say("generate", "--data", data, "--output", output, "--max-new-tokens", 1)
    assert outcome.err.count("'prompt' is empty: write a prompt, or remove the row") == 2
    assert f"1 answer in {output}, 2 rows not answered" in outcome.err
    assert len(re.findall("^(?:Memory|Model) ", outcome.err, re.MULTILINE)) == 2


def test_answers_to_rows_are_resumed_and_the_file_is_the_same(say: Any, tmp_path: Path) -> None:
    command = ["generate", "--quiet", "--data", prompts_file(tmp_path), "--output"]
    sampled = ["--temperature", 1, "--seed", 3]
    whole, part = tmp_path / "whole.jsonl", tmp_path / "part.jsonl"
    assert say(*command, whole, *sampled).code == 0
    content = whole.read_bytes()
    for kept in (0, 2, 4):
        lines = content.splitlines(keepends=True)
        part.write_bytes(b"".join(lines[:kept]) + b'{"row": 9, "ans'[: 15 * (kept < 4)])
        assert say(*command, part, *sampled).code == 0
        assert part.read_bytes() == content

    refused = say(*command, part, "--temperature", 1, "--seed", 4).error
    assert refused.startswith(f"{part} has answers to other prompts")
    assert part.read_bytes() == content
    assert say(*command, part, "--temperature", 0, "--overwrite").code == 0
    assert part.read_bytes() != content
    answer = json.dumps(lines_of(whole)[0]["answer"], ensure_ascii=False).encode()
    for foreign in (b"a file of somebody else\n", b"[1]\n", content.replace(answer, b'"forged"')):
        part.write_bytes(foreign)
        assert "has answers to other prompts" in say(*command, part, *sampled).error
        assert part.read_bytes() == foreign


@pytest.mark.parametrize("link", [None, os.symlink, os.link])
def test_prompts_are_never_replaced_by_their_answers(
    say: Any, tmp_path: Path, link: Callable[[Path, Path], None] | None
) -> None:
    data = prompts_file(tmp_path)
    output, content = tmp_path / "answers.jsonl", data.read_bytes()
    if link is None:
        output = tmp_path / "none" / ".." / data.name
        output.parent.parent.mkdir()
    else:
        link(data, output)
    refused = say("generate", "--data", data, "--output", output, "--overwrite").error
    assert refused == f"{output} is read by this run: choose another --output"
    assert data.read_bytes() == content


def test_interrupt_keeps_the_finished_answers(
    say: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, output = Generator.answer, tmp_path / "answers.jsonl"

    def answer(self: Generator, prompt: Any, *more: Any) -> Any:
        if output.read_bytes():
            raise KeyboardInterrupt
        return whole(self, prompt, *more)

    monkeypatch.setattr(Generator, "answer", answer)
    outcome = say("generate", "--data", prompts_file(tmp_path), "--output", output)
    assert outcome.code == 130
    assert "answers.jsonl has 1 answer: the same command adds the others" in outcome.err
    assert [line["row"] for line in lines_of(output)] == [1]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--data", "a"], "--data needs a file for its answers: give --output answers.jsonl"),
        (["--data", "a", "--output", "b.csv"], "--output b.csv must end in .jsonl: name a file"),
        (["--output", "b.jsonl", "--prompt", "a"], "--output and --overwrite are for the answers"),
        (["--data", "a", "--output", "b.jsonl", "--json"], "--json is for one answer"),
        (["--data", "a", "--output", "b.jsonl", "--prompt", "a"], "are both given: keep one"),
        (["--data", "none.csv", "--output", "b.jsonl"], "none.csv: no such file: check --data"),
        (["--data", ".", "--output", "b.jsonl"], ". is a folder: name a file in it"),
    ],
)
def test_options_of_a_file_of_prompts_are_checked(
    say: Any, arguments: list[str], said: str
) -> None:
    assert said in say("generate", *arguments).error


def test_answer_prints_as_its_text() -> None:
    answer = generate(model_path=DEMO, prompt=ASKED[0], max_new_tokens=5)
    assert f"{answer}" == answer.text != ""
