"""Compare turns under every template of ../shared with transformers' prompts."""

from __future__ import annotations

import copy
import functools
import json
import shutil
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from transformers import AutoTokenizer

from mlxtune.backend.text.tokenizer import ModelTokenizer, load_tokenizer
from mlxtune.config import DataConfig
from mlxtune.core.data.encode import Example
from mlxtune.session.dataset import Dataset, load_dataset
from mlxtune.session.reader import Reader

Row = dict[str, Any]

# Control tokens of Gemma 3 and 4, which Qwen's vocabulary lacks.
GEMMA_TOKENS = (
    *("<bos>", "<eos>", "<start_of_turn>", "<end_of_turn>", "<|turn>", "<turn|>", "<|think|>"),
    *("<|channel>", "<channel|>", "<|tool>", "<tool|>", "<|tool_call>", "<tool_call|>"),
    *("<|tool_response>", "<tool_response|>", '<|"|>'),
)


@dataclass(frozen=True)
class Template:
    """A template file, and its notation according to the model's documentation.

    `calls` is the notation of tool calls, empty if the template omits them. `in_content` and
    `in_field` are the notations of thinking from tags and from a field of the data. `unthought`
    begins an answer without thinking while thinking is on; `unthought_after_tool` does so after a
    tool's answer.
    """

    file: str
    end: str = "<|im_end|>"
    trims: bool = False
    calls: str = "json"
    asks_for_thinking: bool = False
    in_content: str = "<think>\n{}\n</think>\n\n"
    in_field: str = ""
    unthought: str = ""
    unthought_after_tool: str = ""

    @property
    def is_gemma(self) -> bool:
        return "gemma" in self.file

    @property
    def modes(self) -> tuple[str, ...]:
        """The possible values of --thinking."""
        return ("auto", "on", "off") if self.asks_for_thinking else ("auto",)


_EMPTY_BLOCK = "<think>\n\n</think>\n\n"
TEMPLATES = {
    template.file: template
    for template in (
        Template("qwen2_5.jinja"),
        Template(
            "qwen3.jinja",
            asks_for_thinking=True,
            in_field="<think>\n{}\n</think>\n\n",
            unthought=_EMPTY_BLOCK,
            unthought_after_tool=_EMPTY_BLOCK,
        ),
        Template("qwen3_instruct_2507.jinja"),
        Template(
            "qwen3_5_think.jinja",
            trims=True,
            calls="xml",
            asks_for_thinking=True,
            # The generation prompt already opens the thinking block.
            in_content="{}\n</think>\n\n",
            in_field="{}\n</think>\n\n",
            unthought="\n</think>\n\n",
            unthought_after_tool="\n</think>\n\n",
        ),
        Template("gemma.jinja", "<end_of_turn>", trims=True, calls=""),
        Template("gemma3.jinja", "<end_of_turn>", trims=True, calls=""),
        Template(
            "diffusion_gemma.jinja",
            "<turn|>",
            trims=True,
            calls="gemma",
            asks_for_thinking=True,
            in_content="<|channel>thought\n{}\n<channel|>",
            in_field="<|channel>thought\n{}\n<channel|>",
            # The generation prompt opens the thinking channel only after a tool's answer.
            unthought_after_tool="\n<channel|>",
        ),
    )
}


def special_tokens(template: Template) -> dict[str, str]:
    return {"bos_token": "<bos>"} if template.is_gemma else {}


