"""Hubs that send names which lead out of the cache, and a hub that never finishes an answer."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxtune.backend.models.model_folder import find_folder
from mlxtune.errors import DataError, MlxTuneError, ModelError
from mlxtune.hub import client
from mlxtune.hub.dataset_download import fetch
from mlxtune.hub.dataset_name import dataset_name
from tests.attacks.test_files import snapshot
from tests.hub_server import Dataset, Handler, Hub, Model, commit_of
from tests.slow import slow
from tests.waiting import SECONDS, wait_until

FILES = {"config.json": b'{"model_type": "qwen3"}', "tokenizer.json": b"{}"}
ROWS = {"train.jsonl": b'{"prompt": "a", "completion": "b"}\n'}
OUTSIDE = ("../../outside", "../../../private.txt", "a/../../../outside", "/tmp/outside", "..")


@pytest.fixture(autouse=True)
def repositories(hub: Hub) -> None:
    hub.models["org/model"] = Model(private=False, files=FILES)
    hub.datasets["org/rows"] = Dataset({"main": ROWS})


def model() -> Path:
    return find_folder("org/model")


def data() -> Path:
    name = dataset_name("org/rows:train")
    assert name is not None
    return fetch(name).train[0]


@pytest.fixture(params=[model, data], ids=["model", "data set"])
def download(request: pytest.FixtureRequest) -> Callable[[], Path]:
    chosen: Callable[[], Path] = request.param
    return chosen


def outside(folder: Path) -> dict[str, object]:
    """Return a folder's snapshot without the two cached repositories and the caches' own files."""
    return {
        name: each
        for name, each in snapshot(folder).items()
        if not name.startswith(("hub-cache/models--org--model", "hub-cache/datasets--org--rows"))
        and name not in ("hub-cache", ".")
        and not name.startswith(("hub-cache/.locks", "hub-cache/CACHEDIR.TAG", "cache"))
    }


def with_headers(hub: Hub, **changed: str) -> None:
    """Make the hub send files with these headers added or changed."""

    def fault(handler: Handler, method: str, path: str) -> bool:
        if "/resolve/" not in path:
            return False
        files = ROWS if "datasets" in path else FILES
        content = files[path.rpartition("/")[2]]
        headers = {"ETag": '"0"', "X-Repo-Commit": commit_of(files), **changed}
        handler.answer(content, **headers)
        return True

    hub.faults.append(fault)


def test_model_and_data_come_from_a_sound_hub(download: Callable[[], Path]) -> None:
    path = download()
    read = {each.name: each.read_bytes() for each in path.iterdir()} if path.is_dir() else None
    assert read == FILES or path.read_bytes() == ROWS["train.jsonl"]


@pytest.mark.parametrize("header", ["ETag", "X_Linked_Etag"])
@pytest.mark.parametrize("name", OUTSIDE)
def test_etag_cannot_escape_the_cache(
    hub: Hub, tmp_path: Path, download: Callable[[], Path], header: str, name: str
) -> None:
    (tmp_path / "private.txt").write_text("mine")
    with_headers(hub, **{header: f'"{name}"'})
    before = outside(tmp_path)
    with pytest.raises(MlxTuneError) as raised:
        download()
    assert "\n" not in str(raised.value)
    assert outside(tmp_path) == before
    links = [path for path in Path(constants.HF_HUB_CACHE).rglob("*") if path.is_symlink()]
    assert links == []


@pytest.mark.parametrize("name", [*OUTSIDE, "main", "0" * 39])
def test_commit_of_a_file_cannot_escape_the_cache(
    hub: Hub, tmp_path: Path, download: Callable[[], Path], name: str
) -> None:
    with_headers(hub, X_Repo_Commit=name)
    before = outside(tmp_path)
    with pytest.raises(MlxTuneError):
        download()
    assert outside(tmp_path) == before


@pytest.mark.parametrize("name", [*OUTSIDE, "main", 7, ["0" * 40]])
def test_commit_of_a_model_cannot_escape_the_cache(hub: Hub, tmp_path: Path, name: object) -> None:
    def fault(handler: Handler, method: str, path: str) -> bool:
        if not path.startswith("/api/models/org/model/revision"):
            return False
        handler.answer_json({"id": "org/model", "sha": name, "siblings": []})
        return True

    hub.faults.append(fault)
    before = outside(tmp_path)
    with pytest.raises(ModelError, match="org/model: no such folder, and downloading it failed"):
        model()
    assert outside(tmp_path) == before
    assert not list(Path(constants.HF_HUB_CACHE).glob("*/refs/*"))


@pytest.mark.parametrize("name", ["../../../outside.json", "a/../../../../b.json", "/tmp/b.json"])
def test_file_of_a_model_cannot_escape_its_folder(hub: Hub, tmp_path: Path, name: str) -> None:
    hub.models["org/model"].files = {**FILES, name: b"{}"}
    before = outside(tmp_path)
    with pytest.raises(ModelError):
        model()
    assert outside(tmp_path) == before


# Time


@pytest.mark.parametrize("part", [slow("/revision/"), slow("/tree/"), "/resolve/"])
def test_model_download_times_out(hub: Hub, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_SILENCE_SECONDS", 0.2)
    monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.2)
    monkeypatch.setattr(constants, "HF_HUB_ETAG_TIMEOUT", 0.2)

    def fault(handler: Handler, method: str, path: str) -> bool:
        if part in path:
            handler.fall_silent()
        return part in path

    hub.faults.append(fault)
    with pytest.raises(ModelError, match="downloading it failed"):
        model()
    assert hub.given_up()


def test_hub_that_trickles_does_not_hang_a_model(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(client, "MAX_SILENCE_SECONDS", 0.15)
    closed: list[bool] = []

    def fault(handler: Handler, method: str, path: str) -> bool:
        if "/tree/" not in path:
            return False
        handler.send_response(200)
        handler.send_header("Content-Length", "1000000")
        handler.end_headers()
        try:
            for _ in range(50 * SECONDS):
                handler.wfile.write(b" ")
                time.sleep(0.02)
            closed.append(False)
        except OSError:
            closed.append(True)
        handler.close_connection = True
        return True

    hub.faults.append(fault)
    with pytest.raises(ModelError, match="downloading it failed"):
        model()
    wait_until(lambda: bool(closed))
    assert all(closed)


@pytest.mark.parametrize("wait", ["1000000000", "61"])
@pytest.mark.parametrize(
    "headers",
    [{"Retry_After": ""}, {"RateLimit": '"api";r=0;t=', "RateLimit_Policy": '"api";q=1;w=9'}],
    ids=["retry", "rate"],
)
def test_rate_limited_hub_is_an_error(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, headers: dict[str, str], wait: str
) -> None:
    slept: list[float] = []
    monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", slept.append)

    def fault(handler: Handler, method: str, path: str) -> bool:
        if "/tree/" not in path or len(slept) > 1:
            return False
        given = {n: v + wait if n != "RateLimit_Policy" else v for n, v in headers.items()}
        handler.answer(json.dumps({"error": "later"}).encode(), 429, **given)
        return True

    hub.faults.append(fault)
    assert model().is_dir()
    assert slept
    assert max(slept) <= client.MAX_WAIT_SECONDS + 1


def test_checks_outlive_the_session(hub: Hub) -> None:
    """The client makes a new session after a connection error."""
    import huggingface_hub

    model()
    huggingface_hub.close_session()
    with_headers(hub, ETag='"../../outside"')
    with pytest.raises(DataError):
        data()
