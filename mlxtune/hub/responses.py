"""Checks a hub's answers before the client uses them: sizes, names that become paths, and waits.

The client makes paths in its cache from a file's ETag and from commits, and waits as long as an
answer requests. A process has one session of the client, which mlx-lm also uses for downloads.
"""

import importlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import huggingface_hub

from mlxtune.config.limits import HUB_ANSWER, TooLarge, parse_json
from mlxtune.core.names import is_commit, is_file_name, is_relative_path

# Longest silence of the hub, and longest wait it may request, in seconds. The client sets no
# limits.
SILENCE, MOST_WAIT = 60.0, 60
# Lowest average speed of an answer after SILENCE seconds, in bytes per second.
SLOWEST = 1000
# Headers whose values become file names in the cache.
_ETAGS = ("ETag", "X-Linked-Etag", "X-Xet-Hash")
_COMMIT = "X-Repo-Commit"
# A few megabytes of gzip unpack to gigabytes in memory, so only uncompressed answers are requested.
_PLAIN = "identity"
# The part of an address that marks a file. Files are written to disk in pieces, and other answers
# are read whole. The second name keeps this mark on a request that is redirected elsewhere.
_FILE, _IS_FILE = "/resolve/", "mlxtune.is_file"
_RETRY, _LIMITS = "Retry-After", ("ratelimit", "ratelimit-policy")


class BadAnswerError(ValueError):
    """A hub's answer contains an invalid commit or file name."""


def check_answers() -> None:
    """Check every answer that the hub sends to this process, and limit each wait."""
    session = huggingface_hub.get_session()
    hooks = session.event_hooks
    if _check not in hooks["response"]:
        own = {"request": _limit, "response": _check}
        hooks = {name: [*hooks[name], hook] for name, hook in own.items()}
        # After some errors, the client makes a new session, whose answers must be checked too.
        kind: Any = type(session)
        huggingface_hub.set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True))


def _limit(request: Any) -> None:
    """Limit how long a request waits for data, and ask for an uncompressed answer."""
    request.headers["Accept-Encoding"] = _PLAIN
    request.extensions.setdefault(_IS_FILE, _FILE in request.url.path)
    waits = request.extensions["timeout"]
    limited = {
        name: SILENCE if wait is None else min(wait, SILENCE) for name, wait in waits.items()
    }
    request.extensions["timeout"] = limited


def _check(response: Any) -> None:
    """Check the names in an answer, shorten the wait that it requests, and limit its size.

    Raises BadAnswerError for an invalid name, and TooLarge for a compressed answer. The answer's
    stream raises TooLarge if the answer is too long and not a file.
    """
    headers = response.headers
    if (packed := headers.get("Content-Encoding", _PLAIN)) != _PLAIN:
        raise TooLarge(f"the hub's answer is compressed ({packed:.20}), contrary to the request")
    if response.request.method == "HEAD":  # the client's request before it downloads a file
        _check_file_headers(headers)
    for name in _LIMITS:
        headers.pop(name, None)
    if _RETRY in headers and not _short(headers[_RETRY]):
        headers[_RETRY] = str(MOST_WAIT)
    is_file = response.request.extensions.get(_IS_FILE) and response.is_success
    response.stream = _within_limits(response, None if is_file else HUB_ANSWER.bytes)
    if response.request.url.path.startswith("/api/") and response.is_success:
        _check_facts(response)


def _check_file_headers(headers: Mapping[str, str]) -> None:
    """Raise BadAnswerError for a file whose ETag or commit is not a safe file name."""
    for name in _ETAGS:
        # The client strips the header in the same way.
        if not is_file_name(headers.get(name, "none").removeprefix("W/").strip('"')):
            raise BadAnswerError(f"{name} is not a file name: {headers[name]!r:.60}")
    if _COMMIT in headers and not is_commit(headers[_COMMIT]):
        raise BadAnswerError(f"{_COMMIT} is not a commit: {headers[_COMMIT]!r:.60}")


def _short(wait: str) -> bool:
    return wait.isdecimal() and len(wait) < 4 and int(wait) <= MOST_WAIT


def _check_facts(response: Any) -> None:
    """Raise BadAnswerError if JSON about a repository has an invalid commit or file name."""
    try:
        facts = parse_json(response.read(), HUB_ANSWER, "the hub's answer")
    except TooLarge:
        raise
    except ValueError:
        return  # the client reports invalid JSON itself
    for each in facts if isinstance(facts, list) else [facts]:
        if not isinstance(each, dict):
            continue
        if "siblings" in each and not (each.get("sha") is None or is_commit(each["sha"])):
            raise BadAnswerError(f"sha is not a commit: {each['sha']!r:.60}")
        files = [each] if each.get("type") == "file" else each.get("siblings")
        for file in files if isinstance(files, list) else []:
            name = file.get("rfilename", file.get("path")) if isinstance(file, dict) else None
            if name is not None and not is_relative_path(name):
                raise BadAnswerError(f"not a file name: {name!r:.60}")


def _within_limits(response: Any, most: int | None) -> Any:
    """Return an answer's stream, with limits on its speed and size.

    The stream raises the client's ReadTimeout if it is slower than SLOWEST, and TooLarge after
    `most` bytes.
    """
    library = importlib.import_module(type(response).__module__.partition(".")[0])
    stream = response.stream

    class Limited(library.SyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            started, size = time.monotonic(), 0
            for piece in stream:
                size += len(piece)
                if most is not None and size > most:
                    raise TooLarge(f"the hub's answer has more than {most:,} bytes")
                seconds = time.monotonic() - started
                if seconds > SILENCE and size < SLOWEST * seconds:
                    raise library.ReadTimeout("the answer trickles", request=response.request)
                yield piece

        def close(self) -> None:
            stream.close()

    return Limited()
