"""How often a command reads an adapter's config and header: once, unless it wrote the adapter."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mlxtune import (
    EvalConfig,
    ExportConfig,
    FuseConfig,
    GenerateConfig,
    ImportConfig,
    TrainConfig,
    evaluate,
    export,
    fuse,
    generate,
    import_adapter,
    train,
    verify,
)
from mlxtune.core.files import reading, tensor_files
from tests.models import sums, write_chat, write_model
from tests.slow import slow

CONFIG, WEIGHTS = "adapter_config.json", "adapters.safetensors"
PEFT_WEIGHTS = "adapter_model.safetensors"
Reads = Counter[tuple[Path, str]]


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, a model, and adapters of the model quantised to four bits."""
    folder = tmp_path_factory.mktemp("home")
    write_model(folder / "model", "qwen3", num_hidden_layers=1, dtype="bfloat16")
    write_chat(folder / "chat.jsonl", sums(20))
    train(_training(folder, folder / "out", quantize="4"))
    export(
        ExportConfig(str(folder / "out"), output=str(folder / "peft"), format="peft", quiet=True)
    )
    return folder


def _training(home: Path, output: Path, **options: Any) -> TrainConfig:
    model, data = str(home / "model"), str(home / "chat.jsonl")
    return TrainConfig(model, data, output=str(output), samples=0, quiet=True, **options)


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> Reads:
    """The number of reads of each file's header or content, by folder and name."""
    counted: Reads = Counter()
    open_regular, read_bytes = tensor_files.open_regular, reading.read_bytes

    def open_counted(path: Path) -> Any:
        counted[path.parent, path.name] += 1
        return open_regular(path)

    def read_counted(path: Path, *limits: Any, **options: Any) -> bytes:
        counted[path.parent, path.name] += 1
        return read_bytes(path, *limits, **options)

    # `read_header` opens headers, and `read_json` reads JSON, only through these two functions.
    monkeypatch.setattr(tensor_files, "open_regular", open_counted)
    monkeypatch.setattr(reading, "read_bytes", read_counted)
    return counted


def _evaluate(home: Path, target: Path) -> None:
    evaluate(EvalConfig(adapter=str(home / "out"), data=(str(home / "chat.jsonl"),), quiet=True))


def _generate(home: Path, target: Path) -> None:
    prompt = {"prompt": "1 + 1", "max_new_tokens": 1}
    generate(GenerateConfig(adapter=str(home / "out"), quiet=True, **prompt))  # type: ignore[arg-type]


def _export(home: Path, target: Path) -> None:
    export(ExportConfig(str(home / "out"), output=str(target), format="peft", quiet=True))


def _copy(home: Path, target: Path) -> None:
    export(ExportConfig(str(home / "out"), output=str(target), format="mlx-lm", quiet=True))


def _fuse(home: Path, target: Path) -> None:
    fuse(FuseConfig(str(home / "out"), output=str(target), quiet=True))


@pytest.mark.parametrize(
    "use", [slow(_evaluate), slow(_generate), _export, slow(_copy), slow(_fuse)]
)
def test_command_reads_an_adapter_once(
    home: Path, tmp_path: Path, reads: Reads, use: Callable[[Path, Path], None]
) -> None:
    use(home, tmp_path / "target")
    assert (reads[home / "out", CONFIG], reads[home / "out", WEIGHTS]) == (1, 1)
    # The proof of an export reads what was written.
    adapters = {CONFIG, WEIGHTS, PEFT_WEIGHTS}
    assert {place: n for place, n in reads.items() if place[1] in adapters and n > 1} == {}


def test_training_reads_its_initial_adapter_once(home: Path, tmp_path: Path, reads: Reads) -> None:
    init, output = home / "out", tmp_path / "target"
    train(_training(home, output, init_adapter=str(init), quantize="4"))
    assert (reads[init, CONFIG], reads[init, WEIGHTS]) == (1, 1)
    # Another adapter's config is looked for before the adapter is written, and the verdict reads
    # what was written.
    assert (reads[output, CONFIG], reads[output, WEIGHTS]) == (2, 1)


def test_import_reads_an_adapter_of_peft_once(home: Path, tmp_path: Path, reads: Reads) -> None:
    model = str(home / "model")
    output = str(tmp_path / "target")
    import_adapter(ImportConfig(str(home / "peft"), output=output, model_path=model))
    assert (reads[home / "peft", CONFIG], reads[home / "peft", PEFT_WEIGHTS]) == (1, 1)


def test_verify_reads_checkpoint_headers_twice(home: Path, reads: Reads) -> None:
    assert verify(home / "out").ok
    headers = {folder: number for (folder, name), number in reads.items() if name == WEIGHTS}
    checkpoints = home / "out" / "checkpoints"
    expected = {path.parent: 2 for path in checkpoints.glob(f"*/{WEIGHTS}")}
    assert headers == expected | {home / "out": 1}
