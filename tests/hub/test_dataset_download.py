"""The real client downloads data sets from a local hub completely, or gives a one-line error."""

from __future__ import annotations

from pathlib import Path

import pytest
from huggingface_hub import constants

from mlxtune.errors import DataError
from mlxtune.hub.dataset_download import HubData, fetch
from mlxtune.hub.dataset_name import dataset_name
from tests.hub_server import CONVERTED, Dataset, Handler, Hub, commit_of
from tests.slow import slow

ROWS = b'{"prompt": "a", "completion": "b"}\n' * 2000
OWN = {"train.jsonl": ROWS, "test.jsonl": ROWS[:350], "README.md": b"# Sums"}


@pytest.fixture(autouse=True)
def sums(hub: Hub) -> Dataset:
    hub.datasets["org/sums"] = data = Dataset({"main": OWN, "v1": {"train.jsonl": b"{}\n"}})
    return data


def get(text: str, **options: bool) -> HubData:
    name = dataset_name(text)
    assert name is not None
    return fetch(name, **options)


def refusal(text: str) -> str:
    with pytest.raises(DataError) as raised:
        get(text)
    message = str(raised.value)
    assert "\n" not in message
    assert len(message) < 500
    assert message.startswith(text)
    return message.removeprefix(text).lstrip(": ")


def kept() -> list[str]:
    """Return the names of the data sets' files in the hub's cache, complete or partial."""
    cache = Path(constants.HF_HUB_CACHE)
    return sorted(path.name for path in cache.glob("datasets--*/blobs/*"))


def drop_after(count: int, times: int = 1000) -> object:
    """Return a fault that breaks a download after `count` bytes, `times` times."""
    left = [times]

    def fault(handler: Handler, method: str, path: str) -> bool:
        if method != "GET" or "/resolve/" not in path or not left[0]:
            return False
        left[0] -= 1
        start = int((handler.headers.get("Range") or "bytes=0-")[6:-1])
        handler.send_response(206 if start else 200)
        handler.send_header("Content-Length", str(len(ROWS) - start))
        handler.end_headers()
        handler.wfile.write(ROWS[start : start + count])
        handler.wfile.flush()
        handler.drop()
        return True

    return fault


# Downloads


def test_files_of_a_split_are_here_whole_and_of_one_commit(hub: Hub) -> None:
    data = get("org/sums:train")
    assert [path.read_bytes() for path in data.train] == [ROWS]
    assert str(data.name) == f"org/sums/default@{commit_of(OWN)}:train"
    assert data.titles == {"train": "org/sums:train"}


def test_hubs_own_parquet_comes_before_the_repositorys_files(hub: Hub, sums: Dataset) -> None:
    converted = {
        "main/train/0000.parquet": b"PAR1 one",
        "main/train/0001.parquet": b"PAR1 two",
        "main/validation/0000.parquet": b"PAR1 three",
    }
    sums.revisions[CONVERTED] = converted
    data = get("org/sums")
    assert [path.read_bytes() for path in data.train] == [b"PAR1 one", b"PAR1 two"]
    assert [path.read_bytes() for path in data.validation] == [b"PAR1 three"]
    assert data.name.revision == commit_of(converted)
    assert list(data.title_of_files().values()) == [
        "org/sums/main:train/0000.parquet",
        "org/sums/main:train/0001.parquet",
        "org/sums/main:validation",
    ]


def test_revision_takes_the_repositorys_own_files_of_it(sums: Dataset) -> None:
    sums.revisions[CONVERTED] = {"main/train/0000.parquet": b"PAR1 one"}
    assert get("org/sums@v1:train").train[0].read_bytes() == b"{}\n"


def test_files_are_split_as_the_card_of_their_revision_says(sums: Dataset) -> None:
    sums.card = {"configs": [{"config_name": "x", "data_files": "test.jsonl"}]}
    data = get("org/sums")
    assert data.train[0].read_bytes() == ROWS[:350]
    assert data.titles == {"train": "org/sums/x:train"}


@pytest.mark.parametrize(
    ("card", "license"),
    [
        ({"license": "mit"}, "mit"),
        ({"license": ["mit", "cc0-1.0"]}, "mit, cc0-1.0"),
        ({"license": "other", "license_name": "own\nrules"}, "own rules"),
        ({}, ""),
    ],
)
def test_license_comes_from_the_card(sums: Dataset, card: dict[str, object], license: str) -> None:
    sums.card = card
    assert get("org/sums").license == license


