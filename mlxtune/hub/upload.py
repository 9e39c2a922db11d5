"""Uploads an adapter and its model card to the hub, in a single commit.

The card states facts from the run's folder. It gives names instead of paths, and quotes rows only
if all the data is public on the hub.
"""

import dataclasses
import json
import re
import shlex
from collections.abc import Iterator
from contextlib import suppress
from importlib import resources
from pathlib import Path, PurePath
from typing import Any

from huggingface_hub import CommitOperationAdd, EvalResult, ModelCard, ModelCardData
from huggingface_hub.errors import RepositoryNotFoundError

from mlxtune.config import OPTIONS, TrainConfig
from mlxtune.config.data_config import is_jinja
from mlxtune.config.fields import flag_words, part_of
from mlxtune.config.objective_config import LossConfig, parse_reward
from mlxtune.config.option import Effect
from mlxtune.core.evaluation.outcome import Evaluation, Sample
from mlxtune.core.evaluation.verdict_text import verdict_lines
from mlxtune.core.formatting import sentence
from mlxtune.core.objectives.policy import objective_of
from mlxtune.core.run.stored_run import Run, get_mapping, get_str
from mlxtune.core.run.summary import RunView, data_name, data_names, hub_data
from mlxtune.errors import OutputError, one_line
from mlxtune.hub.client import asking, without_password
from mlxtune.hub.dataset_name import REPOSITORY

_REPOSITORY_KIND = "repository"
_TIMEOUT = 20.0
_SAMPLES = 3


def check_may_write(repository: str, *, public: bool) -> bool:
    """Check that an upload is allowed, without uploading; return whether the repository exists.

    Raises OutputError if the token may not write to the repository, or if the visibility of an
    existing repository differs from `public`, because an upload keeps the visibility.
    """
    with asking(repository, _REPOSITORY_KIND, OutputError) as hub:
        account = hub.whoami()
        token = account["auth"]["accessToken"]
        if token.get("role") == "read":
            raise OutputError(
                f"{repository}: the token {token.get('displayName', '')!s:.60} of "
                f"{account['name']!s:.60} can only read: create one with write access on your "
                "tokens page, and set HF_TOKEN"
            )
        try:
            private = hub.model_info(repository, timeout=_TIMEOUT).private is not False
        except RepositoryNotFoundError:
            return False
        hub.auth_check(repository, write=True)
    if private == public:
        has, remedy = ("private", "leave out --public") if private else ("public", "add --public")
        raise OutputError(
            f"{repository}: exists, and is {has}: {remedy}, or change its visibility on its page"
        )
    return True


def upload(folder: Path, repository: str, *, public: bool, exists: bool) -> str:
    """Upload a folder's files, and return the address of the repository. Raises OutputError.

    A repository that was created for the upload is removed if the upload fails.
    """
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    with asking(repository, _REPOSITORY_KIND, OutputError) as hub:
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
    return without_password(str(commit.repo_url))


def model_card(run: Run, view: RunView, *, repository: str, base: str, peft: bool) -> str:
    """Return a card as Markdown, with metadata for the hub; `base` is the base model's name.

    The metadata omits a base model whose name is not of the form `owner/name`, because such a model
    is not on the hub.
    """
    evaluation = run.evaluation
    if evaluation is None or evaluation.adapted is None or evaluation.difference is None:
        evaluation = None
    names = dict.fromkeys(get_str(data_set, "repository") for data_set in hub_data(run))
    datasets = [name for name in names if REPOSITORY.fullmatch(name)]
    is_on_hub = bool(REPOSITORY.fullmatch(base))
    name = repository.partition("/")[2]
    data = ModelCardData(
        base_model=base if is_on_hub else None,
        base_model_relation="adapter" if is_on_hub else None,
        datasets=datasets or None,
        library_name="peft" if peft else "mlx",
        pipeline_tag="text-generation",
        tags=["lora", "mlx", "mlxtune"],
        model_name=name,
        eval_results=_results(run, evaluation, datasets) if evaluation else None,
    )
    values: dict[str, Any] = {
        **{"name": name, "repository": repository, "base": base, "peft": peft, "view": view},
        "evaluation": evaluation,
        "verdict": _verdict(evaluation) if evaluation else "",
        "ledgers": [(data_name(run, ledger.path), ledger) for ledger in run.ledgers],
        "data_lines": list(_data_lines(run)),
        "command": command_of(run, base),
        "training_lines": list(_training_lines(run, view)),
        "samples": quoted_samples(run),
        "code": _code,
        "block": _block,
        "python": lambda value: json.dumps(one_line(value)),
        "shell": lambda value: shlex.quote(one_line(value)),
    }
    template = resources.files(__package__).joinpath("model_card.md").read_text("utf-8")
    return str(ModelCard.from_template(data, template_str=template, **values))


