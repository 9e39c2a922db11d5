"""Options of the model, of reading data and of `inspect`, and the names of a row's fields."""

import dataclasses
import difflib
from collections.abc import Sequence
from pathlib import Path

from mlxtune.config.fields import Checked, as_path
from mlxtune.config.options import option
from mlxtune.errors import shorten

ROW_NAMES = (
    *("messages", "tools", "prompt", "completion", "instruction", "input", "output"),
    *("system", "history", "conversations", "text"),
)
MESSAGE_NAMES = ("role", "content", "from", "value")
FIELD_NAMES = (*ROW_NAMES, *MESSAGE_NAMES)


@dataclasses.dataclass(frozen=True)
class ModelConfig(Checked):
    """Which base model is loaded, in which precision, and the memory that it may use."""

    model_path: str = option("model_path", "")
    _: dataclasses.KW_ONLY
    trust_remote_code: bool = option("trust_remote_code", False)
    memory_limit: float = option("memory_limit", 24.0)
    dtype: str = option("dtype", "auto")
    quantize: str | None = option("quantize", None)
    double_quant: bool = option("double_quant", False)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        if self.double_quant and self.quantize != "nf4":
            problems += ["--double-quant goes with --quantize nf4: leave it out, or give both"]
        return problems


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowsConfig(Checked):
    """How the rows of data are read and encoded."""

    max_seq_len: int = option("max_seq_len", 512)
    format: str = option("format", "auto")
    field: tuple[str, ...] = option("field", ())
    turns: str = option("turns", "all")
    strict: bool = option("strict", False)
    cache_dir: str | None = option("cache_dir", None)
    no_cache: bool = option("no_cache", False)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        try:
            parse_fields(self.field)
        except ValueError as problem:
            problems += [f"--field {problem}"]
        return problems


@dataclasses.dataclass(frozen=True)
class DataConfig(RowsConfig):
    """Which data is read, and how it is encoded, split and batched."""

    model_path: str = option("model_path", "")
    data: tuple[str, ...] = option("data", ())
    batch_size: int = option("batch_size", 4)
    val_split: float = option("val_split", 0.2)
    val_data: str | None = option("val_data", None)
    val_rows: int = option("val_rows", 1000)
    seed: int = option("seed", 42)
    template: str = option("template", "auto")
    thinking: str = option("thinking", "auto")
    merge_system: bool = option("merge_system", False)
    trust_remote_code: bool = option("trust_remote_code", False)
    quiet: bool = option("quiet", False)

    @property
    def cache_path(self) -> Path | None:
        """The folder that caches encoded data, or None."""
        if self.no_cache:
            return None
        if self.cache_dir is not None:
            return as_path(self.cache_dir)
        return user_cache() / "encoded"


@dataclasses.dataclass(frozen=True)
class InspectConfig(DataConfig):
    """Options of `mlxtune inspect`. Raises ConfigError, with every problem at once."""

    row: int | None = option("row", None)
    json: bool = option("json", False)
    html: str | None = option("html", None)
    dump: str | None = option("dump", None)

    def contradictions(self) -> list[str]:
        problems = super().contradictions()
        files = [as_path(path).resolve() for path in (self.html, self.dump) if path is not None]
        if len(files) > len(set(files)):
            problems += ["--html and --dump name the same file: choose another for one of them"]
        return problems


def parse_fields(pairs: Sequence[str]) -> dict[str, str]:
    """Parse `name=key` pairs: a field's name, and the key that the file uses for it.

    Raises ValueError with one sentence for the first wrong pair.
    """
    fields: dict[str, str] = {}
    for pair in pairs:
        name, equals, key = pair.partition("=")
        if not equals or not key:
            raise ValueError(f"{shorten(pair)} is not a pair such as prompt=question")
        if name not in FIELD_NAMES:
            close = difflib.get_close_matches(name, FIELD_NAMES, 1)
            hint = f", did you mean {close[0]}?" if close else ""
            raise ValueError(
                f"{shorten(name)} is not a field{hint} (known: {', '.join(FIELD_NAMES)})"
            )
        if name in fields:
            raise ValueError(
                f"{name} is given twice, as {shorten(fields[name])} and {shorten(key)}"
            )
        fields[name] = key
    return fields


def user_cache() -> Path:
    """Return the folder that this user's runs share: encoded data, hashes, reserved memory."""
    import platformdirs

    return Path(platformdirs.user_cache_path("mlxtune"))
