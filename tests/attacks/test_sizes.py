"""Declared sizes that are false or larger than any real file of the kind.

Each is refused in one line, before memory or time is spent on it.
"""

from __future__ import annotations

import gzip
import json
import shutil
import zlib
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from tests.attacks.attack import attack
from tests.attacks.limits import limited
from tests.attacks.sparse import enlarge, list_again, shapes_of, write_tensors
from tests.command import Cli
from tests.hub_server import Dataset, Handler, Hub
from tests.slow import long, slow, slow_except

GB = 10**9


def empty_lists() -> bytes:
    """Return 6 million empty lists as JSON: each takes 3 bytes in the file, and 64 in memory."""
    return b"[" + b"[]," * 6_000_000 + b"[]]"


@pytest.fixture
def adapter(run_to_copy: Path, tmp_path: Path) -> Path:
    """The weights file of a small adapter, in a copy of its run."""
    return Path(shutil.copytree(run_to_copy, tmp_path / "out")) / "adapters.safetensors"


# Adapters

ADAPTER_COMMANDS: dict[str, list[str]] = {
    "generate": ["generate", "--model-path", "{model}", "--adapter", "{adapter}", "--prompt", "hi"],
    "eval": ["eval", "--model-path", "{model}", "--adapter", "{adapter}", "--data", "{chat}"],
    "fuse": ["fuse", "--model-path", "{model}", "--adapter", "{adapter}", "--output", "{new}"],
    "export": [
        *("export", "--model-path", "{model}", "--adapter", "{adapter}", "--output", "{new}"),
        *("--format", "peft"),
    ],
    "import": ["import", "{adapter}", "--model-path", "{model}", "--output", "{new}"],
    "train": [
        *("train", "--model-path", "{model}", "--data", "{chat}", "--init-adapter", "{adapter}"),
        *("--output", "{new}/adapters.safetensors"),
    ],
}


def _large_adapter(weights: Path, *, rank: int) -> int:
    """Give an adapter this rank, with a hole as data; return the size of its weights file."""
    shapes = {
        name: (dtype, tuple(rank if each == 8 else each for each in shape))
        for name, (dtype, shape) in shapes_of(weights).items()
    }
    write_tensors(weights, shapes)
    config = weights.with_name("adapter_config.json")
    values = json.loads(config.read_text())
    assert values["lora_parameters"]["rank"] == 8
    values["lora_parameters"]["rank"] = rank
    values["mlxtune"] |= {"rank": rank, "alpha": 2.0 * rank}
    config.write_text(json.dumps(values))
    return weights.stat().st_size


@pytest.mark.parametrize("command", slow_except(ADAPTER_COMMANDS, "generate", "import"))
def test_sparse_gigabyte_adapter_is_refused(
    cli: Cli, model: Path, chat: Path, adapter: Path, tmp_path: Path, command: str
) -> None:
    assert _large_adapter(adapter, rank=1_200_000) > GB
    places = {"model": model, "chat": chat, "adapter": adapter, "new": tmp_path / "new"}
    with limited():
        outcome = cli(*(each.format(**places) for each in ADAPTER_COMMANDS[command]))
    assert "of them are on disk" in outcome.err.splitlines()[-1]
    assert outcome.code == 1
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize("command", slow_except(ADAPTER_COMMANDS, "generate"))
def test_adapter_for_another_model_is_refused_before_its_tensors_are_read(
    cli: Cli,
    model: Path,
    chat: Path,
    adapter: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    command: str,
) -> None:
    import mlx.core as mx

    shapes = {
        name: (dtype, tuple(2 * each if each == 64 else each for each in shape))
        for name, (dtype, shape) in shapes_of(adapter).items()
    }
    assert shapes != shapes_of(adapter)
    write_tensors(adapter, shapes)
    whole, read = mx.load, []

    def load(path: str, *arguments: Any, **options: Any) -> Any:
        read.append(Path(path).name)
        return whole(path, *arguments, **options)

    monkeypatch.setattr(mx, "load", load)
    places = {"model": model, "chat": chat, "adapter": adapter, "new": tmp_path / "new"}
    outcome = cli(*(each.format(**places) for each in ADAPTER_COMMANDS[command]))
    assert outcome.code == 1
    assert "mlxtune: error: " in outcome.err.splitlines()[-1]
    assert "adapters.safetensors" not in read


# Runs


