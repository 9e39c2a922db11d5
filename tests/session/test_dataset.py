"""Data options through train and inspect: files, formats and the fate of rows."""

from __future__ import annotations

import gzip
import json
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import AutoTokenizer

from mlxtune import ConfigError, DataError, ModelError, TrainConfig, fuse, train
from mlxtune.commands.inspect import inspect as run_inspect
from mlxtune.config import DataConfig, InspectConfig
from mlxtune.config import data_config as config_data
from mlxtune.config.data_config import ReadingConfig
from mlxtune.core.data.findings import Finding
from mlxtune.core.data.inspection import Inspection
from mlxtune.core.data.problems import NO_END_OF_TURN, BadRowError, SkippedRows
from mlxtune.core.data.prompt import prompt_of
from mlxtune.core.data.template import PLAIN, TEMPLATES, built_in_jinja
from mlxtune.session import dataset, reader
from mlxtune.session.dataset import load_dataset
from mlxtune.session.reader import Reader
from mlxtune.views.run_text import finding_line
from tests.command import Cli
from tests.models import CHATML, THINKING, sums, write_chat, write_model, write_tokenizer

MAX_LENGTH = 4096
NO_SYSTEM = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}"


@pytest.fixture(scope="module")
def own_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model folder with its own chat template."""
    folder = write_model(tmp_path_factory.mktemp("own") / "model", "qwen3", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(CHATML)
    return folder


def inspected(model: Path, data: Any, tmp_path: Path, **options: Any) -> Inspection:
    options = {"max_seq_len": MAX_LENGTH, "val_split": 0} | options
    html = str(tmp_path / "page.html")
    return run_inspect(InspectConfig(str(model), data, html=html, **options))


def both(model: Path, data: Any, tmp_path: Path, **options: Any) -> Inspection:
    """Inspect, and check that train with the same options gives the same ledgers."""
    found = inspected(model, data, tmp_path, **options)
    options = {"max_seq_len": MAX_LENGTH, "val_split": 0} | options
    output = str(tmp_path / "run" / "adapters.safetensors")
    config = TrainConfig(str(model), data, output=output, quiet=True, **options)
    result = train(config, dry_run=True)
    assert [ledger.as_dict() for ledger in result.ledgers] == list(found.files)
    assert all(ledger.adds_up() for ledger in result.ledgers)
    return found


def texts(found: Inspection) -> list[str]:
    """Return the text of every example, with supervised parts in brackets."""
    lines = []
    for shown in found.shown:
        line = "".join(f"⟦{p.text}⟧" if p.supervised else p.text for p in shown.pieces)
        lines.append(line.replace("⟧⟦", ""))
    return lines


def chatml(*turns: str) -> str:
    roles = ("user", "assistant")
    return "".join(
        f"<|im_start|>{roles[i % 2]}\n"
        + (f"⟦{turn}<|im_end|>⟧\n" if i % 2 else f"{turn}<|im_end|>\n")
        for i, turn in enumerate(turns)
    )


# Formats

MESSAGES = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
FORMATS: dict[str, tuple[dict[str, Any], str]] = {
    "chat": ({"messages": MESSAGES}, chatml("q", "a")),
    "prompt": ({"prompt": "q", "completion": "a"}, chatml("q", "a")),
    "alpaca": ({"instruction": "q", "input": "r", "output": "a"}, chatml("q\nr", "a")),
    "sharegpt": (
        {"conversations": [{"from": "human", "value": "q"}, {"from": "gpt", "value": "a"}]},
        chatml("q", "a"),
    ),
    # No token precedes the first one, so the model cannot learn to predict it.
    "text": ({"text": "q a"}, "q⟦ a<|im_end|>⟧"),
}


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("option", ["auto", "named"])
def test_every_format_is_recognized_or_named(
    own_template: Path, tmp_path: Path, name: str, option: str
) -> None:
    row, text = FORMATS[name]
    file = write_chat(tmp_path / "data.jsonl", [row])
    found = inspected(
        own_template, str(file), tmp_path, format="auto" if option == "auto" else name
    )
    assert texts(found) == [text]


def test_named_format_skips_rows_of_others(own_template: Path, tmp_path: Path) -> None:
    file = write_chat(tmp_path / "data.jsonl", [row for row, _ in FORMATS.values()])
    for name, (_, text) in FORMATS.items():
        found = inspected(own_template, str(file), tmp_path, format=name)
        assert texts(found) == [text]
        assert sum(found.files[0]["rows_skipped"].values()) == len(FORMATS) - 1


def test_fields_may_have_other_names(own_template: Path, tmp_path: Path) -> None:
    file = write_chat(tmp_path / "data.jsonl", [{"question": "q", "text": "a"}])
    fields = ("prompt=question", "completion=text")
    assert texts(inspected(own_template, str(file), tmp_path, field=fields)) == [chatml("q", "a")]


@pytest.mark.parametrize(
    ("field", "other"),
    [("prompt=missing", "messages"), ("role=missing", "messages"), ("value=missing", "sharegpt")],
)
def test_field_whose_key_no_row_has_is_an_error(
    own_template: Path, tmp_path: Path, field: str, other: str
) -> None:
    """Also from the cache. A key may be in the rows of one file only."""
    row = FORMATS["sharegpt" if other == "sharegpt" else "chat"][0]
    options = {"field": (field,), "cache_dir": str(tmp_path / "cache")}
    data = [str(write_chat(tmp_path / "data.jsonl", [row]))]
    for _ in range(2):
        with pytest.raises(DataError) as raised:
            inspected(own_template, data, tmp_path, **options)
        assert str(raised.value).startswith("no row has the key 'missing': correct or leave out ")

    data += [
        str(write_chat(tmp_path / "b.jsonl", [{"missing": "q", "messages": [{"missing": 1}]}]))
    ]
    with pytest.raises(DataError, match="only row cannot be used"):
        inspected(own_template, data, tmp_path, **options)


def write_array(path: Path, rows: list[Any]) -> None:
    path.write_text(json.dumps(rows, indent=1))


def write_gzip(path: Path, rows: list[Any]) -> None:
    path.write_bytes(gzip.compress("".join(json.dumps(row) + "\n" for row in rows).encode()))


def write_parquet(path: Path, rows: list[Any]) -> None:
    pyarrow = pytest.importorskip("pyarrow", reason="needs pyarrow to write parquet")
    from pyarrow import parquet

    parquet.write_table(pyarrow.Table.from_pylist(rows), path)


WRITERS = {
    "data.json": write_array,
    "data.jsonl.gz": write_gzip,
    "data.json.gz": lambda path, rows: path.write_bytes(gzip.compress(json.dumps(rows).encode())),
    "data.parquet": write_parquet,
}


@pytest.mark.parametrize("name", WRITERS)
def test_every_kind_of_file_gives_the_same_examples(
    own_template: Path, tmp_path: Path, name: str
) -> None:
    rows = [{"messages": [{"role": r, "content": c} for r, c in row]} for row in sums(5)]
    expected = texts(both(own_template, str(write_chat(tmp_path / "a", rows)), tmp_path))
    WRITERS[name](tmp_path / name, rows)
    assert texts(both(own_template, str(tmp_path / name), tmp_path)) == expected
    assert len(expected) == 5


# Several files


def test_several_files_are_read_in_their_order(own_template: Path, tmp_path: Path) -> None:
    rows = [sums(6)[:2], [FORMATS["alpaca"][0]], sums(6)[3:]]
    files = [str(write_chat(tmp_path / f"{i}.jsonl", part)) for i, part in enumerate(rows)]
    found = inspected(own_template, (files[2], files[0], files[1]), tmp_path)
    assert [ledger["path"] for ledger in found.files] == [files[2], files[0], files[1]]
    assert [(shown.path, shown.row) for shown in found.shown] == [
        *((files[2], row) for row in (1, 2, 3)),
        *((files[0], row) for row in (1, 2)),
        (files[1], 1),
    ]
    # Rows are held out from all files together.
    held_out = inspected(own_template, tuple(files), tmp_path, val_split=0.5)
    assert sum(ledger["rows_validation"] for ledger in held_out.files) == 3
    assert sum(ledger["rows_train"] for ledger in held_out.files) == 3
    for ledger in held_out.files:
        splits = [shown.split for shown in held_out.shown if shown.path == ledger["path"]]
        assert ledger["rows_validation"] == splits.count("validation")
        assert ledger["rows_train"] == splits.count("train")


def test_texts_of_inner_folders_are_read_and_empty_ones_are_noted(
    own_template: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "texts"
    (folder / "a" / "b").mkdir(parents=True)
    for name, text in (("1.txt", "One."), ("a/b/2.md", "Two."), ("0.txt", ""), ("a/3.txt", " \n")):
        (folder / name).write_text(text)

    found = inspected(own_template, f"{folder}=2", tmp_path, format="text")

    assert [(each["path"], each["weight"]) for each in found.files] == [
        (str(folder / name), 2) for name in ("1.txt", "a/b/2.md")
    ]
    assert [finding_line(each) for each in found.findings if each.level == "note"] == [
        f"{folder}/0.txt:1: empty file is left out, and 1 more: it has no text to train on"
    ]
    for name in ("1.txt", "a/b/2.md"):
        (folder / name).write_text("")
    with pytest.raises(DataError, match=r"0\.txt is empty: it needs text to train on"):
        inspected(own_template, str(folder), tmp_path, format="text")


def test_folder_is_read_in_mlx_lms_layout(own_template: Path, tmp_path: Path) -> None:
    folder = tmp_path / "data"
    write_chat(folder / "train.jsonl", sums(8)[:3])
    write_gzip(folder / "valid.jsonl.gz", [FORMATS["prompt"][0]])
    write_chat(folder / "test.jsonl", ["never read"])
    found = both(own_template, str(folder), tmp_path, val_split=0.2)
    assert [
        (Path(ledger["path"]).name, ledger["rows_train"], ledger["rows_validation"])
        for ledger in found.files
    ] == [("train.jsonl", 3, 0), ("valid.jsonl.gz", 0, 1)]
    assert [shown.split for shown in found.shown] == ["train"] * 3 + ["validation"]

    # --val-data replaces the folder's validation file.
    other = write_chat(tmp_path / "other.jsonl", sums(8)[5:])
    found = both(own_template, str(folder), tmp_path, val_data=str(other))
    assert [Path(ledger["path"]).name for ledger in found.files] == ["train.jsonl", "other.jsonl"]

    # Without validation data, rows of the training file are held out.
    (folder / "valid.jsonl.gz").unlink()
    (ledger,) = both(own_template, str(folder), tmp_path, val_split=0.3).files
    assert (ledger["rows_train"], ledger["rows_validation"]) == (2, 1)


def test_validation_file_may_be_of_another_format(own_template: Path, tmp_path: Path) -> None:
    file = write_chat(tmp_path / "a.jsonl", sums(3))
    other = write_chat(tmp_path / "b.jsonl", [FORMATS["sharegpt"][0]])
    found = inspected(own_template, str(file), tmp_path, val_data=str(other), val_split=0.2)
    assert [ledger["rows_validation"] for ledger in found.files] == [0, 1]
    assert found.cost.validation_tokens == found.shown[-1].tokens


# Templates

SYSTEM = {"role": "system", "content": "Be kind."}


def test_own_template_is_used_unless_another_is_named(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    file = str(write_chat(tmp_path / "a.jsonl", [{"messages": MESSAGES}]))
    gemma = "<start_of_turn>user\nq<end_of_turn>\n<start_of_turn>model\n⟦a<end_of_turn>⟧\n"
    built_in = inspected(folder, file, tmp_path)
    assert texts(built_in) == [chatml("q", "a")]
    assert built_in.template == "built-in qwen3, as the model has none"

    (folder / "chat_template.jinja").write_text("Hi! " + CHATML)
    own = inspected(folder, file, tmp_path)
    assert texts(own) == ["Hi! " + chatml("q", "a")]
    assert own.template == "the model's own"
    for name, expected in (("qwen3", chatml("q", "a")), ("gemma", gemma)):
        named = inspected(folder, file, tmp_path, template=name)
        assert texts(named) == [expected]
        assert named.template == f"built-in {name}"


def test_template_that_the_tokenizers_config_holds_is_used(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    config = json.loads((folder / "tokenizer_config.json").read_text())
    (folder / "tokenizer_config.json").write_text(
        json.dumps(config | {"chat_template": "Hi! " + CHATML})
    )
    file = str(write_chat(tmp_path / "a.jsonl", [{"messages": MESSAGES}]))
    assert texts(inspected(folder, file, tmp_path)) == ["Hi! " + chatml("q", "a")]


@pytest.mark.parametrize("template", ["auto", "qwen3"])
def test_turns_last_supervises_the_last_turn_only(
    own_template: Path, tmp_path: Path, template: str
) -> None:
    turns = [("user", "q"), ("assistant", "a"), ("user", "r"), ("assistant", "b")]
    file = str(write_chat(tmp_path / "a.jsonl", [turns]))
    options = {"template": template}
    assert texts(inspected(own_template, file, tmp_path, **options)) == [chatml("q", "a", "r", "b")]
    (last,) = texts(inspected(own_template, file, tmp_path, turns="last", **options))
    assert last == chatml("q", "a", "r", "b").replace("⟦a<|im_end|>⟧", "a<|im_end|>")


def test_thinking_is_trained_as_it_is_asked_for(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(THINKING)
    thinks = [MESSAGES[0], MESSAGES[1] | {"reasoning_content": "t"}]
    rows = [{"messages": MESSAGES}, {"messages": thinks}]
    file = str(write_chat(tmp_path / "a.jsonl", rows))
    asked = "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
    without = asked + "<think>\n\n</think>\n\n⟦a<|im_end|>⟧"
    with_it = asked + "⟦<think>\nt\n</think>\n\na<|im_end|>⟧"
    empty = asked + "⟦<think>\n\n</think>\n\na<|im_end|>⟧"

    def shown(thinking: str) -> list[str]:
        found = inspected(folder, file, tmp_path, thinking=thinking)
        assert found.thinking == thinking
        return [text.rstrip("\n") for text in texts(found)]

    assert shown("auto") == [without, with_it]
    assert shown("on") == [empty, with_it]
    assert shown("off") == [without, without]
    notes = inspected(folder, file, tmp_path, thinking="off").files[0]["notes"]
    assert notes == {"thinking left out by the template": 1, "duplicate row": 1}


def test_thinking_option_without_template_support_is_a_note(
    own_template: Path, tmp_path: Path, train: Cli
) -> None:
    file = str(write_chat(tmp_path / "a.jsonl", sums(3)))
    found = inspected(own_template, file, tmp_path, thinking="on")
    assert texts(found) == texts(inspected(own_template, file, tmp_path))
    (finding,) = found.findings
    assert finding.kind == "--thinking on changes nothing"
    arguments = ["--model-path", own_template, "--data", file, "--thinking", "on", "--dry-run"]
    assert train(*arguments).err.startswith("warning: --thinking on changes nothing: ")


def test_system_message_is_merged_when_asked(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "qwen3", num_hidden_layers=1)
    (folder / "chat_template.jinja").write_text(NO_SYSTEM + CHATML)
    rows = [{"messages": [SYSTEM, *MESSAGES]}, {"messages": MESSAGES}]
    file = str(write_chat(tmp_path / "a.jsonl", rows))
    refused = inspected(folder, file, tmp_path)
    assert texts(refused) == [chatml("q", "a")]
    assert refused.files[0]["rows_skipped"] == {"the model's template refuses it": 1}
    assert refused.findings[-1].places[0].detail == "no system: try --merge-system"
    merged = inspected(folder, file, tmp_path, merge_system=True)
    assert texts(merged) == [chatml("Be kind.\n\nq", "a"), chatml("q", "a")]
    assert merged.files[0]["notes"] == {"system message merged into the first user turn": 1}


# Duplicates, leaks and cuts


def test_duplicates_and_leaks_are_warned_of_by_both(
    inspect: Cli, train: Cli, tmp_path: Path
) -> None:
    file = write_chat(tmp_path / "a.jsonl", [*sums(6), *sums(2)])
    other = write_chat(tmp_path / "b.jsonl", sums(8)[5:])
    arguments = ["--data", file, "--val-data", other]
    said = train(*arguments, "--dry-run")
    assert said.err.splitlines() == [
        f"warning: {file}:7: duplicate row (same as {file}:1), and 1 more: "
        "each copy is trained on: keep one, unless the copies are intended",
        f"warning: {other}:1: validation row that is also trained on (same as {file}:6): "
        "the validation loss looks better than it is: remove the row from one of the two sets",
    ]
    shown = inspect(*arguments).out
    assert (
        "duplicate row (2 rows)\n"
        "    each copy is trained on: keep one, unless the copies are intended\n"
        f"    {file}:7  same as :1\n    {' ' * len(str(file))}:8  same as :2\n" in shown
    )
    assert "also trained on (1 row)\n" in shown
    assert f"    {other}:1  same as {file}:6\n" in shown


def test_identical_rows_are_held_out_or_trained_on_together(model: Path, tmp_path: Path) -> None:
    # These rows are the same for the model, but are written differently.
    again = [
        {"id": i, "messages": [dict(zip(("content", "role"), (c, r), strict=True)) for r, c in row]}
        for i, row in enumerate(sums(10))
    ]
    files = [
        str(write_chat(tmp_path / f"{i}.jsonl", rows))
        for i, rows in enumerate((sums(10), [*again, *sums(12)[10:]]))
    ]
    for seed in range(3):
        found = both(model, tuple(files), tmp_path, val_split=0.5, seed=seed)
        sides: dict[str, set[str]] = {}
        for shown, text in zip(found.shown, texts(found), strict=True):
            sides.setdefault(text, set()).add(shown.split)
        assert len(sides) == 12
        assert all(len(side) == 1 for side in sides.values())
        assert sum(ledger["rows_validation"] for ledger in found.files) == 11
    assert sum(ledger["notes"]["duplicate row"] for ledger in found.files[1:]) == 10


def test_saved_ledger_matches_inspect_and_adds_up(
    inspect: Cli, train: Cli, output: Path, tmp_path: Path
) -> None:
    long = [("user", "Hi"), ("assistant", "word " * 30)]
    late = [("user", "word " * 90), ("assistant", "end")]
    file = write_chat(tmp_path / "a.jsonl", [*sums(9), "{}}", long, {"id": 1}, late, *sums(2)])
    arguments = ["--data", file, "--max-seq-len", 64]
    found = json.loads(inspect(*arguments, "--json").out)
    assert train(*arguments, "--max-steps", 1).code == 0
    saved = json.loads((output.parent / "checkpoints" / "ledger.json").read_text())
    assert saved == found["files"]
    (ledger,) = saved
    assert ledger["rows_skipped"] == {
        "no 'messages'": 1,
        "no supervised token within --max-seq-len 64": 1,
        "not valid JSON": 1,
    }
    assert ledger["notes"] == {"answer cut at --max-seq-len": 1, "duplicate row": 2}
    assert (
        ledger["rows_read"]
        == 15
        == (ledger["rows_train"] + ledger["rows_validation"] + sum(ledger["rows_skipped"].values()))
    )
    seen = ("tokens_supervised", "tokens_context", "tokens_truncated")
    assert ledger["tokens"] == sum(ledger[name] for name in seen)
    assert ledger["rows_truncated"] == 2


def test_rows_that_differ_only_after_a_thousand_equal_ones_are_split(
    model: Path, tmp_path: Path
) -> None:
    file = write_chat(tmp_path / "a.jsonl", [*sums(1) * 1100, *sums(2)[1:]])
    (ledger,) = inspected(model, str(file), tmp_path, val_split=0.2).files
    assert (ledger["rows_train"], ledger["rows_validation"]) == (1100, 1)


@pytest.mark.parametrize("key", ["data", "val_data"])
@pytest.mark.parametrize("nested", [False, True])
def test_vocabulary_must_hold_every_token_of_the_data(
    tmp_path: Path, key: str, nested: bool
) -> None:
    folder = tmp_path / "light"
    write_tokenizer(folder, extra=["<last>"])
    (folder / "chat_template.jinja").write_text(CHATML)
    plain = [{"text": text} for text in ("to be", "or not")]
    common = str(write_chat(tmp_path / "a.jsonl", plain))
    other = str(write_chat(tmp_path / "b.jsonl", [{"text": "an assistant"}]))
    files = {"data": common, "val_data": common} | {key: other}
    found = InspectConfig(str(folder), **files, dump=str(tmp_path / "dump.jsonl"))
    run_inspect(found)
    lines = map(json.loads, (tmp_path / "dump.jsonl").read_text().splitlines())
    (largest, where), *others = sorted(((max(x["tokens"]), x["path"]) for x in lines), reverse=True)
    assert where == other
    assert all(token < largest for token, _ in others)
    for size, fits in ((largest + 1, True), (largest, False)):
        config = {"vocab_size": size}
        nest = {"text_config": config, "vocab_size": 10**6}
        (folder / "config.json").write_text(json.dumps(nest if nested else config))
        if fits:
            assert run_inspect(found).examples == 3
        else:
            with pytest.raises(ModelError, match=f"gives token {largest}, but the model knows"):
                run_inspect(found)


def test_tokenizer_without_a_model_has_no_vocabulary_to_hold_to(tmp_path: Path, chat: Path) -> None:
    write_tokenizer(tmp_path / "light", extra=[f"<extra_{i}>" for i in range(100)])
    (tmp_path / "light" / "chat_template.jinja").write_text(CHATML)
    assert run_inspect(InspectConfig(str(tmp_path / "light"), str(chat))).examples == 20


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *((kind, "qwen3") for kind in ("qwen2", "qwen3", "qwen3_moe")),
        *((kind, "gemma") for kind in ("gemma", "gemma3_text")),
    ],
)
def test_built_in_template_is_chosen_by_the_type_of_the_model(
    tmp_path: Path, kind: str, name: str
) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"model_type": kind}))

    reader = Reader(ReadingConfig(str(tmp_path)), tmp_path)

    assert reader.describe() == f"built-in {name}, as the model has none"


def test_base_model_without_a_template_lists_the_choices(
    tmp_path: Path,
) -> None:
    folder = write_model(tmp_path / "model", "llama", bos=False)
    (folder / "chat_template.jinja").unlink()
    file = str(write_chat(tmp_path / "a.jsonl", [{"messages": MESSAGES}]))
    with pytest.raises(ModelError) as raised:
        inspected(folder, file, tmp_path)
    named = "--template chatml or --template gemma or --template FILE.jinja that ends answers with"
    for choice in ("Instruct", named, "--format text"):
        assert choice in str(raised.value)

    assert texts(inspected(folder, file, tmp_path, template="chatml")) == [chatml("q", "a")]
    plain = str(write_chat(tmp_path / "b.jsonl", [{"text": "Once upon a time"}]))
    assert inspected(folder, plain, tmp_path).template == "none, for plain text"
    for data, added in ((file, True), (plain, False)):
        config = DataConfig(str(folder), data, template="chatml", val_split=0, no_cache=True)
        found = load_dataset(config, Reader(config, folder))
        assert (found.template_added, found.is_plain_text) == (added, not added)


@pytest.mark.parametrize(
    ("known", "remedy"),
    [
        ("<|im_end|>", "--template chatml or"),
        ("", "--template plain or --template FILE.jinja that ends answers with <"),
    ],
)
def test_template_of_another_model_is_answered_with_one_remedy(
    model: Path, chat: Path, monkeypatch: pytest.MonkeyPatch, known: str, remedy: str
) -> None:
    monkeypatch.setattr(reader, "_is_token", lambda _, text: text == known)

    config = InspectConfig(str(model), (str(chat),), template="gemma", no_cache=True)
    found = run_inspect(config).findings

    (line,) = (finding_line(each) for each in found if each.kind == NO_END_OF_TURN)
    assert f"(<end_of_turn>: use {remedy}" in line
    assert line.endswith(
        "it is trained on as plain text: mlxtune stops at it, but other tools do not"
    )


def test_template_of_a_file_is_used_and_decides_the_cache(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    file = str(write_chat(tmp_path / "a.jsonl", [{"messages": MESSAGES}]))
    jinja = tmp_path / "mine.jinja"
    for greeting in ("Hi! ", "Ho! "):
        jinja.write_text(greeting + CHATML)
        for template in (str(jinja), greeting + CHATML):  # an adapter keeps the second
            found = inspected(folder, file, tmp_path, template=template)
            assert texts(found) == [greeting + chatml("q", "a")]
            assert found.template == "from a file"
    jinja.unlink()
    with pytest.raises(ModelError, match=r"--template .*mine\.jinja cannot be read: "):
        inspected(folder, file, tmp_path, template=str(jinja))


def test_template_of_another_name_is_refused() -> None:
    assert ("auto", *TEMPLATES, PLAIN) == config_data.TEMPLATES
    with pytest.raises(
        ConfigError, match=r"--template must be one of auto, chatml, .* not 'llama3'"
    ):
        DataConfig("model", ("a.jsonl",), template="llama3")


@pytest.mark.parametrize("template", ["chatml", "gemma", "FILE"])
@pytest.mark.parametrize("model_type", ["llama", "qwen3"])
def test_template_of_training_gives_the_same_prompts_from_a_folder(
    tmp_path: Path, template: str, model_type: str
) -> None:
    trained, fused = tmp_path / "trained", tmp_path / "fused"
    for folder in (trained, fused):
        write_tokenizer(folder, bos=model_type == "llama")
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    own = tmp_path / "own.jinja"
    own.write_text("{{ bos_token }}Hi! " + CHATML)
    template = str(own) if template == "FILE" else template
    config = DataConfig(str(trained), ("none",), template=template, turns="last")
    reader = Reader(config, trained)
    assert reader.written_template is not None
    assert reader.adds_template
    (fused / "chat_template.jinja").write_text(reader.written_template)
    read = Reader(replace(config, template="auto"), fused)
    assert (read.written_template, read.adds_template) == (None, False)
    assert not Reader(config, fused).adds_template

    asked = {"messages": [*MESSAGES, {"role": "user", "content": "r"}]}
    one, other = (prompt_of(each.encoder, asked, "here") for each in (reader, read))
    assert one == other


def test_template_that_training_chose_by_the_type_is_written(tmp_path: Path) -> None:
    for name, written in (("qwen3", built_in_jinja("chatml")), ("llama", None)):
        (tmp_path / "config.json").write_text(json.dumps({"model_type": name}))
        reader = Reader(ReadingConfig(str(tmp_path)), tmp_path)
        assert (reader.written_template, reader.adds_template) == (written, False)


def test_cut_at_the_start_keeps_the_answer(own_template: Path, tmp_path: Path) -> None:
    row = [("user", "long " * 40), ("assistant", "a")]
    file = str(write_chat(tmp_path / "a.jsonl", [row]))
    (ended,) = inspected(own_template, file, tmp_path, max_seq_len=256).shown
    options = {"max_seq_len": ended.tokens - 20, "cut": "start"}
    (text,) = texts(inspected(own_template, file, tmp_path, **options))
    assert text.endswith("long <|im_end|>\n<|im_start|>assistant\n⟦a<|im_end|>⟧\n")
    assert "user" not in text


def test_plain_template_ends_answers_with_the_models_own_end_token(tmp_path: Path) -> None:
    """The model that is fused from it renders the same prompts, in transformers too."""
    folder = write_model(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").unlink()
    write_tokenizer(folder, bos=True, eos_token="</s>")
    data = write_chat(tmp_path / "chat.jsonl", [{"messages": [SYSTEM, *MESSAGES]}])
    found = inspected(folder, str(data), tmp_path, template="plain")
    (text,) = texts(found)
    assert text.endswith("Be kind.\n\n### User:\nq\n\n### Assistant:\n⟦a</s>⟧\n\n")
    assert found.template == "built-in plain"

    options = {"quiet": True, "max_steps": 1, "val_split": 0, "samples": 0, "template": "plain"}
    output = tmp_path / "out"
    train(model_path=str(folder), data=str(data), output=str(output), **options)
    fused = fuse(adapter=str(output), output=str(tmp_path / "fused"), quiet=True).output
    asked = [SYSTEM, MESSAGES[0]]
    ours = prompt_of(
        Reader(ReadingConfig(str(fused), turns="last"), fused).encoder,
        {"messages": asked},
        "",
    )
    tokenizer = AutoTokenizer.from_pretrained(fused)
    theirs = tokenizer.apply_chat_template(asked, add_generation_prompt=True, return_dict=False)
    assert list(ours.ids) == list(theirs)
    assert tokenizer.eos_token == "</s>"


def test_tools_are_refused_by_the_plain_template(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model", "llama")
    (folder / "chat_template.jinja").unlink()
    call = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "f", "arguments": {}}}],
    }
    data = write_chat(tmp_path / "chat.jsonl", [{"messages": [MESSAGES[0], call]}])
    with pytest.raises(DataError, match="the plain template has no tools: use another template"):
        train(model_path=str(folder), data=str(data), template="plain", quiet=True)


def test_error_of_the_data_is_not_hidden_behind_warnings() -> None:
    skipped = SkippedRows(Path("a.jsonl"))
    skipped.add(1, BadRowError("no 'completion'"))
    findings = [Finding("warning", "duplicate row", 1, ""), Finding("error", "BOS twice", 1, "fix")]
    found = SimpleNamespace(files=[SimpleNamespace(skipped=skipped)], findings=findings)
    warned: list[str] = []
    console = SimpleNamespace(warn=warned.append)
    with pytest.raises(DataError, match="BOS twice"):
        dataset.report_findings(found, console)  # type: ignore[arg-type]
    assert warned == []
    findings.pop()
    dataset.report_findings(found, console)  # type: ignore[arg-type]
    assert len(warned) == 2


@pytest.mark.parametrize("encoding", ["cp1252", "mac_roman", "utf-16", "utf-8"])
def test_guessed_encoding_is_named(own_template: Path, tmp_path: Path, encoding: str) -> None:
    file = tmp_path / "a.csv"
    end = "\r" if encoding == "mac_roman" else "\n"
    file.write_bytes("prompt,completion\né,è\nü,ö\n".replace("\n", end).encode(encoding))
    found = inspected(own_template, str(file), tmp_path)
    assert texts(found) == [chatml("é", "è"), chatml("ü", "ö")]
    kinds = [finding.kind for finding in found.findings if "read as" in finding.kind]
    assert kinds == ([] if encoding.startswith("utf") else [f"text read as {encoding}"])


def test_folder_of_texts_trains_on_each_part(own_template: Path, tmp_path: Path) -> None:
    folder = tmp_path / "docs"
    folder.mkdir()
    (folder / "b.md").write_text("# One\na\n\n# Two\nb\n")
    (folder / "a.txt").write_text("c\n")
    whole = inspected(own_template, str(folder), tmp_path, format="text")
    assert [file["path"] for file in whole.files] == [str(folder / n) for n in ("a.txt", "b.md")]
    assert [file["rows_read"] for file in whole.files] == [1, 1]
    parts = inspected(own_template, str(folder), tmp_path, format="text", split_at="heading")
    assert [file["rows_read"] for file in parts.files] == [1, 2]
    with pytest.raises(ConfigError, match="--split-at is for plain text: add --format text"):
        inspected(own_template, str(folder), tmp_path, split_at="heading")
