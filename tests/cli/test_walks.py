"""docs/architecture.md lists the files that a row passes, and the forms that it has on the way.

A file counts if one of its functions receives or returns the row's text or tokens: alone, in a
container, or in a field of one of the package's classes. A class is a form if a field of it holds
the text or the tokens, alone or in containers. Both are found in a run, and nothing is left out.
"""

from __future__ import annotations

import mlxtune.backend  # loads a fast BLAS before mlx

# isort: split
import dataclasses
import inspect
import re
import sys
import threading
from collections import defaultdict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

import mlxtune
from mlxtune.backend.text import template_helper
from mlxtune.backend.text.tokenizer import load_tokenizer
from mlxtune.config import TrainConfig
from tests.models import CHATML, sums, write_chat, write_model
from tests.paths import DOCS

MAX_FILES, MAX_FORMS = 24, 14
# The heads of the two tables in docs/architecture.md.
FILES, FORMS = "| hop | where |", "| | form | made by |"
PACKAGE = Path(mlxtune.__file__).parent
ANSWER = "Quokkas nap at noon"
# Types outside the package that hold text or tokens; a class with such a field is a form.
PLAIN = {"str", "bytes", "dict", "list", "ndarray", "array"}


class Row:
    """Finds the text and the tokens of a row in values."""

    def __init__(self, text: str, tokens: Sequence[int]) -> None:
        self._text, self._bytes = text, text.encode()
        self._tokens = np.array(tokens, dtype=np.int64)

    def forms(self, value: Any) -> set[str]:
        """Return the names of the types in which a value holds the row; empty if it holds none."""
        kind = type(value)
        if issubclass(kind, str):
            return {"str"} if self._text in value else set()
        # A buffer of a stream, a bytearray, has the text in pieces, now and then as a whole.
        if issubclass(kind, bytes):
            return {"bytes"} if self._bytes in value else set()
        if issubclass(kind, np.ndarray | mx.array):
            return {kind.__name__} if self._has_tokens(value) else set()
        if kind is dict:
            found = set().union(*map(self.forms, value.values()))
            return found - PLAIN | {"dict"} if found & PLAIN else found
        if issubclass(kind, list | tuple):
            if value and type(value[0]) is int:
                return {"list"} if self._has_tokens(value) else set()
            return set().union(*map(self.forms, value))
        return self._of_object(value, kind)

    def _of_object(self, value: Any, kind: type) -> set[str]:
        """Look into an object of the package, and through immutable objects into others."""
        if not kind.__module__.startswith("mlxtune."):
            return set()
        slots = chain.from_iterable(getattr(each, "__slots__", ()) for each in kind.__mro__)
        fields = [getattr(value, name, None) for name in slots]
        fields += vars(value).values() if "__dict__" in dir(kind) else ()
        found = set().union(*map(self.forms, fields if _is_value(kind) else map(_plain, fields)))
        return found - PLAIN | {kind.__name__} if found & PLAIN else found

    def _has_tokens(self, value: Any) -> bool:
        try:
            numbers = np.asarray(value)
        except (ValueError, RuntimeError):  # a list of texts, or an array that is being traced
            return False
        if numbers.dtype.kind not in "iu":
            return False
        return self._tokens.tobytes() in numbers.astype(np.int64).tobytes()


def _is_value(kind: type) -> bool:
    parameters = getattr(kind, "__dataclass_params__", None)
    return parameters is not None and bool(parameters.frozen)


def _plain(value: Any) -> Any:
    """Return a value that an object holds; None if it is an object of the package too."""
    if isinstance(value, dict):
        return {key: _plain(each) for key, each in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(each) for each in value]
    return None if type(value).__module__.startswith("mlxtune.") else value


@dataclasses.dataclass
class Walk:
    """The files whose functions have a row, and the functions that return each form of it."""

    files: set[str] = dataclasses.field(default_factory=set)
    makers: dict[str, set[str]] = dataclasses.field(default_factory=lambda: defaultdict(set))


