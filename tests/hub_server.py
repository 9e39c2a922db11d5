"""A local hub for the real client: data sets to download, and repositories to push to.

It answers huggingface_hub's requests like huggingface.co, and keeps all uploads. By hand:

    python -m tests.hub_server 8080  # then HF_ENDPOINT=http://127.0.0.1:8080 mlxtune …
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import unquote, urlsplit

from tests.waiting import wait_until

CONVERTED = "refs/convert/parquet"
# The role of each token.
TOKENS = {"hf_owner": "write", "hf_reader": "read"}


def commit_of(files: dict[str, bytes]) -> str:
    return hashlib.sha1(repr(sorted(files.items())).encode()).hexdigest()


@dataclass
class Dataset:
    """A data set: its files by revision, and the metadata of its card."""

    revisions: dict[str, dict[str, bytes]]
    card: dict[str, Any] = field(default_factory=dict)
    private: bool = False
    gated: bool = False

    def files_at(self, revision: str) -> tuple[str, dict[str, bytes]] | None:
        for name, files in self.revisions.items():
            if revision in (name, commit_of(files)):
                return commit_of(files), files
        return None


@dataclass
class Model:
    private: bool = True
    files: dict[str, bytes] = field(default_factory=dict)
    commits: list[str] = field(default_factory=list)
    writable: bool = True


@dataclass
class Request:
    method: str
    path: str
    headers: dict[str, str]
    body: bytes


class Hub:
    """The content of a local hub, its received requests, and its faults.

    Each of `faults` is called with a request's handler, method and path; it answers, breaks the
    connection, or returns False to let the hub answer.
    """

    def __init__(self) -> None:
        self.datasets: dict[str, Dataset] = {}
        self.models: dict[str, Model] = {}
        self.stored: dict[str, bytes] = {}
        self.requests: list[Request] = []
        self.faults: list[Callable[[Handler, str, str], bool]] = []
        self.endpoint = ""
        # One entry per unanswered connection: True if the client closed it.
        self.gave_up: list[bool] = []

    def given_up(self) -> bool:
        """Return whether the client closed every unanswered connection."""
        # The server may notice the closed connection later.
        wait_until(lambda: bool(self.gave_up))
        return all(self.gave_up)

    def asked(self, part: str = "") -> list[str]:
        return [
            f"{request.method} {request.path}" for request in self.requests if part in request.path
        ]

    def sent(self) -> bytes:
        """Return all paths, headers and bodies that clients have sent, with base64 decoded."""
        parts = []
        for request in self.requests:
            parts += [request.path.encode(), repr(request.headers).encode(), request.body]
            coded = re.findall(rb'"(?:content|sample)": ?"([A-Za-z0-9+/=]+)"', request.body)
            parts += map(base64.b64decode, coded)
        return b"\n".join(parts)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    # Each answer is two packets; Nagle's algorithm would delay the second by 40 ms.
    disable_nagle_algorithm = True
    hub: Hub

    def log_message(self, format: str, *args: object) -> None:
        pass

    def _handle(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        if self.headers.get("Transfer-Encoding") == "chunked":
            body = self._chunks()
        path = unquote(urlsplit(self.path).path)
        self.hub.requests.append(Request(self.command, path, dict(self.headers), body))
        if any(fault(self, self.command, path) for fault in self.hub.faults):
            return
        for pattern, answer in ROUTES:
            if match := re.fullmatch(pattern, f"{self.command} {path}"):
                answer(self, body, *match.groups())
                return
        self.refuse(404, "EntryNotFound", f"no such page: {path}")

    do_GET = do_HEAD = do_POST = do_PUT = do_DELETE = _handle

    def _chunks(self) -> bytes:
        parts = []
        while size := int(self.rfile.readline(), 16):
            parts.append(self.rfile.read(size))
            self.rfile.readline()
        self.rfile.readline()
        return b"".join(parts)

    def answer(self, content: bytes, code: int = 200, **headers: str) -> None:
        self.send_response(code)
        for name, value in {"Content-Length": str(len(content)), **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def answer_json(self, value: Any, code: int = 200, **headers: str) -> None:
        headers = {"Content-Type": "application/json", **headers}
        self.answer(json.dumps(value).encode(), code, **headers)

    def refuse(self, code: int, kind: str, message: str) -> None:
        headers = {"X-Error-Code": kind} if kind else {}
        self.answer_json({"error": message}, code, **headers, **{"X-Error-Message": message})

    def drop(self) -> None:
        self.close_connection = True
        self.connection.shutdown(socket.SHUT_RDWR)

    def role(self) -> str | None:
        """Return the token's role: None without a token, "unknown" for an unknown one."""
        token = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
        return TOKENS.get(token, "unknown" if token else None)

    def fall_silent(self) -> None:
        """Send no answer until the client gives up or a minute has passed."""
        self.connection.settimeout(60)
        try:
            # `recv` returns nothing once the client has closed the connection.
            self.hub.gave_up.append(self.connection.recv(1) == b"")
        except OSError:
            self.hub.gave_up.append(False)
        self.close_connection = True

    # Data sets

    def dataset(self, name: str) -> Dataset | None:
        """Return a data set that the token may read; otherwise send the refusal and return None."""
        found, role = self.hub.datasets.get(name), self.role()
        if role == "unknown":
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif found is None or (found.private and role is None):
            self.refuse(404 if role else 401, "RepoNotFound", "Repository not found")
        else:
            return found
        return None

    def dataset_info(self, _: bytes, name: str, revision: str | None) -> None:
        if (found := self.dataset(name)) is None:
            return
        if (at := found.files_at(revision or "main")) is None:
            self.refuse(404, "RevisionNotFound", f"Invalid rev id: {revision}")
            return
        self.answer_json(
            {
                "id": name,
                "sha": at[0],
                "private": found.private,
                "gated": "manual" if found.gated else False,
                "cardData": found.card,
                "siblings": [{"rfilename": file} for file in at[1]],
            }
        )

    def dataset_file(self, _: bytes, name: str, revision: str, file: str) -> None:
        if (found := self.dataset(name)) is None:
            return
        if found.gated and self.role() != "write":
            self.refuse(403, "GatedRepo", f"Access to dataset {name} is restricted.")
            return
        at = found.files_at(revision)
        if at is None or file not in at[1]:
            self.refuse(404, "EntryNotFound", "Entry not found")
            return
        self.file(at[1][file], at[0])

    def file(self, content: bytes, commit: str) -> None:
        etag = f'"{hashlib.sha1(content).hexdigest()}"'
        headers = {"ETag": etag, "X-Repo-Commit": commit, "Accept-Ranges": "bytes"}
        if wanted := re.fullmatch(r"bytes=(\d+)-", self.headers.get("Range") or ""):
            start = int(wanted[1])
            headers["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
            self.answer(content[start:], 206, **headers)
            return
        self.answer(content, **headers)

    # Models

    def whoami(self, _: bytes) -> None:
        role = self.role()
        if role in (None, "unknown"):
            self.refuse(401, "", "Invalid credentials in Authorization header")
            return
        access = {"displayName": "test", "role": role}
        self.answer_json({"name": "me", "orgs": [], "auth": {"accessToken": access}})

    def may_write(self, name: str) -> Model | None:
        found, role = self.hub.models.get(name), self.role()
        if role == "unknown":
            self.refuse(401, "", "Invalid credentials in Authorization header")
        elif found is None or (found.private and role is None):
            self.refuse(404 if role else 401, "RepoNotFound", "Repository not found")
        elif role != "write" or not found.writable:
            self.refuse(403, "", "You don't have the rights to write to this repository")
        else:
            return found
        return None

    def auth_check(self, _: bytes, name: str) -> None:
        if self.may_write(name) is not None:
            self.answer_json({})

    def model_info(self, _: bytes, name: str) -> None:
        found = self.hub.models.get(name)
        if found is None:
            self.refuse(404, "RepoNotFound", "Repository not found")
            return
        self.answer_json(
            {
                "id": name,
                "sha": commit_of(found.files),
                "private": found.private,
                "siblings": [{"rfilename": file} for file in found.files],
            }
        )

    def model_tree(self, _: bytes, name: str) -> None:
        files = self.hub.models[name].files if name in self.hub.models else {}
        self.answer_json(
            [
                {"type": "file", "path": path, "size": len(content), "oid": "0" * 40}
                for path, content in files.items()
            ]
        )

    def model_file(self, _: bytes, name: str, file: str) -> None:
        found = self.hub.models.get(name)
        if found is None or file not in found.files:
            self.refuse(404, "EntryNotFound", "Entry not found")
        else:
            self.file(found.files[file], commit_of(found.files))

    def create(self, body: bytes) -> None:
        asked = json.loads(body)
        name = f"{asked['organization']}/{asked['name']}"
        if name in self.hub.models:
            self.refuse(409, "", "You already created this model repo")
        elif self.role() != "write" or asked["organization"] != "me":
            self.refuse(403, "", "You don't have the rights to create a model here")
        else:
            private = asked.get("private") or asked.get("visibility") == "private"
            self.hub.models[name] = Model(private=bool(private))
            self.answer_json({"url": f"{self.hub.endpoint}/{name}"})

    def delete(self, body: bytes) -> None:
        asked = json.loads(body)
        self.hub.models.pop(f"{asked['organization']}/{asked['name']}", None)
        self.answer_json({})

    def validate_yaml(self, _: bytes) -> None:
        self.answer_json({"errors": [], "warnings": []})

    def preupload(self, body: bytes, name: str) -> None:
        if self.may_write(name) is None:
            return
        self.answer_json(
            {
                "files": [
                    {
                        "path": file["path"],
                        "uploadMode": "lfs" if "safetensors" in file["path"] else "regular",
                        "shouldIgnore": False,
                    }
                    for file in json.loads(body)["files"]
                ]
            }
        )

    def batch(self, body: bytes, name: str) -> None:
        if self.may_write(name) is None:
            return
        objects = [
            {**each, "actions": {"upload": {"href": f"{self.hub.endpoint}/storage/{each['oid']}"}}}
            for each in json.loads(body)["objects"]
        ]
        self.answer_json({"transfer": "basic", "objects": objects})

    def store(self, body: bytes, oid: str) -> None:
        assert hashlib.sha256(body).hexdigest() == oid
        self.hub.stored[oid] = body
        self.answer(b"")

    def commit(self, body: bytes, name: str) -> None:
        if (model := self.may_write(name)) is None:
            return
        for line in body.splitlines():
            entry = json.loads(line)
            value = entry["value"]
            if entry["key"] == "header":
                model.commits.append(value["summary"])
            elif entry["key"] == "file":
                model.files[value["path"]] = base64.b64decode(value["content"])
            elif entry["key"] == "lfsFile":
                model.files[value["path"]] = self.hub.stored[value["oid"]]
        oid = commit_of(model.files)
        url = f"{self.hub.endpoint}/{name}/commit/{oid}"
        self.answer_json({"commitUrl": url, "commitOid": oid})


_REPO = r"([^/]+/[^/]+)"
ROUTES: list[tuple[str, Callable[..., None]]] = [
    (rf"GET /api/datasets/{_REPO}(?:/revision/(.+))?", Handler.dataset_info),
    (rf"(?:GET|HEAD) /datasets/{_REPO}/resolve/([0-9a-f]{{40}}|[^/]+)/(.+)", Handler.dataset_file),
    (r"GET /api/whoami-v2", Handler.whoami),
    (rf"GET /api/models/{_REPO}/auth-check/write", Handler.auth_check),
    (rf"GET /api/models/{_REPO}(?:/revision/main)?", Handler.model_info),
    (rf"GET /api/models/{_REPO}/tree/[^/]+", Handler.model_tree),
    (rf"(?:GET|HEAD) /{_REPO}/resolve/[^/]+/(.+)", Handler.model_file),
    (r"POST /api/repos/create", Handler.create),
    (r"DELETE /api/repos/delete", Handler.delete),
    (r"POST /api/validate-yaml", Handler.validate_yaml),
    (rf"POST /api/models/{_REPO}/preupload/main", Handler.preupload),
    (rf"POST /{_REPO}\.git/info/lfs/objects/batch", Handler.batch),
    (r"PUT /storage/([0-9a-f]{64})", Handler.store),
    (rf"POST /api/models/{_REPO}/commit/main", Handler.commit),
]


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Ignore clients that hang up, because the command under test prints to the same stderr."""
        if not isinstance(sys.exception(), ConnectionError):
            super().handle_error(request, client_address)


@contextmanager
def serving(hub: Hub, port: int = 0) -> Iterator[Hub]:
    """Run a server for the hub on this machine."""
    server = _Server(("127.0.0.1", port), type("Own", (Handler,), {"hub": hub}))
    hub.endpoint = f"http://127.0.0.1:{server.server_address[1]}"
    # Poll often, because a shutdown waits for the next poll.
    thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def main() -> None:
    from tests.paths import SHARED

    rows = (SHARED / "chat" / "gsm8k_train.jsonl").read_bytes().splitlines(keepends=True)
    own = {"train.jsonl": b"".join(rows[:400]), "test.jsonl": b"".join(rows[400:450])}
    hub = Hub()
    hub.datasets["org/gsm8k"] = Dataset({"main": own}, {"license": "mit"})
    hub.datasets["org/gated"] = Dataset({"main": own}, {"license": "other"}, gated=True)
    hub.datasets["org/private"] = Dataset({"main": own}, private=True)
    with serving(hub, int(sys.argv[1])):
        print(hub.endpoint, flush=True)
        shown = 0
        while True:
            time.sleep(0.2)
            for request in hub.requests[shown:]:
                print(request.method, request.path, f"{len(request.body):,} bytes", flush=True)
                shown += 1


if __name__ == "__main__":
    main()
