"""What a run checks and claims before it starts: its paths, its folder and its memory."""

from __future__ import annotations

import shlex
import sys
from contextlib import ExitStack
from pathlib import Path

from mlxtune.backend.model import memory, model_folder
from mlxtune.config import DataConfig, RunConfig, user_cache
from mlxtune.core.machine import reservation
from mlxtune.core.machine.files import check_outputs, check_writable
from mlxtune.core.steps.memory_plan import MemoryPlan
from mlxtune.core.training import run_folder
from mlxtune.core.training.checkpoint import ADAPTER_CONFIG
from mlxtune.core.training.run_folder import ResumePoint
from mlxtune.errors import MlxTuneError, OutputError
from mlxtune.setup.dataset import data_files
from mlxtune.terminal.console import RunConsole


def check_paths(data: DataConfig, run: RunConfig) -> Path:
    """Check before any work that the files can be read and written; return the model's folder.

    Raises ModelError, DataError or OutputError.
    """
    folder = model_folder.find_folder(data.model_path)
    model_folder.read_config(folder, trust_remote_code=data.trust_remote_code)
    output = run.output_path
    if output.name == ADAPTER_CONFIG:
        raise OutputError(f"{output}: is written beside the adapter: choose another --output")
    read = [*data_files(data), *folder.iterdir()]
    check_outputs([output, output.with_name(ADAPTER_CONFIG)], read, "--output")
    check_writable(run.checkpoint_path, "--checkpoint-dir")
    return folder


def lock_folder(run: RunConfig, resume: ResumePoint | None, held: ExitStack) -> None:
    """Lock the run's folder for as long as `held`, or this process, lives.

    Raises OutputError if another process trains there, or if it holds another unfinished run.
    """
    folder = run.checkpoint_path
    held.callback(run_folder.lock_run(folder).release)
    if resume is None and not run.overwrite and run_folder.is_unfinished(folder):
        raise OutputError(
            f"{folder}: holds an unfinished run: resume it with mlxtune train --resume "
            f"{shlex.quote(str(folder))}, or start over with --overwrite"
        )


def reserve_memory(run: RunConfig, plan: MemoryPlan, held: ExitStack, console: RunConsole) -> None:
    """Reserve the planned memory among the runs on this machine.

    Raises MemoryLimitError if others hold it and neither --wait nor --ignore-ledger is given.
    """
    folder, owner = user_cache() / "memory", str(run.checkpoint_path.absolute())
    size, capacity = plan.peak.total, memory.capacity()
    try:
        if run.ignore_ledger:
            lock = reservation.reserve(folder, size, sys.maxsize, owner)
        elif run.wait:
            lock = reservation.reserve_when_free(folder, size, capacity, owner, console.warn)
        else:
            lock = reservation.reserve(folder, size, capacity, owner)
    except OSError as error:
        if isinstance(error, MlxTuneError):
            raise
        console.warn(f"{folder}: other runs will not see the memory that this one takes: {error}")
    else:
        held.callback(lock.release)
