"""A model folder's tokenizer, with the interface that core expects.

An untrusted tokenizer is first tried in a process with limited time and memory.
"""

import hashlib
import importlib.metadata
import json
import os
import re
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from typing import Any

import sentencepiece
from mlx_lm.utils import load_tokenizer as load_with_mlx_lm
from transformers.convert_slow_tokenizer import bytes_to_unicode
from transformers.utils import logging as transformers_logging

from mlxtune.backend.models.model_folder import check_auto_map, check_files, json_object
from mlxtune.backend.text import tokenizer_helper
from mlxtune.config.limits import MAX_CONTROL_TOKENS
from mlxtune.core.data.encode import OffsetEncoding
from mlxtune.core.files.processes import LimitedProcess, ProcessEndedError
from mlxtune.core.files.reading import file_hash
from mlxtune.core.files.scratch import scratch_file
from mlxtune.core.files.writing import make_folder, open_to_write
from mlxtune.core.names import is_file_name
from mlxtune.errors import ModelError, one_line

# The limits of a trial: the memory of its process, and the length of the problem that it reports.
_MAX_MEMORY, _MAX_PROBLEM_BYTES = 2**30, 2**16
# The cache's folder of empty files, one for each tokenizer that passed a trial.
_TRIED_FOLDER = "tokenizers-tried"
_STDERR = 2
_stderr_lock = threading.Lock()


