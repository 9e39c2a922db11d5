"""Tries an untrusted tokenizer in a process with limited time and memory."""

import hashlib
import importlib.metadata
import json
from contextlib import closing, suppress
from pathlib import Path

from mlxtune.backend.models.model_folder import json_object
from mlxtune.backend.text import tokenizer_child
from mlxtune.config.limits import CONTROL_TOKENS
from mlxtune.core.files.processes import LimitedProcess, TooMuchMemory
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.writing import make_folder, open_to_write
from mlxtune.core.names import is_file_name
from mlxtune.errors import ModelError, one_line

_MEMORY = 2**30
_LONGEST = 2**16
# The cache's folder of empty files, one for each tokenizer that passed a trial.
_TRIED = "tokenizers-tried"


def try_tokenizer(folder: Path, cache: Path | None = None) -> None:
    """Raise ModelError if a folder's tokenizer takes too much time or memory, or is damaged.

    Other errors surface on loading. With a cache, a file that has passed is not tried again,
    because a trial of a large file takes a second.
    """
    for path in _files(folder):
        tried = None if cache is None else cache / _TRIED / _key(path)
        if tried is not None and tried.exists():
            continue
        if problem := _problem(path):
            problem = one_line(problem)
            raise ModelError(f"{path}: {problem}: use the tokenizer of the original model")
        if tried is not None:
            with suppress(OSError):  # a read-only cache
                make_folder(tried.parent)
                open_to_write(tried).close()


def _files(folder: Path) -> list[Path]:
    """Return the tokenizer files, of which transformers loads one, depending on its version.

    Raises ModelError if tokenizer_config.json names a file outside the folder.
    """
    names = [name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    config = folder / "tokenizer_config.json"
    chosen = json_object(config).get("fast_tokenizer_files") or []
    chosen = chosen if isinstance(chosen, list) else [chosen]
    for name in chosen:
        if not is_file_name(name):
            raise ModelError(
                f"{config}: names {name!r:.60} as a tokenizer, but that is not a file in its "
                "folder: remove fast_tokenizer_files"
            )
    paths = [folder / name for name in dict.fromkeys([*names[:1], *chosen])]
    return [path for path in paths if path.is_file()]


def _key(path: Path) -> str:
    """Return a hash of a trial's inputs: the file, the script, its limit and library versions."""
    versions = map(importlib.metadata.version, ("tokenizers", "sentencepiece"))
    script = file_hash(Path(tokenizer_child.__file__))
    parts = (file_hash(path), script, str(CONTROL_TOKENS), *versions)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _problem(path: Path) -> str | None:
    arguments = str(path.absolute()), str(CONTROL_TOKENS)
    with closing(LimitedProcess(Path(tokenizer_child.__file__), _MEMORY, *arguments)) as process:
        try:
            line = process.read_line(_LONGEST)
            ended = "" if line.endswith(b"\n") else process.why_ended()
        except TooMuchMemory:
            ended = "memory"
    if not ended:
        found: str | None = json.loads(line)
        return found
    limits = {"time": "10 s to load, or to encode a few words", "memory": "1 GB to load and try"}
    if ended in limits:
        return f"takes more than {limits[ended]}"
    return f"ends the process that loads and tries it ({ended})"
