"""Options as resolved once for a command, and how often a run builds its config."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

import mlxtune
from mlxtune.backend.workers import launch
from mlxtune.backend.workers.group import Workers
from mlxtune.backend.workers.launch import join_run
from mlxtune.cli import COMMANDS
from mlxtune.config import DataConfig, TrainConfig
from mlxtune.session.keywords import takes_options
from mlxtune.session.resolved import Resolved, resolve
from mlxtune.views.console import RunConsole
from tests.configs import config
from tests.hub_server import Dataset, Hub
from tests.models import sums, write_chat


@takes_options(TrainConfig)
def described(config: TrainConfig, *, given: frozenset[str]) -> tuple[int, frozenset[str]]:
    return config.rank, given


def test_command_gets_the_names_of_the_given_options() -> None:
    given = {"model_path", "data", "rank"}
    assert described(model_path="m", data="d", rank=8) == (8, given)
    assert described(TrainConfig("m", data=("d",), rank=8)) == (8, given)
    assert described(resolve(config(rank=8))) == (8, given)


def test_options_of_an_earlier_run_are_all_given_and_taken_as_they_are() -> None:
    recorded = config(init_adapter="removed since")
    rank, given = described(Resolved.recorded(recorded))
    assert rank == recorded.rank
    assert {"rank", "alpha", "targets", "epochs"} <= given


def test_options_without_an_adapter_are_the_same_config() -> None:
    for made in (config(), DataConfig("m", ("d",))):
        assert resolve(made).config is made


# The number of configs


@pytest.fixture
def built(monkeypatch: pytest.MonkeyPatch) -> list[TrainConfig]:
    """Every TrainConfig that is built from now on."""
    found: list[TrainConfig] = []
    check = TrainConfig.__post_init__

    def counted(made: TrainConfig) -> None:
        found.append(made)
        check(made)

    monkeypatch.setattr(TrainConfig, "__post_init__", counted)
    return found


def test_plain_run_builds_one_config(
    model: Path, chat: Path, tmp_path: Path, built: list[TrainConfig]
) -> None:
    options = {"model_path": model, "data": chat, "max_steps": 1, "samples": 1}
    mlxtune.train(**options, quiet=True, output=tmp_path / "a")
    assert len(built) == 1
    train = next(each for each in COMMANDS if each.name == "train")
    flags = ["--model-path", str(model), "--data", str(chat), "--max-steps", "1", "--quiet"]
    train.main([*flags, "--output", str(tmp_path / "b")], standalone_mode=False)
    assert len(built) == 2


def test_run_builds_a_config_each_for_the_hub_auto_and_the_adapter(
    hub: Hub, model: Path, tmp_path: Path, built: list[TrainConfig]
) -> None:
    rows = write_chat(tmp_path / "rows.jsonl", sums(20)).read_bytes()
    hub.datasets["org/sums"] = Dataset({"main": {"train.jsonl": rows}})
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
    workers.index, workers.size = index, 2
    monkeypatch.setattr(workers, "texts", lambda text: [text, text])

    @contextmanager
    def watched(*_: Any) -> Iterator[list[str]]:
        yield ["here", "here"]

    monkeypatch.setattr(launch, "join", lambda *_, **__: workers)
    monkeypatch.setattr(launch, "watched", watched)
    given = config(output=str(tmp_path), memory_limit=3, parallel=parallel, track="trackio")
    with join_run(given, lambda *_: RunConsole(quiet=True)) as run:
        assert built == [given, run.config]
        assert run.config.memory_limit <= 1.5
        assert run.config.samples == (0 if index or parallel == "tensor" else given.samples)
        assert (
            (run.config.output == given.output) == (run.config.track == given.track) == (not index)
        )
