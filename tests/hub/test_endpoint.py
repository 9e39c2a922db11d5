"""The address of the hub in HF_ENDPOINT: malformed ones are one line, passwords stay private."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxtune.backend.models.model_folder import find_folder
from mlxtune.errors import ConfigError, MlxTuneError
from mlxtune.hub import check_endpoint
from mlxtune.hub.client import without_password
from mlxtune.hub.dataset_download import fetch
from mlxtune.hub.dataset_name import DatasetName
from mlxtune.hub.upload import check_may_write
from tests.hub_server import Hub

MALFORMED = (
    *("", "huggingface.co", "http://", "http://[::1", "http://host:port", "http://host:99999"),
    *("ftp://host", "http://a b", "http://host\n", "http://ho\u202est", "//host", "http://u:p/w@h"),
)
USES = {
    "data": lambda: fetch(DatasetName("org/sums")),
    "model": lambda: find_folder("org/model"),
    "push": lambda: check_may_write("me/sums", public=False),
}


@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("address", MALFORMED)
def test_malformed_address_is_one_line_without_it(
    address: str, use: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    with pytest.raises(ConfigError) as error:
        USES[use]()
    assert str(error.value) == (
        "HF_ENDPOINT is not an address: set it to https://HOST, or unset it"
    )


@pytest.mark.parametrize("address", ["https://hub.example", "http://127.0.0.1:8080/hub/"])
def test_address_is_accepted(address: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", address)
    check_endpoint()


@pytest.mark.parametrize("use", USES)
def test_password_is_in_no_error(
    hub: Hub, use: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("huggingface_hub.utils._http._DEFAULT_RETRY_ON_STATUS_CODES", ())
    monkeypatch.setattr(constants, "ENDPOINT", "http://ann:secret@127.0.0.1:9")
    template = constants.ENDPOINT + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setenv("HF_TOKEN", "hf_x")
    with pytest.raises(MlxTuneError) as error:
        USES[use]()
    assert "secret" not in str(error.value)
    assert "http://127.0.0.1:9" in str(error.value)


def test_addresses_lose_only_names_and_passwords() -> None:
    text = "http://a:b@host/x@y and https://host/a@b, mail@host"
    assert without_password(text) == "http://host/x@y and https://host/a@b, mail@host"


@pytest.mark.parametrize("command", [["push", "run", "me/x"], ["inspect", "--data", "none.jsonl"]])
def test_address_with_which_the_client_does_not_load_is_one_line(
    command: list[str], tmp_path: Path
) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "mlxtune", *command, *(["--model-path", "x"] * (len(command) > 2))],
        env=os.environ | {"HF_ENDPOINT": "http://u:secret@[::1"},
        capture_output=True,
        text=True,
        cwd=tmp_path,
    )
    assert done.returncode == 2
    assert done.stderr.startswith("mlxtune: error: HF_ENDPOINT is not an address")
    assert len(done.stderr.splitlines()) == 1
