"""What goes wrong with the folders of models and runs, as tests/mutations.py has it of files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.mutations import (
    as_bytes,
    as_json,
    as_text,
    mutate_bytes,
    mutate_value,
    read_json,
    strange,
)


def mutate_json_file(rng: Random, path: Path) -> None:
    """Put a file of JSON in place that says something else, or is none any more."""
    if rng.random() < 0.3 or not path.is_file():
        mutate_file(rng, path)
        return
    value = read_json(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = mutate_value(rng, value)
    path.write_bytes(as_bytes(as_text(rng, value)))


def mutate_file(rng: Random, path: Path) -> None:
    """Damage a file, or put something else in its place."""
    kind = rng.randrange(12)
    content = path.read_bytes() if path.is_file() else b""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    path.unlink(missing_ok=True)
    if kind <= 6:
        for _ in range(rng.choice((1, 1, 3))):
            content = mutate_bytes(rng, content)
        path.write_bytes(content)
    elif kind == 7:
        os.mkfifo(path)
    elif kind == 8:
        path.mkdir()
    elif kind == 9:
        path.symlink_to(rng.choice((path.name, "missing", "/dev/zero", "..", ".")))
    elif kind == 10:
        path.write_bytes(b"[" * rng.choice((500, 2000, 100_000)))


def mutate_safetensors(rng: Random, path: Path) -> None:
    """Change the header of weights, or damage the file."""
    if rng.random() < 0.3 or not path.is_file():
        mutate_file(rng, path)
        return
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header, data = content[8 : 8 + size], content[8 + size :]
    if rng.random() < 0.5:
        header = as_bytes(as_json(mutate_value(rng, read_json(header))))
    else:
        header = mutate_bytes(rng, header)
    length = len(header) if rng.random() < 0.9 else rng.choice((0, 2**63, size + 8, len(content)))
    path.write_bytes(length.to_bytes(8, "little") + header + data)


_EXTRA: dict[str, Callable[[Random], Any]] = {
    "quantization": lambda rng: {
        "group_size": rng.choice((32, 64, 0, -1, 7, "a")),
        "bits": rng.choice((4, 0, 1, 3, 64, -4, None)),
    },
    "rope_scaling": lambda rng: {
        "type": rng.choice(("linear", "yarn", "llama3", "x", None)),
        "factor": strange(rng),
    },
    "text_config": strange,
    "eos_token_id": strange,
    "auto_map": lambda rng: {"AutoConfig": "own.Own", "AutoTokenizer": strange(rng)},
    "model_file": lambda rng: rng.choice(("own.py", "../own.py", 3)),
    "tokenizer_class": lambda rng: rng.choice(("LlamaTokenizer", "Own", strange(rng))),
    "quantization_config": lambda rng: {"quant_method": rng.choice(("awq", "fp8", "bitnet", 3))},
    "layer_types": lambda rng: ["full_attention", rng.choice(("sliding_attention", 3))],
    "chat_template": strange,
    "tool_parser_type": strange,
    "architectures": strange,
}


def mutate_model(rng: Random, folder: Path) -> None:
    """Damage a model folder in some of its files, or add others to it."""
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        kind = rng.randrange(10)
        if kind <= 2:
            mutate_json_file(rng, folder / "config.json")
        elif kind == 3:
            name = rng.choice(("config.json", "tokenizer_config.json"))
            if (folder / name).is_file():
                add = rng.choice(list(_EXTRA))
                with open(folder / name, "rb") as file:  # noqa: PTH123
                    text = file.read()
                extra = as_json({add: _EXTRA[add](rng)})[1:-1]
                (folder / name).write_bytes(as_bytes("{" + extra + ",") + text.lstrip()[1:])
        elif kind == 4:
            mutate_json_file(rng, folder / "tokenizer_config.json")
        elif kind == 5:
            mutate_json_file(rng, folder / "tokenizer.json")
        elif kind <= 7:
            mutate_safetensors(rng, folder / "model.safetensors")
        elif kind == 8:
            mutate_file(rng, folder / "chat_template.jinja")
        else:
            name = rng.choice(("generation_config.json", "special_tokens_map.json", "vocab.json"))
            name = rng.choice((name, "added_tokens.json", "tokenizer.model", "merges.txt"))
            value = {"eos_token_id": strange(rng), "bos_token": strange(rng), "<x>": strange(rng)}
            (folder / name).write_bytes(as_bytes(as_json(mutate_value(rng, value))))
            if rng.random() < 0.3:
                mutate_file(rng, folder / name)


def mutate_run(rng: Random, run: Path) -> None:
    """Damage the folder of a run, half of the time so that its manifests say that it is right."""
    checkpoints = sorted(path.parent for path in run.rglob("manifest.json"))
    for _ in range(rng.choice((1, 1, 2, 4))):
        folder = rng.choice([*checkpoints, run / "checkpoints"])
        files = sorted(path for path in folder.glob("*") if path.is_file())
        if not files:
            continue
        path = rng.choice(files)
        if rng.random() < 0.05:
            shutil.rmtree(folder)
            return
        if path.suffix == ".safetensors":
            mutate_safetensors(rng, path)
        elif path.suffix == ".json":
            mutate_json_file(rng, path)
        elif path.suffix == ".jsonl":
            lines = path.read_bytes().splitlines(keepends=True)
            place = rng.randrange(len(lines) or 1)
            if lines and rng.random() < 0.6:
                value = mutate_value(rng, read_json(lines[place]))
                lines[place] = as_bytes(as_json(value)) + b"\n"
                path.write_bytes(b"".join(lines))
            else:
                mutate_file(rng, path)
    if rng.random() < 0.5:
        for folder in checkpoints:
            _mend_manifest(folder)


def _mend_manifest(folder: Path) -> None:
    if not (folder / "manifest.json").is_file():
        return
    try:
        manifest = json.loads((folder / "manifest.json").read_bytes())
        for name, said in manifest["files"].items():
            if (folder / name).is_file() and not (folder / name).is_symlink():
                content = (folder / name).read_bytes()
                said |= {"size": len(content), "sha256": hashlib.sha256(content).hexdigest()}
        (folder / "manifest.json").write_text(json.dumps(manifest))
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError):
        return