@contextmanager
def followed(row: Row) -> Iterator[Walk]:
    """Yield the walk of a row through the package's functions."""
    package, walk = f"{PACKAGE}/", Walk()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        code = frame.f_code
        path = code.co_filename.removeprefix(package)
        # Modules and class bodies run at import.
        is_ours = path != code.co_filename and code.co_flags & inspect.CO_OPTIMIZED
        if not is_ours or event not in ("call", "return"):
            return
        if event == "return":
            forms = row.forms(argument)
            for form in forms:
                walk.makers[form].add(f"{path}, {code.co_qualname}")
        else:
            forms = row.forms([frame.f_locals.get(name) for name in _parameters(code)])
        for form in forms - PLAIN:
            walk.makers[form]
        if forms:
            walk.files.add(path)

    threading.setprofile(note)
    sys.setprofile(note)
    try:
        yield walk
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]


def _parameters(code: CodeType) -> Sequence[str]:
    flags = (inspect.CO_VARARGS, inspect.CO_VARKEYWORDS)
    count = code.co_argcount + code.co_kwonlyargcount + sum(bool(code.co_flags & f) for f in flags)
    names: Sequence[str] = code.co_varnames[:count]
    return names


@dataclasses.dataclass(frozen=True)
class Form:
    """A line of the table of forms: a type, and the function that makes values of it, if any."""

    kind: str
    made_by: str


def table(heading: str) -> str:
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    return heading + text.partition(heading)[2].partition("\n\n")[0]


def listed_forms() -> list[Form]:
    cells = [line.split(" | ") for line in table(FORMS).splitlines()[2:]]
    return [Form(re.findall(r"`(\w+)`", form)[0], by.replace("`", "")) for _, form, by, _ in cells]


@pytest.fixture(scope="module")
def walk(tmp_path_factory: pytest.TempPathFactory) -> Walk:
    """The walk of the third of eight rows, from its file to the loss of the first step."""
    folder = tmp_path_factory.mktemp("walk")
    model = write_model(folder / "model", "qwen3")
    (model / "chat_template.jinja").write_text(CHATML)
    rows = sums(8)
    rows[2] = [("user", "What do quokkas do?"), ("assistant", ANSWER)]
    chat = write_chat(folder / "chat.jsonl", rows)
    tokens = load_tokenizer(model).encode_batch([ANSWER])[0].ids
    assert len(tokens) > 5
    config = TrainConfig(
        *(str(model), str(chat)),
        output=str(folder / "out" / "adapters.safetensors"),
        **{"max_steps": 1, "val_split": 0, "samples": 0, "no_cache": True, "quiet": True},
    )
    with followed(Row(ANSWER, tokens)) as walked:
        mlxtune.train(config)
    # The helper that renders is another process, which is not traced.
    walked.files.add(str(Path(template_helper.__file__).relative_to(PACKAGE)))
    return walked


def test_row_passes_the_files_that_are_listed_and_no_others(walk: Walk) -> None:
    listed = set(re.findall(r"`([a-z_/]+\.py)`", table(FILES)))
    assert walk.files == listed
    assert len(listed) <= MAX_FILES


def test_row_has_the_forms_that_are_listed_and_no_others(walk: Walk) -> None:
    forms = listed_forms()
    assert len(forms) <= MAX_FORMS
    assert walk.makers.keys() - PLAIN <= {form.kind for form in forms}
    for form in forms:
        if form.made_by == "indices":
            assert classes()[form.kind].__module__.startswith("mlxtune.core.")
        elif form.made_by != "the file":
            assert form.made_by in walk.makers[form.kind], form


def classes() -> dict[str, type]:
    """Return the package's classes by name."""
    modules = [each for name, each in sys.modules.items() if name.startswith("mlxtune.core.")]
    values = chain.from_iterable(vars(module).values() for module in modules)
    return {value.__name__: value for value in values if isinstance(value, type)}
