"""Reads parquet files in a helper process for rows.py, and imports nothing from mlxtune.

core/files/limited_helper.py calls `prepare` and then `serve`, which writes one JSON line per row:
the object, or `[reason, detail]` if the row has none. The last line is a string: the reason why
reading failed, or empty.
"""

import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

_BATCH_ROWS, _BATCH_BYTES, _PIECE_BYTES = 256, 2**24, 2**20
# The maximum CPU time for a batch, in seconds.
_SECONDS = 10.0


def prepare() -> Any:
    # pyarrow's own allocator reserves a gigabyte of address space.
    os.environ["ARROW_DEFAULT_MEMORY_POOL"] = "system"
    import pyarrow
    import pyarrow.parquet

    return pyarrow


def serve(pyarrow: Any, path: str) -> None:
    write = sys.stdout.buffer.write
    try:
        for batch in _batches(pyarrow, path):
            for line in _lines(batch):
                write(line + b"\n")
            sys.stdout.flush()
        problem = ""
    except MemoryError:
        raise
    except (pyarrow.ArrowException, OSError, ValueError, OverflowError) as error:
        problem = str(error) or type(error).__name__
    write(json.dumps(problem).encode() + b"\n")
    sys.stdout.flush()


def _batches(pyarrow: Any, path: str) -> Iterator[Any]:
    signal.setitimer(signal.ITIMER_PROF, _SECONDS)
    # Without buffer_size, pyarrow would read a whole column of a row group.
    with pyarrow.parquet.ParquetFile(path, pre_buffer=False, buffer_size=_PIECE_BYTES) as file:
        # Times contain no text to train on, and Python cannot represent all of them.
        kinds = enumerate(file.schema_arrow.types)
        columns = [i for i, kind in kinds if not pyarrow.types.is_temporal(kind)]
        groups = map(file.metadata.row_group, range(file.metadata.num_row_groups))
        size = max((g.total_byte_size // max(g.num_rows, 1) for g in groups), default=0)
        rows = min(max(_BATCH_BYTES // max(size, 1), 1), _BATCH_ROWS)
        for batch in file.iter_batches(rows, use_threads=False):
            # After `_SECONDS` of CPU time, the system ends this process with SIGPROF.
            signal.setitimer(signal.ITIMER_PROF, _SECONDS)
            yield batch.select(columns)


def _lines(batch: Any) -> Iterator[bytes]:
    """Yield the rows of a pyarrow RecordBatch as JSON, converted one by one if the batch fails."""
    try:
        rows = batch.to_pylist(maps_as_pydicts="lossy")
    except (ValueError, OverflowError) as error:
        if batch.num_rows > 1:
            for i in range(batch.num_rows):
                yield from _lines(batch.slice(i, 1))
            return
        utf8 = isinstance(error, UnicodeDecodeError)
        problem = ["not UTF-8" if utf8 else "a value cannot be read", str(error)]
        yield json.dumps(problem).encode()
        return
    for row in rows:
        try:
            yield json.dumps(row, default=_text, skipkeys=True).encode()
        except RecursionError:
            yield json.dumps(["nested too deeply", ""]).encode()


def _text(value: Any) -> str:
    # Bytes that are not text become lone surrogates, which are rejected when used.
    return value.decode("utf-8", "surrogateescape") if isinstance(value, bytes) else str(value)
