"""Every row's fate is known for any content, from a file's lines to tokens and masks.

Each message has its own characters (own_characters.py), so each supervised token reveals its
message.
"""

from __future__ import annotations

import functools
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from mlxtune.core.data import problems
from mlxtune.core.data.cache import encode_file
from mlxtune.core.data.conversation import Conversation, Message
from mlxtune.core.data.corpus import Corpus
from mlxtune.core.data.encode import EncodedRows, Encoder, Example
from mlxtune.core.data.encoded_file import EncodedFile
from mlxtune.core.data.model_template import ModelTemplate
from mlxtune.core.data.problems import BadRowError, RowTally, SkippedRows
from mlxtune.core.data.sources.recognition import read_rows
from mlxtune.core.data.template import TEMPLATES, Rendering, Template
from tests.core.data import renderers
from tests.core.data.encoding import NO_LIMIT, TOKENIZERS, SmallTokenizer
from tests.core.data.own_characters import ENDS, owners, rows, texts
from tests.core.data.renderers import REFUSED, RENDERERS, Messages, Render, Renderer
from tests.slow import long_except, slow_except


def encode_lines(
    folder: Path, lines: Iterable[str], tokenizer: SmallTokenizer, template: Template, kind: str
) -> EncodedFile:
    path = folder / "data.jsonl"
    path.write_text("\n".join(lines), encoding="utf-8")

    def run(skipped: SkippedRows, told: RowTally) -> Iterable[EncodedRows]:
        skipped.places_per_kind = told.places_per_kind = NO_LIMIT
        read = read_rows(path, skipped, format=kind)
        return Encoder(template, tokenizer).encode(read, skipped, told)

    return encode_file(path, run, cache=None, key="")


def runs_of(example: Example) -> list[tuple[list[int], list[int]]]:
    """Return each stretch of supervised tokens, with the tokens before it."""
    edges = np.flatnonzero(np.diff(example.assistant_mask.astype(int), prepend=0, append=0))
    tokens = example.tokens.tolist()
    return [(tokens[:start], tokens[start:end]) for start, end in edges.reshape(-1, 2).tolist()]


def check_ledger(file: EncodedFile, lines: int, limit: int) -> None:
    """Check that each row is kept or skipped, and each token supervised, context or cut."""
    uncut = Corpus([file.arrays.truncate()])
    whole = {row: [e.tokens.tolist() for e in uncut if e.row == row] for row in uncut.row_numbers}
    truncated = file.truncate(limit)
    ledger = truncated.ledger()

    corpus = Corpus.of_files([truncated])
    assert ledger.adds_up()
    assert ledger.rows_read == lines
    skipped = [row for places in truncated.skipped.places.values() for row, _ in places]
    kept = {example.row for example in corpus}
    assert sorted([*skipped, *kept]) == list(range(1, lines + 1))
    assert ledger.rows_train == len(kept)
    assert ledger.tokens == sum(len(ids) for several in whole.values() for ids in several)
    assert ledger.tokens_supervised == sum(example.supervised for example in corpus)
    for example in corpus:
        assert len(example) <= limit
        assert example.tokens.tolist() in [ids[:limit] for ids in whole[example.row]]
        assert example.supervised > 0
        assert example.assistant_mask[0] == 0


def trained_turns(conversation: Conversation, turns: str, first_has_prompt: bool) -> list[int]:
    positions = [i for i, m in enumerate(conversation.messages) if m.role == "assistant"]
    positions = positions[-1:] if turns == "last" else positions
    return [
        i for i in positions if conversation.messages[i].trained and (i > 0 or first_has_prompt)
    ]


def without_unasked(
    conversation: Conversation, chosen: list[int], runs: int, told: Mapping[str, list[str]]
) -> list[int]:
    """Return the chosen turns, without unprompted turns if the template cannot write these.

    A note reports such turns. Each of them has a tool call, because not every template shows calls.
    """
    missing = len(chosen) - runs
    assert missing == 0 or told[problems.NO_PROMPT]
    unasked = [
        position
        for position in chosen[:-1]
        if not {m.role for m in conversation.messages[:position]} & {"user", "tool"}
        and conversation.messages[position].tool_calls
    ]
    assert missing in (0, len(unasked))
    return [position for position in chosen if not missing or position not in unasked]