class FastTokenizer:
    """A tokenizer of the `tokenizers` library, loaded by mlx-lm and transformers.

    A chat template may use the `special_tokens`; the tokens `end_tokens` may end a turn, and the
    tokens `eos_ids` end generation with any template.
    """

    def __init__(self, tokenizer: Any, eos_ids: Sequence[int]) -> None:
        self._backend = tokenizer.backend_tokenizer
        self._folder = tokenizer.name_or_path
        # A tokenizer.json may enable truncation or padding; transformers disables both per call.
        self._backend.no_truncation()
        self._backend.no_padding()
        self.bos_id: int | None = tokenizer.bos_token_id
        self.eos_id: int | None = tokenizer.eos_token_id
        self.eos_ids = frozenset(eos_ids) | ({self.eos_id} - {None})
        self.special_tokens: dict[str, Any] = dict(tokenizer.special_tokens_map)
        special = {id_: t for id_, t in tokenizer.added_tokens_decoder.items() if t.special}
        self.control_ids = frozenset(special)
        self.control_tokens = tuple(token.content for token in special.values())
        self._added = {id_: t.content for id_, t in tokenizer.added_tokens_decoder.items()}
        byte_level = "ByteLevel" in repr(self._backend.decoder)
        self._byte_of = {c: b for b, c in bytes_to_unicode().items()} if byte_level else None
        ends = (self._backend.id_to_token(token) for token in eos_ids)
        self.end_tokens = tuple(
            dict.fromkeys(filter(None, (tokenizer.eos_token, *ends, *self.control_tokens)))
        )

    def encode_batch(self, texts: Sequence[str]) -> list[OffsetEncoding]:
        """Encode texts; control tokens in them are parsed, and none are added."""
        with _panics_as_errors(self._folder):
            encodings = self._backend.encode_batch(list(texts), add_special_tokens=False)
        return [OffsetEncoding(encoding.ids, encoding.offsets) for encoding in encodings]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; a character may be spread over several tokens."""
        return [self._spelled(token) for token in ids]

    def _spelled(self, token: int) -> bytes:
        if token in self._added:
            return self._added[token].encode()
        text = self._backend.id_to_token(token) or ""
        if self._byte_of is not None and all(character in self._byte_of for character in text):
            return bytes(self._byte_of[character] for character in text)
        return _spell_piece(text)


class SentencePieceTokenizer:
    """A `tokenizer.model` without tokenizer.json, read by sentencepiece.

    transformers would convert it to `tokenizers`, but lose the dummy prefix and add control tokens
    that the model lacks.
    """

    def __init__(self, path: Path, eos_ids: Sequence[int]) -> None:
        self._processor = sentencepiece.SentencePieceProcessor(model_file=str(path))
        bos_id, eos_id = self._processor.bos_id(), self._processor.eos_id()
        self.bos_id = bos_id if bos_id >= 0 else None
        self.eos_id = eos_id if eos_id >= 0 else None
        self.eos_ids = frozenset(token for token in (*eos_ids, eos_id) if token >= 0)
        control = filter(self._processor.is_control, range(len(self._processor)))
        self._ids_of_control = {self._processor.id_to_piece(token): token for token in control}
        self._control = re.compile(f"({'|'.join(map(re.escape, self._ids_of_control)) or '(?!)'})")
        end_ids = [token for token in (*eos_ids, eos_id) if 0 <= token < len(self._processor)]
        # The file does not mark the symbols around Gemma's turns as control tokens.
        symbols = filter(self._is_symbol, range(len(self._processor)))
        self.control_ids = frozenset([*self._ids_of_control.values(), *end_ids, *symbols])
        self.control_tokens = tuple(map(self._processor.id_to_piece, sorted(self.control_ids)))
        self.end_tokens = tuple(dict.fromkeys(map(self._processor.id_to_piece, end_ids)))
        self.special_tokens: dict[str, Any] = {}
        if self.bos_id is not None:
            self.special_tokens["bos_token"] = self._processor.id_to_piece(self.bos_id)
        if self.eos_id is not None:
            self.special_tokens["eos_token"] = self._processor.id_to_piece(self.eos_id)

    def _is_symbol(self, token: int) -> bool:
        piece = self._processor.id_to_piece(token)
        if not re.fullmatch(r"<\|.+\|>|<\w*_\w*>", piece) or self._processor.is_byte(token):
            return False
        return token in self._processor.encode(piece)

    def encode_batch(self, texts: Sequence[str]) -> list[OffsetEncoding]:
        """Encode texts; control tokens in them are parsed, and none are added."""
        # sentencepiece would split a control token in the text into ordinary tokens.
        parts = [list(filter(None, self._control.split(text))) for text in texts]
        plain = [part for several in parts for part in several if part not in self._ids_of_control]
        mappings = iter(self._processor.encode(plain, return_type="offset_mapping"))
        return [self._join_parts(several, mappings) for several in parts]

    def token_bytes(self, ids: Sequence[int]) -> list[bytes]:
        """Return the bytes of each token; a character may be spread over several tokens."""
        return [_spell_piece(self._processor.id_to_piece(token)) for token in ids]

    def _join_parts(self, parts: list[str], mappings: Iterator[dict[str, Any]]) -> OffsetEncoding:
        encoded, position = OffsetEncoding([], []), 0
        for part in parts:
            if part in self._ids_of_control:
                encoded.ids.append(self._ids_of_control[part])
                encoded.offsets.append((position, position + len(part)))
            else:
                mapping = next(mappings)
                encoded.ids.extend(mapping["ids"])
                encoded.offsets.extend((position + a, position + b) for a, b in mapping["offsets"])
            position += len(part)
        return encoded


ModelTokenizer = FastTokenizer | SentencePieceTokenizer


def _spell_piece(piece: str) -> bytes:
    """Return the bytes of a SentencePiece piece: `▁` means a space, `<0x0A>` a byte."""
    if byte := re.fullmatch(r"<0x([0-9A-F]{2})>", piece):
        return bytes.fromhex(byte[1])
    return piece.replace("▁", " ").encode()


def load_tokenizer(
    folder: Path, *, trust_remote_code: bool = False, cache: Path | None = None
) -> ModelTokenizer:
    """Try a model folder's tokenizer, unless `cache` records an earlier success, and load it.

    Raises ModelError if there is no tokenizer, or if it is broken or its code is not trusted.
    """
    check_files(folder)
    if trust_remote_code:
        check_auto_map(folder)
    try_tokenizer(folder, cache)
    eos_ids = _eos_ids(folder)
    spm = folder / "tokenizer.model"
    if spm.is_file() and not (folder / "tokenizer.json").exists():
        try:
            return SentencePieceTokenizer(spm, eos_ids)
        except (OSError, RuntimeError) as error:
            raise ModelError(
                f"{spm} is not a SentencePiece model ({one_line(error)}): download it again"
            ) from error
    try:
        # Without this option, transformers asks on the terminal whether to run a folder's code.
        options = {"trust_remote_code": trust_remote_code}
        with _without_advice():
            tokenizer = load_with_mlx_lm(folder, tokenizer_config_extra=options)
        loaded = FastTokenizer(tokenizer, eos_ids)
    except ModelError:
        raise
    except Exception as error:
        if "trust_remote_code" in str(error) and not trust_remote_code:
            raise ModelError(
                f"{folder}: its tokenizer runs code (auto_map in tokenizer_config.json): read "
                "that code, then add --trust-remote-code"
            ) from error
        raise ModelError(
            f"{folder}: its tokenizer.json or config.json cannot be loaded "
            f"({type(error).__name__}: {one_line(error)}): download it again"
        ) from error
    # For a folder without a tokenizer, transformers returns an empty one.
    if not loaded.encode_batch(["a"])[0].ids:
        raise ModelError(
            f"{folder} has no tokenizer (tokenizer.json or tokenizer.model): download it again"
        )
    return loaded


def try_tokenizer(folder: Path, cache: Path | None = None) -> None:
    """Raise ModelError if a folder's tokenizer takes too much time or memory, or is damaged.

    Other errors surface on loading. With a cache, a file that has passed is not tried again,
    because a trial of a large file takes a second.
    """
    for path in _tokenizer_files(folder):
        tried = None if cache is None else cache / _TRIED_FOLDER / _trial_key(path)
        if tried is not None and tried.exists():
            continue
        if problem := _problem_of(path):
            problem = one_line(problem)
            raise ModelError(f"{path}: {problem}: use the tokenizer of the original model")
        if tried is not None:
            with suppress(OSError):  # a read-only cache
                make_folder(tried.parent)
                open_to_write(tried).close()


def _tokenizer_files(folder: Path) -> list[Path]:
    """Return the tokenizer files, of which transformers loads one, depending on its version.

    Raises ModelError if tokenizer_config.json names a file outside the folder.
    """
    names = [name for name in ("tokenizer.json", "tokenizer.model") if (folder / name).is_file()]
    config = folder / "tokenizer_config.json"
    listed = json_object(config).get("fast_tokenizer_files") or []
    listed = listed if isinstance(listed, list) else [listed]
    for name in listed:
        if not is_file_name(name):
            raise ModelError(
                f"{config} names {name!r:.60} as a tokenizer, but that is not a file in its "
                "folder: remove fast_tokenizer_files"
            )
    paths = [folder / name for name in dict.fromkeys([*names[:1], *listed])]
    return [path for path in paths if path.is_file()]


def _trial_key(path: Path) -> str:
    """Return a hash of a trial's inputs: the file, the script, its limit and library versions."""
    versions = map(importlib.metadata.version, ("tokenizers", "sentencepiece"))
    script = file_hash(Path(tokenizer_helper.__file__))
    parts = (file_hash(path), script, str(MAX_CONTROL_TOKENS), *versions)
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _problem_of(path: Path) -> str | None:
    arguments = str(path.absolute()), str(MAX_CONTROL_TOKENS)
    with closing(
        LimitedProcess(Path(tokenizer_helper.__file__), _MAX_MEMORY, *arguments)
    ) as process:
        try:
            problem: str | None = json.loads(process.read_line(_MAX_PROBLEM_BYTES))
        except ProcessEndedError as error:
            ended = error.reason
        else:
            return problem
    limits = {"time": "10 s to load, or to encode a few words", "memory": "1 GB to load and try"}
    if ended in limits:
        return f"takes more than {limits[ended]}"
    return f"ends the process that loads and tries it ({ended})"


