"""The record of a run's samples, which a resumed run reads."""

import gzip
import os
from collections.abc import Sequence
from pathlib import Path

from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.writing import as_output_error, open_to_append, write_file
from mlxtune.core.run.sampled_answers import (
    GroupRecord,
    groups_at,
    places_in,
    read_members,
    step_of,
)
from mlxtune.errors import OutputError


class SampleRecords:
    """The file of a run's samples, in the order of their steps.

    Only a `resumed` run reads the samples that are there. Raises OutputError if the file cannot be
    read or written.
    """

    def __init__(self, path: Path, *, resumed: bool = True) -> None:
        self._path = path
        # By step, where a rollout's member starts and ends.
        self._places: dict[int, Sequence[int]] = {}
        if not (resumed and path.exists()):
            return
        try:
            with as_output_error(path, "file"), open_regular(path, links=False) as file:
                self._places = {step: place for step, *place in places_in(file)}
        except ValueError as problem:
            raise self._damaged(problem) from problem

    def read(self, step: int, adapter: str | None) -> list[GroupRecord] | None:
        """Return a rollout's groups; None if LoRA matrices other than `adapter` sampled them."""
        if step not in self._places:
            return None
        try:
            with as_output_error(self._path, "file"), open_regular(self._path, links=False) as file:
                groups = groups_at(file, self._places[step][0])
        except ValueError as problem:
            raise self._damaged(problem) from problem
        same = adapter is None or all(group.adapter == adapter for group in groups)
        return groups if same else None

    def _damaged(self, problem: ValueError) -> OutputError:
        return OutputError(f"{self._path} {problem}: start over with --overwrite")

    def add(self, groups: Sequence[GroupRecord]) -> None:
        """Add the groups of a rollout; remove later rollouts, which an abandoned run wrote."""
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


def copy_samples(source: Path, copy: Path, last_step: int) -> None:
    """Copy the samples up to a step. Raises OutputError, OSError, or ValueError."""
    with open_regular(source, links=False) as file:
        kept = [content for _, _, content in read_members(file) if step_of(content) <= last_step]
    write_file(copy, [gzip.compress(content, mtime=0) for content in kept])
