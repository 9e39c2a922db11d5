"""Adapters to the hub: a model card with its metadata, and uploads in one commit or none."""

from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from huggingface_hub import CommitOperationAdd, EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import RepositoryNotFoundError

from mlxtune.core.run.run import Run, text
from mlxtune.core.run.summary import data_names, hub_data
from mlxtune.errors import OutputError
from mlxtune.hub.client import asking
from mlxtune.hub.names import REPOSITORY

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


def model_card(run: Run, lines: Iterable[str], *, repository: str, base: str, peft: bool) -> str:
    """Return a card as Markdown with the hub's metadata.

    A base model that is not on the hub, which its name shows, is left out of the metadata.
    """
    names = dict.fromkeys(text(each, "repository") for each in hub_data(run))
    datasets = [name for name in names if REPOSITORY.fullmatch(name)]
    data = ModelCardData(
        base_model=base if REPOSITORY.fullmatch(base) else None,
        base_model_relation="adapter" if REPOSITORY.fullmatch(base) else None,
        datasets=datasets or None,
        library_name="peft" if peft else "mlx",
        pipeline_tag="text-generation",
        tags=["lora", "mlx", "mlxtune"],
        model_name=repository.partition("/")[2],
        eval_results=_results(run, datasets) or None,
    )
    body = "\n".join(lines)
    return str(ModelCard(f"---\n{data.to_yaml()}\n---\n\n{body}\n"))


def _results(run: Run, datasets: list[str]) -> list[EvalResult]:
    evaluation = run.evaluation
    if evaluation is None or evaluation.adapted is None:
        return []
    losses = {"base model": evaluation.base, "with the adapter": evaluation.adapted}
    return [
        EvalResult(
            task_type="text-generation",
            dataset_type=datasets[0] if datasets else "custom",
            dataset_name=f"rows held out of {', '.join(data_names(run))}",
            metric_type="loss",
            metric_name=f"loss per supervised token, {name}",
            metric_value=round(each.loss, 4),
        )
        for name, each in losses.items()
    ]