def _hollow(run: Path) -> None:
    """Make each checkpoint's adapter 400 GB large, and list this size in the manifest."""
    for checkpoint in (*run.glob("*-*"), run / "best"):
        enlarge(checkpoint / "adapters.safetensors", 400 * GB)
        list_again(checkpoint, "adapters.safetensors")


@pytest.mark.parametrize("command", [["verify"], ["train", "--resume"]])
def test_sparse_400_gigabyte_checkpoint_is_not_hashed(
    cli: Cli, adapter: Path, command: list[str]
) -> None:
    run = adapter.parent / "checkpoints"
    _hollow(run)
    with limited():
        outcome = cli(*command, run)
    assert outcome.code == 1
    assert "400,000,000,000 bytes, but only" in outcome.out + outcome.err


READERS = ("report of run.json", "report of metrics.jsonl", "verify of epoch-1/manifest.json")
READERS += ("runs of result.json", "report of ledger.json", "report of evaluation.json")
READERS += ("resume of epoch-1/metadata.json",)


@pytest.mark.parametrize("read", READERS)
def test_file_of_a_run_with_millions_of_empty_lists_takes_little_memory(
    cli: Cli, adapter: Path, read: str
) -> None:
    run = adapter.parent / "checkpoints"
    command, _, name = read.partition(" of ")
    (run / name).write_bytes(b'{"format": 1, "files": ' + empty_lists() + b"}")
    arguments = ["train", "--resume", run] if command == "resume" else [command, run]
    with limited(memory=300_000_000):
        outcome = cli(*arguments)
    assert "Traceback" not in outcome.err
    assert "memory ran out" not in outcome.out + outcome.err
    if (command, name) == ("report", "run.json"):
        assert "problem: run.json has more than 500,000 values" in outcome.out
    if (command, name) == ("verify", "epoch-1/manifest.json"):
        assert "manifest.json is too large: 18,000,028 bytes, more than" in outcome.out


def _skipped_steps() -> bytes:
    rows = ",".join(['"a"'] * 1000)
    values = '"epoch":1,"learning_rate":0.1,"reason":"x"'
    lines = (
        f'{{"kind":"skipped","step":{n},{values},"rows":[{rows}]}}\n' for n in range(1, 20_000)
    )
    return "".join(lines).encode()


LINES: dict[str, Callable[[], bytes]] = {
    "blank lines": lambda: b"\n" * 200_000_000,
    "no records": lambda: b"{}\n" * 60_000_000,
    "skipped steps": _skipped_steps,
}


@pytest.mark.parametrize("name", [slow(next(iter(LINES))), *map(long, [*LINES][1:])])
def test_records_of_a_run_take_memory_for_steps_only(cli: Cli, adapter: Path, name: str) -> None:
    run = adapter.parent / "checkpoints"
    (run / "metrics.jsonl").write_bytes(LINES[name]())
    with limited(seconds=30, memory=900_000_000):
        outcome = cli("report", run)
    assert "metrics.jsonl" in outcome.out + outcome.err


@pytest.mark.parametrize("dtype", ["C64", "I32", slow("F16")])
def test_optimizer_state_of_another_dtype_is_refused(cli: Cli, adapter: Path, dtype: str) -> None:
    run = adapter.parent / "checkpoints"
    for checkpoint in run.glob("*-*"):
        path = checkpoint / "optimizer.safetensors"
        shapes = {
            name: (dtype if kind == "F32" else kind, shape)
            for name, (kind, shape) in shapes_of(path).items()
        }
        content = b"\x01" + b"\0" * 1000
        write_tensors(path, shapes, content)
        list_again(checkpoint)
    error = cli("train", "--resume", run, "--max-steps", 9, "--quiet", "--samples", 0).error
    assert f"m.0 is {dtype}, not F32" in error


# Model folders

FUSED = ("LICENSE", "NOTICE", "code.py", "words.tiktoken", "x.txt", "additional.model")


@pytest.mark.parametrize("name", slow_except(FUSED, "LICENSE", "code.py"))
def test_fuse_skips_missing_files(
    cli: Cli, model: Path, adapter: Path, broken: Path, tmp_path: Path, name: str
) -> None:
    enlarge(broken / name, 5_400_000_000)
    options = ["--adapter", adapter, "--model-path", broken, "--output", tmp_path / "fused"]
    with limited():
        error = cli("fuse", *options, "--quiet").error
    assert "is far larger than such a file should be" in error or "cannot be copied" in error
    assert not (tmp_path / "fused").exists()


