"""Options of reading data."""

from __future__ import annotations

import dataclasses
from pathlib import Path

from mlxtune.config.fields import Checked
from mlxtune.config.options import option
from mlxtune.config.paths import as_path, user_cache
from mlxtune.config.row_fields import parse_fields


@dataclasses.dataclass(frozen=True)
class DataConfig(Checked):
    """Which data is read, and how it is encoded, split and batched.

    Raises ConfigError, with every problem at once.
    """

    model_path: str = option("model_path", "")
    data: tuple[str, ...] = option("data", ())
    max_seq_len: int = option("max_seq_len", 512)
    batch_size: int = option("batch_size", 4)
    val_split: float = option("val_split", 0.2)
    val_data: str | None = option("val_data", None)
    val_rows: int = option("val_rows", 1000)
    seed: int = option("seed", 42)
    format: str = option("format", "auto")
    field: tuple[str, ...] = option("field", ())
    template: str = option("template", "auto")
    turns: str = option("turns", "all")
    thinking: str = option("thinking", "auto")
    merge_system: bool = option("merge_system", False)
    strict: bool = option("strict", False)
    cache_dir: str | None = option("cache_dir", None)
    no_cache: bool = option("no_cache", False)
    trust_remote_code: bool = option("trust_remote_code", False)
    quiet: bool = option("quiet", False)

    def contradictions(self) -> list[str]:
        try:
            parse_fields(self.field)
        except ValueError as problem:
            return [f"--field {problem}"]
        return []

    @property
    def data_paths(self) -> list[Path]:
        """The data files and folders."""
        return [as_path(data) for data in self.data]

    @property
    def val_data_path(self) -> Path | None:
        """The validation file, or None."""
        return None if self.val_data is None else as_path(self.val_data)

    @property
    def cache_path(self) -> Path | None:
        """The folder that caches encoded data, or None."""
        if self.no_cache:
            return None
        if self.cache_dir is not None:
            return as_path(self.cache_dir)
        return user_cache() / "encoded"
