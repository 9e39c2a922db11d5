"""The session of a run, with the checks and locks before any work."""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt

from mlxtune.backend.adapters.adapter_file import AdapterFile
from mlxtune.backend.adapters.adapter_folder import check_known, check_replaceable
from mlxtune.backend.adapters.attach import check_base
from mlxtune.backend.adapters.initialize import check_initial
from mlxtune.backend.workers.launch import WorkerRun
from mlxtune.config import TrainConfig, as_path
from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.files.remembered import is_own
from mlxtune.core.files.writing import check_outputs, check_writable, is_same_place
from mlxtune.core.machine.conditions import keep_awake
from mlxtune.core.run import run_folder, trained_rows
from mlxtune.core.run.checkpoint import ADAPTER_CONFIG
from mlxtune.errors import ConfigError, OutputError, resume_command
from mlxtune.session.arguments import ResolvedOptions
from mlxtune.session.auto import with_auto_options
from mlxtune.session.resuming import RunContext, context_of
from mlxtune.session.session import TrainingSession
from mlxtune.views.console import RunConsole

# Suffixes of files in formats that `train` does not write.
_OTHER_FILES = (".bin", ".csv", ".gguf", ".json", ".jsonl", ".npz", ".pt", ".pth", ".txt", ".yaml")


class RunSession(TrainingSession[TrainConfig]):
    """The session of one worker of `train`, which resumes from the checkpoint `resume`, if any.

    `options` apply to all workers; `worker_run` has this worker's config and console. `origin` is
    a checkpoint of the earlier run that is resumed or repeated, if any.
    """

    def __init__(
        self, worker_run: WorkerRun[RunConsole], options: ResolvedOptions[TrainConfig]
    ) -> None:
        super().__init__(worker_run.config, worker_run.console, options.explicit_options)
        self._initial, self.origin, self.resume = options.initial, options.origin, options.resume
        self.worker_run, self.workers = worker_run, worker_run.workers
        self.is_locked = False

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read data in this block, once the first worker of this machine has cached it."""
        with self.worker_run.in_turn(), super().reading():
            yield

    @cached_property
    def initial(self) -> AdapterFile | None:
        """The adapter that training starts from, if any. Raises ModelError."""
        if self.config.init_adapter is None or self.resume is not None:
            return None
        return self._initial or AdapterFile.find(self.config.init_adapter, "--init-adapter")

    @cached_property
    def context(self) -> RunContext:
        """Where this run, or the earlier run that it resumes or repeats, was started."""
        names = [self.source.titles[path] for path in self.source.files.all]
        if self.origin is None:
            return RunContext(Path.cwd(), names)
        earlier = context_of(self.origin)
        return earlier if len(earlier.files) == len(names) else replace(earlier, files=names)

    @property
    def reward_folder(self) -> Path | None:
        """The folder in which reward functions are called; None for the current folder.

        Functions may read files relative to the folder in which the run was started, which is used
        if the run is this user's.
        """
        folder = self.context.folder
        if self.origin is None or not is_own(self.origin.run) or is_same_place(folder, Path.cwd()):
            return None
        return folder if folder.is_dir() else None


def open_run(
    worker_run: WorkerRun[RunConsole],
    options: ResolvedOptions[TrainConfig],
    cleanup: ExitStack,
    *,
    trains: bool,
) -> RunSession:
    """Return the session of a run that may begin; with `trains`, keep it alone until `cleanup`.

    A missing folder is not created yet: `lock_folder` does so just before training starts. Raises
    ConfigError, DataError, ModelError or OutputError.
    """
    session = RunSession(worker_run, options)
    check_paths(session)
    if session.config.auto:
        session = with_auto_options(session)
    config = session.config
    if trains and not config.allow_sleep and worker_run.first_on_machine:
        cleanup.enter_context(keep_awake())
    if trains and config.checkpoint_path.is_dir():
        lock_folder(session, cleanup)
    check_initial_adapter(session)
    return session


def check_paths(session: RunSession) -> None:
    """Check before any work that files can be read and written.

    Raises DataError or OutputError.
    """
    config, output = session.config, session.config.output_path
    if session.resume is not None:
        _check_resumed(config.checkpoint_path)
    if output.name == ADAPTER_CONFIG:
        raise OutputError(
            f"{output} would be overwritten with the adapter's config: choose another --output"
        )
    if is_same_place(output.parent, session.folder):
        raise OutputError(f"{output.parent} is the model's own folder: choose another --output")
    if (named := as_path(config.output)).suffix in _OTHER_FILES and not named.is_dir():
        raise OutputError(
            f"{named}: an adapter is a .safetensors file: name one, or a folder, as --output"
        )
    check_outputs([output, output.with_name(ADAPTER_CONFIG)], session.inputs, "--output")
    check_replaceable(output)
    run_folder.check_outside(output, config.checkpoint_path)
    check_writable(config.checkpoint_path, "--checkpoint-dir")
    if session.resume is None and not config.overwrite:
        check_known(output, run_folder.adapters_in(config.checkpoint_path))


def _check_resumed(run: Path) -> None:
    """Raise OutputError if a resumed run cannot stay in its folder, as with another user's run."""
    try:
        check_writable(run, "--checkpoint-dir")
        run_folder.check_own(run, new=False)
    except OutputError as error:
        problem, _, _ = error.with_flags.rpartition(": ")
        raise OutputError(f"{problem}: copy the run's folder, and resume the copy") from error


