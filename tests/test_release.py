"""The release: its notes, its workflow, and the files that name the version."""

from __future__ import annotations

import importlib.util
import re
import tomllib
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import yaml

from tests.paths import ROOT

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
GITHUB = ROOT / ".github"
CHANGELOG = """# Changelog

## [0.2.0] - 2026-03-01

### Added

- Fish.

## [0.1.0] - unreleased

- Salt.
"""


@pytest.fixture(scope="module")
def maker() -> ModuleType:
    spec = importlib.util.spec_from_file_location("notes", GITHUB / "release_notes.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def read_yaml(path: Path) -> Any:
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def test_notes_are_only_the_section_of_the_version(maker: ModuleType) -> None:
    assert maker.release_notes("v0.2.0", "0.2.0", CHANGELOG) == "### Added\n\n- Fish.\n"


@pytest.mark.parametrize(
    ("tag", "version", "changelog", "problem"),
    [
        ("v0.3.0", "0.2.0", CHANGELOG, "tag v0.2.0"),
        ("0.2.0", "0.2.0", CHANGELOG, "tag v0.2.0"),
        ("v0.3.0", "0.3.0", CHANGELOG, r"0 sections \[0.3.0\]"),
        ("v0.1.0", "0.1.0", CHANGELOG, "give it a date"),
        ("v0.2.0", "0.2.0", CHANGELOG.replace("### Added\n\n- Fish.", ""), "has no text"),
        ("v0.2.0", "0.2.0", 2 * CHANGELOG, "2 sections"),
    ],
)
def test_release_without_its_notes_is_refused(
    maker: ModuleType, tag: str, version: str, changelog: str, problem: str
) -> None:
    with pytest.raises(ValueError, match=problem):
        maker.release_notes(tag, version, changelog)


def test_changelog_has_one_section_of_the_current_version(maker: ModuleType) -> None:
    text = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    version = PROJECT["version"]
    dated = text.replace(f"## [{version}] - unreleased", f"## [{version}] - 2026-01-01")
    assert maker.release_notes(f"v{version}", version, dated).startswith("### ")


def test_citation_names_version_and_license() -> None:
    citation = read_yaml(ROOT / "CITATION.cff")
    assert (citation["version"], citation["license"]) == (PROJECT["version"], PROJECT["license"])
    assert {"cff-version", "message", "title", "authors"} <= citation.keys()


def test_release_runs_for_tags_alone_and_needs_no_secret() -> None:
    path = GITHUB / "workflows" / "release.yml"
    workflow = read_yaml(path)
    # YAML 1.1 reads the key `on` as true.
    assert workflow[True] == {"push": {"tags": ["v*"]}}
    assert "secrets." not in path.read_text(encoding="utf-8")
    assert workflow["permissions"] == {"contents": "read"}
    jobs = workflow["jobs"]
    writers = {name: job["permissions"] for name, job in jobs.items() if "permissions" in job}
    assert writers == {"publish": {"id-token": "write"}, "announce": {"contents": "write"}}


def test_release_publishes_only_what_was_checked_and_tried() -> None:
    jobs = read_yaml(GITHUB / "workflows" / "release.yml")["jobs"]
    needs = {name: job.get("needs") for name, job in jobs.items()}
    assert needs == {"build": None, "try": "build", "publish": "try", "announce": "publish"}
    commands = [step.get("run", "") for step in jobs["build"]["steps"]]
    assert "twine check --strict dist/*" in commands
    assert any(each.startswith("python .github/release_notes.py") for each in commands)
    systems = {name.partition("-")[0] for name in jobs["try"]["strategy"]["matrix"]["os"]}
    assert systems == {"macos", "ubuntu"}
    assert ".ci/try_wheel dist/*.whl" in [step.get("run") for step in jobs["try"]["steps"]]
    # The jobs that may write run no code of the repository.
    for name in ("publish", "announce"):
        used = [step.get("uses", "") for step in jobs[name]["steps"]]
        assert not any(each.startswith("actions/checkout") for each in used)


def test_issue_forms_ask_for_json_of_doctor() -> None:
    forms = [each for each in (GITHUB / "ISSUE_TEMPLATE").glob("*.yml") if each.stem != "config"]
    assert len(forms) == 2
    for form in forms:
        fields = read_yaml(form)["body"]
        (doctor,) = [each for each in fields if each["id"] == "doctor"]
        assert "`mlxtune doctor --json`" in doctor["attributes"]["description"]
        assert doctor["validations"] == {"required": True}


def test_contributing_is_one_page_whose_links_and_paths_exist() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert text.count("\n") <= 60
    links = re.findall(r"\]\((?!http)([^)#]+)", text)
    assert "docs/architecture.md" in links
    paths = re.findall(r"(?:python|pytest|bash) ([\w./]+/[\w./]+)", text)
    assert [each for each in links + paths if not (ROOT / each).exists()] == []
