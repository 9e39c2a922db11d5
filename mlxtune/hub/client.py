"""The hub's client: checks responses, hides the client's output, and gives errors in one line.

The client makes paths in its cache from a file's ETag and from commits, and waits as long as a
response requests. A process has one session of the client, which mlx-lm also uses for downloads.
"""

import importlib
import re
import sys
import time
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import disable_progress_bars, logging

from mlxtune.config.limits import HUB_RESPONSE_LIMITS, TooLargeError, parse_json
from mlxtune.core.machine.installation import installed_version
from mlxtune.core.names import is_commit, is_file_name, is_relative_path
from mlxtune.errors import ConfigError, MlxTuneError, one_line
from mlxtune.hub import check_endpoint

_LOG_IN = "log in with hf auth login, or set HF_TOKEN"
# The longest silence of the hub, and the longest wait that it may request, in seconds. The client
# sets no limits.
MAX_SILENCE_SECONDS, MAX_WAIT_SECONDS = 60.0, 60
# The lowest average speed of a response after MAX_SILENCE_SECONDS seconds, in bytes per second.
MIN_BYTES_PER_SECOND = 1000
# Headers whose values become file names in the cache.
_ETAGS = ("ETag", "X-Linked-Etag", "X-Xet-Hash")
_COMMIT = "X-Repo-Commit"
# A few megabytes of gzip may unpack to gigabytes, so only uncompressed responses are requested.
_IDENTITY_ENCODING = "identity"
# The part of an address that marks a file. Files are written to disk in pieces, and other
# responses are read whole. The second name keeps this mark on a request that is redirected
# elsewhere.
_FILE, _IS_FILE = "/resolve/", "mlxtune.is_file"
_PASSWORD = re.compile(r"//[^/?#\s]*@")
_RETRY, _LIMITS = "Retry-After", ("ratelimit", "ratelimit-policy")


@contextmanager
def asking(
    name: str, kind: str, error: type[MlxTuneError], *, quiet: bool = False, here: str = ""
) -> Iterator[huggingface_hub.HfApi]:
    """Yield the client, and raise `error` with one line about `name` for any failure.

    If the hub has nothing with this name, the error says "no such" and `kind`. `here` starts the
    error if the hub does not know the name or cannot be asked. Hides the client's warnings, such as
    a line for each retry.
    """
    # By default, uploads draw progress bars even into a pipe.
    if quiet or not sys.stderr.isatty():
        disable_progress_bars()
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            install_response_checks()
            yield huggingface_hub.HfApi(library_name="mlxtune", library_version=installed_version())
    except MlxTuneError:
        raise
    except Exception as problem:
        raise error(f"{name}: {reason(problem, kind, here)}") from problem
    finally:
        logging.set_verbosity(verbosity)


def without_password(text: str) -> str:
    """Remove the names and passwords from addresses, as HF_ENDPOINT may have them."""
    return _PASSWORD.sub("//", text)


def reason(error: Exception, kind: str, here: str = "") -> str:
    """Return why a request failed. Raises ConfigError if HF_ENDPOINT is malformed."""
    if isinstance(error, ConfigError):
        raise error
    return without_password(_reason(error, kind, here))


def _reason(error: Exception, kind: str, here: str) -> str:
    if isinstance(error, errors.LocalEntryNotFoundError) and isinstance(error.__cause__, Exception):
        error = error.__cause__
    if isinstance(error, errors.OfflineModeIsEnabled):
        return (
            f"{here}HF_HUB_OFFLINE forbids contacting the hub: unset it, or name a commit (@…) "
            "whose files are cached"
        )
    if isinstance(error, errors.GatedRepoError):
        return (
            f"is gated: ask for access on its page at {constants.ENDPOINT}, then {_LOG_IN} to a "
            "token of the account with access"
        )
    if isinstance(error, errors.RevisionNotFoundError):
        return "has no such revision on the hub: check the revision after @"
    if isinstance(error, errors.HfHubHTTPError):
        return _refusal(error, kind, here)
    if isinstance(error, errors.LocalTokenNotFoundError):
        return f"needs an access token for the hub: {_LOG_IN}"
    if isinstance(error, errors.HFValidationError):
        return f"is not a valid name on the hub: {one_line(error)}"
    if isinstance(error, OSError) and error.errno is not None:
        return f"cannot be kept in {constants.HF_HUB_CACHE}: {error.strerror}"
    cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
    if isinstance(cause, errors.HfHubHTTPError):
        return _refusal(cause, kind, here)
    if isinstance(error, TooLargeError):
        return f"{error}: check HF_ENDPOINT"
    nonsense = (TypeError, ValueError, LookupError, AttributeError, AssertionError)
    if isinstance(error, (*nonsense, errors.FileMetadataError)):
        return f"{constants.ENDPOINT} does not answer like a hub: check HF_ENDPOINT"
    return (
        f"{here}the connection to {constants.ENDPOINT} failed ({one_line(cause)}): check the "
        "network, and try again"
    )


def _refusal(error: errors.HfHubHTTPError, kind: str, here: str) -> str:
    code = error.response.status_code
    has_token = huggingface_hub.get_token() is not None
    if code == 401 and has_token and not isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub refuses the token: {_LOG_IN} to a valid one"
    if isinstance(error, errors.RepositoryNotFoundError):
        readers = "one that this token may not read" if has_token else f"a private one: {_LOG_IN}"
        return f"{here}no such {kind} on the hub, or {readers}"
    answer = one_line(error.server_message or "")
    if code in (401, 403):
        return f"the hub denies access ({answer}): {_LOG_IN} to a token with access"
    if code == 404:
        return "the hub lacks a file that it lists: try again, or name another revision"
    if code == 429:
        return "the hub has received too many requests: wait a few minutes, and try again"
    if code >= 500:
        return f"the hub is not working ({code}): try again later"
    return f"the hub answers with error {code} ({answer})"


