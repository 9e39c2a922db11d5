"""One word for one thing: names follow the glossary in docs/architecture.md."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest

from tests.paths import DOCS, ROOT
from tests.sources import PACKAGE, nodes_of, tree_of


class Name(NamedTuple):
    """A name that the package gives, and its file below the package."""

    text: str
    file: str


@dataclass(frozen=True)
class Word:
    """A word of the glossary: the files and names in which it may stand."""

    text: str
    rooms: tuple[str, ...]
    names: tuple[str, ...]

    def allows(self, name: Name) -> bool:
        return name.file.startswith(self.rooms) or any(
            fnmatchcase(name.text, each) for each in self.names
        )


def sections() -> dict[str, list[list[str]]]:
    """Return the cells of the tables under "Words", by the table's second heading."""
    text = (DOCS / "architecture.md").read_text(encoding="utf-8")
    words = text.partition("\n## Words\n")[2].partition("\n## ")[0]
    tables: dict[str, list[list[str]]] = {}
    for block in re.findall(r"(?:^\|.*\n)+", words, re.MULTILINE):
        head, _, *rows = [
            [cell.strip() for cell in line.strip().strip("|").split("|")]
            for line in block.splitlines()
        ]
        tables[head[1]] = rows
    return tables


def glossary() -> list[Word]:
    """Return the words whose third cell names the rooms and names that may use them."""
    return [Word(text, *allowed(where)) for text, _, where in sections()["meaning"] if where]


def avoided() -> list[Word]:
    """Return the words that no name has, except where the third cell says so."""
    return [
        Word(text, *allowed(where))
        for cell, _, where in sections()["say"]
        for text in re.findall(r"\w+", cell)
    ]