def _config(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "config.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _write(name: str, content: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_text(json.dumps(content))


def _tokenizer(**changes: Any) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        path = folder / "tokenizer.json"
        path.write_text(json.dumps(json.loads(path.read_text()) | changes))

    return change


def _sparse(name: str, size: int) -> Callable[[Path], None]:
    return lambda folder: enlarge(folder / name, size)


def _without_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    (folder / "vocab.json").write_text('{"a": 0, "b": 1}')
    (folder / "merges.txt").write_text("#version: 0.2\na b\n")
    enlarge(folder / "merges.txt", 100_000_000)


def _layer_format(**values: Any) -> Callable[[Path], None]:
    layer = "model.layers.0.self_attn.q_proj"
    quantization = {"group_size": 32, "bits": 4, layer: {"group_size": 32, "bits": 4} | values}
    return _config(quantization=quantization)


TOKENS = [f"<special{number}>" for number in range(100_000)]
NEMOTRON = {"model_type": "nemotron_h", "hybrid_override_pattern": "M" * 400_000}
TOO_LARGE = "is far larger than such a file should be"
FOLDERS: dict[str, tuple[Callable[[Path], object], str]] = {
    "400,000 layers in a string": (_config(**NEMOTRON), TOO_LARGE),
    "9,000 layers in a string": (
        _config(**NEMOTRON | {"hybrid_override_pattern": "M" * 9000}),
        "but the weights have only",
    ),
    "layers that are text": (_config(n_layer="400000"), "is more than 10,000"),
    "layers in a list": (_config(layers_block_type=["m"] * 50_000), "is more than 10,000"),
    "a list of millions": (_config(x=[0] * 1_000_000), TOO_LARGE),
    "a number of a thousand digits": (_config(x=10**1000), TOO_LARGE),
    "a text of a megabyte": (_config(hidden_act="x" * 2**20), TOO_LARGE),
    "a width of billions": (_config(hidden_size=10**10), "hidden_size is more than"),
    "a group size of 0 in a layer": (_layer_format(group_size=0), "has group_size 0"),
    "a group size of 0": (
        _config(quantization={"group_size": 0, "bits": 4}),
        "has group_size 0",
    ),
    "bits of 0 in a layer": (_layer_format(bits=0), "has bits 0"),
    "bits of 64 in a layer": (_layer_format(bits=64), "has bits 64"),
    "an unknown mode in a layer": (_layer_format(mode="x"), "has mode 'x'"),
    "100,000 special tokens": (
        _write("special_tokens_map.json", {"additional_special_tokens": TOKENS}),
        TOO_LARGE,
    ),
    "100,000 special tokens of the tokenizer": (
        _write("tokenizer_config.json", {"additional_special_tokens": TOKENS}),
        TOO_LARGE,
    ),
    "100,000 added tokens": (
        _tokenizer(
            added_tokens=[
                *(
                    {"id": id_, "content": text, "special": True, "single_word": False}
                    | {"lstrip": False, "rstrip": False, "normalized": False}
                    for id_, text in enumerate(TOKENS, start=400)
                )
            ]
        ),
        "adds 100,000 tokens",
    ),
    "merges.txt of 100 MB": (_without_tokenizer, TOO_LARGE),
    "a hole for a tokenizer": (_sparse("tokenizer.json", 200_000_000), TOO_LARGE),
    "a hole for a template": (_sparse("chat_template.jinja", 10**12), TOO_LARGE),
    "a hole for weights": (_sparse("model.safetensors", 10**12), "of them are on disk"),
    "a generation config of lists": (
        lambda folder: (folder / "generation_config.json").write_bytes(empty_lists()),
        TOO_LARGE,
    ),
    "an index of lists": (
        lambda folder: (folder / "model.safetensors.index.json").write_bytes(empty_lists()),
        TOO_LARGE,
    ),
}
QUICK = ("400,000 layers in a string", "100,000 special tokens", "a group size of 0 in a layer")
QUICK += ("merges.txt of 100 MB", "layers that are text", "a hole for weights")
QUICK += ("100,000 special tokens of the tokenizer", "9,000 layers in a string")
QUICK += ("a width of billions", "bits of 0 in a layer")


@pytest.mark.parametrize("name", slow_except(FOLDERS, *QUICK))
def test_model_folder_with_sizes_that_no_model_has_is_refused(
    cli: Cli, broken: Path, name: str
) -> None:
    change, said = FOLDERS[name]
    change(broken)
    with limited():
        outcome = cli("generate", "--model-path", broken, "--template", "qwen3", "--prompt", "hi")
    assert outcome.code == 1
    assert said in outcome.err.splitlines()[-1]
    assert len(outcome.err) < 700


@pytest.mark.parametrize("name", [slow("a group size of 0 in a layer"), long("a group size of 0")])
def test_group_size_of_0_ends_no_process(broken: Path, name: str) -> None:
    FOLDERS[name][0](broken)
    assert "group_size" in attack("generate", "--model-path", broken, "--prompt", "hi").error


# The hub


def _answer_of(content: bytes, **headers: str) -> Callable[[Handler, str, str], bool]:
    def fault(handler: Handler, method: str, path: str) -> bool:
        if "/api/datasets/" not in path:
            return False
        with suppress(OSError):  # the client stops reading early
            handler.answer(content, **{"Content-Type": "application/json", **headers})
        handler.close_connection = True
        return True

    return fault


def _zipped() -> bytes:
    """Return 4 MB of gzip data that unpack to 4 GB of spaces; the checksum at the end is wrong."""
    packer = zlib.compressobj(9, zlib.DEFLATED, 31)
    start = packer.compress(b"{") + packer.flush(zlib.Z_FULL_FLUSH)
    piece = packer.compress(b" " * 2**24) + packer.flush(zlib.Z_FULL_FLUSH)
    return b"".join([start, piece * 256, packer.compress(b"}"), packer.flush()])


@pytest.mark.parametrize("command", ["inspect", slow("train")])
def test_hubs_zipped_answer_is_not_unpacked(
    cli: Cli, hub: Hub, model: Path, tmp_path: Path, command: str
) -> None:
    hub.datasets["evil/data"] = Dataset({"main": {"train.jsonl": b"{}"}})
    hub.faults.append(_answer_of(_zipped(), Content_Encoding="gzip"))
    options = ["--model-path", model, "--data", "evil/data"]
    options += ["--output", tmp_path / "a.safetensors"] if command == "train" else []
    with limited(memory=500_000_000):
        error = cli(command, *options).error
    assert "the hub's response is compressed (gzip)" in error


def test_hubs_answer_without_an_end_is_not_read_whole(cli: Cli, hub: Hub, model: Path) -> None:
    def fault(handler: Handler, method: str, path: str) -> bool:
        handler.send_response(200)
        handler.send_header("Content-Type", "application/json")
        handler.end_headers()
        handler.close_connection = True
        with suppress(OSError):
            for _ in range(1000):
                handler.wfile.write(b" " * 2**20)
        return True

    hub.faults.append(fault)
    with limited(memory=500_000_000):
        error = cli("inspect", "--model-path", model, "--data", "evil/data").error
    assert "the hub's response has more than" in error


def test_file_of_the_hub_may_be_larger_than_an_answer(
    hub: Hub, monkeypatch: pytest.MonkeyPatch
) -> None:
    from mlxtune.config.limits import Limits
    from mlxtune.hub import client
    from mlxtune.hub.dataset_download import fetch
    from mlxtune.hub.dataset_name import dataset_name

    monkeypatch.setattr(client, "HUB_RESPONSE_LIMITS", Limits(1000))
    row = b'{"text": "hello"}\n'
    hub.datasets["org/rows"] = Dataset({"main": {"train.jsonl": row * 500}})
    name = dataset_name("org/rows")
    assert name is not None
    assert fetch(name).train[0].read_bytes() == row * 500


@pytest.mark.slow
def test_models_answer_of_the_hub_is_limited_too(cli: Cli, hub: Hub, chat: Path) -> None:
    def fault(handler: Handler, method: str, path: str) -> bool:
        handler.answer(gzip.compress(b"{}"), Content_Encoding="gzip")
        return True

    hub.faults.append(fault)
    error = cli("inspect", "--model-path", "evil/model", "--data", chat).error
    assert "the hub's response is compressed (gzip)" in error


def test_complete_model_is_accepted(cli: Cli, model: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model, tmp_path / "copy")
    assert (
        cli("generate", "--model-path", folder, "--prompt", "hi", "--max-new-tokens", 1).code == 0
    )
