"""How turns end: for other tools, for samples of a run, and for templates in each file."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from mlxtune.backend.models.loading import load_base
from mlxtune.backend.text.chat_template import read_chat_template
from mlxtune.config import DataConfig
from mlxtune.core.data import problems
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.prompt import last_turn
from mlxtune.errors import ModelError
from mlxtune.session.dataset import Dataset, load_dataset
from mlxtune.session.judge import answer_sample
from mlxtune.session.reader import Reader
from mlxtune.session.trained_model import LoadedModel
from mlxtune.views.console import RunConsole
from tests.core.data.rows import ANSWER, CHAT, TEXT, USER
from tests.models import CHATML, write_chat, write_model, write_tokenizer

NO_TOKEN = CHATML.replace("<|im_end|>", "</turn>")
ROWS = [
    {"messages": [USER, ANSWER]},
    {"messages": [USER | {"content": "Add 2."}, ANSWER | {"content": "It is 4."}]},
]


def folder_of(path: Path, template: str = CHATML, **ends: Any) -> Path:
    path.mkdir(exist_ok=True)
    write_tokenizer(path)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | ends))
    (path / "chat_template.jinja").write_text(template)
    return path


def load(folder: Path, rows: list[Any], **options: Any) -> tuple[Dataset, Reader]:
    data = write_chat(folder.parent / "chat.jsonl", rows)
    config = DataConfig(str(folder), str(data), val_split=0, no_cache=True, **options)  # type: ignore[arg-type]
    reader = Reader(config, folder)
    return load_dataset(config, reader), reader


def unknown_ends(dataset: Dataset) -> list[Finding]:
    return [finding for finding in dataset.findings if finding.kind == problems.UNKNOWN_END]


def test_end_that_the_model_does_not_know_is_found_with_what_helps(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"eos_token": "<|im_start|>"})
    )

    dataset, reader = load(folder, ROWS)

    (found,) = unknown_ends(dataset)
    end = reader.tokenizer.encode_batch(["<|im_end|>"])[0].ids[0]
    assert reader.unknown_end == end
    assert (found.level, found.rows) == ("warning", 2)
    detail = found.places[0].detail
    assert "mlx_lm.generate --extra-eos-token '<|im_end|>'" in detail
    assert f"eos_token_id={end}" in detail and f"tokenizer.ggml.eos_token_id=int:{end}" in detail
    assert "mlxtune fuse" in found.advice
    assert not unknown_ends(load(folder, [TEXT, {"text": "Once."}])[0])


@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
@pytest.mark.parametrize("several", [False, True])
def test_end_among_the_models_end_tokens_is_known(tmp_path: Path, file: str, several: bool) -> None:
    folder = folder_of(tmp_path / "model")
    tokenizer = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(tokenizer | {"eos_token": "<|im_start|>"})
    )
    dataset, reader = load(folder, ROWS)
    end = reader.unknown_end
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(json.dumps(content | {"eos_token_id": [0, end] if several else end}))

    dataset, reader = load(folder, ROWS)

    assert reader.unknown_end is None
    assert not unknown_ends(dataset)


def test_turn_whose_end_is_text_has_a_prompt_and_an_answer(tmp_path: Path) -> None:
    dataset, reader = load(folder_of(tmp_path / "model", NO_TOKEN), ROWS)

    turns = [last_turn(row, reader.turn_ends) for row in dataset.corpus.select()]

    assert reader.turn_ends.text == "</turn>"
    for turn, row in zip(turns, ROWS, strict=True):
        assert turn is not None
        spelled = b"".join(reader.tokenizer.token_bytes(turn.answer)).decode()
        assert spelled == row["messages"][1]["content"] + "</turn>"
        assert (turn.prompt.end, turn.prompt.end_text) == (None, "</turn>")


def test_truncated_answer_has_no_last_turn(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model", NO_TOKEN)
    dataset, reader = load(
        folder, [ROWS[0], {"messages": [USER, ANSWER | {"content": "a" * 200}]}], max_seq_len=60
    )
    turns = [last_turn(row, reader.turn_ends) for row in dataset.corpus.select()]
    assert [turn is None for turn in turns] == [False, True]


def test_rows_whose_end_is_text_are_answered(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(NO_TOKEN)
    dataset, reader = load(folder, ROWS)
    model = LoadedModel(load_base(folder, "float32"), None)

    generated = answer_sample(model, reader, dataset.corpus.select(), 4, RunConsole(quiet=True))

    assert [sample.expected for sample in generated.samples] == ["Hello!", "It is 4."]


# Files of templates


@pytest.mark.parametrize(
    "file", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"]
)
def test_template_is_read_from_each_file(tmp_path: Path, file: str) -> None:
    folder = folder_of(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    path = folder / file
    content = json.loads(path.read_text()) if path.is_file() else {}
    path.write_text(
        CHATML if file.endswith("jinja") else json.dumps(content | {"chat_template": CHATML})
    )

    assert read_chat_template(folder) == {"default": CHATML}
    assert load(folder, [CHAT, *ROWS])[0].template == "the model's own"


def test_template_of_the_tokenizer_comes_first(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": NO_TOKEN}))
    assert read_chat_template(folder) == {"default": CHATML}


def test_damaged_template_file_is_named(tmp_path: Path) -> None:
    folder = folder_of(tmp_path / "model")
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.json").write_text("[]")
    with pytest.raises(ModelError, match=r"chat_template\.json, cannot be read"):
        read_chat_template(folder)