def allowed(cell: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the rooms and the names in a cell."""
    quoted = re.findall(r"`([^`]+)`", cell)
    rooms = tuple(each for each in quoted if "/" in each or each.endswith(".py"))
    return rooms, tuple(each for each in quoted if each not in rooms)


@cache
def parts(name: str) -> frozenset[str]:
    """Return the words in a name, in lower case and in the singular."""
    snake = re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower()
    words = {word for word in snake.split("_") if word}
    return frozenset(words | {word.removesuffix("s") for word in words})


def functions(node: ast.FunctionDef | ast.AsyncFunctionDef) -> Iterator[str]:
    """Yield the names of a public function and of its parameters."""
    if node.name.startswith("_") and not node.name.startswith("__"):
        return
    yield node.name
    taken = node.args
    every = [*taken.posonlyargs, *taken.args, *taken.kwonlyargs, taken.vararg, taken.kwarg]
    yield from (each.arg for each in every if each is not None)


def defined(node: ast.AST, *, public: bool = True) -> Iterator[str]:
    """Yield the names of classes, and of public functions, parameters, methods and fields."""
    for child in getattr(node, "body", []):
        if isinstance(child, ast.If | ast.Try):
            yield from defined(child, public=public)
        elif isinstance(child, ast.ClassDef):
            yield child.name
            yield from defined(child, public=public and not child.name.startswith("_"))
        elif isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef) and public:
            yield from functions(child)
        elif isinstance(child, ast.AnnAssign) and isinstance(node, ast.ClassDef) and public:
            field = child.target
            if isinstance(field, ast.Name) and not field.id.startswith("_"):
                yield field.id


def given(nodes: Iterable[ast.AST]) -> Iterator[str]:
    """Yield every name that a module gives, also private names and those of local variables."""
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr


def names_in(found: Iterable[str], file: str) -> list[Name]:
    stem = Path(file).stem
    module = [] if stem.startswith("__") else [stem]
    return [Name(each, file) for each in dict.fromkeys([*module, *found])]


@cache
def files() -> dict[str, Path]:
    """Return the package's modules by their names below the package."""
    return {path.relative_to(PACKAGE).as_posix(): path for path in sorted(PACKAGE.rglob("*.py"))}


@cache
def public_names() -> list[Name]:
    return [n for file, path in files().items() for n in names_in(defined(tree_of(path)), file)]


@cache
def every_name() -> list[Name]:
    return [n for file, path in files().items() for n in names_in(given(nodes_of(path)), file)]


def misused(word: Word, names: list[Name]) -> list[str]:
    return sorted(
        {
            f"{name.file}: {name.text}"
            for name in names
            if word.text in parts(name.text) and not word.allows(name)
        }
    )


@pytest.mark.parametrize("word", glossary(), ids=lambda word: word.text)
def test_public_name_uses_word_as_glossary_defines_it(word: Word) -> None:
    assert misused(word, public_names()) == [], f"see `{word.text}` in docs/architecture.md, Words"


@pytest.mark.parametrize("word", avoided(), ids=lambda word: word.text)
def test_no_name_has_an_avoided_word(word: Word) -> None:
    assert misused(word, every_name()) == [], f"see `{word.text}` in docs/architecture.md, Words"


def test_every_exception_of_the_glossary_is_in_use() -> None:
    every = every_name()
    unused = [
        f"{word.text}: {pattern}"
        for word in glossary() + avoided()
        for pattern in word.names
        if not any(fnmatchcase(each.text, pattern) for each in every)
    ] + [
        f"{word.text}: {room}"
        for word in glossary() + avoided()
        for room in word.rooms
        if not any(each.file.startswith(room) for each in every)
    ]
    assert unused == []


@pytest.mark.parametrize(
    ("word", "source"),
    [
        ("product", "def _add(product): ..."),
        ("row", "class SplitRows: ..."),
        ("line", "class _Lines: ..."),
        ("run", "class Plan:\n    run_share: float"),
        ("group", "def load_of(group): ..."),
        ("share", "def padding_share(): ..."),
        ("target", "def losses(logits, targets): ..."),
        ("label", "class Label: ..."),
        ("side", "class BenchSide: ..."),
        ("side", "def _draw():\n    for side in (1, 2): ..."),
        ("child", "class _Renderer:\n    def start(self):\n        self._child = None"),
    ],
)
def test_misuse_of_a_word_is_found(word: str, source: str) -> None:
    avoids = {each.text: each for each in avoided()}
    rule = avoids.get(word) or next(each for each in glossary() if each.text == word)
    tree = ast.parse(source)
    found = given(ast.walk(tree)) if word in avoids else defined(tree)
    assert misused(rule, names_in(found, "backend/step/new.py"))


AVOIDED_IN_NAMES = {
    "limits are MAX or MIN": (
        r"^_?(MOST|FEWEST|LONGEST|SHORTEST|LARGEST|SMALLEST|HIGHEST|LOWEST|LEAST)(_|$)",
        ["_MOST_ROWS", "LONGEST"],
    ),
    "spelling is American": (
        r"(?i)(quanti|initiali|normali|summari|recogni|plurali|tokeni|seriali|optimi)s(e|ing|ation)"
        r"|(?i:colour|neighbour|behaviour|favour|licence|labelled|centre)",
        ["initialise", "_COLOURS", "test_quantised_head_is_split"],
    ),
    "tests are named after the behaviour": (
        r"^test_.*(_(told|said|anew|whatever|hears|says_so|all_the_same)|_are_no(?!_more)"
        r"|(?<!there)_is_no(?!_longer))(_|$)",
        ["test_file_is_no_table", "test_run_trains_all_the_same"],
    ),
    "tests are named in at most 70 letters, without a possessive": (
        r"^test_(.*_s_.*|.{66,})$",
        ["test_separator_is_the_header_s_own", "test_" + "it_" * 22],
    ),
}

# Names that say only how a value came about; a name says what the value is.
PARTICIPLES = re.compile(r"^_?(found|known|given|asked|told|said)$")
# The outcome of a check, which `doctor --json` calls `found`.
OUTCOMES = {"core/machine/machine_checks.py", "diagnosis/checks.py"}


def test_no_name_of_the_package_is_a_bare_participle() -> None:
    assert PARTICIPLES.search("found") and not PARTICIPLES.search("is_known")
    bare = {
        f"{name.file}: {name.text}"
        for name in every_name()
        if PARTICIPLES.search(name.text) and not (name.text == "found" and name.file in OUTCOMES)
    }
    assert sorted(bare) == []


# A constant says what it is, with its unit: `_POLL_SECONDS`, `_MAX_BATCH`, `_BLOCK_TOKENS`.
_PREPOSITIONS = "OF|IN|ON|FOR|TO|FROM|WITH|BESIDE|ACROSS|ABOVE|BELOW"
_ADVERBS = "ALWAYS|NEVER|HARDLY|MOSTLY|NEARLY|EXACTLY|ELSEWHERE|ASIDE|AGAIN"
_ADJECTIVES = (
    "CLOSE|NEAR|FEW|MANY|LARGE|SMALL|SHORT|LONG|WIDE|HIGH|QUICK|FAST|SLOW|ODD|BUSY|FULL|FREE|ANY"
    "|REALISTIC|SHARED|MEASURED|COMPARED|DIVIDED|AVERAGED|COPIED|CACHED|SKIPPED|SHOWN|WRITTEN|KEPT"
    "|WIDEST|NARROWEST|LONGEST|SHORTEST|COLDEST|SLOWEST"
)
PHRASES = re.compile(
    rf"^_?(?:{_PREPOSITIONS})_|_(?:AT_ONCE|EVERY|AGAIN|ANEW)$|^_?(?:{_ADVERBS}|{_ADJECTIVES})$"
)


def test_no_constant_is_a_lone_adjective_or_a_phrase() -> None:
    assert all(map(PHRASES.search, ("_OF_RESULTS", "_AT_ONCE", "_LOOK_EVERY", "_ALWAYS", "_FEW")))
    assert not any(map(PHRASES.search, ("_SHORT_LINE", "_POLL_SECONDS", "_FREE_FRACTION")))
    phrases = {f"{name.file}: {name.text}" for name in every_name() if PHRASES.search(name.text)}
    assert sorted(phrases) == []


def test_every_exception_ends_in_error() -> None:
    classes = {
        node.name: {ast.unparse(base).split(".")[-1] for base in node.bases}
        for path in files().values()
        for node in nodes_of(path)
        if isinstance(node, ast.ClassDef)
    }
    raised = {"Exception", "BaseException"}
    while more := {name for name, bases in classes.items() if is_raised(bases, raised)} - raised:
        raised |= more
    assert "BadRowError" in raised
    assert [each for each in sorted(raised & classes.keys()) if not each.endswith("Error")] == []


def is_raised(bases: set[str], raised: set[str]) -> bool:
    """Return whether a class with these bases is an exception, except those for an interrupt."""
    return bool(bases & raised) or any(each.endswith("Error") for each in bases)


@cache
def names_of_tests() -> list[Name]:
    """Return the names that the tests give, by their files."""
    return [
        Name(text, path.relative_to(ROOT).as_posix())
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for text in (path.stem, *given(nodes_of(path)))
    ]


@pytest.mark.parametrize("rule", AVOIDED_IN_NAMES)
def test_names_of_package_and_tests_follow_a_rule(rule: str) -> None:
    pattern, wrong = AVOIDED_IN_NAMES[rule]
    assert all(re.search(pattern, name) for name in wrong)
    found = {
        f"{name.file}: {name.text}"
        for name in every_name() + names_of_tests()
        if re.search(pattern, name.text)
    }
    assert sorted(found) == []


# Words of the glossary in text: messages, templates and pages


AVOIDED_IN_TEXT = {
    "planned": r"\bplanned\b",
    "side": r"\b(?:each|both|either|which|other|of a)\s+sides?\b(?!-)",
    "share": r"\b(?:a|its|the|this|small|smaller|large|largest)\s+shares?\b",
    "child": r"\bchild(?:ren)?\b",
    "a second, a line, an epoch": r"(?<!real )\b(?:tokens a second|one a line|times an epoch)\b",
    "anew": r"\banew\b",
    "go on": r"\b(?:goes|going|gone|go) on\b",
    "from here on": r"\bfrom here on\b",
    "sign of life": r"\bsigns? of life\b",
    "told": r"\btold\b",
}


def messages(nodes: tuple[ast.AST, ...]) -> Iterator[str]:
    """Yield the texts of a module that are neither docstrings nor names."""
    documents = {
        id(node.value)
        for node in nodes
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
    }
    for node in nodes:
        is_text = isinstance(node, ast.Constant) and isinstance(node.value, str)
        if is_text and id(node) not in documents and " " in node.value.strip():
            yield node.value


def prose(page: str) -> str:
    """Return a page without its code and without the glossary, which names these words."""
    before, _, after = page.partition("\n## Words\n")
    page = before + "\n## " + after.partition("\n## ")[2]
    return re.sub(r"```.*?```|`[^`\n]*`", "", page, flags=re.DOTALL)


@cache
def texts() -> dict[str, str]:
    """Return the texts that people read, by file."""
    found = {
        f"mlxtune/{file}": "\n\n".join(messages(nodes_of(path))) for file, path in files().items()
    }
    pages = [*DOCS.glob("*.md"), ROOT / "README.md", ROOT / "tests" / "long" / "README.md"]
    for path in sorted({*pages, *PACKAGE.rglob("*.html")} - {DOCS / "reference.md"}):
        found[path.relative_to(ROOT).as_posix()] = prose(path.read_text(encoding="utf-8"))
    return found


@pytest.mark.parametrize("word", AVOIDED_IN_TEXT)
def test_no_text_has_an_avoided_word(word: str) -> None:
    pattern = re.compile(AVOIDED_IN_TEXT[word])
    found = {
        f"{file}: {match[0]}" for file, text in texts().items() for match in pattern.finditer(text)
    }
    assert sorted(found) == []


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("planned", "the planned steps"),
        ("side", "the peak of each side"),
        ("share", "a small share of a step"),
        ("told", "unless told otherwise"),
    ],
)
def test_misuse_of_a_word_in_text_is_found(word: str, text: str) -> None:
    assert re.search(AVOIDED_IN_TEXT[word], next(messages((ast.Constant(text),))))
    assert not re.search(AVOIDED_IN_TEXT[word], "runs share a prefix, side by side")
    assert not re.search(AVOIDED_IN_TEXT[word], prose(f"`{text}` is code"))


_STEMS, _ENDINGS = (
    "(?:de)?(?:quanti|initiali|normali|summari|recogni|minimi)",
    "(?:e[sd]?|ing|ation)",
)
BRITISH = re.compile(rf"(?i)\b{_STEMS}s{_ENDINGS}\b")
# Options, keys and other code are American.
AMERICAN = re.compile(rf"(?i)(?<![-_=.'`{{])\b{_STEMS}z{_ENDINGS}\b(?![-_='`])")


def mixed(text: str) -> bool:
    """Return whether a text has words in both spellings, besides the values of options."""
    text = re.sub(r"--[\w-]+ \w+", "", text)
    return bool(BRITISH.search(text) and AMERICAN.search(text))


def test_every_message_has_one_spelling() -> None:
    assert mixed("quantised weights; auto is dequantized")
    assert not mixed("quantised weights: use --quantized-compute dequantized")
    every = {
        f"{file}: {text[:60]}"
        for file, path in files().items()
        for text in messages(nodes_of(path))
        if mixed(text)
    }
    assert sorted(every) == []
