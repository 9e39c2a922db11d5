"""Random damage to the folders of models and runs; mutations.py damages single files."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

from tests.long.mutations import (
    as_bytes,
    as_json,
    as_text,
    mutate_bytes,
    mutate_value,
    read_json,
    strange,
)


def mutate_json_file(rng: Random, path: Path) -> None:
    """Change values of a JSON file, or damage the file."""
    if rng.random() < 0.3 or not path.is_file():
        mutate_file(rng, path)
        return
    value = read_json(path.read_bytes())
    for _ in range(rng.choice((1, 1, 2, 5))):
        value = mutate_value(rng, value)
    path.write_bytes(as_bytes(as_text(rng, value)))


def mutate_file(rng: Random, path: Path) -> None:
    """Damage a file, or replace it with a different kind of file."""
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
    """Change the header of a weight file, or damage the file."""
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
    """Damage some files of a model folder, or add others."""
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


# Numbers for an adapter's config: invalid, or so large that they would fill the memory.
_NUMBERS = (0, -1, 1, 3, 0.5, 10**6, 10**9, 2**31, 2**63, 10**30, 10**400, None, True, "8", "x")
_NUMBERS += (float("nan"), float("inf"), -float("inf"), 1e308, 1e-320, [8], {"q_proj": 8})
_NAMES = (
    *("../../x", "/etc/passwd", "a\x00b", "\x1b[31mred", "lm_head", "embed_tokens", "", ".."),
    *("model.layers.999999999.self_attn.q_proj", "layers.-1.mlp", "x" * 5000, "layers.0." * 5000),
)
# Patterns, some of which a backtracking engine would never finish matching.
_PATTERNS = (
    *("(a+)+$", "((.*)*)*!", "(.|.|.)*\\.z", "(([a-z_.0-9]+)+)+X", "(.*)*q", ".*.*.*.*.*.*.*.*!"),
    *("((x{60000}){60000}){60000}", "(?R)", "(((x{99}){99}){99})*", "(?:x{1000}){1000}", "\\", "*"),
    *("[", "(" * 3000, "(" * 900, "a{99999999999}", "(?P<a>.)(?P=a)", "q_proj", "(?<=a)q_proj", ""),
    *("model.layers.0.self_attn.q_proj", ".*q_proj", r"layers\.[01]\..*", "(?i)Q_PROJ"),
)


def _put(rng: Random, path: Path, changes: dict[str, Any]) -> None:
    """Set entries of a JSON file; `outer/inner` names an entry of a nested object."""
    value = read_json(path.read_bytes()) if path.is_file() else None
    if not isinstance(value, dict):
        return
    for name, change in changes.items():
        outer, _, inner = name.rpartition("/")
        where = value.setdefault(outer, {}) if outer else value
        if isinstance(where, dict):
            where[inner] = change
    path.write_bytes(as_bytes(as_text(rng, value)))


def _rename_tensors(rng: Random, path: Path) -> None:
    """Rename a tensor of a file as if it belonged to another module."""
    if not path.is_file():
        return
    content = path.read_bytes()
    size = int.from_bytes(content[:8], "little")
    header = read_json(content[8 : 8 + size])
    if not isinstance(header, dict):
        return
    name = rng.choice(sorted(header) or [""])
    leaf = name.rpartition(".lora_")[1:]
    other = rng.choice((*_NAMES, *_NAMES, "x\n" + "layers.1." * 20_000 + "\n"))
    header[other + "".join(leaf)] = header.pop(name, {})
    if rng.random() < 0.3:
        header = {key: each for key, each in header.items() if "layers.0" not in key}
    text = as_bytes(as_json(header))
    path.write_bytes(len(text).to_bytes(8, "little") + text + content[8 + size :])


def _spoil_numbers(rng: Random, path: Path) -> None:
    """Overwrite weights with NaN, infinity or the largest float."""
    content = bytearray(path.read_bytes()) if path.is_file() else bytearray()
    start = 8 + int.from_bytes(content[:8], "little")
    if not 8 < start < len(content) - 8:
        return
    number = rng.choice((b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f", b"\xff\xff\x7f\x7f"))
    count = rng.choice((1, (len(content) - start) // 4))
    content[start : start + 4 * count] = number * count
    path.write_bytes(content)


def _mutate_folder(
    rng: Random, folder: Path, weights: str, entries: dict[str, Callable[[Random], Any]]
) -> None:
    config = folder / "adapter_config.json"
    for _ in range(rng.choice((0, 1, 1, 1, 2, 3))):
        kind = rng.randrange(10)
        if kind <= 3:
            name = rng.choice(list(entries))
            _put(rng, config, {name: entries[name](rng)})
        elif kind <= 5:
            mutate_json_file(rng, config)
        elif kind == 6:
            mutate_safetensors(rng, folder / weights)
        elif kind == 7:
            _rename_tensors(rng, folder / weights)
        elif kind == 8:
            _spoil_numbers(rng, folder / weights)
        else:
            mutate_file(rng, folder / rng.choice((weights, "adapter_config.json")))


_OF_ADAPTER: dict[str, Callable[[Random], Any]] = {
    "lora_parameters/rank": lambda rng: rng.choice(_NUMBERS),
    "lora_parameters/scale": lambda rng: rng.choice(_NUMBERS),
    "lora_parameters/dropout": lambda rng: rng.choice(_NUMBERS),
    "lora_parameters/keys": lambda rng: [rng.choice(_NAMES), strange(rng)],
    "lora_parameters": strange,
    "num_layers": lambda rng: rng.choice(_NUMBERS),
    "fine_tune_type": lambda rng: rng.choice(("lora", "dora", "full", None, strange(rng))),
    "model": lambda rng: rng.choice((*_NAMES, strange(rng))),
    "mlxtune": lambda rng: {"rank": rng.choice(_NUMBERS), "alpha": strange(rng)},
    "mlxtune/rank": lambda rng: rng.choice(_NUMBERS),
    "mlxtune/alpha": lambda rng: rng.choice(_NUMBERS),
    "mlxtune/init": lambda rng: rng.choice(("pissa", "lora", strange(rng))),
    "mlxtune/rslora": strange,
    "mlxtune/target_ranks": lambda rng: {rng.choice(_NAMES): rng.choice(_NUMBERS)},
}


def mutate_adapter(rng: Random, folder: Path) -> None:
    """Damage an adapter in mlx-lm's layout, or change its config."""
    if rng.random() < 0.1:
        # The metadata of the adapter's checkpoint.
        value = {"working_directory": strange(rng), "config": {"data": [strange(rng)]}}
        (folder / "metadata.json").write_bytes(as_bytes(as_json(value)))
        checkpoint = folder / "checkpoints" / "best"
        checkpoint.mkdir(parents=True)
        shutil.copyfile(folder / "metadata.json", checkpoint / "metadata.json")
        mutate_file(rng, checkpoint / "adapters.safetensors")
    _mutate_folder(rng, folder, "adapters.safetensors", _OF_ADAPTER)


