"""`mlxtune push`: uploads an adapter and its model card to the hub, after a preview."""

import re
from dataclasses import replace
from pathlib import Path

from mlxtune.backend.adapters.file_formats import mlx_lm, peft
from mlxtune.config import ExportConfig, as_path
from mlxtune.core.files.reading import file_hash, read_text
from mlxtune.core.files.scratch import scratch_folder
from mlxtune.core.files.writing import make_folder, write_file
from mlxtune.core.formatting import byte_size
from mlxtune.core.run.checkpoint import ADAPTER
from mlxtune.core.run.stored_run import Run, read_run, run_folder_at
from mlxtune.core.run.summary import RunView
from mlxtune.errors import ConfigError, ModelError, OutputError, resume_command, shorten
from mlxtune.hub.dataset_name import REPOSITORY
from mlxtune.hub.upload import check_may_write, model_card, quoted_samples, upload
from mlxtune.session.interrupt import interrupt_on_signal
from mlxtune.session.verified_output import TrainedAdapter, find_source
from mlxtune.views.console import RunConsole
from mlxtune.views.output import ask, print_line

CARD = "README.md"
# The subfolder for mlx-lm's layout of the adapter; PEFT requires its own files at the top level.
MLX_LM = "mlx-lm"
_CACHE_FOLDER = re.compile(r"models--([\w.-]+?)--([\w.-]+)")


def push(
    run: str | Path,
    repository: str,
    *,
    public: bool = False,
    base_model: str = "",
    model_path: str = "",
) -> str:
    """Upload the adapter of a run with a model card, and return the address of the repository.

    `base_model` is the base model's name on the hub, and `model_path` its folder; by default, both
    are taken from the run.

    Raises a subclass of MlxTuneError, without changing the hub.
    """
    with interrupt_on_signal(), scratch_folder("push") as folder:
        write_package(folder, str(run), repository, base_model, model_path, RunConsole(quiet=True))
        exists = check_may_write(repository, public=public)
        return upload(folder, repository, public=public, exists=exists)


def main(
    run: str,
    repository: str,
    *,
    public: bool,
    base_model: str,
    model_path: str,
    yes: bool,
    dry_run: bool,
) -> None:
    """Print the files, ask for permission, and upload them. Raises the errors of `push`."""
    with interrupt_on_signal(), scratch_folder("push") as folder:
        write_package(folder, run, repository, base_model, model_path, RunConsole())
        _print_package(folder)
        kind = "public" if public else "private"
        if dry_run:
            print_line(f"{'Dry run':<12}nothing was uploaded; {repository} would be {kind}")
            return
        exists = check_may_write(repository, public=public)
        where = f"{repository}, {f'which exists and is {kind}' if exists else f'new and {kind}'}"
        if not yes and not ask(f"Upload this to {where}?"):
            print_line(f"{'Stopped':<12}nothing was uploaded")
            return
        address = upload(folder, repository, public=public, exists=exists)
    print_line(f"{'Pushed':<12}{address}")


def write_package(
    folder: Path,
    run_path: str,
    repository: str,
    base_model: str,
    model_path: str,
    console: RunConsole,
) -> None:
    """Write the upload to a folder: the adapter, in two layouts if possible, and its card."""
    _check_names(repository, base_model)
    run = read_run(run_folder_at(as_path(run_path)))
    source = find_source(
        ExportConfig(run_path, output=repository, format="peft", model_path=model_path or None)
    )
    view = RunView.of(run)
    _check_adapter(run, view, source)
    if not view.finished:
        console.warn(f"the run is {view.status}: this is the run's best adapter so far")
    base = base_model or _name_of(source.folder)
    if not REPOSITORY.fullmatch(base):
        console.warn(
            f"the base model is known only by its local name {base}: pass --base-model owner/name, "
            "so that others can find the model"
        )
    option_names = (
        *("base", "prompt", "objective", "rank", "alpha", "rslora", "init", "target_ranks"),
        *("chat_template", "trained_rows"),
    )
    own = source.adapter.settings.get("mlxtune", {})
    settings = {"mlxtune": {name: own[name] for name in option_names if name in own}}
    adapter = replace(source.adapter, model=base, settings=settings)
    make_folder(folder / MLX_LM)
    mlx_lm.write_mlx_lm(adapter, folder / MLX_LM / ADAPTER)
    has_peft = True
    try:
        peft.write_peft(adapter, source.folder, folder)
    except ModelError as problem:
        has_peft = False
        console.warn(f"the adapter is uploaded only for mlx-lm: {problem}")
    if run.evaluation is not None and run.evaluation.generated and not quoted_samples(run):
        console.say("Samples", "left out: they quote rows that are not public on the hub")
    card = model_card(run, view, repository=repository, base=base, peft=has_peft)
    write_file(folder / CARD, [card.encode()])


def _check_names(repository: str, base_model: str) -> None:
    problems = [
        f"{name} {shorten(value)}: write it as owner/name"
        for name, value in (("the repository", repository), ("--base-model", base_model or "a/b"))
        if not REPOSITORY.fullmatch(value)
    ]
    if problems:
        raise ConfigError(problems)


def _check_adapter(run: Run, view: RunView, source: TrainedAdapter) -> None:
    """Raise OutputError if the adapter is not the one that the run's records describe."""
    weights = source.file.path
    digest = file_hash(weights)
    if not view.sha256:
        # An unfinished run has only checkpoints, so an adapter next to them may be from an earlier
        # run.
        if digest not in map(file_hash, run.folder.glob(f"*/{ADAPTER}")):
            raise OutputError(
                f"{weights} is not the adapter of this unfinished run: finish it with "
                f"{resume_command(run.folder)}"
            )
    elif digest != view.sha256:
        raise OutputError(
            f"{weights} is not the adapter that the run wrote, so the card would not "
            "describe it: name the run's own adapter, or train again"
        )


def _name_of(base: Path) -> str:
    """Return the hub name of a base model in the hub's cache, or else its folder's name."""
    if base.parent.name == "snapshots" and (match := _CACHE_FOLDER.fullmatch(base.parents[1].name)):
        return f"{match[1]}/{match[2]}"
    return base.resolve().name


def _print_package(folder: Path) -> None:
    for line in read_text(folder / CARD).splitlines():
        print_line(line)
    for path in sorted(folder.rglob("*")):
        if path.is_file():
            size = byte_size(path.stat().st_size)
            print_line(f"{'File':<12}{path.relative_to(folder)}, {size}")
