"""The record of a run's samples, which a resumed run reads."""

import gzip
import io
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from hashlib import sha256
from pathlib import Path
from typing import Any

from mlxtune.core.files.reading import open_regular
from mlxtune.core.files.writing import as_output_error, open_to_append, write_file
from mlxtune.core.run.checkpoint import WRITTEN_SAMPLES, Checkpoint
from mlxtune.core.run.sampled_answers import GroupRecord, Member, groups_at, read_members
from mlxtune.core.run.stored_run import get_mapping
from mlxtune.errors import OutputError

_PIECE_BYTES = 2**20


class SampleRecords:
    """The file of a run's samples, in the order of their steps.

    Only a run that resumes from a `checkpoint` reads the samples that are there. In another user's
    run (`is_own` is false), those that no checkpoint vouches for are drawn again. `on_problem` gets
    a sentence if the samples up to the checkpoint are missing or different, or if the end of the
    file is damaged. Raises OutputError if the file cannot be read or written.
    """

    def __init__(
        self,
        path: Path,
        checkpoint: Checkpoint | None = None,
        *,
        is_own: bool = True,
        on_problem: Callable[[str], None] = lambda problem: None,
    ) -> None:
        self._path, self._on_problem = path, on_problem
        self._members: dict[int, Member] = {}
        self._has_damaged_end = False
        # The last step whose samples must not be used, because other runs drew them.
        self._foreign_until = 0
        if checkpoint is not None:
            expected = get_mapping(checkpoint.metadata, WRITTEN_SAMPLES)
            if path.exists():
                with as_output_error(path, "file"), open_regular(path, links=False) as file:
                    self._members = self._find(file, expected.get("bytes"))
            self._compare(checkpoint.step, expected)
            if not is_own:
                self._keep_until(checkpoint.step)

    def _find(self, file: io.BufferedReader, needed: Any) -> dict[int, Member]:
        """Find the rollouts; a damaged end, behind the `needed` bytes if known, is left out."""
        members, end = dict[int, Member](), 0
        try:
            for each in read_members(file, keep=0):
                members[each.step], end = each, each.end
        except ValueError as problem:
            if not members or (isinstance(needed, int) and end < needed):
                raise self._damaged(problem) from problem
            self._has_damaged_end = True
            self._on_problem(
                f"{self._path} {problem} behind step {[*members][-1]}: the rest is replaced"
            )
        return members

    def _compare(self, step: int, expected: Mapping[str, Any]) -> None:
        """Report samples up to a checkpoint that another run drew."""
        if expected and self.written(step) != expected:
            self._foreign_until = step
            what = "has other samples than the run drew" if self._path.exists() else "is missing"
            self._on_problem(
                f"{self._path} {what} up to step {step}: bring it back, or mlxtune verify will "
                "report it"
            )

    def read(self, step: int, adapter: str | None) -> list[GroupRecord] | None:
        """Return a rollout's groups; None if LoRA matrices other than `adapter` sampled them."""
        if step not in self._members or step <= self._foreign_until:
            return None
        if self._has_damaged_end:
            # Perhaps no rollout is left to draw, which would replace it.
            with as_output_error(self._path, "file"), open_to_append(self._path) as file:
                file.truncate(self._last_before(max(self._members) + 1).end)
            self._has_damaged_end = False
        try:
            with as_output_error(self._path, "file"), open_regular(self._path, links=False) as file:
                groups = groups_at(file, self._members[step].start)
        except ValueError as problem:
            raise self._damaged(problem) from problem
        same = adapter is None or all(group.adapter == adapter for group in groups)
        return groups if same else None

    def error(self, step: int, problem: ValueError) -> OutputError:
        """Return the error of samples of a step that cannot be trained on."""
        return OutputError(
            f"{self._path}: step {step}: {problem}: bring the file back, or start over with "
            "--overwrite"
        )

    def _damaged(self, problem: ValueError) -> OutputError:
        return OutputError(
            f"{self._path} {problem}: bring it back, or move it away to train on without the "
            "samples so far"
        )

    def written(self, step: int) -> dict[str, Any]:
        """Return the size and the hash of the file up to a step, for a checkpoint."""
        last = self._last_before(step + 1)
        return {"bytes": last.end, "sha256": last.digest.hexdigest()}

    def _last_before(self, step: int) -> Member:
        members = [each for each in self._members.values() if each.step < step]
        return max(members, key=lambda each: each.end, default=Member(0, 0, 0, b"", sha256()))

    def add(self, groups: Sequence[GroupRecord]) -> None:
        """Add the groups of a rollout; remove later rollouts, which an abandoned run wrote."""
        step = groups[0].step
        self._keep_until(step - 1)
        last = self._last_before(step)
        # Without the time of writing, so that the same samples have the same bytes.
        content = gzip.compress(b"".join(group.as_json() for group in groups), mtime=0)
        with as_output_error(self._path, "file"), open_to_append(self._path) as file:
            file.truncate(last.end)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        digest = last.digest.copy()
        digest.update(content)
        self._members[step] = Member(step, last.end, last.end + len(content), b"", digest)

    def _keep_until(self, step: int) -> None:
        self._members = {each: own for each, own in self._members.items() if each <= step}


def read_pieces(file: io.BufferedReader, size: int) -> Iterator[bytes]:
    """Yield the next `size` bytes of a file, or fewer at its end."""
    while size and (piece := file.read(min(size, _PIECE_BYTES))):
        yield piece
        size -= len(piece)


def copy_samples(source: Path, copy: Path, last_step: int) -> None:
    """Copy the intact samples up to a step. Raises OutputError or OSError."""
    with open_regular(source, links=False) as file:
        end = 0
        with suppress(ValueError):  # other checks report the damage
            for member in read_members(file, keep=0):
                end = member.end if member.step <= last_step else end
        file.seek(0)
        write_file(copy, read_pieces(file, end))
