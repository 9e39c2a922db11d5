"""Base models whose folder links to foreign files."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.attacks.test_files import snapshot
from tests.command import Cli

SECRET = "-----BEGIN OPENSSH PRIVATE KEY-----"
Plant = Callable[[Path, Path], None]


def _link(name: str, *, upwards: bool = False) -> Plant:
    def plant(base: Path, secret: Path) -> None:
        (base / name).unlink(missing_ok=True)
        target = Path("..", *secret.relative_to(base.parent).parts) if upwards else secret
        (base / name).symlink_to(target)

    return plant


def _link_to_link(base: Path, secret: Path) -> None:
    (base / "inner").symlink_to(secret)
    (base / "README.txt").symlink_to(base / "inner")


def _folder_of_templates(base: Path, secret: Path) -> None:
    secret.rename(secret.with_name("secret.jinja"))
    (base / "additional_chat_templates").symlink_to(secret.parent)


def _beside_the_folder(base: Path, secret: Path) -> None:
    """Link to a file in a sibling folder whose name starts with the model folder's name."""
    other = base.with_name(base.name + "-private")
    other.mkdir()
    (base / "README.txt").symlink_to(shutil.copy(secret, other))


def _named_blobs(base: Path, secret: Path) -> None:
    blobs = base.parent.parent / "blobs"
    blobs.mkdir(exist_ok=True)
    (base / "README.txt").symlink_to(shutil.copy(secret, blobs))


PLANTS: dict[str, Plant] = {
    **{
        name: _link(name)
        for name in ("LICENSE", "NOTICE.md", "USE_POLICY.md", "added_tokens.json", "vocab.txt")
    },
    **{name: _link(name) for name in ("extra.py", "a.tiktoken", "x.model", "chat.jinja")},
    "upwards": _link("README.txt", upwards=True),
    "a link to a link": _link_to_link,
    "a folder of templates": _folder_of_templates,
    "beside the folder": _beside_the_folder,
    "blobs of no cache": _named_blobs,
}


@pytest.fixture
def adapter(run_to_copy: Path, output: Path) -> Path:
    shutil.copytree(run_to_copy, output.parent)
    return output


@pytest.mark.parametrize("name", PLANTS)
def test_link_that_leaves_the_base_is_refused_before_anything_is_written(
    cli: Cli, adapter: Path, broken: Path, tmp_path: Path, name: str
) -> None:
    secret = tmp_path / "home" / ".ssh" / "id_ed25519"
    secret.parent.mkdir(parents=True)
    secret.write_text(SECRET)
    PLANTS[name](broken, secret)
    before = snapshot(tmp_path)
    target = tmp_path / "fused"
    error = cli(
        "fuse", "--adapter", adapter, "--model-path", broken, "--output", target, "--quiet"
    ).error
    assert "outside the model's folder and would be copied" in error
    assert snapshot(tmp_path) == before


def test_links_within_the_folder_and_within_the_hubs_cache_are_copied(
    cli: Cli, adapter: Path, model: Path, tmp_path: Path
) -> None:
    blobs = tmp_path / "hub" / "models--a--b" / "blobs"
    snapshots = tmp_path / "hub" / "models--a--b" / "snapshots" / "abc"
    shutil.copytree(model, blobs)
    snapshots.mkdir(parents=True)
    (blobs / "1234").write_text("licence")
    for path in model.iterdir():
        (snapshots / path.name).symlink_to(Path("../../blobs") / path.name)
    (snapshots / "LICENSE").symlink_to("../../blobs/1234")
    (snapshots / "NOTICE").symlink_to("LICENSE")
    target = tmp_path / "fused"
    options = ["--adapter", adapter, "--model-path", snapshots, "--output", target, "--quiet"]
    assert cli("fuse", *options).code == 0
    assert [(target / name).read_text() for name in ("LICENSE", "NOTICE")] == ["licence"] * 2