def test_only_data_that_anybody_may_read_is_public(
    sums: Dataset, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert get("org/sums").public
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    sums.gated = True
    assert not get("org/sums").public
    sums.gated, sums.private = False, True
    assert not get("org/sums").public


def test_pinned_name_asks_the_hub_nothing_once_its_files_are_here(hub: Hub) -> None:
    first = get("org/sums")
    hub.datasets["org/sums"].revisions["main"] = {"train.jsonl": b"changed"}
    hub.requests.clear()
    again = get(str(first.name))
    assert hub.requests == []
    assert (again.train, again.license, again.public) == (first.train, "", True)


def test_pinned_name_is_the_same_commit_when_fetched_again(hub: Hub, tmp_path: Path) -> None:
    first = get("org/sums")
    hub.datasets["org/sums"].revisions["old"] = OWN
    hub.datasets["org/sums"].revisions["main"] = {"train.jsonl": b"changed"}
    (tmp_path / "hub-cache").rename(tmp_path / "away")
    assert get(str(first.name)).train[0].read_bytes() == ROWS


def test_damaged_record_is_requested_again(hub: Hub, tmp_path: Path) -> None:
    first = get("org/sums")
    (record,) = (tmp_path / "cache").rglob("hub/*.json")
    for content in ("", "[]", "{}", '{"license": "", "public": 1, "files": 3}'):
        record.write_text(content)
        assert get(str(first.name)).train == first.train


# Tokens


@pytest.mark.parametrize("token", ["hf_owner", None])
def test_private_data_set_needs_a_token(
    sums: Dataset, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    sums.private = True
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
        assert get("org/sums").train[0].read_bytes() == ROWS
        return
    assert refusal("org/sums") == (
        "no such file or folder here, and no such dataset on the hub, or a private one: log in "
        "with hf auth login, or set HF_TOKEN"
    )


def test_missing_data_set_differs_from_an_unreadable_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_reader")
    assert refusal("org/none").endswith("or one that this token may not read")


@pytest.mark.parametrize("token", ["hf_reader", None])
def test_gated_data_set_names_the_page_to_ask_on(
    sums: Dataset, monkeypatch: pytest.MonkeyPatch, token: str | None
) -> None:
    sums.gated = True
    if token is not None:
        monkeypatch.setenv("HF_TOKEN", token)
    assert refusal("org/sums").startswith("is gated: ask for access on its page at http://127")
    assert kept() == []


def test_wrong_token_is_an_error_even_for_public_data(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_typo")
    assert refusal("org/sums") == (
        "the hub refuses the token: log in with hf auth login, or set HF_TOKEN to a valid one"
    )


def test_token_is_never_part_of_a_message(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "hf_owner")
    hub.faults.append(lambda handler, *_: handler.drop() is None)
    assert "hf_owner" not in refusal("org/sums")


# Missing data sets, splits and files


def test_missing_revision_and_split_are_errors() -> None:
    assert refusal("org/sums@v9") == "has no such revision on the hub: check the revision after @"
    assert refusal("org/sums:dev").startswith("has no split 'dev' (test, train)")
    assert "is not a valid name on the hub" in refusal("org/a--b")


# A faulty hub or network


@pytest.mark.parametrize(
    "answer",
    [
        b"<html>Log in to this Wi-Fi</html>",
        b"",
        b"[]",
        b"{}",
        b'{"id": "org/sums", "sha": null, "siblings": [{"rfilename": "train.jsonl"}]}',
        b'{"id": "org/sums", "sha": "../../..", "siblings": [{"rfilename": "train.jsonl"}]}',
        b'{"id": "org/sums", "siblings": 7}',
        b'{"id": "org/sums", "siblings": [{"name": "x"}]}',
        b'{"id": "org/sums", "sha": "%s", "siblings": [{"rfilename": "../../train.jsonl"}]}'
        % (b"0" * 40),
        b"\xff\x00",
    ],
)
def test_invalid_response_is_a_one_line_error(hub: Hub, answer: bytes) -> None:
    def fault(handler: Handler, method: str, path: str) -> bool:
        if "/api/" in path:
            handler.answer(answer)
        return "/api/" in path

    hub.faults.append(fault)
    assert refusal("org/sums") == (f"{hub.endpoint} does not answer like a hub: check HF_ENDPOINT")
    assert kept() == []


def test_file_without_the_hubs_headers_is_an_error(hub: Hub) -> None:
    def fault(handler: Handler, method: str, path: str) -> bool:
        if method == "HEAD":
            handler.answer(ROWS)
        return method == "HEAD"

    hub.faults.append(fault)
    assert refusal("org/sums").endswith("does not answer like a hub: check HF_ENDPOINT")


@pytest.mark.parametrize("part", ["/api/", "/resolve/"])
@pytest.mark.parametrize(
    ("code", "message"),
    [(500, "not working (500)"), (503, "not working (503)"), (429, "too many requests")],
)
def test_unavailable_hub_is_an_error(hub: Hub, part: str, code: int, message: str) -> None:
    def fault(handler: Handler, method: str, path: str) -> bool:
        if part in path:
            handler.refuse(code, "", "<html>oh no</html>")
        return part in path

    hub.faults.append(fault)
    assert message in refusal("org/sums")
    assert kept() == []


def test_no_network_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert refusal("org/sums").startswith(
        "no such file or folder here, and the connection to http://127.0.0.1:9 failed ("
    )


def test_offline_is_an_error_that_names_the_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert refusal("org/sums").startswith(
        "no such file or folder here, and HF_HUB_OFFLINE forbids contacting the hub"
    )


@pytest.mark.parametrize("part", ["/api/", slow("/resolve/")])
def test_hub_times_out(hub: Hub, part: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("mlxtune.hub.dataset_download._TIMEOUT", 0.2)
    monkeypatch.setattr("huggingface_hub.file_download._ETAG_RETRY_TIMEOUT", 0.2)
    for name in ("HF_HUB_DOWNLOAD_TIMEOUT", "HF_HUB_ETAG_TIMEOUT"):
        monkeypatch.setattr(constants, name, 0.15)

    def fault(handler: Handler, method: str, path: str) -> bool:
        if part in path:
            handler.fall_silent()
        return part in path

    hub.faults.append(fault)
    assert "the connection to" in refusal("org/sums")
    assert kept() == []
    assert hub.given_up()


# A connection that breaks within a file


def test_broken_download_continues_where_it_broke(hub: Hub) -> None:
    hub.faults.append(drop_after(20_000, times=2))
    assert get("org/sums:train").train[0].read_bytes() == ROWS
    ranges = [request.headers.get("Range") for request in hub.requests if "resolve" in request.path]
    assert ranges[-2:] == ["bytes=20000-", "bytes=40000-"]


def test_broken_download_leaves_no_partial_file_and_can_be_retried(hub: Hub, sums: Dataset) -> None:
    sums.revisions["main"] = {"a/train.jsonl": ROWS[:700], "b/train.jsonl": ROWS}
    whole = []

    def fault(handler: Handler, method: str, path: str) -> bool:
        return path.endswith("b/train.jsonl") and broken(handler, method, path)

    broken = drop_after(0)
    hub.faults.append(fault)
    assert "the connection to" in refusal("org/sums")
    whole = kept()
    assert len(whole) == 1

    hub.faults.clear()
    hub.requests.clear()
    assert [path.read_bytes() for path in get("org/sums").train] == [ROWS[:700], ROWS]
    # Complete files are not fetched again.
    assert [each for each in hub.asked("resolve") if each.startswith("GET")] == [
        f"GET /datasets/org/sums/resolve/{commit_of(sums.revisions['main'])}/b/train.jsonl"
    ]
    assert set(whole) < set(kept())


def test_interrupted_download_leaves_nothing_half(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.faults.append(drop_after(20_000))

    def interrupt(seconds: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("huggingface_hub.file_download.time.sleep", interrupt)
    with pytest.raises(KeyboardInterrupt):
        get("org/sums")
    assert kept() == []


def test_cache_that_cannot_be_written_is_an_error_of_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "file" / "cache"))
    assert refusal("org/sums") == (f"cannot be kept in {tmp_path}/file/cache: Not a directory")