def _verdict(evaluation: Evaluation) -> str:
    lines = verdict_lines(evaluation)
    # The table has the other rewards.
    return " ".join(map(sentence, lines[:1] if evaluation.rewards else lines))


def _results(run: Run, evaluation: Evaluation, datasets: list[str]) -> list[EvalResult]:
    """Return the losses on the held-out rows, without and with the adapter."""
    losses = {"base model": evaluation.base, "with the adapter": evaluation.adapted}
    if evaluation.rewards:  # they have a name of the user's, and no scale
        return []
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
        if each is not None
    ]


def quoted_samples(run: Run) -> list[Sample]:
    """Return the first answers to validation rows if all data is public, or else an empty list."""
    public = {
        title
        for data_set in hub_data(run)
        if data_set.get("public") is True
        for title in get_mapping(data_set, "titles").values()
    }
    names = set(data_names(run))
    generated = run.evaluation.generated if run.evaluation else None
    if generated is None or not names or not names <= public:
        return []
    return generated.samples[:_SAMPLES]


def _data_lines(run: Run) -> Iterator[str]:
    for data_set in hub_data(run):
        license = get_str(data_set, "license")
        licensed = f"licence {_code(license)}" if license else "no licence stated"
        commit = _code(get_str(data_set, "commit"))
        yield f"{_code(get_str(data_set, 'repository'))}: {licensed}, commit {commit}"
    hashes = {get_str(run.about, name): name for name in ("validation_hash", "data_hash")}
    for hash_, name in hashes.items():
        if hash_:
            yield f"{name.replace('_', ' ')}: {_code(hash_)}"


def _objective(run: Run) -> str:
    """Return a run's objective with its main options; empty for supervised fine-tuning."""
    objective = objective_of(part_of(run.config, LossConfig))
    return "" if objective.is_sft else objective.description


def _training_lines(run: Run, view: RunView) -> Iterator[str]:
    yield f"{view.course}, {view.status}"
    started_from = get_str(run.config, "init_adapter")
    lora = get_str(run.about, "lora", "description")
    for name, value in (
        ("objective", _objective(run)),
        ("LoRA", lora.replace(started_from, PurePath(started_from).name)),
        ("model", get_str(run.about, "model", "description")),
        ("template", get_str(run.about, "template")),
        ("computed on", get_str(run.about, "device")),
        ("SHA-256 of mlx-lm/adapters.safetensors", view.sha256),
        ("versions", ", ".join(f"{k} {v}" for k, v in get_mapping(run.about, "versions").items())),
    ):
        if value:
            yield f"{name}: {one_line(value).replace('<', '&lt;')}"


def command_of(run: Run, base: str) -> str:
    """Return the command that repeats the training, with file names instead of paths."""
    defaults = {field.name: field.default for field in dataclasses.fields(TrainConfig)}
    on_hub = {get_str(data_set, "name") for data_set in hub_data(run)}
    words = ["mlxtune", "train", "--model-path", base]
    for name, value in run.config.items():
        option = OPTIONS.get(name)
        shown = tuple(value) if isinstance(value, list) else value
        if option is None or name == "model_path" or shown == defaults.get(name) or shown is None:
            continue
        if option.affects not in (Effect.INPUT, Effect.RESULT, Effect.LENGTH):
            continue
        texts = tuple(map(str, shown)) if isinstance(shown, tuple) else (str(shown),)
        if name == "reward":
            shown = tuple(parse_reward(text).with_file(_name) for text in texts)
        elif option.path or (name == "template" and not is_jinja(texts[0])):
            shown = tuple(text if text in on_hub else PurePath(text).name for text in texts)
        words += flag_words(name, shown, option)
    return " ".join(shlex.join(words).split())


def _name(path: str) -> str:
    return PurePath(path).name


def _block(content: str) -> str:
    """Return text as a block of code, with a fence longer than any run of backticks in the text."""
    fence = "`" * max(3, *(1 + len(each) for each in re.findall("`+", content)), 0)
    return f"{fence}text\n{content}\n{fence}"


def _code(value: str) -> str:
    """Return text as inline code, with backticks and bars replaced."""
    return f"`{one_line(value).replace('`', chr(39)).replace('|', '/')}`"