_OF_PEFT: dict[str, Callable[[Random], Any]] = {
    "r": lambda rng: rng.choice(_NUMBERS),
    "lora_alpha": lambda rng: rng.choice(_NUMBERS),
    "lora_dropout": lambda rng: rng.choice(_NUMBERS),
    "target_modules": lambda rng: rng.choice((*_PATTERNS, strange(rng))),
    "rank_pattern": lambda rng: {rng.choice(_PATTERNS): rng.choice((8, 8, *_NUMBERS))},
    "alpha_pattern": lambda rng: {rng.choice(_PATTERNS): rng.choice((8, 8, *_NUMBERS))},
    "alpha_pattern/x": lambda rng: strange(rng),
    "layers_to_transform": strange,
    "layers_pattern": lambda rng: rng.choice(_PATTERNS),
    "use_dora": strange,
    "use_rslora": strange,
    "peft_type": strange,
    "bias": strange,
    "base_model_name_or_path": lambda rng: rng.choice((*_NAMES, strange(rng))),
}


def mutate_peft(rng: Random, folder: Path) -> None:
    """Damage an adapter in PEFT's layout, or change its config."""
    _mutate_folder(rng, folder, "adapter_model.safetensors", _OF_PEFT)
    weights = folder / "adapter_model.safetensors"
    if rng.random() < 0.05 and weights.exists():
        weights.rename(folder / "adapter_model.bin")


def mutate_run(rng: Random, run: Path, *, everything: bool = False) -> None:
    """Damage a run's folder; half of the time, update its manifests to match.

    With `everything`, also damage the files that `train` writes for `report`, and replace some of
    them with folders.
    """
    checkpoints = sorted(path.parent for path in run.rglob("manifest.json"))
    for _ in range(rng.choice((1, 1, 2, 4))):
        folder = rng.choice([*checkpoints, run / "checkpoints"])
        if everything and rng.random() < 0.7:
            folder = run / "checkpoints"
        files = sorted(path for path in folder.glob("*") if path.is_file())
        if not files:
            continue
        path = rng.choice(files)
        if everything and rng.random() < 0.1:
            names = ("report.html", "profile.jsonl", ".mlxtune.lock", "run.json", "tracking.json")
            mutate_file(rng, folder / rng.choice(names))
            continue
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
