"""The place of a row, as messages name it: a line of a file, or an element of an array."""

import zlib
from pathlib import Path

from mlxtune.config import user_cache
from mlxtune.core.files.reading import open_regular, open_zipped

UTF8_BOM = b"\xef\xbb\xbf"
GZIP, PARQUET = b"\x1f\x8b", b"PAR1"
_HEAD_BYTES = 8192


def rows_folder() -> Path:
    """Return the folder whose files, such as `data-HASH.jsonl`, hold rows passed from Python."""
    return user_cache() / "rows"


def shown(path: str | Path) -> str:
    """Return a file's path for messages; for rows passed from Python, their argument's name."""
    file = Path(path)
    return file.name.partition("-")[0] if file.parent == rows_folder() else str(path)


def where(path: str | Path, row: int) -> str:
    """Return `path:26` for a line, `path[26]` for an element; both count from 1."""
    name = shown(path)
    try:
        head = b"[" if name != str(path) else read_head(Path(path))
    except (OSError, ValueError, EOFError, zlib.error):
        head = b""
    return f"{name}[{row}]" if has_elements(head) else f"{name}:{row}"


def has_elements(head: bytes) -> bool:
    """Return whether a file with these first bytes is parquet or a JSON array."""
    return head.startswith(PARQUET) or head.removeprefix(UTF8_BOM).lstrip().startswith(b"[")


def is_zipped(path: Path) -> bool:
    """Return whether a file is gzipped. Raises OSError."""
    with open_regular(path) as file:
        return file.read(len(GZIP)) == GZIP


def read_head(path: Path) -> bytes:
    """Return the first bytes of a file, unzipped. Raises the errors of opening and unzipping."""
    with open_zipped(path) if is_zipped(path) else open_regular(path) as file:
        return file.read(_HEAD_BYTES)
