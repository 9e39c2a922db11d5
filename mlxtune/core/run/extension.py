"""Extensions of a run: resuming with more epochs or steps, which lengthens its schedule."""

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from typing import Any

from mlxtune.core.files.typed_json import from_json

# The key of the extensions in a checkpoint's metadata.
EXTENSIONS = "extensions"


@dataclass(frozen=True)
class Extension:
    """A run of `total_steps` steps got more after step `step`.

    `epochs` and `max_steps` are the run's options until then, which decided the learning rates.
    """

    step: int
    total_steps: int
    epochs: int
    max_steps: int | None


def extensions_of(metadata: Mapping[str, Any]) -> list[Extension]:
    """Return the extensions in a checkpoint's metadata, in order; invalid ones count as absent."""
    with suppress(ValueError):
        extensions: list[Extension] = from_json(list[Extension], metadata.get(EXTENSIONS, []))
        return extensions
    return []


def extended(metadata: Mapping[str, Any], total_steps: int) -> dict[str, Any]:
    """Return the entry for the metadata of a run that resumes with `total_steps` steps.

    `metadata` belongs to the checkpoint. If the run was never extended, the entry is empty.
    """
    extensions, config = extensions_of(metadata), metadata.get("config")
    if metadata.get("total_steps") != total_steps and isinstance(config, Mapping):
        now = {name: config.get(name) for name in ("epochs", "max_steps")}
        now |= {name: metadata.get(name) for name in ("step", "total_steps")}
        with suppress(ValueError):
            extensions.append(from_json(Extension, now))
    return {EXTENSIONS: [asdict(extension) for extension in extensions]} if extensions else {}