def check_initial_adapter(session: RunSession) -> None:
    """Raise ConfigError if a run would replace or move the adapter that it starts from.

    The run's verdict compares with that adapter, and its replay starts there. Raises ModelError if
    the adapter was trained on another base, or if options contradict it.
    """
    config, start = session.config, session.initial
    if start is None:
        return
    check_base(start, session.folder, other_base=config.other_base)
    inside = start.path.resolve().is_relative_to(config.checkpoint_path.resolve())
    if inside or is_same_place(start.path, config.output_path):
        raise ConfigError(
            [
                f"--init-adapter: this run would replace {start.path}, with which its verdict "
                "compares: choose another --output"
            ]
        )
    check_initial(start, session.base.model, config.pipeline_config())


def lock_folder(session: RunSession, cleanup: ExitStack) -> None:
    """Lock the run's folder and adapter until `cleanup` closes or this process ends.

    Raises OutputError if another process trains there, or if a new run finds an unfinished run
    there.
    """
    config, resume = session.config, session.resume
    folder = config.checkpoint_path
    for new in (config.output_path.parent, folder):
        if not new.exists():
            cleanup.callback(run_folder.discard_empty, new)
    if (lock := run_folder.lock_output(config.output_path)) is not None:
        cleanup.callback(lock.release)
    cleanup.callback(run_folder.lock_run(folder, new=resume is None).release)
    if resume is None:
        run_folder.check_own(folder)
    if resume is None and not config.overwrite and run_folder.is_unfinished(folder):
        raise OutputError(
            f"{folder} holds an unfinished run: resume it with {resume_command(folder)}, "
            "or start over with --overwrite"
        )
    session.is_locked = True


def trained_identities(session: RunSession, rows: CorpusRows) -> npt.NDArray[np.uint64]:
    """Return the identities of all rows that the adapter will have been trained on."""
    own = trained_rows.identities_of(rows, session.reader.text_hash)
    return np.union1d(own, trained_before(session))


def trained_before(session: RunSession) -> npt.NDArray[np.uint64]:
    """Return the identities of the rows that the adapter was already trained on."""
    if session.resume is not None:
        run = session.resume.checkpoint.run
        return trained_rows.read_trained_rows(run, session.console.warn)
    if session.initial is None:
        return trained_rows.NO_ROWS
    return trained_rows.rows_behind(session.initial.path, session.console.warn)
