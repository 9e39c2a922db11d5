"""Options as keywords of public functions, and rows in place of files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from contextlib import contextmanager
from inspect import isfunction, signature
from itertools import cycle
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import mlxtune
from mlxtune.backend.workers import launch
from mlxtune.backend.workers.launch import join_run
from mlxtune.backend.workers.workers import Workers
from mlxtune.cli import COMMANDS
from mlxtune.config import DataConfig, TrainConfig
from mlxtune.core.data import cache, problems
from mlxtune.core.data.problems import BadRowError, SkippedRows, where
from mlxtune.core.run.checkpoint import Checkpoint
from mlxtune.errors import ConfigError, DataError
from mlxtune.session import arguments
from mlxtune.session.arguments import (
    ResolvedOptions,
    resolve_options,
    takes_options,
    takes_resolved,
    with_rows,
)
from mlxtune.views.console import RunConsole
from tests.configs import config
from tests.hub_server import Dataset as HubDataset
from tests.hub_server import Hub
from tests.models import sums, write_chat

ROWS = [{"prompt": "é", "completion": "b", "id": None}, {"prompt": "c", "completion": "d"}]


class Dataset:
    """Like datasets.Dataset, can be iterated more than once and yields dictionaries."""

    def __iter__(self) -> Iterator[dict[str, Any]]:
        return iter(ROWS)


def read(path: str) -> list[Any]:
    return [json.loads(line) for line in Path(path).read_text(encoding="utf-8").splitlines()]


@takes_options(TrainConfig)
def described(config: TrainConfig, *, loudly: bool = False) -> tuple[str, int, bool]:
    return config.model_path, config.rank, loudly


def test_config_fields_are_keywords_of_the_function() -> None:
    assert described(model_path="m", data="d", rank=3, loudly=True) == ("m", 3, True)
    assert described(TrainConfig("m", data=("d",)), loudly=True) == ("m", 8, True)
    assert described(loudly=True, config=TrainConfig("m", data=("d",))) == ("m", 8, True)
    with pytest.raises(ConfigError, match=r"unknown option 'learning_rate': use lr=0\.1"):
        described(model_path="m", data="d", learning_rate=0.1)
    with pytest.raises(ConfigError, match=r"name the options: described\(model_path=…, data=…\)"):
        described("m", "d")
    with pytest.raises(ConfigError, match="rank: give all options in the config, or all as"):
        described(TrainConfig("m", data=("d",)), rank=3)
    with pytest.raises(ConfigError, match="rank: give all options in the config, or all as"):
        described(config=TrainConfig("m", data=("d",)), rank=3)


@pytest.mark.parametrize("name", mlxtune.__all__)
def test_config_can_be_given_by_the_name_that_its_signature_shows(name: str) -> None:
    function = getattr(mlxtune, name)
    if isfunction(function) and "config" in signature(function).parameters:
        with pytest.raises(ConfigError, match=r"^rank: give all options in the config, or all"):
            function(config=object(), rank=3)


@pytest.mark.parametrize("columns", [{"a": [1]}, {"prompt": ["Hi", "?"], "completion": ["a", "b"]}])
def test_columns_are_refused_with_the_rows_to_pass(columns: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="data has columns, not rows: pass") as raised:
        with_rows({"data": columns})
    rows = eval(str(raised.value).partition("pass ")[2], {"data": columns})
    assert rows == [
        dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=True)
    ]


def test_row_of_lists_of_messages_is_one_row() -> None:
    turns = [{"role": "user", "content": "Hi"}]
    with pytest.raises(DataError, match="data is one row"):
        with_rows({"data": {"prompt": turns, "completion": turns}})


def test_nulls_of_a_dataset_are_absent_keys() -> None:
    class Filled(list[Any]):
        features = None

    call = {"name": "look", "arguments": {"city": "Oslo", "amount": None}}
    (row,) = read(with_rows({"data": Filled([{"completion": [{"tool_calls": [call]}]}])})["data"])

    assert row["completion"][0]["tool_calls"][0]["arguments"] == {"city": "Oslo"}


@pytest.mark.parametrize("rows", [ROWS, tuple(ROWS), Dataset(), (row for row in ROWS)])
def test_rows_are_written_without_missing_values(rows: Any) -> None:
    found = with_rows({"data": rows, "rank": 3})

    assert read(found["data"]) == [{"prompt": "é", "completion": "b"}, ROWS[1]]
    assert found["rank"] == 3
    assert with_rows({"data": ROWS})["data"] == found["data"]


@pytest.mark.parametrize("name", ["validation", "dev"])
def test_splits_of_a_dataset_are_training_and_validation(name: str) -> None:
    found = with_rows({"data": {"train": Dataset(), name: ROWS[:1], "test": ROWS[1:]}})

    assert (len(read(found["data"])), len(read(found["val_data"]))) == (2, 1)


@pytest.mark.parametrize("data", ["a.jsonl", Path("a"), ["a", "b"], {"a": 2, "text": 1}, None])
def test_paths_are_passed_unchanged(data: Any) -> None:
    assert with_rows({"data": data}) == {"data": data}


NO_DICTIONARY = (
    'data: row 2 is not a dictionary: 3: make it one, such as {"prompt": "…", "completion": "…"}'
)


@pytest.mark.parametrize(
    ("rows", "problem"),
    [
        ([], "data has no rows"),
        (ROWS[0], "data is one row: put it in a list, data=[{…}]"),
        ({"messages": []}, "data is one row: put it in a list, data=[{…}]"),
        ([{}, 3], NO_DICTIONARY),
        ([{"text": object()}], "data: row 1 is not JSON: it has a value of type object"),
    ],
)
def test_invalid_rows_are_named(rows: Any, problem: str) -> None:
    with pytest.raises(DataError) as raised:
        with_rows({"data": rows})
    assert str(raised.value) == problem


def test_rows_without_end_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(arguments, "_MAX_ROWS", 3)
    with pytest.raises(DataError, match=r"^data has no end after 3 rows \(107 B\): end the iter"):
        with_rows({"data": cycle(ROWS)})
    assert len(read(with_rows({"data": ROWS * 2})["data"])) == 4


def test_rows_are_named_by_their_keyword_and_pruned(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(problems, "user_cache", lambda: tmp_path)
    first = Path(with_rows({"data": ROWS})["data"])
    assert (where(first, 2), where(tmp_path / first.name, 2)) == (
        "data[2]",
        f"{tmp_path / first.name}:2",
    )
    skipped = SkippedRows(first, places_per_kind=0)
    skipped.add(1, BadRowError("empty"))
    assert list(skipped.warnings()) == ["data: 1 more row skipped: empty"]
    monkeypatch.setattr(cache, "MAX_BYTES", first.stat().st_size)
    second = Path(with_rows({"val_data": ROWS})["val_data"])
    assert [second] == list(first.parent.iterdir())


def test_numbers_of_numpy_are_numbers() -> None:
    found = with_rows({"data": [{"label": np.bool_(True), "ids": np.arange(2)}]})

    assert read(found["data"]) == [{"label": True, "ids": [0, 1]}]


def test_run_from_python_calls_back_after_steps_and_validations(
    model: Path, tmp_path: Path
) -> None:
    steps: list[int] = []
    validations: list[tuple[int, float]] = []
    rows = [{"prompt": ask[1], "completion": answer[1]} for ask, answer in sums(10)]

    result = mlxtune.train(
        model_path=model,
        data=rows,
        output=tmp_path / "out",
        samples=0,
        quiet=True,
        on_step=lambda record: steps.append(record.step),
        on_validation=lambda step, loss: validations.append((step, loss)),
    )

    assert steps == [1, 2]
    assert result.training is not None
    assert [
        (validation.step, validation.val_loss) for validation in result.training.validations
    ] == validations
    assert mlxtune.plan(model_path=model, data=rows).steps == 2
    assert [ledger.path for ledger in result.ledgers] == ["data"]


class Once:
    """An iterable that, like a progress bar, has a length but can be iterated only once."""

    def __init__(self, rows: Any) -> None:
        self._rows = iter(rows)

    def __len__(self) -> int:
        return len(ROWS)

    def __iter__(self) -> Iterator[Any]:
        return self._rows


def test_rows_that_can_be_read_once_lose_none_and_have_their_length() -> None:
    assert len(read(with_rows({"data": Once(ROWS)})["data"])) == len(ROWS)
    with pytest.raises(DataError, match=f"^data has more rows than its length, {len(ROWS)}$"):
        with_rows({"data": Once(cycle(ROWS))})


def test_saved_rows_that_were_changed_are_written_again() -> None:
    path = Path(with_rows({"data": ROWS})["data"])
    whole = path.read_bytes()
    path.write_text('{"prompt": "other", "completion": "rows"}\n')
    assert with_rows({"data": ROWS})["data"] == str(path)
    assert path.read_bytes() == whole


def test_unknown_length_and_invalid_first_row() -> None:
    class Bar(Once):
        def __len__(self) -> int:
            raise TypeError("object of type 'generator' has no len()")

    assert len(read(with_rows({"data": Bar(ROWS)})["data"])) == len(ROWS)
    with pytest.raises(DataError, match=r"^data: row 1 is not a dictionary: None: make it one"):
        with_rows({"data": iter([None, *ROWS])})


def test_rows_of_data_frames_are_read_and_kept_private() -> None:
    class Pandas:
        def __iter__(self) -> Iterator[str]:
            return iter(ROWS[0])

        def itertuples(self) -> None: ...

        def to_dict(self, orient: str) -> list[dict[str, Any]]:
            assert orient == "records"
            return [row | {"missing": math.nan} for row in ROWS]

    class Polars:
        def __iter__(self) -> Iterator[list[str]]:
            return iter([["a"]])

        def to_dicts(self) -> list[dict[str, Any]]:
            return ROWS

    for frame in (Pandas(), Polars()):
        path = with_rows({"data": frame})["data"]
        assert read(path) == [
            {name: row[name] for name in row if row[name] is not None} for row in ROWS
        ]
        assert Path(path).stat().st_mode & 0o077 == 0


# Resolved options


@takes_resolved(TrainConfig)
def rank_and_explicit_options(options: ResolvedOptions[TrainConfig]) -> tuple[int, frozenset[str]]:
    return options.config.rank, options.explicit_options


def test_command_gets_the_names_of_the_explicit_options() -> None:
    explicit_options = {"model_path", "data", "rank"}
    assert rank_and_explicit_options(model_path="m", data="d", rank=8) == (8, explicit_options)
    assert rank_and_explicit_options(TrainConfig("m", data=("d",), rank=8)) == (8, explicit_options)
    assert rank_and_explicit_options(resolve_options(config(rank=8))) == (8, explicit_options)


def test_options_of_an_earlier_run_are_reused_unchanged(tmp_path: Path) -> None:
    recorded = config(init_adapter="removed since")
    options = ResolvedOptions.recorded(recorded, Checkpoint(tmp_path, {}))
    rank, explicit_options = rank_and_explicit_options(options)
    assert rank == recorded.rank
    assert {"rank", "alpha", "targets", "epochs"} <= explicit_options


def test_options_without_an_adapter_are_the_same_config() -> None:
    for made in (config(), DataConfig("m", ("d",))):
        assert resolve_options(made).config is made


# The number of configs


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Every TrainConfig that is built from now on."""
    found: list[TrainConfig] = []
    check = TrainConfig.__post_init__

    def counted(made: TrainConfig, *initial: Any) -> None:
        found.append(made)
        check(made, *initial)

    monkeypatch.setattr(TrainConfig, "__post_init__", counted)
    return found


