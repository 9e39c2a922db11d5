"""The record of a run's samples: `samples.jsonl.gz`, with a line for each group.

The samples of a rollout are a gzip member of their own, which is added and flushed before they are
trained on. A run that was killed leaves at most one incomplete member, at the end.
"""

from __future__ import annotations

import gzip
import io
import json
import os
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from mlxtune.config.limits import SAMPLED, parse_json
from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.typed_json import from_json
from mlxtune.core.files.writing import as_output_error, open_to_append, write_file
from mlxtune.errors import OutputError

# The most bytes that the samples of a rollout unpack to, and the bytes of a read.
_MAX_UNPACKED, _PIECE = 2**30, 2**20


@dataclass(frozen=True)
class SampleRecord:
    """A sample: its tokens with their log-probabilities, its text, and what its rewards were.

    `finished` says whether the model ended it; otherwise, its length was limited. A reward is None
    if it has no value, and `reward`, the weighted sum, is None if any is; `problems` say why.
    `old_logps` and `reference_logps` are those of `SampledExample`.
    """

    tokens: tuple[int, ...]
    logps: tuple[float, ...]
    text: str
    finished: bool
    rewards: dict[str, float | None]
    reward: float | None
    advantage: float
    problems: tuple[str, ...] = ()
    old_logps: tuple[float, ...] | None = None
    reference_logps: tuple[float, ...] | None = None


@dataclass(frozen=True)
class GroupRecord:
    """The samples of one prompt.

    `step` is the first step that trains on them, `row` the place of the prompt's row, `use` the
    number of earlier uses of the row in the step, and `adapter` a hash of the LoRA matrices that
    sampled.
    """

    step: int
    row: str
    use: int
    seed: int
    adapter: str
    prompt: str
    prompt_tokens: tuple[int, ...]
    samples: tuple[SampleRecord, ...]

    def as_json(self) -> bytes:
        values = asdict(self)
        for sample in values["samples"]:
            for name in ("problems", "old_logps", "reference_logps"):
                if not sample[name]:
                    del sample[name]
        return json.dumps(values, allow_nan=False, ensure_ascii=False).encode() + b"\n"


class SampleLedger:
    """The file of a run's samples, in the order of their steps.

    Only a `resumed` run reads the samples that are there. Raises OutputError if the file cannot be
    read or written.
    """

    def __init__(self, path: Path, *, resumed: bool = True) -> None:
        self._path = path
        # By step, where a rollout's member starts and ends.
        self._places: dict[int, tuple[int, int]] = {}
        if not (resumed and path.exists()):
            return
        try:
            with as_output_error(path, "file"), open_regular(path, links=False) as file:
                for start, end, content in _members(file):
                    self._places[groups_of(content)[0].step] = start, end
        except (ValueError, IndexError) as problem:
            raise OutputError(f"{path} {problem}: start over with --overwrite") from problem

    def read(self, step: int, adapter: str | None) -> list[GroupRecord] | None:
        """Return the groups of a rollout, if the given LoRA matrices, or any, sampled them."""
        if step not in self._places:
            return None
        start, _ = self._places[step]
        with as_output_error(self._path, "file"), open_regular(self._path, links=False) as file:
            file.seek(start)
            groups = groups_of(next(_members(file))[2])
        same = adapter is None or all(group.adapter == adapter for group in groups)
        return groups if same else None

    def add(self, groups: Sequence[GroupRecord]) -> None:
        """Add the groups of a rollout; later rollouts, of a run that went another way, go."""
        step = groups[0].step
        self._places = {each: place for each, place in self._places.items() if each < step}
        start = max((end for _, end in self._places.values()), default=0)
        # Without the time of writing, so that the same samples have the same bytes.
        content = gzip.compress(b"".join(group.as_json() for group in groups), mtime=0)
        with as_output_error(self._path, "file"), open_to_append(self._path) as file:
            file.truncate(start)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self._places[step] = start, start + len(content)


def read_samples(path: Path) -> Iterator[GroupRecord]:
    """Yield the groups of a run. Raises OSError, or ValueError for a damaged file."""
    with open_regular(path, links=False) as file:
        for _, _, content in _members(file):
            yield from groups_of(content)


def copy_samples(source: Path, copy: Path, last_step: int) -> None:
    """Copy the samples up to a step. Raises OutputError, OSError, or ValueError."""
    with open_regular(source, links=False) as file:
        members = [
            content for _, _, content in _members(file) if groups_of(content)[0].step <= last_step
        ]
    write_file(copy, [gzip.compress(content, mtime=0) for content in members])


def groups_of(content: bytes) -> list[GroupRecord]:
    """Return the groups of JSON lines. Raises ValueError."""
    lines = content.splitlines()
    return [from_json(GroupRecord, parse_json(line, SAMPLED, "a group")) for line in lines]


def _members(file: io.BufferedReader) -> Iterator[tuple[int, int, bytes]]:
    """Yield the start, the end and the content of each complete gzip member from here on.

    An incomplete member at the end is left out. Raises ValueError for a damaged one.
    """
    start, left = file.tell(), b""
    while left or (left := file.read(_PIECE)):
        unpack, parts, size = zlib.decompressobj(wbits=31), list[bytes](), 0
        read = 0
        while not unpack.eof and (left or (left := file.read(_PIECE))):
            try:
                parts.append(unpack.decompress(left, _MAX_UNPACKED - size + 1))
            except zlib.error as error:
                raise ValueError(f"is damaged: {error}") from error
            size += len(parts[-1])
            if size > _MAX_UNPACKED:
                raise ValueError("unpacks to too much")
            read += len(left) - len(unpack.unused_data)
            left = unpack.unused_data
        if not unpack.eof:
            return
        yield start, start + read, b"".join(parts)
        start += read