class BadResponseError(ValueError):
    """A hub's response contains an invalid commit or file name."""


def install_response_checks() -> None:
    """Check every response that the hub sends to this process, and limit each wait.

    Raises ConfigError if HF_ENDPOINT is malformed.
    """
    check_endpoint()
    session = huggingface_hub.get_session()
    hooks = session.event_hooks
    if _check not in hooks["response"]:
        own = {"request": _limit, "response": _check}
        hooks = {name: [*hooks[name], hook] for name, hook in own.items()}
        # After some errors, the client makes a new session, whose responses must be checked too.
        kind: Any = type(session)
        huggingface_hub.set_client_factory(lambda: kind(event_hooks=hooks, follow_redirects=True))


def _limit(request: Any) -> None:
    """Limit how long a request waits for data, and ask for an uncompressed response."""
    request.headers["Accept-Encoding"] = _IDENTITY_ENCODING
    request.extensions.setdefault(_IS_FILE, _FILE in request.url.path)
    waits = request.extensions["timeout"]
    limited = {
        name: MAX_SILENCE_SECONDS if wait is None else min(wait, MAX_SILENCE_SECONDS)
        for name, wait in waits.items()
    }
    request.extensions["timeout"] = limited


def _check(response: Any) -> None:
    """Check the names in a response, shorten the wait that it requests, and limit its size.

    Raises BadResponseError for an invalid name, and TooLargeError for a compressed response. The
    stream raises TooLargeError if the response is too long and not a file.
    """
    headers = response.headers
    if (packed := headers.get("Content-Encoding", _IDENTITY_ENCODING)) != _IDENTITY_ENCODING:
        raise TooLargeError(
            f"the hub's response is compressed ({packed:.20}), contrary to the request"
        )
    if response.request.method == "HEAD":  # the client's request before it downloads a file
        _check_file_headers(headers)
    for name in _LIMITS:
        headers.pop(name, None)
    if _RETRY in headers and not _is_acceptable_wait(headers[_RETRY]):
        headers[_RETRY] = str(MAX_WAIT_SECONDS)
    is_file = response.request.extensions.get(_IS_FILE) and response.is_success
    response.stream = _within_limits(response, None if is_file else HUB_RESPONSE_LIMITS.bytes)
    if response.request.url.path.startswith("/api/") and response.is_success:
        _check_facts(response)


def _check_file_headers(headers: Mapping[str, str]) -> None:
    """Raise BadResponseError for a file whose ETag or commit is not a safe file name."""
    for name in _ETAGS:
        # The client strips the header in the same way.
        if not is_file_name(headers.get(name, "none").removeprefix("W/").strip('"')):
            raise BadResponseError(f"{name} is not a file name: {headers[name]!r:.60}")
    if _COMMIT in headers and not is_commit(headers[_COMMIT]):
        raise BadResponseError(f"{_COMMIT} is not a commit: {headers[_COMMIT]!r:.60}")


def _is_acceptable_wait(wait: str) -> bool:
    return wait.isdecimal() and len(wait) < 4 and int(wait) <= MAX_WAIT_SECONDS


def _check_facts(response: Any) -> None:
    """Raise BadResponseError if JSON about a repository has an invalid commit or file name."""
    try:
        facts = parse_json(response.read(), HUB_RESPONSE_LIMITS, "the hub's response")
    except TooLargeError:
        raise
    except ValueError:
        return  # the client reports invalid JSON itself
    for each in facts if isinstance(facts, list) else [facts]:
        if not isinstance(each, dict):
            continue
        if "siblings" in each and not (each.get("sha") is None or is_commit(each["sha"])):
            raise BadResponseError(f"sha is not a commit: {each['sha']!r:.60}")
        files = [each] if each.get("type") == "file" else each.get("siblings")
        for file in files if isinstance(files, list) else []:
            name = file.get("rfilename", file.get("path")) if isinstance(file, dict) else None
            if name is not None and not is_relative_path(name):
                raise BadResponseError(f"not a file name: {name!r:.60}")


def _within_limits(response: Any, most: int | None) -> Any:
    """Return a response's stream, with limits on its speed and size.

    The stream raises the client's ReadTimeout if it is slower than MIN_BYTES_PER_SECOND, and
    TooLargeError after `most` bytes.
    """
    library = importlib.import_module(type(response).__module__.partition(".")[0])
    stream = response.stream

    class Limited(library.SyncByteStream):  # type: ignore[name-defined, misc]
        def __iter__(self) -> Iterator[bytes]:
            started, size = time.monotonic(), 0
            for piece in stream:
                size += len(piece)
                if most is not None and size > most:
                    raise TooLargeError(f"the hub's response has more than {most:,} bytes")
                seconds = time.monotonic() - started
                if seconds > MAX_SILENCE_SECONDS and size < MIN_BYTES_PER_SECOND * seconds:
                    raise library.ReadTimeout("the response trickles", request=response.request)
                yield piece

        def close(self) -> None:
            stream.close()

    return Limited()
