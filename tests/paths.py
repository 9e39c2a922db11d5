"""Paths of the repository, its data and the shared material."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
DATA = ROOT / "data"
DOCS = ROOT / "docs"
SHARED = ROOT.parent / "shared"