@dataclass(frozen=True)
class Folder:
    """A folder with a real vocabulary and one of the templates, but without a model.

    `ours` is the tokenizer as mlxtune reads it, `theirs` as transformers does. Both are loaded from
    `source`, once for all folders with the same source.
    """

    path: Path
    template: Template
    source: Path

    @property
    def ours(self) -> ModelTokenizer:
        return load_once(self.source)

    @property
    def theirs(self) -> Any:
        return _load_theirs(self.source)

    def encode(self, data: Path, **options: Any) -> Dataset:
        """Encode a file as `train` does, without truncation and without validation rows."""
        defaults = {"max_seq_len": 10**9, "val_split": 0, "no_cache": True}
        config = DataConfig(str(self.path), str(data), **defaults | options)
        reader = Reader(config, self.path)
        reader.tokenizer = self.ours  # loading it again would take seconds
        return load_dataset(config, reader)

    def prompt(self, messages: Sequence[Row], **options: Any) -> list[int]:
        """Return the tokens of transformers' prompt for the next turn."""
        ids = self.theirs.apply_chat_template(
            list(messages),
            chat_template=(self.path / "chat_template.jinja").read_text(encoding="utf-8"),
            add_generation_prompt=True,
            tokenize=True,
            return_dict=False,
            **options,
        )
        return list(ids)


# Loading a real vocabulary takes more than a second.
load_once = functools.cache(load_tokenizer)
_load_theirs = functools.cache(AutoTokenizer.from_pretrained)


class Folders(dict[str, Folder]):
    """The folders of templates below `parent`, by the template's file; written when first used."""

    def __init__(self, shared: Path, parent: Path) -> None:
        self._shared, self._parent = shared, parent

    def __missing__(self, file: str) -> Folder:
        template, path = TEMPLATES[file], self._parent / file
        source = self._gemma if template.is_gemma else self._shared / "tokenizers" / "qwen3"
        shutil.copytree(source, path)
        shutil.copy(self._shared / "templates" / file, path / "chat_template.jinja")
        self[file] = Folder(path, template, source)
        return self[file]

    @functools.cached_property
    def _gemma(self) -> Path:
        folder = self._parent / "gemma-tokenizer"
        _write_gemma_tokenizer(self._shared / "tokenizers" / "qwen3", folder)
        return folder


def _write_gemma_tokenizer(qwen: Path, folder: Path) -> None:
    tokenizer = copy.deepcopy(_load_theirs(qwen))
    tokenizer.add_special_tokens({"additional_special_tokens": list(GEMMA_TOKENS)})
    tokenizer.bos_token, tokenizer.eos_token = "<bos>", "<eos>"
    tokenizer.chat_template = None
    tokenizer.save_pretrained(folder)
    # As in Gemma's own folders, a token other than eos_token ends a turn.
    ends = [tokenizer.convert_tokens_to_ids(end) for end in ("<eos>", "<end_of_turn>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": ends}))


def turns_of(examples: Iterable[Example]) -> Iterator[tuple[list[int], list[int]]]:
    """Yield the tokens before each supervised stretch, and the stretch's tokens."""
    for example in examples:
        ids, mask = example.tokens.tolist(), example.assistant_mask.tolist()
        end = 0
        while 1 in mask[end:]:
            start = mask.index(1, end)
            end = mask.index(0, start) if 0 in mask[start:] else len(mask)
            yield ids[:start], ids[start:end]


def calls_of(message: Row) -> list[Row]:
    return [call["function"] for call in message.get("tool_calls") or ()]


