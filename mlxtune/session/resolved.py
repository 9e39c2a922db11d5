"""Resolves the options of a command once, for the command line and Python alike."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Generic, Self, TypeVar

from mlxtune.config.fields import Checked, given_options, options_of

if TYPE_CHECKING:
    from mlxtune.backend.adapters.adapter_file import AdapterFile

C = TypeVar("C", bound=Checked)


@dataclass(frozen=True)
class Resolved(Generic[C]):
    """The options of a command, and the names of the given ones, which take precedence.

    An option is given by the caller, or by `initial`, the adapter that a run continues from.
    """

    config: C
    given: frozenset[str]
    initial: AdapterFile | None = None

    @classmethod
    def recorded(cls, config: C) -> Self:
        """Return the options of an earlier run, which were resolved when that run started."""
        return cls(config, frozenset(options_of(type(config))))


def resolve(config: C) -> Resolved[C]:
    """Return a config as its caller gave it, completed by the adapter in `init_adapter`, if any.

    The adapter's rank, alpha, targets, layers and kind replace the defaults of these options.
    Raises ModelError if training cannot continue from the adapter.
    """
    given = given_options(config)
    path = getattr(config, "init_adapter", None)
    if path is None:
        return Resolved(config, given)
    # These imports load mlx, which --help must not do.
    from mlxtune.backend.adapters.adapter_file import AdapterFile
    from mlxtune.backend.adapters.initialise import with_adapter

    initial = AdapterFile.find(path, "--init-adapter")
    options = with_adapter({name: getattr(config, name) for name in given}, initial)
    return Resolved(type(config)(**options), frozenset(options), initial)
