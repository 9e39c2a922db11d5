"""The records of a run's samples in `samples.jsonl.gz`: a line for each group of a prompt.

The samples of a rollout are a gzip member of their own, which is added and flushed before they are
trained on. A run that was killed leaves at most one incomplete member, at the end.
"""

from __future__ import annotations

import io
import json
import re
import zlib
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from mlxtune.config.limits import (
    MEMBER_BYTES,
    SAMPLED,
    SEARCHED_SAMPLES,
    SHOWN_SAMPLES,
    SHOWN_STEPS,
    TooLarge,
    parse_json,
)
from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.typed_json import from_json

# The bytes of a read, and those of a member's start with its step.
_PIECE, _START = 2**20, 64
_STEP = re.compile(rb'\{"step": (\d{1,15}),')


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


def read_samples(path: Path) -> Iterator[GroupRecord]:
    """Yield the groups of a run. Raises OSError, or ValueError for a damaged file."""
    with open_regular(path, links=False) as file:
        for _, _, content in read_members(file):
            yield from groups_in(content)


def read_shown(path: Path) -> tuple[dict[int, list[GroupRecord]], bool]:
    """Return groups by step, for a page: of some steps from the first to the last.

    A step has its first groups, if they are too large together. Also return whether the file is too
    large to search, so that later steps are missing. Raises OSError, or ValueError for a damaged
    file.
    """
    starts, is_cut = dict[int, int](), False
    with open_regular(path, links=False) as file:
        try:
            for step, start, _ in places_in(file, most=SEARCHED_SAMPLES):
                starts[step] = start
        except TooLarge:
            is_cut = True
        steps, shown = sorted(starts), dict[int, list[GroupRecord]]()
        last, count = len(steps) - 1, min(len(steps), SHOWN_STEPS)
        for i in range(count):
            step = steps[last * i // max(count - 1, 1)]
            shown[step] = groups_at(file, starts[step], keep=SHOWN_SAMPLES)
    return shown, is_cut


def groups_in(content: bytes) -> list[GroupRecord]:
    """Return the groups of a member. Raises ValueError."""
    lines = content.splitlines()
    return [from_json(GroupRecord, parse_json(line, SAMPLED, "a group")) for line in lines]


def groups_at(file: io.BufferedReader, start: int, keep: int = MEMBER_BYTES) -> list[GroupRecord]:
    """Return the groups of the member at `start`, as far as its first `keep` bytes have them."""
    file.seek(start)
    content = next((content for _, _, content in read_members(file, keep)), b"")
    return groups_in(content[: content.rfind(b"\n") + 1])


def step_of(content: bytes) -> int:
    """Return the step of a member, without reading its samples. Raises ValueError."""
    if (found := _STEP.match(content)) is None:
        raise ValueError("is damaged: it has samples without a step")
    return int(found[1])


def places_in(file: io.BufferedReader, most: int | None = None) -> Iterator[tuple[int, int, int]]:
    """Yield the step, the start and the end of each complete member. Raises as `read_members`."""
    for start, end, content in read_members(file, keep=_START, most=most):
        yield step_of(content), start, end


def read_members(
    file: io.BufferedReader, keep: int = MEMBER_BYTES, most: int | None = None
) -> Iterator[tuple[int, int, bytes]]:
    """Yield the start, the end and the first `keep` bytes of each complete gzip member from here.

    An incomplete member at the end is left out. Raises ValueError for a damaged one, and TooLarge
    for one that unpacks to more than MEMBER_BYTES, or if all together unpack to more than `most`.
    """
    start, left, total = file.tell(), b"", 0
    while left or (left := file.read(_PIECE)):
        unpack, parts, size = zlib.decompressobj(wbits=31), list[bytes](), 0
        read, piece = 0, b""
        # A full piece may not be all that the last bytes unpack to.
        while not unpack.eof and (left or len(piece) == _PIECE or (left := file.read(_PIECE))):
            try:
                piece = unpack.decompress(left, _PIECE)
            except zlib.error as error:
                raise ValueError(f"is damaged: {error}") from error
            parts.append(piece[: max(keep - size, 0)])
            size += len(piece)
            total += len(piece)
            if size > MEMBER_BYTES or (most is not None and total > most):
                raise TooLarge("unpacks to too much")
            rest = unpack.unused_data if unpack.eof else unpack.unconsumed_tail
            read += len(left) - len(rest)
            left = rest
        if not unpack.eof:
            return
        yield start, start + read, b"".join(parts)
        start += read