def check_turn(message: Message, position: int, answer: str, told: Mapping[str, list[str]]) -> None:
    """Check that an answer is this whole message, up to the end of its turn."""
    assert owners(answer) <= {position}, "of another message"
    assert "겉" not in answer
    assert answer.rstrip().endswith(ENDS)
    tags = [message.content.count(tag) for tag in ("<think>", "</think>", "think>")]
    # The generation prompt may already have written a single tag.
    if tags in ([0, 0, 0], [1, 1, 2]):
        said = message.content.rpartition("</think>")[2].strip()
        assert said in answer
    if message.thinking and message.thinking not in answer:
        assert told[problems.DROPPED_THINKING]
    for call in message.tool_calls:
        function = call.get("function") or call
        for value in function.get("arguments", {}).values():
            assert owners(value) <= owners(answer)


def check_conversation(
    conversation: Conversation,
    examples: Sequence[Example],
    tokenizer: SmallTokenizer,
    chosen: list[int],
    prompt_of: Callable[[Conversation, int, str], str],
    told: Mapping[str, list[str]],
) -> None:
    runs = [run for example in examples for run in runs_of(example)]
    chosen = without_unasked(conversation, chosen, len(runs), told)
    for position, (before, run) in zip(chosen, runs, strict=True):
        text = tokenizer.decode(before)
        check_turn(conversation.messages[position], position, tokenizer.decode(run), told)
        prompt = prompt_of(conversation, position, text)
        (encoded,) = tokenizer.encode_batch([prompt])
        bos = [] if prompt == text else [tokenizer.bos_id]
        assert before == bos + list(encoded.ids)
        users = {i for i, m in enumerate(conversation.messages[:position]) if m.role == "user"}
        asked = {i for i in users if owners(conversation.messages[i].content)}
        assert asked <= owners(prompt) <= set(range(position))


