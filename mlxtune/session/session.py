"""Opens the inputs that a command's options name, each once: model folder, data and model.

A session opens and checks them in one order:

    model folder -> data sets of the hub -> data files -> rows -> model, without weights

The first two are opened with the session, the others where a command first asks for them.
"""

from collections.abc import Collection, Iterator
from contextlib import closing, contextmanager
from copy import copy
from functools import cached_property
from pathlib import Path
from typing import Generic, Self, TypeVar

from mlxtune.backend.models import loading
from mlxtune.backend.models.loading import BaseModel
from mlxtune.backend.models.model_folder import find_folder, read_config
from mlxtune.config import DataConfig, TrainConfig, UseConfig
from mlxtune.session.dataset import (
    Dataset,
    DataSource,
    find_data,
    load_dataset,
    report_findings,
    with_hub_data,
)
from mlxtune.session.reader import Reader
from mlxtune.views.console import RunConsole

C = TypeVar("C", bound=DataConfig)
T = TypeVar("T", bound=TrainConfig)


def model_folder(config: DataConfig | UseConfig) -> Path:
    """Return the folder of --model-path, whose config is checked. Raises ModelError."""
    folder = find_folder(str(config.model_path))
    read_config(folder, trust_remote_code=config.trust_remote_code)
    return folder


class Session(Generic[C]):
    """The model's folder and the data of one command.

    `config` holds the command's options, with each data set of the hub pinned to a commit. With
    `held_out`, the held-out splits of data sets and folders are used. `folder` is the model's
    folder, if the command has already checked it. Raises ModelError or DataError.
    """

    def __init__(
        self,
        config: C,
        console: RunConsole,
        folder: Path | None = None,
        *,
        held_out: bool = False,
    ) -> None:
        self.console = console
        self.folder = folder or model_folder(config)
        self.config, self._sets = with_hub_data(config, console, held_out=held_out)

    @cached_property
    def source(self) -> DataSource:
        """The data files. Raises DataError."""
        return find_data(self.config, self._sets)

    @property
    def inputs(self) -> list[Path]:
        """The files that the command reads, which it must not replace."""
        return [*self.source.files.all, *self.folder.iterdir()]

    @cached_property
    def reader(self) -> Reader:
        return Reader(self.config, self.folder, self.console.on_encoding)

    @cached_property
    def dataset(self) -> Dataset:
        """The rows, as `load_dataset` reads them."""
        with self.reading():
            return load_dataset(self.config, self.reader, self.source)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Read data in this block, which ends the console's live line."""
        with closing(self.console):
            yield

    def load(self) -> Dataset:
        """Return the rows, and warn of problems. Raises DataError if one rules out training."""
        report_findings(self.dataset, self.console)
        return self.dataset


class TrainingSession(Session[T]):
    """A session of `train` or `plan`, in which `explicit_options` lists what the user chose.

    `command` is the equivalent command if --auto chose the other options.
    """

    def __init__(self, config: T, console: RunConsole, explicit_options: Collection[str]) -> None:
        super().__init__(config, console)
        self.explicit_options, self.command = explicit_options, ""
        self._has_base = True

    def with_options(self, config: T, command: str) -> Self:
        """Return a session with the options that --auto chose and everything opened so far.

        No choice changes what --auto opens: the data files, their reader and the model.
        """
        assert "dataset" not in vars(self), "the choices decide how rows are read"
        session = copy(self)
        session.config, session.command = config, command
        return session

    @property
    def auto_chose_epochs(self) -> bool:
        """Whether --auto chose the number of epochs."""
        return bool(self.command) and "epochs" not in self.explicit_options

    @cached_property
    def base(self) -> BaseModel:
        """The model, without its weights. Raises ModelError."""
        assert self._has_base, "the model was released to another owner"
        return loading.open_base(self.folder, self.config.dtype, self.config.base_options())

    def release_base(self) -> BaseModel:
        """Return the model to a caller that becomes its only owner, and so can free it."""
        base = self.base
        del self.base
        self._has_base = False
        return base
