"""Model folders whose tokenizer, template or config would exhaust memory if it were accepted."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.text import tokenizer
from mlxtune.backend.text.tokenizer import try_tokenizer
from mlxtune.core.data import encode
from mlxtune.core.data.template import RenderedText, Rendering
from mlxtune.errors import ModelError
from tests.attacks.limits import limited
from tests.command import Cli
from tests.models import CHATML
from tests.slow import long_except

Json = dict[str, Any]
GROWS = r"its normalizer turns a character into up to [\d.e+]+ characters"


def _replace(content: str, *, pattern: str = "a", kind: str = "String") -> Json:
    return {"type": "Replace", "pattern": {kind: pattern}, "content": content}


def _sequence(*steps: Json) -> Json:
    return {"normalizer": {"type": "Sequence", "normalizers": list(steps)}}


def _nested(step: Json, depth: int) -> Json:
    for _ in range(depth):
        step = {"type": "Sequence", "normalizers": [step, step]}
    return {"normalizer": step}


# The changes that each attack makes to tokenizer.json, and the expected message.
TOKENIZERS: dict[str, tuple[Callable[[], Json], str]] = {
    "33 that double": (lambda: _sequence(*[_replace("aa")] * 33), GROWS),
    "one of 30 MB": (lambda: {"normalizer": _replace("a" * 30_000_000)}, GROWS),
    "one of 30 MB for any character": (
        lambda: {"normalizer": _replace("b" * 30_000_000, pattern=".", kind="Regex")},
        GROWS,
    ),
    "33 that double what is rare": (
        lambda: _sequence(*[_replace("ßß", pattern="ß")] * 33),
        GROWS,
    ),
    "33 that double a word": (
        lambda: _sequence(*[_replace("secretsecret", pattern="secret")] * 33),
        GROWS,
    ),
    "33 that match nothing": (
        lambda: _sequence(*[_replace("x", pattern="", kind="Regex")] * 33),
        GROWS,
    ),
    "8 that match a place": (
        lambda: _sequence(*[_replace("xxxx", pattern=r"\b", kind="Regex")] * 8),
        GROWS,
    ),
    "20 of two by turns": (
        lambda: _sequence(*[_replace("bb"), _replace("aa", pattern="b")] * 10),
        GROWS,
    ),
    "sequences in sequences": (lambda: _nested(_replace("aa"), 6), GROWS),
    "prefixes of prefixes": (
        lambda: _sequence(*[{"type": "Prepend", "prepend": "a" * 1000}] * 4),
        GROWS,
    ),
}
TEMPLATES = {
    "12 million characters": "{{ 'a' * 12000000 }}",
    "12 million in a loop": "{% for i in range(12000) %}{{ 'abcde fgh ' * 100 }}{% endfor %}",
    "2 million new lines": "{{ '\n' * 2000000 }}",
    "a conversation 100,000 times": "{% for i in range(100000) %}{{ messages }}{% endfor %}",
    "a million control tokens": "{{ '<|im_end|>' * 1000000 }}",
}
CONFIGS: dict[str, Json] = {
    "experts": {"model_type": "qwen3_moe", "num_experts": 10**8},
    "local experts": {"num_local_experts": 10**8},
    "routed experts": {"n_routed_experts": 10**8},
    "layers": {"num_hidden_layers": 10**8},
    "experts of a part": {"text_config": {"num_experts": 10**8}},
    "layers of a part of a part": {"text_config": {"audio_config": {"num_hidden_layers": 10**8}}},
    "layers of sight": {"vision_config": {"num_hidden_layers": 10**8}},
}


@pytest.mark.parametrize("name", TOKENIZERS)
def test_tokenizer_that_expands_text_is_refused_before_it_is_loaded(
    broken: Path, inspect: Cli, name: str
) -> None:
    changes, said = TOKENIZERS[name]
    path = broken / "tokenizer.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes()))
    with limited():
        outcome = inspect("--model-path", broken, "--no-cache")
    _assert_refused(outcome.error, path, said)


@pytest.mark.slow
@pytest.mark.parametrize("name", long_except(TEMPLATES, "2 million new lines"))
def test_template_that_renders_millions_of_characters_is_refused(
    broken: Path, inspect: Cli, name: str
) -> None:
    (broken / "chat_template.jinja").write_text(TEMPLATES[name] + CHATML)
    with limited():
        error = inspect("--model-path", broken, "--no-cache").error
    assert "produces more text or values than any conversation needs" in error


@pytest.mark.parametrize("name", CONFIGS)
def test_config_of_a_hundred_million_is_refused(broken: Path, inspect: Cli, name: str) -> None:
    path = broken / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | CONFIGS[name]))
    with limited():
        error = inspect("--model-path", broken, "--no-cache").error
    _assert_refused(error, path, "is more than 10,000")


def test_tokenizer_is_tried_once_per_version(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Path(shutil.copytree(model, tmp_path / "model"))
    tried: list[Path] = []
    monkeypatch.setattr(tokenizer, "_problem_of", lambda path: tried.append(path) or "")
    for _ in range(2):
        try_tokenizer(folder, tmp_path / "cache")
    assert len(tried) == 1
    path = folder / "tokenizer.json"
    path.write_text(path.read_text() + "\n")
    try_tokenizer(folder, tmp_path / "cache")
    assert len(tried) == 2
    monkeypatch.setattr(tokenizer, "_problem_of", lambda path: "is bad")
    path.write_text(path.read_text() + "\n")
    for _ in range(2):
        with pytest.raises(ModelError, match="is bad: use the tokenizer of the original model"):
            try_tokenizer(folder, tmp_path / "cache")


def test_tokenizer_gets_few_characters_at_once_but_all_rows_in_their_order() -> None:
    rows = [
        Rendering(number, (RenderedText("a" * length, ()),))
        for number, length in enumerate([1, 3 * 2**20, 2**20, 2**20, 1, *[2] * 1500])
    ]
    chunks = list(encode._chunks(iter(rows), encode._total))
    assert [row for chunk in chunks for row in chunk] == rows
    for chunk in chunks:
        assert len(chunk) <= 512
        assert len(chunk) == 1 or sum(len(row.texts[0].text) for row in chunk) <= 2**21
    assert len(chunks) < 10


def _assert_refused(error: str, path: Path, said: str) -> None:
    assert error.startswith(str(path)), error
    assert re.search(said, error), error