def check_file(
    lines: list[dict[str, Any]],
    tokenizer: SmallTokenizer,
    template: Template,
    *,
    turns: str,
    limit: int,
    first_has_prompt: bool,
    prompt_of: Callable[[Conversation, int, str], str],
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        dumped = [json.dumps(line, ensure_ascii=i % 2 == 0) for i, line in enumerate(lines)]
        file = encode_lines(Path(folder), dumped, tokenizer, template, "chat")
        unread = SkippedRows(Path(folder))
        conversations = list(read_rows(Path(folder) / "data.jsonl", unread, format="chat"))
    corpus = Corpus([file.arrays.truncate()])
    for conversation in conversations:
        assert isinstance(conversation, Conversation)
        examples = [example for example in corpus if example.row == conversation.row]
        if not examples:
            continue
        told = {
            kind: [detail for row, detail in places if row == conversation.row]
            for kind, places in file.notes.places.items()
        }
        chosen = trained_turns(conversation, turns, first_has_prompt)
        event("checked")
        check_conversation(conversation, examples, tokenizer, chosen, prompt_of, told)
    check_ledger(file, len(lines), limit)
    # Rows that this project has no reason to refuse are kept.
    reasons = " ".join(file.skipped.counts)
    assert "tokenises to nothing" not in reasons


OPTIONS: dict[str, Any] = {
    "lines": st.lists(rows(), min_size=1, max_size=3),
    "chosen": st.sampled_from(sorted(TOKENIZERS)),
    "turns": st.sampled_from(["all", "all", "last"]),
    "limit": st.integers(2, 60) | st.just(NO_LIMIT),
}


@pytest.mark.parametrize("name", slow_except(sorted(TEMPLATES), "qwen3"))
@given(bos=st.sampled_from([None, "<bos>"]), **OPTIONS)
def test_rows_in_a_built_in_template(
    name: str,
    bos: str | None,
    lines: list[dict[str, Any]],
    chosen: str,
    turns: str,
    limit: int,
) -> None:
    def template(conversation: Conversation) -> Rendering:
        return TEMPLATES[name](conversation, turns)

    def prompt_of(conversation: Conversation, position: int, _: str) -> str:
        before = (*conversation.messages[:position], Message("assistant", "(here)"))
        asked = Conversation(1, before, conversation.tools)
        (rendered,) = TEMPLATES[name](asked, "all").texts
        return rendered.text[: rendered.text.rindex("(here)")]

    check_file(
        lines,
        TOKENIZERS[chosen](bos, None),
        template,
        turns=turns,
        limit=limit,
        first_has_prompt=True,
        prompt_of=prompt_of,
    )


def check_model_template(
    render: Render,
    source: str,
    lines: list[dict[str, Any]],
    chosen: str,
    turns: str,
    limit: int,
    **options: Any,
) -> None:
    given = set()

    def recorded(messages: Messages, *, add_generation_prompt: bool, **rest: Any) -> str:
        text = render(messages, add_generation_prompt=add_generation_prompt, **rest)
        if add_generation_prompt:
            given.add(text)
        return text

    def prompt_of(_: Conversation, __: int, text: str) -> str:
        assert text in given
        return text

    check_file(
        lines,
        TOKENIZERS[chosen](None, None),
        ModelTemplate(Renderer(recorded), ENDS, source, turns=turns, **options),
        turns=turns,
        limit=limit,
        first_has_prompt=False,
        prompt_of=prompt_of,
    )


MODEL_OPTIONS = OPTIONS | {
    "thinking": st.sampled_from(["auto", "auto", "on", "off"]),
    "merge_system": st.booleans(),
}


@pytest.mark.parametrize("name", long_except(sorted(RENDERERS), sorted(RENDERERS)[0]))
@given(**MODEL_OPTIONS)
def test_rows_in_a_models_template(name: str, **options: Any) -> None:
    check_model_template(*RENDERERS[name], **options)


@functools.cache
def jinja(path: Path) -> tuple[Render, str]:
    """Compile a template as transformers does."""
    sandbox = pytest.importorskip("jinja2.sandbox", reason="needs jinja2 to render the templates")
    from jinja2 import TemplateError

    def refuse(reason: str) -> None:
        raise TemplateError(reason)

    environment = sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.filters["tojson"] = lambda value, **_: json.dumps(value, ensure_ascii=False)
    environment.globals["raise_exception"] = refuse
    source = path.read_text(encoding="utf-8")
    template = environment.from_string(source)

    def render(messages: Messages, *, enable_thinking: bool | None, **options: Any) -> str:
        thinking = {} if enable_thinking is None else {"enable_thinking": enable_thinking}
        try:
            return str(template.render(messages=messages, bos_token="<bos>", **thinking, **options))
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise BadRowError(REFUSED, str(error)) from error

    return render, source


JINJA = [
    *("diffusion_gemma", "gemma", "gemma3", "qwen2_5", "qwen3", "qwen3_5_think"),
    "qwen3_instruct_2507",
]


@pytest.mark.parametrize("name", slow_except(JINJA, "qwen3"))
def test_rows_in_a_real_template(shared: Path, name: str) -> None:
    found = jinja(shared / "templates" / f"{name}.jinja")

    @given(**MODEL_OPTIONS)
    def check(**options: Any) -> None:
        check_model_template(*found, **options)

    check()


@pytest.mark.parametrize("name", JINJA)
def test_real_template_writes_its_tags_around_a_result_once(shared: Path, name: str) -> None:
    render, source = jinja(shared / "templates" / f"{name}.jinja")
    template = ModelTemplate(Renderer(render), ENDS, source)

    def rendered(result: str) -> str:
        call = {"name": "add", "arguments": {}}
        turns = [("user", "a"), {"role": "assistant", "content": "b", "tool_calls": [call]}]
        row = renderers.converse(*turns, ("tool", result), ("assistant", "c"))
        found = template(row)
        assert problems.DROPPED_TEXT not in found.notes
        return found.texts[-1].text

    tag = "<tool_response>"
    if tag not in source:
        pytest.skip(f"{name} writes no tags around results")
    assert rendered(f"{tag}\n1\n</tool_response>") == rendered("1")
    assert rendered("1").count(tag) == 1


@given(
    written=st.lists(texts("あ"), min_size=1, max_size=4),
    chosen=st.sampled_from(sorted(TOKENIZERS)),
    bos=st.sampled_from([None, "<bos>"]),
    eos=st.sampled_from([None, "<|endoftext|>"]),
    limit=st.integers(2, 20) | st.just(NO_LIMIT),
)
def test_rows_of_plain_text(
    written: list[str], chosen: str, bos: str | None, eos: str | None, limit: int
) -> None:
    tokenizer = TOKENIZERS[chosen](bos, eos)
    with tempfile.TemporaryDirectory() as folder:
        lines = [json.dumps({"text": text}) for text in written]
        file = encode_lines(Path(folder), lines, tokenizer, TEMPLATES["qwen3"], "text")
    for example in Corpus([file.arrays.truncate()]):
        text = written[example.row - 1]
        ids = tokenizer.encode_batch([text])[0].ids
        own_bos = [] if bos is None or ids[:1] == [tokenizer.bos_id] else [tokenizer.bos_id]
        assert example.tokens.tolist() == [*own_bos, *ids, tokenizer.eos_id]
        assert example.assistant_mask.tolist() == [0] + [1] * (len(example) - 1)
    if eos is None:
        assert len(Corpus([file.arrays.truncate()])) == 0
    check_ledger(file, len(written), limit)