def test_plain_run_builds_one_config(
    model: Path, chat: Path, tmp_path: Path, built: list[TrainConfig]
) -> None:
    options = {"model_path": model, "data": chat, "max_steps": 1, "samples": 0}
    mlxtune.train(**options, quiet=True, output=tmp_path / "a")
    assert len(built) == 1
    train = next(command for command in COMMANDS if command.name == "train")
    flags = [f"--model-path={model}", f"--data={chat}", "--max-steps=1", "--samples=0", "--quiet"]
    train.main([*flags, "--output", str(tmp_path / "b")], standalone_mode=False)
    assert len(built) == 2


def test_hub_auto_and_adapter_each_build_one_config(
    hub: Hub, model: Path, tmp_path: Path, built: list[TrainConfig]
) -> None:
    rows = write_chat(tmp_path / "rows.jsonl", sums(20)).read_bytes()
    hub.datasets["org/sums"] = HubDataset({"main": {"train.jsonl": rows}})
    common: dict[str, Any] = {"model_path": model, "data": "org/sums", "max_steps": 1}
    common |= {"auto": True, "samples": 0, "quiet": True}
    mlxtune.train(**common, output=tmp_path / "first")
    assert len(built) == 3
    mlxtune.train(**common, output=tmp_path / "next", init_adapter=tmp_path / "first")
    assert len(built) == 3 + 4


@pytest.mark.parametrize("parallel", ["data", "tensor"])
@pytest.mark.parametrize("index", [0, 1])
def test_worker_builds_one_config(
    index: int,
    parallel: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    built: list[TrainConfig],
) -> None:
    workers = Workers()
    workers.rank, workers.world_size = index, 2
    monkeypatch.setattr(workers, "all_gather_text", lambda text: [text, text])

    @contextmanager
    def watched(*_: Any) -> Iterator[list[str]]:
        yield ["here", "here"]

    monkeypatch.setattr(launch, "join", lambda *_, **__: workers)
    monkeypatch.setattr(launch, "watched", watched)
    original = config(output=str(tmp_path), memory_limit=3, parallel=parallel, track="trackio")
    with join_run(original, lambda *_: RunConsole(quiet=True)) as run:
        assert built == [original, run.config]
        assert run.config.memory_limit <= 1.5
        assert run.config.samples == (0 if index or parallel == "tensor" else original.samples)
        assert (
            (run.config.output == original.output)
            == (run.config.track == original.track)
            == (not index)
        )