def _gemma_value(value: Any) -> str:
    if isinstance(value, str):
        return f'<|"|>{value}<|"|>'
    if isinstance(value, dict):
        return "{" + ",".join(f"{k}:{_gemma_value(value[k])}" for k in _sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ",".join(map(_gemma_value, value)) + "]"
    return (
        "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)
    )


def _xml_value(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False) if isinstance(value, dict | list) else str(value)


def _sorted(names: Iterable[str]) -> list[str]:
    return sorted(names, key=str.lower)


def _written_calls(template: Template, message: Row) -> str:
    blocks = []
    for call in calls_of(message):
        name, arguments = call["name"], call["arguments"]
        if template.calls == "gemma":
            blocks.append(f"<|tool_call>call:{name}{_gemma_value(arguments)}<tool_call|>")
        elif template.calls == "xml":
            parameters = "".join(
                f"<parameter={key}>\n{_xml_value(value)}\n</parameter>\n"
                for key, value in arguments.items()
            )
            blocks.append(f"<tool_call>\n<function={name}>\n{parameters}</function>\n</tool_call>")
        else:
            arguments = json.dumps(arguments, ensure_ascii=False)
            block = f'{{"name": "{name}", "arguments": {arguments}}}'
            blocks.append(f"<tool_call>\n{block}\n</tool_call>")
    return ("" if template.calls == "gemma" else "\n").join(blocks)


def answer(template: Template, mode: str, messages: Sequence[Row], position: int) -> str:
    """Return a turn's supervised text as the model's documentation says; `mode` is on or off."""
    message = messages[position]
    _, has_block, text = message["content"].rpartition("</think>")
    if has_block or template.trims:
        text = text.strip()
    thinking = _thinking(message)
    before = ""
    if thinking and (mode == "on" or not template.asks_for_thinking):
        before = (template.in_content if has_block else template.in_field).format(thinking)
    elif mode == "on" and template.asks_for_thinking:
        after_tool = messages[position - 1]["role"] == "tool"
        before = template.unthought_after_tool if after_tool else template.unthought
    calls = _written_calls(template, message)
    if template.calls == "gemma":
        # Gemma's calls come first, and the turn stays open for the tool's response.
        return before + calls + text + ("<|tool_response>" if calls else template.end)
    between = ("\n\n" if template.calls == "xml" else "\n") if text and calls else ""
    return before + text + between + calls + template.end


def _thinking(message: Row) -> str:
    block = message["content"].rpartition("</think>")[0].partition("<think>")[2]
    return str(block.strip() or message.get("reasoning_content") or "")


def compare(folder: Folder, mode: str, data: Path) -> Counter[str]:
    """Compare every turn of a file with transformers' prompt and the documented answer.

    Returns the number of turns by kind. Raises AssertionError at the first difference.
    """
    template = folder.template
    rows = [json.loads(line) for line in data.read_text(encoding="utf-8").rstrip("\n").split("\n")]
    dataset = folder.encode(data, thinking=mode)
    (ledger,) = dataset.ledgers
    assert ledger.adds_up()
    assert ledger.rows_read == len(rows)
    examples: dict[int, list[Example]] = {}
    for example in dataset.corpus:
        examples.setdefault(example.row, []).append(example)
    left_out = [
        row
        for row, content in enumerate(rows, start=1)
        if not template.calls and any(map(calls_of, content["messages"]))
    ]
    assert set(examples) == set(range(1, len(rows) + 1)) - set(left_out)
    refused = {"the model's template leaves out a tool call": len(left_out)} if left_out else {}
    assert ledger.rows_skipped == refused
    counts = Counter(rows=len(rows), refused=len(left_out), examples=ledger.examples)
    for row, of_row in examples.items():
        counts["turns"] += _compare_row(folder, mode, rows[row - 1], of_row, f"{data}:{row}")
    return counts


def _compare_row(
    folder: Folder, mode: str, content: Row, examples: list[Example], where: str
) -> int:
    template, messages = folder.template, content["messages"]
    if mode == "auto":
        mode = "on" if any(map(_thinking, messages)) else "off"
    options = {"enable_thinking": mode == "on"} if template.asks_for_thinking else {}
    positions = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = list(turns_of(examples))
    assert len(turns) == len(positions), where
    for position, (before, supervised) in zip(positions, turns, strict=True):
        said = f"{template.file}, thinking {mode}: {where}, message {position + 1}"
        prompt = folder.prompt(messages[:position], tools=content.get("tools"), **options)
        assert before == prompt, said
        written = folder.theirs.decode(supervised, clean_up_tokenization_spaces=False)
        expected = answer(template, mode, messages, position)
        assert written == expected, f"{said}: {written!r} is not {expected!r}"
    return len(turns)
