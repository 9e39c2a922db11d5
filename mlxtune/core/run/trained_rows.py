"""The training rows of a run, recorded so that `eval` finds them in any file.

Rows that the run did not reach, because it ended within its first epoch, are recorded too: a run
may stop early, or train on later.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from mlxtune.core.data.corpus import CorpusRows
from mlxtune.core.data.held_out import RunRows
from mlxtune.core.data.near_copies import TextHash
from mlxtune.core.files.reading import file_hash, read_json, read_own
from mlxtune.core.run.checkpoint import FILE_HASHES, MANIFEST, METADATA, checkpoint_folders
from mlxtune.core.run.run_folder import RESULT, TRAINED_ROWS
from mlxtune.core.run.stored_run import get_mapping, get_str, run_folder_at
from mlxtune.errors import OutputError

NO_ROWS: npt.NDArray[np.uint64] = np.zeros(0, dtype=np.uint64)


def identities_of(rows: CorpusRows, text_hash: TextHash | None = None) -> npt.NDArray[np.uint64]:
    """Return the hashes of rows and answers; an answer's hash is the same under any objective.

    With `text_hash`, the hashes of the answers' texts are added, by which near copies are found,
    also of a part of a conversation, and of the prompts.
    """
    hashes = [rows.identities, rows.answers[1]]
    if text_hash is not None:
        hashes += [rows.hash_texts(text_hash), rows.hash_prompts(text_hash)]
    return np.unique(np.concatenate(hashes))


def as_bytes(identities: npt.NDArray[np.uint64]) -> bytes:
    """Return the content of trained_rows.bin: the sorted identities, after their SHA-256.

    Each identity takes 8 little-endian bytes.
    """
    content = np.unique(identities).astype("<u8").tobytes()
    return sha256(content).digest() + content


def check_trained_rows(run: Path) -> str:
    """Describe a run's recorded identities. Raises OSError, or ValueError if they are damaged."""
    return f"{len(_identities(run / TRAINED_ROWS)):,} hashes of rows and answers"


def _identities(path: Path) -> npt.NDArray[np.uint64]:
    content = read_own(path)
    start = sha256().digest_size
    if sha256(content[start:]).digest() != content[:start]:
        raise ValueError("is damaged: its hash differs")
    return np.frombuffer(content[start:], dtype="<u8").astype(np.uint64)


def read_trained_rows(run: Path, warn: Callable[[str], None]) -> npt.NDArray[np.uint64]:
    """Return the identities that a run recorded; warn and return none if they are unreadable.

    Warns too if the file is not the one whose hash the run's checkpoints have, or if no checkpoint
    is left that could confirm it.
    """
    path, not_left_out = run / TRAINED_ROWS, "so rows that were also trained on are not left out"
    try:
        identities, actual = _identities(path), file_hash(path)
    except (OSError, ValueError):
        warn(f"{path} is missing or damaged, {not_left_out}")
        return NO_ROWS
    expected = {hashes.get(TRAINED_ROWS) for hashes in _hashes_in_checkpoints(run)}
    if expected and actual not in expected:
        warn(f"{path} has another hash than the run's checkpoints record, {not_left_out}")
        return NO_ROWS
    if not expected:
        warn(f"{path}: no checkpoint is left to confirm it, so more rows may have been trained on")
    return identities


def _hashes_in_checkpoints(run: Path) -> Iterator[Mapping[str, Any]]:
    """Yield the hashes in each checkpoint of the files that the run wrote before its first step."""
    for folder in checkpoint_folders(run):
        with suppress(OSError, ValueError):
            yield get_mapping(read_json(folder / METADATA), FILE_HASHES)


def record_of(rows: RunRows, val_split: float, seed: int, val_rows: int) -> dict[str, Any]:
    """Return what an adapter records about the rows that it was trained on: number and hash.

    If the validation rows were held out of the same data, the options that chose them are added.
    """
    record = {"rows": len(rows.train), "hash": _hash_of(rows.train)}
    if rows.validation and rows.validation.corpus is rows.train.corpus:
        record["held_out"] = {"val_split": val_split, "seed": seed, "val_rows": val_rows}
    return record


def _hash_of(rows: CorpusRows) -> str:
    return f"sha256:{sha256(as_bytes(rows.identities)).hexdigest()}"


def rows_in_record(rows: CorpusRows, record: Any) -> npt.NDArray[np.uint64]:
    """Return the identities of the rows that an adapter's record proves to be trained on.

    The record has only a hash, so it proves this of all `rows`, or of the rows that remain after
    holding some out as training did.
    """
    if not isinstance(record, Mapping):
        return NO_ROWS
    trained = [rows]
    # Invalid options in a damaged record prove nothing.
    with suppress(ValueError, TypeError, KeyError):
        options = record["held_out"]
        fraction, most = float(options["val_split"]), int(options["val_rows"])
        split = RunRows.of(rows.corpus, None, fraction, int(options["seed"]), most)
        trained.append(split.train)
    for array in trained:
        if _hash_of(array) == record.get("hash"):
            return identities_of(array)
    return NO_ROWS


def rows_behind(adapter: Path, warn: Callable[[str], None]) -> npt.NDArray[np.uint64]:
    """Return the identities of the rows that an adapter was trained on; none if they are unknown.

    They are known if the adapter is in a checkpoint, or next to a run whose result, if any, has the
    adapter's hash.
    """
    with suppress(OSError, ValueError, OutputError):
        run = run_folder_at(adapter)
        in_checkpoint = (adapter.parent / MANIFEST).exists()
        # A run that resumes removes its result but keeps its adapter.
        if (
            in_checkpoint
            or not (run / RESULT).exists()
            or get_str(read_json(run / RESULT), "sha256") == file_hash(adapter)
        ):
            return read_trained_rows(run, warn)
    return NO_ROWS
