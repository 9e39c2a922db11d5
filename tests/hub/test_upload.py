"""Uploads by the real client to a local hub are one complete commit, or nothing."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mlxtune.errors import OutputError
from mlxtune.hub.upload import check_may_write, upload
from tests.hub_server import Handler, Hub, Model

FILES = {
    "README.md": b"---\ntags:\n- lora\n---\n\n# Sums\n",
    "adapter_model.safetensors": b"weights of PEFT",
    "mlx-lm/adapters.safetensors": b"weights of mlx-lm",
    "mlx-lm/adapter_config.json": b"{}",
}
Fault = Callable[[Handler, str, str], bool]


@pytest.fixture(autouse=True)
def token(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_owner")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / "package" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / "package"


def push(folder: Path, *, public: bool = False) -> str:
    exists = check_may_write("me/sums", public=public)
    return upload(folder, "me/sums", public=public, exists=exists)


def refusal(folder: Path, repository: str = "me/sums", *, public: bool = False) -> str:
    with pytest.raises(OutputError) as raised:
        exists = check_may_write(repository, public=public)
        upload(folder, repository, public=public, exists=exists)
    message = str(raised.value)
    assert message.startswith(repository)
    assert "\n" not in message
    return message.removeprefix(repository).lstrip(": ")


def failing(part: str, how: Callable[[Handler], object]) -> Fault:
    def fault(handler: Handler, method: str, path: str) -> bool:
        if part in f"{method} {path}":
            how(handler)
        return part in f"{method} {path}"

    return fault


def test_files_arrive_in_one_commit_of_a_private_repository(hub: Hub, folder: Path) -> None:
    assert push(folder) == f"{hub.endpoint}/me/sums"
    model = hub.models["me/sums"]
    assert model.private
    assert model.files == FILES
    assert len(model.commits) == 1


def test_public_repository_needs_an_option(hub: Hub, folder: Path) -> None:
    push(folder, public=True)
    assert not hub.models["me/sums"].private


def test_existing_repository_keeps_its_other_files(hub: Hub, folder: Path) -> None:
    hub.models["me/sums"] = Model(files={"README.md": b"old", "NOTES.md": b"mine"})
    push(folder)
    assert hub.models["me/sums"].files == {**FILES, "NOTES.md": b"mine"}
    assert "POST /api/repos/create" not in hub.asked()


@pytest.mark.parametrize(("private", "remedy"), [(False, "add --public"), (True, "leave out")])
def test_existing_repository_is_as_visible_as_was_asked_for(
    hub: Hub, folder: Path, private: bool, remedy: str
) -> None:
    hub.models["me/sums"] = Model(private=private)
    assert remedy in refusal(folder, public=private)
    assert hub.models["me/sums"].files == {}


# Tokens, checked before any upload


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("", "needs an access token for the hub"),
        ("hf_typo", "the hub refuses the token"),
        ("hf_reader", "the token test of me can only read"),
    ],
)
def test_token_that_may_not_write_is_found_before_anything_is_sent(
    hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch, value: str, message: str
) -> None:
    monkeypatch.setenv("HF_TOKEN", value)
    assert message in refusal(folder)
    assert {request.method for request in hub.requests} <= {"GET"}


def test_repository_of_somebody_else_is_found_before_anything_is_sent(
    hub: Hub, folder: Path
) -> None:
    assert "You don't have the rights to create" in refusal(folder, "you/sums")
    hub.models["you/sums"] = Model(writable=False)
    assert "You don't have the rights to write" in refusal(folder, "you/sums")
    assert b"Sums" not in hub.sent()
    assert hub.stored == {}


# Failures during an upload

PLACES = ["POST /api/validate-yaml", "preupload", "objects/batch", "PUT /storage", "commit/main"]


@pytest.mark.parametrize("existing", [True, False])
@pytest.mark.parametrize("part", PLACES)
def test_upload_that_breaks_leaves_the_hub_as_it_was(
    hub: Hub, folder: Path, part: str, existing: bool
) -> None:
    if existing:
        hub.models["me/sums"] = Model(files={"README.md": b"old"})
    hub.faults.append(failing(part, Handler.drop))
    assert "the connection to" in refusal(folder)
    left = {name: each.files for name, each in hub.models.items()}
    assert left == ({"me/sums": {"README.md": b"old"}} if existing else {})

    hub.faults.clear()
    push(folder)
    assert hub.models["me/sums"].files == FILES


@pytest.mark.parametrize("part", ["whoami", "repos/create", *PLACES])
@pytest.mark.parametrize(
    ("how", "message"),
    [
        (lambda handler: handler.refuse(503, "", "down"), "not working (503)"),
        (lambda handler: handler.refuse(403, "", "no more"), "denies access (no more)"),
        (lambda handler: handler.answer(b"<html>"), "does not answer like a hub"),
    ],
    ids=["down", "forbidden", "nonsense"],
)
def test_broken_hub_is_an_error_in_one_line(
    hub: Hub, folder: Path, part: str, how: Callable[[Handler], object], message: str
) -> None:
    hub.faults.append(failing(part, how))
    if part == "PUT /storage" and message == "does not answer like a hub":
        # The client ignores the content of the storage's answers.
        return
    assert message in refusal(folder)
    assert hub.models == {}


def test_metadata_that_the_hub_refuses_is_an_error_with_its_reason(hub: Hub, folder: Path) -> None:
    def how(handler: Handler) -> None:
        handler.answer_json({"errors": [{"message": '"license" must be one of …'}]}, 400)

    hub.faults.append(failing("validate-yaml", how))
    assert '"license" must be one of' in refusal(folder)


def test_interrupted_upload_leaves_the_hub_as_it_was(hub: Hub, folder: Path) -> None:
    def interrupt(handler: Handler) -> None:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.2)
        handler.drop()

    hub.faults.append(failing("commit/main", interrupt))
    with pytest.raises(KeyboardInterrupt):
        push(folder)
    assert hub.models == {}


def test_silent_hub_times_out(hub: Hub, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtune.hub.client.MAX_SILENCE_SECONDS", 0.2)
    hub.faults.append(failing("commit/main", Handler.fall_silent))
    assert "the connection to" in refusal(folder)
    assert hub.models == {}
    assert hub.given_up()
