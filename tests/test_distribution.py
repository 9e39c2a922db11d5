"""The distribution's name: free on an index, and the only name in commands that install."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlxtune.core.machine.installation import DISTRIBUTION
from tests.paths import DOCS, ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Other projects on PyPI.
NEIGHBORS = (
    "mlx",
    "mlx-embeddings-lora",
    "mlx-lm",
    "mlx-lm-lora",
    "mlx-train-perf",
    "mlx-tune",
    "mlx-tuning-fork",
    "mlxtuner",
    "unsloth-mlx",
)
# What an installer takes before a package's name.
INSTALLS = re.compile(
    r"(?:pip|pipx|tool|runpip \S+) install|pipx (?:inject|run)|uvx|--from|--spec|--with"
)


def compared(name: str) -> str:
    """Return a name as PyPI compares it with taken names (ultranormalize_name in warehouse)."""
    plain = re.sub("[-_.]", "", name.lower())
    return plain.translate(str.maketrans("lio", "110"))


def test_pypi_would_refuse_the_name_mlxtune() -> None:
    assert compared("mlxtune") == compared("mlx-tune") == compared("MIX_tune")


def test_distribution_name_is_not_taken() -> None:
    assert PROJECT["name"] == DISTRIBUTION
    assert compared(DISTRIBUTION) not in set(map(compared, NEIGHBORS))
    assert re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", DISTRIBUTION), "the normal form of PEP 503"


def test_command_and_import_keep_their_name() -> None:
    assert PROJECT["scripts"] == {"mlxtune": "mlxtune.cli:main"}


def test_extras_of_extras_are_the_distribution_s() -> None:
    for requirements in PROJECT["optional-dependencies"].values():
        ours = [each for each in requirements if each.startswith("mlxtune")]
        assert all(each.startswith(f"{DISTRIBUTION}[") for each in ours)


def pages() -> Iterator[Path]:
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md", "pyproject.toml"))
    yield from (ROOT / ".ci").iterdir()
    for folder in ("mlxtune", "tests", "docs", ".github"):
        for path in sorted((ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md", ".yml", ".ipynb", ".html") and path != Path(__file__):
                yield path


def wrong_installs(text: str) -> list[str]:
    """Return the commands that would install another project's package, or none."""
    text = " ".join(text.split())
    after = rf"(?:{INSTALLS.pattern})(?: -\S+)* ['\"`]*mlxtune(?![-\w/])"
    return re.findall(rf"{after}|\bmlxtune\[[a-z]", text)


def test_no_page_or_message_installs_another_package() -> None:
    found = {
        path.relative_to(ROOT).as_posix(): wrong
        for path in pages()
        if (wrong := wrong_installs(path.read_text(encoding="utf-8")))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("text", "wrong"),
    [
        ("pip install 'mlxtune[gguf]'", True),
        ("pip install -U mlxtune", True),
        ("pip install\nmlxtune", True),
        ("uv tool install mlxtune", True),
        ("uvx mlxtune demo", True),
        ("pipx run mlxtune demo", True),
        ("pip install 'mlxtune-lora[gguf]'", False),
        ("pip install -e '.[cpu]' && mlxtune train", False),
        ("uvx --from '.[cpu]' mlxtune demo", False),
        ("uvx --from mlxtune-lora mlxtune demo", False),
        ("uv tool install .", False),
    ],
)
def test_wrong_command_is_found(text: str, wrong: bool) -> None:
    assert bool(wrong_installs(text)) is wrong


def test_commands_of_messages_are_made_in_one_place() -> None:
    """A literal `pip install` would miss the environments of pipx and uv."""
    home = ROOT / "mlxtune" / "core" / "machine" / "installation.py"
    found = [
        path.name
        for path in (ROOT / "mlxtune").rglob("*.py")
        if path != home and re.search(r"pip (?:un)?install", path.read_text(encoding="utf-8"))
    ]
    assert found == []


def test_second_readme_paragraph_is_the_project_state() -> None:
    badges = (ROOT / "README.md").read_text(encoding="utf-8").split("\n\n")[1]
    classifiers = PROJECT["classifiers"]
    (stage,) = (each.split(" - ")[1] for each in classifiers if each.startswith("Development"))
    python = PROJECT["requires-python"].removeprefix(">=")
    assert badges.startswith(f"**{PROJECT['version']}, {stage.lower()}** · macOS 14")
    assert f"· Python {python} or later · {PROJECT['license']} ·" in badges
    assert "\n" not in badges
    assert f"Programming Language :: Python :: {python}" in classifiers


def test_docs_name_only_extras_that_exist() -> None:
    for path in [ROOT / "README.md", *DOCS.glob("*.md")]:
        for extras in re.findall(rf"{DISTRIBUTION}\[([\w,]+)\]", path.read_text(encoding="utf-8")):
            assert set(extras.split(",")) <= PROJECT["optional-dependencies"].keys(), path
