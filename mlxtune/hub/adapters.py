"""Uploads of adapters to the hub, in one commit or none."""

from contextlib import suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd
from huggingface_hub.errors import RepositoryNotFoundError

from mlxtune.errors import OutputError
from mlxtune.hub.client import asking

_MISSING = "repository"
_TIMEOUT = 20.0


def check_may_write(repository: str, *, public: bool) -> bool:
    """Return whether a repository exists already. Nothing is uploaded.

    Raises OutputError if the token may not write there, and for a repository that is public where
    `public` is not, or the other way round: the hub would leave it as it is.
    """
    with asking(repository, _MISSING, OutputError) as hub:
        account = hub.whoami()
        token = account["auth"]["accessToken"]
        if token.get("role") == "read":
            raise OutputError(
                f"{repository}: the token {token.get('displayName', '')!s:.60} of "
                f"{account['name']!s:.60} may only read: make one that may write on the page of "
                "your tokens, and set HF_TOKEN"
            )
        try:
            private = hub.model_info(repository, timeout=_TIMEOUT).private is not False
        except RepositoryNotFoundError:
            return False
        hub.auth_check(repository, write=True)
    if private == public:
        has, remedy = ("private", "leave out --public") if private else ("public", "add --public")
        raise OutputError(
            f"{repository}: exists, and is {has}: {remedy}, or change that on its page"
        )
    return True


def upload(folder: Path, repository: str, *, public: bool, exists: bool) -> str:
    """Upload a folder's files, and return the address of the repository. Raises OutputError.

    A repository that had to be made for them is removed again if that fails.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with asking(repository, _MISSING, OutputError) as hub:
        if not exists:
            hub.create_repo(repository, private=not public)
        try:
            commit = hub.create_commit(
                repository,
                [CommitOperationAdd(str(path.relative_to(folder)), path) for path in files],
                commit_message="Upload a LoRA adapter with mlxtune",
            )
        except BaseException:
            if not exists:
                with suppress(Exception):
                    hub.delete_repo(repository, missing_ok=True)
            raise
    return str(commit.repo_url)
