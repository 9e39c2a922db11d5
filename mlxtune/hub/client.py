"""Yields the hub's client, hides its output, and turns each error into one line."""

import importlib.metadata
import sys
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

import huggingface_hub
from huggingface_hub import constants, errors
from huggingface_hub.utils import disable_progress_bars, logging

from mlxtune.config.limits import TooLarge
from mlxtune.errors import MlxTuneError, one_line
from mlxtune.hub.responses import check_answers

_LOG_IN = "log in with hf auth login, or set HF_TOKEN"


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
            check_answers()
            version = importlib.metadata.version("mlxtune")
            yield huggingface_hub.HfApi(library_name="mlxtune", library_version=version)
    except MlxTuneError:
        raise
    except Exception as problem:
        raise error(f"{name}: {reason(problem, kind, here)}") from problem
    finally:
        logging.set_verbosity(verbosity)


def reason(error: Exception, kind: str, here: str = "") -> str:
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
    if isinstance(error, TooLarge):
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
    known = huggingface_hub.get_token() is not None
    if code == 401 and known and not isinstance(error, errors.RepositoryNotFoundError):
        return f"the hub refuses the token: {_LOG_IN} to a valid one"
    if isinstance(error, errors.RepositoryNotFoundError):
        readers = "one that this token may not read" if known else f"a private one: {_LOG_IN}"
        return f"{here}no such {kind} on the hub, or {readers}"
    said = one_line(error.server_message or "")
    if code in (401, 403):
        return f"the hub denies access ({said}): {_LOG_IN} to a token with access"
    if code == 404:
        return "the hub lacks a file that it lists: try again, or name another revision"
    if code == 429:
        return "the hub has received too many requests: wait a few minutes, and try again"
    if code >= 500:
        return f"the hub is not working ({code}): try again later"
    return f"the hub answers with error {code} ({said})"
