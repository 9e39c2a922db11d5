"""What mkdocs needs to build the site from pages that are written for GitHub.

README.md and CHANGELOG.md become pages. Links to folders and to other files outside docs/ are
replaced by the text of the link.
"""

from __future__ import annotations

import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files

DOCS = Path(__file__).resolve().parent
ROOT = DOCS.parent
PAGES = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that lie outside docs/."""
    for source, page in PAGES.items():
        content = (ROOT / source).read_text(encoding="utf-8").replace("](docs/", "](")
        files.append(File.generated(config, page, content=content))
    return files


def on_page_markdown(markdown: str, **_: object) -> str:
    """Rewrite the Markdown that mkdocs and GitHub read differently."""
    # In guide.md, the words after a block's language are for tests/long/check_guide.py.
    markdown = re.sub(r"(?m)^```(\w+) .*$", r"```\1", markdown)
    return re.sub(r"\[([^\]]+)\]\(([^)#:]+)(#[^)]*)?\)", _link, markdown)


def _link(found: re.Match[str]) -> str:
    text, target, anchor = found.groups()
    path = (DOCS / target).resolve()
    name = str(path.relative_to(ROOT))
    if name in PAGES:
        return f"[{text}]({PAGES[name]}{anchor or ''})"
    # mkdocs itself resolves the links to files in docs/.
    if path.is_dir() or (path.is_file() and not path.is_relative_to(DOCS)):
        return text
    return found[0]