@contextmanager
def _panics_as_errors(folder: str) -> Iterator[None]:
    """Turn a panic of `tokenizers` into ModelError, and drop the lines that Rust prints for it.

    Without a panic, output to stderr is captured and shown afterwards.
    """
    with _stderr_lock, scratch_file() as captured:
        _flush_stderr()
        try:
            before = os.dup(_STDERR)
        except OSError:  # stderr is closed, so there is no output to hide
            before = os.dup(captured.fileno())
        os.dup2(captured.fileno(), _STDERR)
        panicked = False
        try:
            yield
        except BaseException as error:
            # A panic is not an Exception, and each Rust library has a separate class for it.
            panicked = type(error).__name__ == "PanicException"
            if not panicked:
                raise
            raise ModelError(
                f"{folder}: its tokenizer.json is damaged ({one_line(error)}): download it again"
            ) from error
        finally:
            _flush_stderr()
            os.dup2(before, _STDERR)
            os.close(before)
            captured.seek(0)
            if not panicked and (text := captured.read()):
                os.write(_STDERR, text)


def _flush_stderr() -> None:
    with suppress(OSError, ValueError, AttributeError):
        sys.stderr.flush()


@contextmanager
def _without_advice() -> Iterator[None]:
    """Silence transformers' advice to model authors inside the block."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _eos_ids(folder: Path) -> list[int]:
    """Return the ids that end generation, from config.json and generation_config.json."""
    eos_ids: list[int] = []
    for name in ("config.json", "generation_config.json"):
        config = json_object(folder / name)
        for part in (config, config.get("text_config")):
            ids = part.get("eos_token_id") if isinstance(part, dict) else None
            ids = ids if isinstance(ids, list) else [ids]
            eos_ids += [id_ for id_ in ids if type(id_) is int and 0 <= id_ < 2**31]
    return eos_ids
